"""The command line. Exit codes: 0 done, 1 a replay ended elsewhere than its run, 2 bad input, 3 the run stopped on bad
numbers, 4 files that cannot be written or are not what was written, 130 interrupted.

Commands import what they need when they are called: help and plain mistakes do not wait for PyTorch, NumPy and
Matplotlib. What a file of this folder imports at its head is light.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

from offbeat import __version__
from offbeat.cli.bench_command import bench
from offbeat.cli.check_command import check
from offbeat.cli.choose_command import choose
from offbeat.cli.clusters_command import clusters
from offbeat.cli.compare_command import compare
from offbeat.cli.flags import merge as merge
from offbeat.cli.fleet_command import fleet_app
from offbeat.cli.list_command import list_names
from offbeat.cli.live_commands import from_run, join, keys, serve
from offbeat.cli.measure_command import measure
from offbeat.cli.paper_command import paper
from offbeat.cli.plan_command import plan
from offbeat.cli.report_command import report, watch
from offbeat.cli.run_commands import replay, resume, run
from offbeat.cli.shelf_commands import explain, plot, runs, show, table
from offbeat.cli.tune_command import tune
from offbeat.config import registry
from offbeat.errors import BadNumbers, ConfigError, Interrupted, OffbeatError, ReplayDiffers, StorageError

EXITS: dict[type, int] = {ReplayDiffers: 1, BadNumbers: 3, StorageError: 4, Interrupted: 130}
COMMANDS: dict[str, Callable[..., None]] = {
    "run": run, "resume": resume, "replay": replay, "compare": compare, "measure": measure, "choose": choose,
    "report": report, "watch": watch, "serve": serve, "join": join, "keys": keys, "clusters": clusters,
    "tune": tune, "runs": runs, "show": show, "table": table, "plot": plot, "explain": explain,
    "list": list_names, "check": check, "paper": paper, "plan": plan, "bench": bench,
}  # fmt: skip

app = typer.Typer(
    help="Train one model over many clients that keep no common time.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
for name, command in COMMANDS.items():
    app.command(name)(command)
fleet_app.command("from-run")(from_run)
app.add_typer(fleet_app, name="fleet")


@app.callback(invoke_without_command=True)
def version(
    shown: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Train one model over many clients that keep no common time."""
    if shown:
        print(f"offbeat {__version__}")
        raise typer.Exit


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """The entry point: turns errors into sentences and exit codes."""
    signal.signal(signal.SIGTERM, interrupt)
    warnings.showwarning = lambda message, *_, **__: print(f"offbeat: {message}", file=sys.stderr)
    try:
        app()
    except ConfigError as error:
        for problem in error.problems:
            print(f"offbeat: {problem}", file=sys.stderr)
        sys.exit(2)
    except OffbeatError as error:
        print(f"offbeat: {error}", file=sys.stderr)
        sys.exit(EXITS.get(type(error), 2))
    except Exception as error:
        if not registry.outside:
            raise
        theirs = f"It uses code of your own ({', '.join(registry.outside)})"
        tried = "`offbeat check` tries methods, policies and stages"
        print(f"offbeat: it stopped with {registry.fault(error)}. {theirs}; {tried}", file=sys.stderr)
        sys.exit(2)
