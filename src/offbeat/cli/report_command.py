"""`offbeat report`: one page about runs. `offbeat watch`: a run of this or another process, live in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.flags import Json
from offbeat.cli.output import show_json, writing
from offbeat.errors import ConfigError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories that `run` or `compare` left, or folders of them.")],
    out: Annotated[Path, typer.Option(help="The page: a file that ends in .html.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its title; else task and fleet.")] = "",
    target: Annotated[
        list[float] | None, typer.Option(help="An accuracy whose time is told; repeatable. Else the configs' own.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one self-contained page about runs: curves, times to target, timeline, staleness, fairness, fleet, config.

    Example: offbeat report runs/compare --out page.html
    """
    if wrong := [value for value in target or () if not 0 < value <= 1]:
        raise ConfigError([f"--target {value:g}; an accuracy is a share above 0 and at most 1" for value in wrong])
    from offbeat.studies import webpage

    with writing(out, ".html"):
        path = webpage.report(runs, out, title, target or ())
    size = path.stat().st_size
    if as_json:
        show_json({"page": str(path), "bytes": size})
    else:
        print(f"page: {path} ({size / 1e6:.2f} MB; it needs no network)")


def watch(
    run: Annotated[Path, typer.Argument(help="A run directory; another process may be writing it.")],
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show where it stands and leave, as in a pipe.")] = False,
    as_json: Json = False,
) -> None:
    """Watch a run in the terminal: curve, limits, timeline, staleness, participation. Ends with the run, or by Ctrl-C.

    A run writes itself down at every checkpoint (`checkpoint_seconds` of its config, 60 by default): that is how often
    there is something new. Example: offbeat watch runs/fedbuff
    """
    from offbeat.runs import watching

    if as_json:
        show_json(watching.state(run))
    else:
        watching.watch(run, every, once)
