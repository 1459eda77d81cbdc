"""A headless Chromium, controlled through its debugging protocol with tornado, which Dask needs anyway."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import urlopen

from tornado.ioloop import IOLoop
from tornado.websocket import websocket_connect

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-port=0"
).split()


def find_chromium() -> str | None:
    """Return the path of Chromium, under any of its names, or None."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Browser:
    """One page in one browser."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 1000) -> None:
        command = [
            str(find_chromium()),
            *FLAGS,
            f"--window-size={width},{height}",
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file = folder / "DevToolsActivePort"
        while not port_file.exists() or not port_file.read_text().strip():
            assert self._process.poll() is None, "chromium has ended"
            time.sleep(0.05)
        port = port_file.read_text().split()[0]
        pages = json.loads(urlopen(f"http://127.0.0.1:{port}/json/list").read())
        address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        self._loop = IOLoop(make_current=False)
        self._socket = self._loop.run_sync(lambda: websocket_connect(address, max_message_size=2**27))
        self._number = 0

    def call(self, method: str, **parameters: Any) -> Any:
        """Send one command of the protocol and return its answer; ignore events in between."""
        self._number += 1
        self._loop.run_sync(
            lambda: self._socket.write_message(json.dumps({"id": self._number, "method": method, "params": parameters}))
        )
        while True:
            answer = json.loads(self._loop.run_sync(self._socket.read_message))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, address: str) -> None:
        """Open a page."""
        self.call("Page.navigate", url=address)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        while not (value := self.evaluate(script)):
            time.sleep(0.1)
        return value

    def screenshot(self, path: Path) -> None:
        """Save a picture of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run_sync(self._close)
        self._loop.close()
        self._process.terminate()
        self._process.wait()

    async def _close(self) -> None:
        self._socket.close()  # writes a last message, which needs a loop
