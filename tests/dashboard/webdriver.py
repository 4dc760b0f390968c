"""A headless Chromium, driven over the W3C WebDriver protocol: it is JSON over HTTP, so no package is needed."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


class Browser:
    """One browser window."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        options = {"args": _FLAGS}
        capabilities = {
            "alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}},
        }
        session = self._ask("POST", "/session", {"capabilities": capabilities})["sessionId"]
        self._session = f"/session/{session}"

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """Run the body of a JavaScript function and return its value."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def emulate(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the page size and the preferred color scheme, `light` or `dark`."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._command("Emulation.setEmulatedMedia", {"features": features})

    def click(self, selector: str) -> None:
        """Click as a user would; fail if the element is covered or missing."""
        self._ask("POST", f"{self._session}/element/{self._find(selector)}/click", {})

    def write(self, selector: str, text: str) -> None:
        self._ask("POST", f"{self._session}/element/{self._find(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Press and release keys in turn, at whatever has the focus; a key may be several that are held together."""
        actions = [
            {"type": kind, "value": key}
            for together in keys
            for kind, key in (*(("keyDown", key) for key in together), *(("keyUp", key) for key in reversed(together)))
        ]
        self._ask(
            "POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}
        )

    def reload(self) -> None:
        self._ask("POST", f"{self._session}/refresh", {})

    def allow_clipboard(self) -> None:
        """Let scripts of the tests read the clipboard."""
        self._command("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})

    def text(self, selector: str) -> str:
        """Return an element's visible text."""
        text: str = self.run("return document.querySelector(arguments[0]).innerText", selector)
        return text

    def number(self, selector: str) -> float:
        """Return the first number in an element's text, or -1 if there is none."""
        found = re.search(r"\d[\d,]*(\.\d+)?", self.text(selector))
        return float(found.group().replace(",", "")) if found else -1.0

    def wait_for(self, script: str, *arguments: object, limit_s: float = 30) -> Any:
        """Wait until the script returns a true value; return that value."""
        deadline = time.monotonic() + limit_s
        while not (value := self.run(script, *arguments)):
            assert time.monotonic() < deadline, f"the condition did not become true in time: {script}"
            time.sleep(0.1)
        return value

    def screenshot(self) -> bytes:
        """Return a screenshot as PNG."""
        return base64.b64decode(self._ask("GET", f"{self._session}/screenshot"))

    def complaints(self) -> list[str]:
        """Return the errors and warnings in the browser's console since the last call."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def close(self) -> None:
        self._ask("DELETE", self._session)

    def _find(self, selector: str) -> str:
        found: dict[str, str] = self._ask(
            "POST", f"{self._session}/element", {"using": "css selector", "value": selector}
        )
        return found[_ELEMENT]

    def _command(self, name: str, parameters: Mapping[str, object]) -> None:
        self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def _ask(self, method: str, path: str, body: dict[str, object] | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._driver + path, data, method=method)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser; requires the Debian packages `chromium` and `chromium-driver`."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    browser = None
    try:
        port = next(
            found for line in driver.stdout if (found := re.search(r"started successfully on port (\d+)", line))
        )
        browser = Browser(f"http://127.0.0.1:{port.group(1)}")
        yield browser
    finally:
        # chromedriver leaves the browser running if it ends before its session.
        if browser is not None:
            browser.close()
        driver.terminate()
        driver.wait()
        driver.stdout.close()
