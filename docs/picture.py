"""Draw docs/img/report.png, from the page of a demo, and builtin.png: make pictures.

Needs Chromium and the package playwright.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from modenorm.lab.data import load
from modenorm.lab.data.picture import contact_sheet

SHOWN = ("results", "modes", "gallery")
"""Sections of the page; the others are left out."""
PICTURES = Path(__file__).parent / "img"
RUN = "lenet on builtin: MN K=4, seed 0"


def draw(page: Page, output: Path) -> None:
    """Take the picture of the sections that are shown, one under the other."""
    for select in ("#modes-run", "#gallery-run"):
        page.select_option(select, label=RUN)
    hidden = "section" + "".join(f":not(#{name})" for name in SHOWN)
    page.add_style_tag(content=f"{hidden} {{ display: none }}")
    page.wait_for_timeout(500)  # for the charts to find their places
    page.locator("main").screenshot(path=output)


if __name__ == "__main__":
    contact_sheet(load("builtin").train, columns=6).save(PICTURES / "builtin.png", optimize=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": 1180, "height": 900})
        page.goto(Path(sys.argv[1]).resolve().as_uri())
        draw(page, PICTURES / "report.png")
        browser.close()
