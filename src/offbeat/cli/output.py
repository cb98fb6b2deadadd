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

    from offbeat.runs.loop import Outcome


def terminal() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 180)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from offbeat.runs import report

    report.show(title, columns, rows, terminal())


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
    rows = report.comparison_rows({result["method"]: [result]}, target)
    show_table(f"{result['task']} on {result['fleet']}", report.COLUMNS, rows)
    for kind, title in (("reached", "first reached"), ("reached_smoothed", "mean of 5 evaluations reached")):
        for target, at in result[kind].items():
            said = f"after {at['virtual_seconds']:,.2f} virtual s, commit {at['commit']}" if at else "not reached"
            print(f"{title} {target}: {said}")
    print(f"ended: {result['ended']}; {result['wall_seconds']:.1f} s on {result['device']}")
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
