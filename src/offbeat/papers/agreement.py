"""Records beside the paper's figures: a table, which figures agree, and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, combinations
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from offbeat.papers.recipe import Cell, Made, Picture, Recipe, Record, Records, Table
from offbeat.runs import plots, report
from offbeat.runs.store import strict

REACHED = ("seconds", "smoothed", "rounds", "hours")  # None here is "not within the limit": infinity
CLOSE, APART = 1.25, 1.10  # a ratio that agrees; figures of the paper that far apart have an order


class Ours(NamedTuple):
    """The mean over seeds of one value, how it varies, and over how many."""

    mean: float
    spread: float | None
    seeds: int

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "failed"
        return shown(self.mean) + (f" ± {shown(self.spread)}" if self.spread else "")


def shown(value: float) -> str:
    """Four digits; not reached is infinite.

    >>> [shown(v) for v in (0.90123, 51.888, 414000.0, 1e-5, math.inf)]
    ['0.9012', '51.89', '414,000', '1e-05', 'not reached']
    """
    if math.isinf(value):
        return "not reached"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ours(records: Sequence[Record], name: str) -> Ours | None:
    """None where no record has the value. A run that failed counts as not reached where a target was asked for."""
    values = []
    for record in records:
        value = record["values"].get(name)
        if value is None and name in REACHED and name in record["values"]:
            value = math.inf
        values.append(math.nan if value is None and record.get("failed") else value)
    known = [value for value in values if value is not None]
    if not known:
        return None
    finite = len(known) > 1 and all(map(math.isfinite, known))
    return Ours(mean(known), stdev(known) if finite else None, len(known))


def ratio_agrees(mine: Ours | None, paper: float | None) -> bool | None:
    """Whether ours is within 25 % of the paper's; None where one of them is lacking or not reached."""
    if mine is None or paper is None or not (math.isfinite(mine.mean) and math.isfinite(paper)) or not paper:
        return None
    return 1 / CLOSE <= mine.mean / paper <= CLOSE


def pairs(recipe: Recipe, records: Records) -> Iterator[tuple[Cell, Cell, str, bool]]:
    """Comparable pairs of a recipe's own cells that we have, and whether their order is the paper's: they differ in one
    word, and the paper's figures by more than 10 %."""
    fixed = [recipe.kinds.index(kind) for kind in recipe.apart]
    for name in recipe.values:
        known = [cell for cell in recipe.cells if cell.home == recipe.name and name in cell.paper
                 and ours(records.get(cell.name, ()), name)]  # fmt: skip
        for a, b in combinations(known, 2):
            differ = [place for place, (x, y) in enumerate(zip(a.words, b.words, strict=True)) if x != y]
            low, high = sorted((a, b), key=lambda cell: cell.paper[name])
            if len(differ) > 1 or differ[0] in fixed or not high.paper[name] > APART * low.paper[name]:
                continue
            small, large = (ours(records[cell.name], name) for cell in (low, high))
            assert small is not None
            assert large is not None
            yield low, high, name, small.mean < large.mean


def table(recipe: Recipe, records: Records, title: str) -> Table:
    """Ours (the paper's in brackets), a row for each combination of words that `across` leaves; = marks a ratio within
    25 %, ! one beyond."""
    cells = [cell for cell in recipe.cells if cell.name in records]
    place = recipe.kinds.index(recipe.across) if recipe.across in recipe.kinds else None
    boxes: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in cells:
        for name in recipe.values:
            words, column = cell.words, name
            if place is not None:
                column = words.pop(place)
                words += [name] if len(recipe.values) > 1 else []
            boxes.setdefault(tuple(words), {})[column] = box(ours(records[cell.name], name), cell.paper.get(name))
    heads = [kind for kind in recipe.kinds if kind != recipe.across]
    heads += ["value"] if place is not None and len(recipe.values) > 1 else []
    columns = list(dict.fromkeys(column for row in boxes.values() for column in row))
    said = recipe.values[0] if place is not None and len(recipe.values) == 1 else ""
    named = [f"{said}, {column}" if said else column for column in columns]
    return Table(title, (*heads, *named), [[*words, *(row.get(column, "") for column in columns)]
                                           for words, row in boxes.items()])  # fmt: skip


def box(mine: Ours | None, paper: float | None) -> str:
    text = "-" if mine is None else str(mine)
    if paper is None:
        return text
    mark = {True: " =", False: " !", None: ""}[ratio_agrees(mine, paper)]
    return f"{text} ({shown(paper)}){mark}"


def write(made: Made, folder: Path, name: str) -> None:
    """The table and the remarks as Markdown, and a line of JSON for each run."""
    text = report.write_table(folder / f"{name}.md", *made.tables[0])
    with text.open("a") as file:
        file.writelines(f"\n{note}\n" for note in made.notes)
    figures = folder / f"{name}.json"
    figures.write_text("[\n" + ",\n".join(json.dumps(strict(figure)) for figure in made.figures) + "\n]\n")
    made.files = [text, figures]


# ---- pictures -------------------------------------------------------------------------------------
def curves(
    lines: Sequence[str], against: Sequence[str] = ("commits",), best: bool = False, losses: bool = False
) -> Picture:
    """Accuracy of all cells, a panel for each combination of words beside the kinds in `lines`; with `best` the best
    so far; with `losses` a second picture, of the training loss over commits."""

    def draw(recipe: Recipe, records: Records, path: Path) -> list[Path]:
        groups: dict[str, dict[str, list[list[dict[str, Any]]]]] = {}
        falls: dict[str, list[tuple[float, float]]] = {}
        for name, runs in records.items():
            rows = [unpacked(run["curve"], best) for run in runs if run.get("curve")]
            if not rows:
                continue
            words = dict(zip(recipe.kinds, name.split(), strict=True))
            line = " ".join(words.pop(kind) for kind in lines)
            groups.setdefault(" ".join(words.values()), {})[line] = rows
            fall = [(row["commit"], row["training_loss"]) for row in rows[0] if row["training_loss"] is not None]
            falls |= {name: fall} if losses and fall else {}
        paths = [plots.panels(groups, path, recipe.title, against)] if groups else []
        if falls:
            second = path.with_name(f"{path.stem}-loss.png")
            paths.append(plots.falling(falls, second, "commits", "training loss", recipe.title))
        return paths

    return draw


def unpacked(curve: Sequence[Sequence[Any]], best: bool) -> list[dict[str, Any]]:
    scores = [row[2] or 0.0 for row in curve]
    scores = list(accumulate(scores, max)) if best else scores
    return [{"commit": row[0], "virtual_seconds": row[1], "accuracy": score, "training_loss": row[4]}
            for row, score in zip(curve, scores, strict=True)]  # fmt: skip


def points(along: str, value: str, log: bool = False) -> Picture:
    """A value against the words of one kind, ours and the paper's; a series for each combination of the others."""

    def draw(recipe: Recipe, records: Records, path: Path) -> list[Path]:
        series: dict[str, dict[str, float]] = {}
        for name, runs in records.items():
            words = dict(zip(recipe.kinds, name.split(), strict=True))
            tick = words.pop(along).rpartition("=")[2]
            label, mine, paper = " ".join(words.values()), ours(runs, value), recipe.cell(name).paper.get(value)
            if mine is not None and math.isfinite(mine.mean):
                series.setdefault(label or "ours", {})[tick] = mine.mean
            if paper is not None and math.isfinite(paper):
                series.setdefault(f"{label} paper".strip(), {})[tick] = paper
        return [plots.points(series, path, along, value, recipe.title)] if series else []

    return draw


def falling(along: str, values: Sequence[str]) -> Picture:
    """Values over powers of ten against the number in the words of one kind, ours and the paper's."""

    def draw(recipe: Recipe, records: Records, path: Path) -> list[Path]:
        lines: dict[str, list[tuple[float, float]]] = {}
        for name, runs in records.items():
            words = dict(zip(recipe.kinds, name.split(), strict=True))
            x = float(words.pop(along).rpartition("=")[2].rstrip("%"))
            for value in values:
                mine, paper = ours(runs, value), recipe.cell(name).paper.get(value)
                for whose, y in (("", mine and mine.mean), ("paper ", paper)):
                    if y and math.isfinite(y):
                        lines.setdefault(" ".join([f"{whose}{value}", *words.values()]), []).append((x, y))
        return [plots.falling(lines, path, along, "", recipe.title)] if lines else []

    return draw


def heat_maps(row: str, column: str, value: str) -> Picture:
    """A map for each combination of the other words."""

    def draw(recipe: Recipe, records: Records, path: Path) -> list[Path]:
        maps: dict[str, dict[tuple[str, str], float]] = {}
        for name, runs in records.items():
            words = dict(zip(recipe.kinds, name.split(), strict=True))
            key = tuple(words.pop(kind).rpartition("=")[2] for kind in (row, column))
            mine = ours(runs, value)
            maps.setdefault(" ".join(words.values()), {})[key[0], key[1]] = math.nan if mine is None else mine.mean
        return [plots.heat_maps(maps, path, (row, column), recipe.title)] if maps else []

    return draw


def by_cell(recipe: Recipe, records: Mapping[str, Sequence[Record]]) -> dict[str, Sequence[Record]]:
    """Records in the order of the recipe's cells."""
    return {cell.name: records[cell.name] for cell in recipe.cells if records.get(cell.name)}
