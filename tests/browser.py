"""A real headless browser, driven over the DevTools protocol through two pipes: nothing to install but Chromium itself."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # continuous integration runs as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """Path of a Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser. `console` and `requests` fill while it is used.

    Raises TimeoutError when the browser does not answer.
    """

    def __init__(self, executable: str, timeout_s: float = 240.0) -> None:
        self.console: list[str] = []
        """Errors and warnings of the page's console, and exceptions of its scripts."""
        self.requests: list[str] = []
        """Addresses of everything that the page loaded, itself and data addresses left out."""
        self._timeout_s, self._numbers, self._received = timeout_s, itertools.count(1), b""
        self._folder = tempfile.TemporaryDirectory(prefix="browser")
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()

        def take_pipes() -> None:
            # The protocol's pipes are descriptors 3 and 4 of the browser; the copies make sure that neither is overwritten.
            commands, answers = os.dup(read_commands), os.dup(write_answers)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        command = [executable, *_FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=take_pipes, close_fds=False
        )
        os.close(read_commands)
        os.close(write_answers)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda event: event.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path) -> None:
        """Load a file and wait until it is there."""
        os.write(
            self._write,
            json.dumps(
                {
                    "id": next(self._numbers),
                    "method": "Page.navigate",
                    "params": {"url": page.resolve().as_uri()},
                    "sessionId": self._session,
                }
            ).encode()
            + b"\0",
        )
        self._wait(lambda event: event.get("method") == "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """Value of an expression; promises are waited for."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, script: str, timeout_s: float = 120.0) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.run(script):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {script}")
            time.sleep(0.05)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``, as a system's settings say."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse, in pixels of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """The page as a PNG: all of it, or what the window shows."""
        data = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, **({} if not whole else {"clip": self._extent()})
        )
        path.write_bytes(base64.b64decode(data["data"]))
        return path

    def close(self) -> None:
        for descriptor in (self._write, self._read):
            os.close(descriptor)
        try:
            self._process.wait(5)  # it ends when its pipe does
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for _ in range(20):  # its helpers write until they notice
            try:
                self._folder.cleanup()
                return
            except OSError:
                time.sleep(0.1)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _extent(self) -> dict[str, float]:
        width, height = self.run("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        return {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}

    def _wait(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            while b"\0" in self._received:
                line, _, self._received = self._received.partition(b"\0")
                event = json.loads(line)
                self._note(event)
                if wanted(event):
                    return event
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise TimeoutError(f"the browser has ended with status {self._process.poll()}")
            self._received += data

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.console.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.console.append(str(parameters["entry"]))
        elif method == "Network.requestWillBeSent":
            url, document = parameters["request"]["url"], parameters.get("documentURL")
            if url != document and not url.startswith("data:"):
                self.requests.append(url)
