"""What commands print and write: tables for people, one line of JSON for programs, a file by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import ConfigError, OffbeatError

if TYPE_CHECKING:
    from rich.console import Console

    from offbeat.runs.outcome import Outcome


def terminal() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 180, force_terminal=sys.stdout.isatty())


def sign_of_life(label: str) -> None:
    """A word on a terminal at once: PyTorch takes some seconds to load. The line of progress takes its place."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{label}: starting\r")
        sys.stderr.flush()


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], ranks: Sequence[int] | None = None
) -> None:
    from offbeat.runs import report

    report.show(title, columns, rows, terminal(), ranks)


def show_json(value: Any) -> None:
    from offbeat.runs.store import strict

    print(json.dumps(strict(value)))


def show_outcome(outcome: Outcome, as_json: bool, out: Path | None) -> None:
    result = outcome.result
    if as_json:
        show_json(result)
        return
    from offbeat.runs import report

    target = next(iter(result["reached"]), None)
    table = report.comparison_table({result["method"]: [result]}, target)
    show_table(f"{result['task']} on {result['fleet']}", *table)
    for kind, title in (("reached", "first reached"), ("reached_smoothed", "mean of 5 evaluations reached")):
        for target, at in result[kind].items():
            said = f"after {at['virtual_seconds']:,.2f} virtual s, commit {at['commit']}" if at else "not reached"
            print(f"{title} {target}: {said}")
    print(f"ended: {result['ended']}; {result['wall_seconds']:.1f} s on {result['device']}")
    for name, said in result.get("metric_faults", {}).items():
        print(f"metric {name} failed: {said}")
    if out is not None:
        print(f"run directory: {out}")


@contextmanager
def writing(out: Path | None, suffix: str) -> Iterator[None]:
    """Refuses a name that is no file of this kind before the work, and says what went wrong with the file after it."""
    if out is not None and (out.is_dir() or out.suffix.lower() != suffix):
        raise ConfigError([f"--out {out}; give the name of a file, ending in {suffix}"])
    try:
        yield
    except OSError as error:
        if out is None or error.filename is None or not str(error.filename).startswith(str(out.parent)):
            raise
        raise OffbeatError(f"--out {out} cannot be written: {error.strerror}") from None
