"""A headless Chromium, driven through chromedriver's WebDriver protocol.

    with Chromium() as browser:
        browser.open(url)
        browser.click("#reset")

The log has each request that the pages sent and each message of their consoles.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import HTTPError

import pytest

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
STARTS = 5
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def installed() -> bool:
    return bool(shutil.which("chromedriver") and shutil.which("chromium"))


def install() -> None:
    """Install Chromium with apt-get where it is missing, or skip the test."""
    if installed():
        return
    if os.geteuid() or shutil.which("apt-get") is None:
        pytest.skip("installing Chromium needs root and apt-get")
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends"]
    subprocess.run([*command, "chromium", "chromium-driver"], capture_output=True, check=True)


class Chromium:
    def __init__(self, width: int = 1440, height: int = 950) -> None:
        self.size = (width, height)
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.driver, self.server = _driver()
        self.session = ""

    def __enter__(self) -> Chromium:
        width, height = self.size
        data = f"--user-data-dir={self.profile.name}"
        options = {
            "args": [*FLAGS, data, f"--window-size={width},{height}"],
            "binary": shutil.which("chromium"),
        }
        logging = {"browser": "ALL", "performance": "ALL"}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": logging}
        result = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self.session = f"/session/{result['sessionId']}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        try:
            self._ask("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait()
            self.profile.cleanup()

    def open(self, url: str) -> None:
        self.post("/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """Run JavaScript in the page; `arguments[0]` is the first argument."""
        return self.post("/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: object, seconds: float = 20.0) -> Any:
        """Wait until JavaScript returns something true, and return it."""
        return wait(lambda: self.run(script, *arguments), seconds, script)

    def click(self, selector: str, number: int = 0) -> None:
        result = self.post("/elements", {"using": "css selector", "value": selector})
        self.post(f"/element/{result[number][ELEMENT]}/click", {})

    def mouse(self, *moves: tuple[str, float, float], touch: bool = False) -> None:
        """Move, press and release the mouse, or a finger, at places of the window:
        `("move", 10, 20)`."""
        names = {"move": "pointerMove", "down": "pointerDown", "up": "pointerUp"}
        actions = []
        for name, x, y in moves:
            place = (
                {"x": round(x), "y": round(y), "duration": 0} if name == "move" else {"button": 0}
            )
            actions.append({"type": names[name], **place})
        kind = "touch" if touch else "mouse"
        pointer = {"type": "pointer", "id": kind, "actions": actions}
        pointer["parameters"] = {"pointerType": kind}
        self.post("/actions", {"actions": [pointer]})

    def tap(self, x: float, y: float) -> None:
        """Tap as a finger does: a click follows, on what lies there then."""
        point = {"x": round(x), "y": round(y)}
        for kind, points in (("touchStart", [point]), ("touchEnd", [])):
            self._tools("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def device(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Set the size of the window and the reader's colours."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1}
        self._tools("Emulation.setDeviceMetricsOverride", {**metrics, "mobile": phone})
        touch = {"enabled": phone, "maxTouchPoints": 5}
        self._tools("Emulation.setTouchEmulationEnabled", touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._ask("GET", f"{self.session}/screenshot")))

    def errors(self) -> list[str]:
        """Return the messages of the console above information."""
        result = self.post("/se/log", {"type": "browser"})
        return [entry["message"] for entry in result if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Return the URLs that the pages have asked for since the last call."""
        entries = self.post("/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [item["params"]["request"]["url"] for item in sent]

    def post(self, path: str, body: object) -> Any:
        return self._ask("POST", self.session + path, body)

    def _tools(self, command: str, parameters: dict[str, object]) -> None:
        self.post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.server + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None


def _driver() -> tuple[subprocess.Popen[str], str]:
    """Start chromedriver; return it with its URL. It ends at once if another process has taken the
    port that it chose."""
    for _ in range(STARTS):
        process = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if "started successfully on port" in line:
                port = line.strip().rstrip(".").rpartition(" ")[2]
                return process, f"http://127.0.0.1:{port}"
        process.wait()
    raise AssertionError("chromedriver does not start")


def wait(look: Callable[[], Any], seconds: float, event: str) -> Any:
    end = time.monotonic() + seconds
    while not (result := look()):
        assert time.monotonic() < end, f"not within {seconds:g} seconds: {event}"
        time.sleep(0.05)
    return result
