"""The site: `make docs`. Pages are Markdown; the gallery is run while it is built, so it shows what it says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from sphinx_gallery.scrapers import figure_rst

from offbeat.runs import fleet_plots, plots

project = "Offbeat"
author = "The Offbeat authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_gallery.gen_gallery"]
html_theme = "furo"
html_title = "Offbeat"
html_show_sourcelink = False
exclude_patterns = ["_build", "gallery"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "undoc-members": False}
nitpicky = False
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "filename_pattern": r"/\w+\.py$",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "write_computation_times": False,
    "within_subsection_order": "FileNameSortKey",
    "plot_gallery": True,
    "min_reported_time": 10**6,
    "show_signature": False,
}

# Pictures that a page saves are shown below its code.
waiting: list[Path] = []
write = plots.save


def saved(figure: Any, path: Path) -> Path:
    waiting.append(write(figure, path))
    return path


plots.save = fleet_plots.save = saved


def saved_pictures(block: Any, variables: Any, config: Any) -> str:
    shown = []
    while waiting:
        shown.append(next(variables["image_path_iterator"]))
        shutil.copyfile(waiting.pop(0), shown[-1])
    return str(figure_rst(shown, config["src_dir"]))


# Docstrings are plain English with formulas; what reStructuredText would take for markup is text here.
SPECIAL = re.compile(r"([*|_\\])")
CODE = re.compile(r"`([^`]+)`")


def plain_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    shown = False
    for number, line in enumerate(lines):
        shown = (shown or line.lstrip().startswith(">>>")) and bool(line.strip())
        if shown:
            continue
        parts = CODE.split(line)
        text = [SPECIAL.sub(r"\\\1", part) for part in parts[::2]]
        code = [f"``{part}``" for part in parts[1::2]]
        lines[number] = "".join(piece for pair in zip(text, [*code, ""], strict=True) for piece in pair)
    indent_free(lines)


def indent_free(lines: list[str]) -> None:
    """Formulas that stand on lines of their own, indented, become literal blocks."""
    for number, line in enumerate(lines):
        if line.startswith("    ") and not line.lstrip().startswith((">>>", "...")):
            lines[number] = f"| {line.strip()}"


def outside_links(app: Any, page: str, source: list[str]) -> None:
    """Links to files beside the documentation become their names: the site does not carry them."""
    source[0] = re.sub(r"!?\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", source[0])
    source[0] = source[0].replace("<!-- test -->\n", "")


sphinx_gallery_conf["image_scrapers"] = (saved_pictures,)
suppress_warnings = ["config.cache"]  # the scraper above is a function, which Sphinx does not keep between builds


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("source-read", outside_links)
    (Path(__file__).parent / "_build").mkdir(exist_ok=True)
