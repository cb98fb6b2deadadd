"""`offbeat paper`: tables and figures of the papers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.flags import Address, Json, Overwrite
from offbeat.cli.output import show_json, show_table, terminal
from offbeat.errors import ConfigError

if TYPE_CHECKING:
    from offbeat.papers.ledger import Ledger
    from offbeat.papers.recipe import Recipe, Settings


def paper(
    name: Annotated[
        str, typer.Argument(help="A recipe: `offbeat list papers`, or module:name; or `all`, with what is kept.")
    ],
    only: Annotated[list[str] | None, typer.Option(help="Only these methods or data sets; repeatable.")] = None,
    n: Annotated[list[int] | None, typer.Option("--n", help="Only these values of n; repeatable.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Seeds 0 .. SEEDS-1; 1, or with --cells and --resume as many as the paper.", min=1),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="This seed alone.", min=0)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, or tf32 on CUDA.")] = "float32",
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale",
            "--size",
            help="smoke (seconds, embedded data), small, or full (the paper's size). "
            "[default: small; full with --cells and --resume]",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for tables and pictures.")] = Path("runs/papers"),
    overwrite: Overwrite = False,
    cells: Annotated[bool, typer.Option("--cells", help="Show missing cells and the seconds they take here.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Run missing cells, the most telling first.")] = False,
    minutes: Annotated[float, typer.Option(help="How long --resume may take.", min=0.01)] = 9.0,
    results: Annotated[Path, typer.Option(help="Where records of cells are kept.")] = Path("results/papers"),
    status: Annotated[bool, typer.Option("--status", help="Show what has been run, and what agrees.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Write results/README.md and docs/papers.md.")] = False,
    workers: Annotated[
        int | None, typer.Option(help="Cells side by side, each on one thread (or one GPU), by Ray.", min=1)
    ] = None,
    address: Address = None,
    merge: Annotated[Path | None, typer.Option(help="Take over the records of this folder.")] = None,
    as_json: Json = False,
) -> None:
    """Remake one table or figure of a paper; prints our figures beside the paper's.

    Example: offbeat paper dlsgd-table2 --cells; offbeat paper dlsgd-table2 --resume --minutes 9 --device cuda
    """
    from offbeat.papers import recipes_of
    from offbeat.papers.ledger import Ledger
    from offbeat.papers.recipe import Settings
    from offbeat.runs.folder import file_name

    keeping = cells or resume or status or page or merge is not None
    recipes = recipes_of(name)
    if name == "all" and not keeping:
        raise ConfigError(["all recipes are a long run; name one, or give --cells, --resume, --status or --page"])
    size = scale or ("full" if keeping else "small")
    settings = Settings(tuple(only or ()), tuple(n or ()), seeds, device, precision, size, out / file_name(name), seed,
                        workers, address)  # fmt: skip
    if not keeping:
        remake(recipes[0], settings, overwrite, as_json)
        return
    kept = Ledger(results)
    if merge is not None:
        print(f"took over {kept.merge(merge)} records from {merge}")
    if resume:
        fill(recipes, kept, settings, minutes)
    if cells or status:
        show_cells(recipes, kept, settings if cells else None, as_json)
    if page:
        from offbeat.papers.page import write_pages

        for path in write_pages(recipes, kept):
            print(f"wrote {path}")


def remake(recipe: Recipe, settings: Settings, overwrite: bool, as_json: bool) -> None:
    """Run the chosen cells, keep nothing but tables and pictures, and show them."""
    from offbeat.papers.runner import make
    from offbeat.runs.disk import storing
    from offbeat.runs.folder import Folder

    with Folder(settings.out, "paper", overwrite) as folder, storing(settings.out):
        made = make(recipe, settings)
        folder.add(made.files)
    if as_json:
        show_json(made.json())
        return
    for table in made.tables:
        show_table(table.title, table.columns, table.rows)
    for line in (*made.notes, *(f"wrote {path}" for path in made.files)):
        print(line)


def fill(recipes: list[Recipe], kept: Ledger, settings: Settings, minutes: float) -> None:
    """Run missing cells and keep their records."""
    from offbeat.papers.runner import resume

    done = resume(recipes, kept, settings, minutes, lambda text: print(text, file=sys.stderr, flush=True))
    print(f"{done} cells were run; their records are in {kept.folder}")


def show_cells(recipes: list[Recipe], kept: Ledger, settings: Settings | None, as_json: bool) -> None:
    """The missing cells under these settings, or how all of them stand."""
    from offbeat.papers import page

    lines = page.status(recipes, kept) if settings is None else page.cells(recipes, kept, settings)
    if as_json:
        show_json(lines)
    else:
        page.show(lines, terminal())
