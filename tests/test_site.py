"""The documentation's site: builds without a warning, needs no network, reads well in a browser.

A worker that finds the site built by another one takes that.
"""

import os
import subprocess
import sys
from html.parser import HTMLParser
from inspect import ismodule
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock

import modenorm
from modenorm import functional, reference

pytest.importorskip("sphinx")
pytest.importorskip("furo")
pytest.importorskip("myst_parser")

ROOT = Path(__file__).parents[1]
LOADING = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
}
NO_RESOURCE = {"canonical", "index", "search", "next", "prev", "author", "license"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "site"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            options = ["-q", "-W", "--keep-going", "-d", f"{folder}-doctrees"]
            command = [sys.executable, "-m", "sphinx", *options, ROOT / "docs", folder]
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
            run = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert run.returncode == 0, run.stderr
            assert run.stderr == ""
    return folder


class Page(HTMLParser):
    """What a page points to, what it loads, and the places in it that can be pointed to."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.ids = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        for key in ("src", "href"):
            if (tag, key) in LOADING and key in found and found.get("rel") not in NO_RESOURCE:
                self.loaded.append(found[key])
        if found.get("id"):
            self.ids.add(found["id"])


@pytest.fixture(scope="module")
def pages(site):
    found = {path.name: Page(path.read_text()) for path in site.glob("*.html")}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= set(found)
    return found


def broken(pages, folder):
    for name, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                good = url.scheme == "https"
            else:
                target = unquote(url.path) or name
                good = (folder / target).exists()
                if url.fragment and target in pages:
                    good = good and url.fragment in pages[target].ids | {"top"}
            if not good:
                yield name, link


def test_every_link_of_the_site_leads_somewhere(site, pages):
    assert list(broken(pages, site)) == []
    assert sum(len(page.links) for page in pages.values()) > 100
    bad = {"index.html": Page("<a href='nowhere.html'></a><a href='#nothing'></a>")}
    assert [link for _, link in broken(bad, site)] == ["nowhere.html", "#nothing"]


def test_the_site_loads_nothing_from_elsewhere(site, pages):
    for name, page in pages.items():
        assert page.loaded
        for link in page.loaded:
            url = urlsplit(link)
            assert url[:2] == ("", ""), f"{name} loads {link}"
            assert (site / unquote(url.path)).exists(), f"{name} loads {link}, which is missing"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert "@import" not in text
        assert "url(http" not in text.replace('"', "").replace("'", "")


def test_every_public_name_has_its_entry(pages):
    here = {
        f"modenorm.{name}" for name in modenorm.__all__ if not ismodule(getattr(modenorm, name))
    }
    here |= {f"{m.__name__}.{name}" for m in (functional, reference) for name in m.__all__}
    assert here - pages["api.html"].ids == set(), "add them to docs/api.md"


def test_formulas_are_drawn_by_the_browser_itself(site):
    text = (site / "math.html").read_text()
    assert text.count("<math") > 100
    assert "menclose" not in text, "not every browser draws boxes around formulas"
    assert "<mn>12</mn>" not in text, "the converter reads \\frac12 as 12 over what follows"
    assert "$" not in text.partition("<article")[2].partition("</article>")[0]


KINDS = {
    "desktop": {"viewport": {"width": 1280, "height": 844}},
    "phone in the dark": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_in_a_browser(browser, site, pages, kind):
    """Without a network: nothing complains, nothing runs over the edge, pictures are there."""
    context = browser.new_context(offline=True, **KINDS[kind])
    page, complaints = context.new_page(), []
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    for name in pages:
        page.goto((site / name).as_uri())
        width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert width[0] <= width[1], f"{name} is wider than the window"
        empty = page.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
        assert empty == [], name
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, colour[4:-1].split(","))) < 150) == ("dark" in kind)
        assert complaints == [], name
    context.close()


def test_formulas_fit_a_desktop(browser, site):
    page = browser.new_context(offline=True, **KINDS["desktop"]).new_page()
    for name in ("math.html", "scaling.html"):
        page.goto((site / name).as_uri())
        wide = page.evaluate(
            "[...document.querySelectorAll('div.math')]"
            ".filter(f => f.scrollWidth > f.clientWidth).map(f => f.textContent)"
        )
        assert wide == [], f"{name}: break these formulas into lines"


def test_the_search_finds_a_function(browser, site):
    page = browser.new_context(offline=True).new_page()
    page.goto(f"{(site / 'search.html').as_uri()}?q=replace_batchnorm")
    page.wait_for_selector("#search-results li")
    assert "replace_batchnorm" in page.locator("#search-results").inner_text()
