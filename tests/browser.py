"""A headless Chromium, driven through its DevTools protocol over a pipe; nothing but the standard library."""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --mute-audio "
    "--disable-background-networking --disable-component-update --disable-extensions --no-proxy-server "
    "--remote-debugging-pipe"
)
"""No sandbox: tests run as root in containers, and open nothing but their own server."""


def find_chromium() -> str | None:
    """Path of a Chromium; EYAS_CHROMIUM names one that is not on the path."""
    named = os.environ.get("EYAS_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


LAUNCH = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Moves the pipes to where Chromium looks for them, and becomes it."""


class Browser:
    """One page of one browser. Commands go to its descriptor 3 and answers come from 4, each ended by NUL."""

    def __init__(self, program: str, *, width: int = 1200, height: int = 800) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        child_in, self._out = os.pipe()
        self._in, child_out = os.pipe()
        flags = f"{FLAGS} --user-data-dir={self._folder.name} --window-size={width},{height} about:blank"
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(child_in), str(child_out), program, *flags.split()],
            pass_fds=(child_in, child_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(child_in)
        os.close(child_out)
        self._buffer, self._count, self._session = b"", 0, None
        self.problems: list[str] = []
        """Exceptions and refused loads that the page reported."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._out)  # Chromium ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._folder.cleanup()

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Until a condition holds in the page."""
        end = time.monotonic() + seconds
        while not self.js(condition):
            shown = self.js("document.body.innerText.slice(0, 600)") if time.monotonic() > end else None
            assert shown is None, f"it did not happen in time: {condition}\n{shown}\n{self.problems}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.js(f"document.querySelector({selector!r}).textContent")

    def click(self, selector: str) -> None:
        """A real click of the mouse in an element's middle."""
        x, y = self.js(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView();"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Text into whatever has the focus."""
        self.command("Input.insertText", text=text)

    def key(self, name: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.command(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **extra
            )

    def screenshot(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["params"]["exceptionDetails"])[:500])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.problems.append(event["params"]["entry"]["text"])
