"""What the documents show must run, and what they point to must exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))
WITH_CODE = ["README.md", "docs/layers.md", "docs/modes.md", "docs/scaling.md"]


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_blocks_run(page):
    """The blocks of a page, one after the other, in one namespace."""
    blocks = code_blocks((ROOT / page).read_text())
    assert blocks
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{page}, code block {number}", "exec"), namespace)


def test_the_check_of_code_blocks_can_fail():
    (block,) = code_blocks("text\n```python\nraise RuntimeError('run')\n```\n")
    with pytest.raises(RuntimeError, match="run"):
        exec(block, {})


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".github/workflows/ci.yml"])
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(
        re.findall(r"(?:^ *|`|run: )make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE)
    )
    assert named
    assert named <= targets


def test_the_layout_in_the_readme_exists():
    paths = re.findall(
        r"^    ((?:src|tests|docs)/\S*)", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(paths) >= 10
    assert all((ROOT / path).exists() for path in paths)


def test_every_file_of_the_library_names_its_rule():
    for path in (ROOT / "src" / "modenorm").glob("*.py"):
        assert path.read_text().startswith(('"""', 'r"""')), path
