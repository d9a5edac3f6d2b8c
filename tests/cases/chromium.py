"""A page in headless Chromium, over its debugging pipe: console messages, sizes, screenshots."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe",
)  # fmt: skip
_WIDE = "[...document.querySelectorAll('body > *')].map(e => e.getBoundingClientRect().right)"


class Browser:
    """One Chromium with a fresh profile; a context manager."""

    def __init__(self, profile: Path):
        there, commands = os.pipe()
        answers, back = os.pipe()

        def descriptors() -> None:
            # Chromium reads commands from descriptor 3 and writes answers to 4.
            first, second = os.dup(there), os.dup(back)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [PROGRAM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=descriptors, close_fds=False, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(there)
        os.close(back)
        self._commands, self._answers = os.fdopen(commands, "wb"), os.fdopen(answers, "rb")
        self._rest, self._number, self._session = b"", 0, None
        self.messages: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_) -> None:
        self._commands.close()
        self._process.terminate()
        self._process.wait(timeout=30)
        self._answers.close()

    def _next(self) -> dict:
        while b"\0" not in self._rest:
            self._rest += os.read(self._answers.fileno(), 1 << 20)
        message, self._rest = self._rest.split(b"\0", 1)
        answer = json.loads(message)
        if answer.get("method") in (
            "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded",
        ):  # fmt: skip
            self.messages.append(json.dumps(answer["params"]))
        return answer

    def _call(self, method: str, **params) -> dict:
        self._number += 1
        request = {"id": self._number, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        self._commands.write(json.dumps(request).encode() + b"\0")
        self._commands.flush()
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, page: Path, width: int) -> None:
        """Open a file in a window of ``width`` pixels, and wait until it is loaded."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self._call("Page.navigate", url=page.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str):
        """Return the value of a JavaScript expression."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"]["value"]

    def widest(self) -> float:
        """Return the right edge of the page's widest part, in pixels."""
        return max(self.evaluate("document.documentElement.scrollWidth"), *self.evaluate(_WIDE))

    def screenshot(self, file: Path) -> None:
        """Write the whole page as PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))
