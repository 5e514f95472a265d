"""What the documents show must run, and what they point to must exist."""

import os
import re
import runpy
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import modenorm

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def without_code(text: str) -> str:
    """The page without blocks and spans of code, where a bracket is no link."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


WITH_CODE = [page for page in PAGES if code_blocks(text_of(page))]


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    """The blocks of a page, one after the other, in one namespace."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for number, block in enumerate(code_blocks(text_of(page)), start=1):
        exec(compile(block, f"{page}, code block {number}", "exec"), namespace)
    assert os.listdir(tmp_path) == [], "a code block left files behind"


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_is_one_that_is_run(page):
    """Blocks of other languages, or without one, would slip past the test above."""
    opened = re.findall(r"^ *(`{3,}|~{3,}) *(\S*)", text_of(page), re.MULTILINE)[::2]
    kinds = {language for _, language in opened}
    assert kinds <= {"python", "{toctree}", "{eval-rst}", "{include}"}


def test_the_check_of_code_blocks_can_fail():
    (block,) = code_blocks("text\n```python\nraise RuntimeError('run')\n```\n")
    with pytest.raises(RuntimeError, match="run"):
        exec(block, {})


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ +(.+?)\s*$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: str, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)]+)\)", without_code(text)):
        url = urlsplit(link)
        if url.scheme or url.netloc:
            good = url.scheme == "https" and re.fullmatch(r"[\w.-]+\.[a-z]{2,}", url.netloc)
        else:
            target = (ROOT / page).parent / url.path if url.path else ROOT / page
            good = target.exists()
            if good and url.fragment:
                good = target.suffix == ".md" and url.fragment in anchors(target.read_text())
        if not good:
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    assert broken_links(page, text_of(page)) == []


@pytest.mark.parametrize(
    "link",
    [
        "nowhere.md",
        "layers.md#nothing",
        "#nothing",
        "http://example.org",
        "https://example",
        "ftp:a",
    ],
)
def test_the_check_of_links_can_fail(link):
    assert broken_links("docs/math.md", f"see [this]({link})") == [link]
    assert broken_links("docs/math.md", "see [this](layers.md#gates), `[not](nowhere.md)`") == []


def test_the_figure_is_what_its_script_draws():
    script = runpy.run_path(str(ROOT / "docs" / "figure.py"))
    assert script["draw"]() == (ROOT / "docs" / "img" / "how_it_works.svg").read_text()


def test_citation():
    """CITATION.cff names the package's version; both entries of the paper are the same."""
    citation = text_of("CITATION.cff")
    assert f"\nversion: {modenorm.__version__}\n" in citation
    assert "family-names: Deecke" in citation
    entry = re.search(r"    @inproceedings.*?\n    }", text_of("README.md"), re.DOTALL)
    assert entry is not None
    assert entry[0] in text_of("docs/citation.md")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".github/workflows/ci.yml"])
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"(?:^ *|`|run: )make ([a-z-]+)", text_of(page), re.MULTILINE))
    assert named
    assert named <= targets


def test_the_layout_in_the_readme_is_that_of_the_code():
    layout = text_of("README.md").partition("## Layout")[2].partition("    tests/ ")[0]
    library, _, laboratory = layout.partition("src/modenorm/lab/")
    source = ROOT / "src" / "modenorm"
    for folder, text in ((source, library), (source / "lab", laboratory)):
        files = {path.name for path in folder.glob("[!_]*.py")}
        folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")} - {"lab/"}
        named = set(re.findall(r"\b[a-z_]+(?:\.py|/)", text)) - {"src/", "modenorm/"}
        assert named == files | folders


def test_every_file_of_the_library_names_its_rule():
    for path in (ROOT / "src" / "modenorm").glob("*.py"):
        assert path.read_text().startswith(('"""', 'r"""')), path
