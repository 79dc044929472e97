"""Work for processes that take turns; it imports nothing that takes time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from threading import Timer
from typing import Any


def begin_and_go_on(what: str, turn: Any) -> Iterator[dict[str, Any]]:
    if what == "hangs":
        time.sleep(60)
    yield {"begun": what}
    if what == "is killed while it waits":
        Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    turn.acquire()
    yield {"done": what}
