"""Two jobs on one device, in turn, at once and co-located: the same as ``trainmux bench zico``.

    python benchmarks/zico.py --pairs bert+gnmt --out benchmarks/results/zico_h200.json

For a machine where trainmux is not installed, with ``PYTHONPATH=src``.
"""

from __future__ import annotations

import sys

from trainmux.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "zico"]
    main()
