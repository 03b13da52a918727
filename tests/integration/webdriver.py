"""A real browser by the WebDriver protocol, so that nothing has to be installed but chromium and its chromedriver."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "there is no chromium with its chromedriver here"

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that WebDriver wraps elements in
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "ArrowRight": "\ue014"}
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


class Browser:
    def __init__(self, port: int, profile: Path) -> None:
        self._root = f"http://127.0.0.1:{port}"
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            told = json.load(error)["value"]
            raise AssertionError(f"{told['error']}: {told['message']}") from None

    def open(self, page: Path | str, fragment: str = "") -> None:
        url = page if isinstance(page, str) else page.resolve().as_uri()
        self._call("POST", f"{self._session}/url", {"url": url + fragment})

    def run(self, script: str) -> Any:
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def find(self, selector: str) -> str:
        found = self._call("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        return f"{self._session}/element/{found[ELEMENT]}"

    def click(self, selector: str) -> None:
        place = "{block: 'center', behavior: 'instant'}"
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({place})")
        self._call("POST", f"{self.find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"{self.find(selector)}/value", {"text": text})

    def clear(self, selector: str) -> None:
        self._call("POST", f"{self.find(selector)}/clear", {})

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(%s)].map((node) => node.textContent)"
        return list(self.run(script % json.dumps(selector)))

    def devtools(self, command: str, **params: Any) -> Any:
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": params})

    def log(self, kind: str) -> list[dict[str, Any]]:
        return list(self._call("POST", f"{self._session}/se/log", {"type": kind}))

    def quit(self) -> None:
        self._call("DELETE", self._session)


@contextmanager
def chromedriver() -> Iterator[int]:
    """The port of a chromedriver of our own."""
    assert DRIVER is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    process = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5).close()
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=20)
