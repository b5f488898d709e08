"""A headless Chromium for the tests of the page; they are skipped where there is none."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_WAIT_S = 60  # for a condition; the machine may be busy


def _program(*names: str) -> str:
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no {names[0]}: apt-get install chromium chromium-driver")
    return found


class Page:
    """The page in a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, *, width: int = 1280, height: int = 900, theme: str = "light"):
        self._size(width, height)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.get(path.as_uri())
        self.driver.execute_script("localStorage.clear()")
        self.driver.refresh()
        return self

    def _size(self, width: int, height: int) -> None:
        is_phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """Their texts, with plain spaces, whether they are on the screen or not."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return [text.replace("\u00a0", " ") for text in self.run(script, selector)]

    def wait(self, condition: Any) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, _WAIT_S).until(lambda _: condition())

    def choose(self, selector: str, value: str) -> None:
        from selenium.webdriver.support.ui import Select

        Select(self.find(selector)).select_by_value(value)

    def slide(self, selector: str, value: float) -> None:
        """Moves a slider as a reader does: its value changes, and it says so."""
        self.run(
            "const [slider, value] = arguments; slider.value = value;"
            "slider.dispatchEvent(new Event('input', { bubbles: true }))",
            self.find(selector),
            value,
        )

    def write(self, selector: str, text: str) -> None:
        """Replaces what is written in a field."""
        from selenium.webdriver.common.keys import Keys

        field = self.find(selector)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(Keys.DELETE)
        field.send_keys(text)

    def press(self, *keys: str) -> None:
        """On what has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def methods(self) -> list[str]:
        """The names in the table, from top to bottom."""
        return self.texts("#table tbody th .method span")

    def column(self, key: str) -> list[str]:
        keys = self.run(
            "return [...document.querySelectorAll('#table thead th')].map((e) => e.dataset.key)"
        )
        return self.texts(f"#table tbody tr > :nth-child({keys.index(key) + 1})")

    def messages(self) -> list[str]:
        """What the console says."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses of everything that was asked for."""
        found = []
        for entry in self.driver.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                parameters = event["params"]
                found.append(parameters.get("request", parameters)["url"])
        return found


@contextmanager
def browser() -> Iterator[Page]:
    pytest.importorskip("selenium", reason="no selenium: pip install selenium")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program = _program("chromium", "chromium-browser", "google-chrome")
    driver_program = _program("chromedriver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = program
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        logs = {"browser": "ALL", "performance": "ALL"}
        options.set_capability("goog:loggingPrefs", logs)
        driver = webdriver.Chrome(options=options, service=Service(driver_program))
        try:
            yield Page(driver)
        finally:
            driver.quit()
