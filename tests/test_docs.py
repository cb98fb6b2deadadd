"""README and docs show only what runs: every block marked `<!-- test -->` is executed."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from command_line import exit_code

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- test -->\n```(\w+)\n(.*?)```", re.DOTALL)


def blocks(language: str) -> list[Any]:
    texts = {page.name: BLOCK.findall(page.read_text()) for page in PAGES}
    found = [(name, [body for kind, body in marked if kind == language]) for name, marked in texts.items()]
    long = pytest.mark.soak
    return [
        pytest.param(name, bodies, marks=long if (language, name) in LONG else ()) for name, bodies in found if bodies
    ]


LONG = {  # half a minute and more each: in `make soak`
    ("console", "cluster.md"), ("console", "reports.md"), ("console", "runs.md"), ("console", "tuning.md"),
    ("python", "step_asynchronism.md"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("page", "bodies"), blocks("python"), ids=lambda value: value if isinstance(value, str) else ""
)
def test_python_blocks_run_one_after_another(
    page: str, bodies: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for body in bodies:
        exec(compile(body, page, "exec"), names)


@pytest.mark.parametrize(
    ("page", "bodies"), blocks("console"), ids=lambda value: value if isinstance(value, str) else ""
)
def test_commands_run(
    page: str, bodies: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process; that `offbeat` starts as a process of its own is in test_cli.py."""
    monkeypatch.chdir(tmp_path)
    for line in "".join(bodies).splitlines():
        if line.startswith("$ offbeat "):
            code = exit_code(monkeypatch, *shlex.split(line)[2:])
            assert (code, capsys.readouterr().err) == (0, ""), line


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "gallery").glob("*.py")), ids=lambda page: page.stem)
def test_gallery_pages_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(page))


def test_every_page_is_on_the_site() -> None:
    listed = set((ROOT / "docs" / "index.md").read_text().split())
    assert {page.stem for page in PAGES[1:]} - listed == {"index"}


def test_links_and_pictures_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_the_readme_lists_every_method() -> None:
    from offbeat import METHODS

    text = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in text for name in METHODS)


def test_public_names_are_sorted_and_there() -> None:
    import offbeat

    kinds = [(not name.isupper(), not name[0].isupper(), name) for name in offbeat.__all__]
    assert kinds == sorted(kinds)
    assert all(getattr(offbeat, name) is not None for name in offbeat.__all__)


def test_methods_stay_short() -> None:
    """One paper, one file, under 60 code lines (docstrings, comments, imports and blank lines do not count)."""
    for file in (ROOT / "src/offbeat/methods").glob("[a-z]*.py"):
        code = re.sub(r'"""(.|\n)*?"""', "", file.read_text())
        lines = [text for text in code.splitlines() if text.strip() and not re.match(r"\s*(#|from |import )", text)]
        assert len(lines) < 60, f"{file.name} has {len(lines)} code lines"
