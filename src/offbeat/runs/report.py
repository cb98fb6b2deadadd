"""Tables of results, on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table


def show_records(title: str, records: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A table of records: a column for every plain figure or word in any of them."""
    columns = list(dict.fromkeys(name for record in records for name in record))
    plain = [name for name in columns if all(isinstance(r.get(name), str | float | int | None) for r in records)]
    show(title, plain, [[spoken(record.get(name)) for name in plain] for record in records], console)


def spoken(value: Any) -> str:
    """A figure with the digits that a reader wants."""
    if not isinstance(value, float):
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


COLUMNS = (
    "method",
    "accuracy",
    "best",
    "loss",
    "commits",
    "virtual s",
    "client-steps",
    "MB up",
    "MB down",
    "MB d2d",
    "stale",
    "idle",
    "to target",
)


def amount(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def significant(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def average(results: Sequence[Mapping[str, Any]], *path: str) -> float | None:
    """The mean over seeds of one figure; None where a seed does not have it."""
    found: list[float] = []
    for result in results:
        value: Any = result
        for name in path:
            value = None if value is None else value.get(name)
        if value is None:
            return None
        found.append(float(value))
    return mean(found)


def comparison_rows(runs: Mapping[str, Sequence[Mapping[str, Any]]], target: str | None) -> list[list[str]]:
    """One row per label, figures averaged over seeds."""
    rows = []
    for label, results in runs.items():
        reached = None if target is None else average(results, "reached", target, "virtual_seconds")
        some = any(r["reached"].get(target) for r in results) if target is not None else False
        megabytes = [average(results, name) for name in ("bytes_up", "bytes_down", "bytes_d2d")]
        rows.append(
            [
                label,
                amount(average(results, "accuracy_final"), 4),
                amount(average(results, "accuracy_best"), 4),
                significant(average(results, "loss_final")),
                amount(average(results, "commits"), 0),
                amount(average(results, "virtual_seconds"), 1),
                amount(average(results, "client_steps"), 0),
                *(amount(None if many is None else many / 1e6, 1) for many in megabytes),
                amount(average(results, "staleness", "mean"), 1),
                amount(average(results, "idle_share")),
                f"{reached:,.1f} s" if reached is not None else ("some seeds" if some else "-"),
            ]
        )
    return rows


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def write_table(path: Path, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {title}\n\n{markdown(columns, rows)}")
    return path


# ---- what was measured --------------------------------------------------------------------------
READINGS = ("", "value", "95 % interval", "how", "says")


class Measured(Protocol):
    @property
    def readings(self) -> Sequence[Any]: ...


def reading_rows(measured: Measured) -> list[list[str]]:
    rows = []
    for reading in measured.readings:
        ends = "" if reading.low is None else f"{reading.low:.4g} to {reading.high:.4g}"
        rows.append([reading.symbol, f"{reading.value:.4g}", ends, reading.how, reading.said])
    return rows


def schedule_lines(schedule: Any) -> list[str]:
    never = f"; {schedule.never} were never heard" if schedule.never else ""
    lines = [
        f"schedule of {schedule.commits} commits: staleness {schedule.staleness_mean:.2f} on average, at most "
        f"{schedule.staleness}; whoever is heard least has {schedule.least:.0%} of an equal part{never}"
    ]
    if schedule.likely is not None:
        lines.append(f"with 99 % chance nobody stays undrawn for more than {schedule.likely:.0f} commits (DLSGD)")
    return lines


def counsel_lines(name: str, counsel: Any) -> list[str]:
    """What a theorem admits, and which of its conditions the configured rates fail."""
    lines = [f"{name}: cannot be asked: {sentence}" for sentence in counsel.refused]
    for whose, advice in (("admits", counsel.own), ("yours", counsel.yours)):
        if advice is None:
            continue
        bound = "" if advice.bound is None else f", {advice.bounded} at most {advice.bound:.3g}"
        said = "its own rates" if whose == "admits" and advice.failing else whose
        lines.append(f"{name}: {said}: client_lr {advice.client_lr:.3g}, server_lr {advice.server_lr:.3g}{bound}")
        for condition in advice.failing:
            sign = "at least" if condition.least else "at most"
            lines.append(
                f"    fails {condition.name}: {condition.text}: {condition.given:.3g}, {sign} {condition.allowed:.3g}"
            )
        if whose == "admits":
            lines += [f"    {note}" for note in advice.notes]
    return lines
