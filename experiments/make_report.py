"""What does the page of `gradwire report` look like? Draws docs/report.png in Chromium.

    python experiments/make_report.py    # trains examples/report.toml, about a minute on two cores

Needs chromium and chromedriver (`apt-get install chromium chromium-driver`) and selenium. Without
them the picture stays as it is.
"""

import base64
import shutil
import sys
import tempfile
from pathlib import Path

import gradwire
import kept
from gradwire.experiment.report.page import write_report

FIGURE = kept.ROOT / "docs" / "report.png"
_SIZE = (1280, 1500)


def main() -> None:
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        print(f"{FIGURE.name} stays as it is: there is no {missing[0]}", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gradwire.sweep(kept.ROOT / "examples" / "report.toml", folder / "report")
        FIGURE.write_bytes(picture(write_report([folder / "report"], folder / "report.html")))


def picture(page: Path) -> bytes:
    """The upper part of a page, as PNG."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        width, height = _SIZE
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(page.as_uri())
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", {})
        return base64.b64decode(shot["data"])
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
