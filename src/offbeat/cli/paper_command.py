"""`offbeat paper`: tables and figures of the papers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.flags import Json, Overwrite
from offbeat.cli.output import show_table
from offbeat.errors import ConfigError, unknown


def paper(
    name: Annotated[str, typer.Argument(help="A recipe: `offbeat list papers`.")],
    only: Annotated[list[str] | None, typer.Option(help="Only these methods or data sets; repeatable.")] = None,
    n: Annotated[list[int] | None, typer.Option("--n", help="Only these values of n; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds 0 .. SEEDS-1.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, or tf32 on CUDA.")] = "float32",
    scale: Annotated[
        str, typer.Option(help="smoke (seconds, embedded data), small, or full (the paper's size).")
    ] = "small",
    out: Annotated[Path, typer.Option(help="Directory for tables and pictures.")] = Path("runs/papers"),
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Remake one table or figure of a paper; prints our figures beside the paper's."""
    from offbeat.papers import PAPERS
    from offbeat.papers.recipe import Settings
    from offbeat.runs.disk import storing
    from offbeat.runs.folder import Folder

    if name not in PAPERS:
        raise ConfigError([unknown("paper recipe", name, PAPERS)])
    settings = Settings(tuple(only or ()), tuple(n or ()), seeds, device, precision, scale, out / name)
    with Folder(settings.out, "paper", overwrite) as folder, storing(settings.out):
        made = PAPERS[name](settings)
        folder.add(made.files)
    if as_json:
        print(json.dumps(made.json()))
        return
    for table in made.tables:
        show_table(table.title, table.columns, table.rows)
    for line in (*made.notes, *(f"wrote {path}" for path in made.files)):
        print(line)
