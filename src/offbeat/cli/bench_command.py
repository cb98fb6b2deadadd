"""`offbeat bench`: how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.bench import NAMES, RAY
from offbeat.cli.flags import Json
from offbeat.cli.output import terminal
from offbeat.config.options import option_problems
from offbeat.errors import ConfigError

HELP = f"Only these items: {', '.join(NAMES)}. With the extra ray, by name alone: ray (all of {', '.join(RAY)})."


def bench(
    item: Annotated[list[str] | None, typer.Argument(help=HELP)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, or tf32 or bf16 on CUDA.")] = "float32",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats: a look, not a figure.")] = False,
    others: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="NAME=COMMAND: another simulator for the protocol; its last line must be JSON with seconds_per_round.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A JSON file for the figures.")] = None,
    as_json: Json = False,
) -> None:
    """Measure speed: waves against PyTorch's plain loop, asynchronous against synchronous, the clock, the protocol.

    Example: offbeat bench waves asynchronous --device cuda --precision tf32 --out bench.json
    """
    from rich.console import Console

    from offbeat.bench.items import Settings, bench
    from offbeat.runs import report

    if problems := option_problems("bench", Settings, {"precision": precision}, ("device", "quick", "others")):
        raise ConfigError(problems)
    settings = Settings(device, precision, quick, tuple(map(simulator, others or [])))  # type: ignore[arg-type]
    if out is not None:
        if out.is_dir():
            raise ConfigError([f"--out {out} is a directory; name a JSON file"])
        out.parent.mkdir(parents=True, exist_ok=True)

    def keep(results: dict[str, Any]) -> None:
        if out is not None:
            out.write_text(json.dumps(results, indent=1) + "\n")

    with Console(stderr=True).status("bench") as status:
        results = bench(tuple(item or ()), settings, lambda name: status.update(f"bench: {name}"), keep)
    keep(results)
    if as_json:
        print(json.dumps(results))
        return
    where = f"{results['facts']['device']}, {precision}, torch {results['facts']['torch']}"
    for name in (*NAMES, *RAY):
        if name in results:
            report.show_records(f"{name}: {where}", results[name], terminal())
    if out is not None:
        print(f"wrote {out}")


def simulator(text: str) -> tuple[str, str]:
    """The name and the command of another simulator."""
    name, equals, command = text.partition("=")
    if not equals or not name or not command:
        raise ConfigError([f"--with {text}: write it as NAME=COMMAND, e.g. --with 'pfl=python pfl_protocol.py'"])
    return name.strip(), command.strip()
