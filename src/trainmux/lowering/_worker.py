"""The program of a compile worker: regions in on standard input, failures (or nothing) out."""

from __future__ import annotations

import os
import pickle
import sys

from trainmux.lowering._compile import Kernel
from trainmux.lowering._inductor import settings
from trainmux.lowering._regions import from_payload
from trainmux.runtime import deterministic_algorithms


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    deterministic = sys.argv[1:] == ["deterministic"]
    while True:
        try:
            payload, combines, key = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        failure = ""
        try:
            kernel = Kernel("", from_payload(payload))
            with (
                settings(deterministic=deterministic, combines=combines),
                deterministic_algorithms(deterministic),
            ):
                kernel.compile()
            failure, kernel.stored_key = kernel.failure, key
            kernel.store()
        except Exception as error:  # one region must not cost the others their worker
            failure = repr(error)
        pickle.dump(failure, answers)
        answers.flush()


if __name__ == "__main__":
    main()
