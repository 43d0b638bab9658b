"""Settings with which Sphinx builds the docs; `make docs` runs Sphinx."""

import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from reference import expand, relink

project = "Moorage"
author = copyright = "The Moorage authors"  # noqa: A001  # Sphinx's own name.
version = release = version_of("moorage")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
smartquotes = False  # Options are typed with two dashes.
html_theme = "furo"
html_title = f"Moorage {version}"
html_show_sourcelink = False
nitpicky = True
# Types of the standard library and of others have no pages here.
nitpick_ignore_regex = [("py:.*", ".*")]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"


def _fill(_: Sphinx, name: str, content: list[str]) -> None:
    content[0] = relink(expand(content[0]), f"{name}.md")


def _quote(
    _app: Sphinx, _kind: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Replace `code` in docstrings, which is Markdown, by ``code``, as Sphinx expects."""
    lines[:] = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", "\n".join(lines)).split("\n")


def setup(app: Sphinx) -> None:
    """Fill in generated parts of pages, convert docstrings, and show query examples as text."""
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _quote, priority=400)
    for name in ("query", "filter", "search"):
        app.add_lexer(name, TextLexer)
