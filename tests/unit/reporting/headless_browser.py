"""A real browser without a window, for tests of pages: Chromium over its debugging pipe, no driver needed.

The protocol is the Chrome DevTools Protocol: JSON messages, each ended by a zero byte, written to the
browser's file descriptor 3 and read from its descriptor 4.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_OPTIONS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking"),
)
_ANSWER_SECONDS = 60.0
_ARROWS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
_KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, **_ARROWS}


def find_browser() -> str | None:
    """The path of an installed Chromium or Chrome, or of what CHROMIUM names; ``None`` without one."""
    named = os.environ.get("CHROMIUM")
    if named:
        return shutil.which(named)
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser refused a command, threw while evaluating, or did not answer in time."""


class Browser:
    """One page in a headless browser. Errors and messages of its console are kept in ``problems``."""

    def __init__(self, executable: str, profile: Path) -> None:
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._next = 0
        self._buffer = b""
        commands_read, self._commands = os.pipe()
        self._answers, answers_write = os.pipe()

        def place_pipes() -> None:
            # Away from 3 and 4 first: one of the pipes may lie there already.
            reading, writing = os.dup(commands_read), os.dup(answers_write)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._process = subprocess.Popen(
            [executable, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=place_pipes,
        )
        os.close(commands_read)
        os.close(answers_write)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(timeout=10)
        except (BrowserError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, page: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file at a window size and colour scheme, and wait until its script has run."""
        scheme = "dark" if dark else "light"
        window = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **window)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.problems.clear()
        self.requested.clear()
        self.call("Page.navigate", url=page.as_uri())
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.evaluate(condition):
            if time.monotonic() > deadline:
                raise BrowserError(f"still false after {seconds} s: {condition}; problems: {self.problems}")
            time.sleep(0.02)

    def move_mouse(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.move_mouse(*start)
        for kind, (x, y), buttons in (("Pressed", start, 1), ("Moved", end, 1), ("Released", end, 0)):
            left = {"button": "left", "buttons": buttons, "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **left)

    def tap(self, x: float, y: float) -> None:
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str, *, shift: bool = False) -> None:
        text = key if len(key) == 1 else "\r" if key == "Enter" else ""
        code = _KEY_CODES.get(key, ord(key[0]))
        pressed = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **pressed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                raise BrowserError("the browser did not answer" if not ready else "the browser went away")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled":
                self.problems.append(str([argument.get("value") for argument in parameters["args"]]))
            case "Log.entryAdded":
                self.problems.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])
