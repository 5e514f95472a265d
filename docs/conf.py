"""The documentation site: `make docs`. Nothing on its pages comes from a network."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

import modenorm

logger = logging.getLogger(__name__)

project = "modenorm"
author = "The modenorm developers"
copyright = author
release = version = modenorm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
myst_dmath_double_inline = True

default_role = "py:obj"  # `ModeNorm2d` in a docstring is a link if there is such a page
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shape"]
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "modenorm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_math_renderer = "mathml"


def _mathml(node: nodes.math | nodes.math_block, as_block: bool) -> str:
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        logger.warning("a formula can't become MathML: %s", error, location=node)
        return ""


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _block(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def _as_written(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings are plain text: (N, C, *positions) has no emphasis, and "C." begins no list."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            line = re.sub(r"(?<=[ (])\*(?=\w)", r"\\*", line)
            lines[i] = re.sub(r": ([A-Z])([.;])", r": \\\1\2", line)


def setup(app: Sphinx) -> None:
    """Formulas become MathML while the site is built, so that no script is needed to show them."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("autodoc-process-docstring", _as_written, priority=400)
