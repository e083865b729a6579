"""How Sphinx builds the documentation site (`make docs`).

The source folder is the root of the repository, not docs/, so that a relative link means the same on the site and in
the repository, and so that HOUSE.md and the benchmark pages are pages of the site too. Only Markdown pages are read.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

ROOT = Path(__file__).resolve().parents[1]

project = "together-LLM"
author = "the authors of together-LLM"
copyright = f"{author}; Apache-2.0"
match = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/tllm/__init__.py").read_text("utf-8"), re.MULTILINE)
release = version = match[1] if match else "unknown"

extensions = ["myst_parser"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["docs/**", "*.md", "benchmarks/**/results/*.md"]
exclude_patterns = [".*", "docs/_build", "docs/_root", "README.md", "models", "src", "tests", "build", "runs"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

html_theme = "furo"
html_title = f"together-LLM {release}"
html_static_path = ["_static"]
html_extra_path = ["_root"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "default"
pygments_dark_style = "github-dark"
templates_path: list[str] = []

FROM_ELSEWHERE = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"'](?:https?:)?//[^>]*>")
"""An asset that a browser would fetch from another server."""


def refuse_assets_from_elsewhere(app: Sphinx, failure: Exception | None) -> None:
    """The site must work without a network: no page may load a script, style, font or image from another server."""
    if failure is not None:
        return
    for page in Path(app.outdir).rglob("*.html"):
        if found := FROM_ELSEWHERE.search(page.read_text("utf-8")):
            raise SphinxError(f"{page.relative_to(app.outdir)} loads from another server: {found[0]}")


def setup(app: Sphinx) -> None:
    app.connect("build-finished", refuse_assets_from_elsewhere)
