"""Several measurements built at once, timed one after another.

Building (tracing, compiling) takes minutes and the host's cores; timing takes seconds and the whole device.
A measuring process says when it is built and waits for its turn, which comes when all are. A way that has
nothing to compile waits before it uses the device, and has its turn after the others: what it needs of the
device's memory is then only needed once they have gone.
"""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

READY, GO = "ready", "go"
POLL_SECONDS = 0.02


def wait_for_turn(folder: str) -> None:
    """In the measuring process: say that it is built, and wait."""
    (Path(folder) / READY).touch()
    while not (Path(folder) / GO).exists():
        time.sleep(POLL_SECONDS)


class Turns:
    """For ``number`` measurements that are built at once."""

    def __init__(self, number: int) -> None:
        self._barrier = threading.Barrier(number)
        self._change = threading.Condition()
        self._waiting: list[tuple[bool, int]] = []
        self._num_arrived = 0

    def pass_over(self) -> None:
        """For a measurement that needs no turn."""
        self._barrier.wait()

    def take(
        self, process: subprocess.Popen[bytes], folder: Path, time_limit_s: float, *, goes_last: bool = False
    ) -> int | None:
        """Wait until all are built or have ended, then let ``process`` measure alone; its exit status.

        ``None`` where it was not built, or did not end, within the limit. Those that ``goes_last`` marks
        measure after all others.
        """
        is_ready = _until_ready(process, folder, time_limit_s)
        if not is_ready and process.poll() is None:
            process.kill()  # it must not disturb the others
        if is_ready:
            with self._change:
                turn = (goes_last, self._num_arrived)
                self._num_arrived += 1
                self._waiting.append(turn)
        self._barrier.wait()
        if not is_ready:
            return None if process.returncode is None or process.returncode == -9 else process.returncode
        with self._change:
            self._change.wait_for(lambda: min(self._waiting) == turn)
        try:
            (folder / GO).touch()
            return process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None
        finally:
            with self._change:
                self._waiting.remove(turn)
                self._change.notify_all()


def _until_ready(process: subprocess.Popen[bytes], folder: Path, time_limit_s: float) -> bool:
    end = time.monotonic() + time_limit_s
    while time.monotonic() < end:
        if (folder / READY).exists():
            return True
        if process.poll() is not None:
            return False
        time.sleep(POLL_SECONDS)
    return False
