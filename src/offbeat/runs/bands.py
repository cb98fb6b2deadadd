"""Several seeds as one line: the mean and its 95 % interval, on one grid. Whoever draws or tables seeds asks here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

POINTS = 240  # of a band's grid
Rows = Sequence[Mapping[str, Any]]


class Band(NamedTuple):
    """`low` and `high` bound the mean's 95 % interval (Student); None where there is one seed."""

    x: list[float]
    mean: list[float]
    low: list[float] | None
    high: list[float] | None


class Interval(NamedTuple):
    mean: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def half(self) -> float:
        return 0.0 if self.high is None else self.high - self.mean


def interval(values: Sequence[float]) -> Interval:
    """The mean of one number per seed, with its 95 % interval.

    >>> interval([1.0, 2.0, 3.0]).low < 0 < interval([1.0, 2.0, 3.0]).mean
    True
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None, len(values))
    half = wide(len(values)) * float(np.std(values, ddof=1))
    return Interval(mean, mean - half, mean + half, len(values))


def wide(seeds: int) -> float:
    """Half the interval over the standard deviation."""
    return float(stdtrit(seeds - 1, 0.975) / np.sqrt(seeds))  # Student's t; scipy.stats takes a second to import


def value(row: Mapping[str, Any], key: str) -> float | None:
    """A figure of a metrics row; `bytes` are those up and down, which rows do not have of their own."""
    if key == "bytes" and "bytes" not in row:
        return float(row["bytes_up"] + row["bytes_down"])
    return row.get(key)


def points(rows: Rows, key: str, score: str) -> tuple[list[float], list[float]]:
    """The rows that have both figures, as two columns."""
    pairs = [(value(row, key), row.get(score)) for row in rows]
    whole = [(float(x), float(y)) for x, y in pairs if x is not None and y is not None and np.isfinite([x, y]).all()]
    return [x for x, _ in whole], [y for _, y in whole]


def band(runs: Sequence[Rows], key: str, score: str) -> Band:
    """One line for all seeds; it goes as far as the shortest of them."""
    lines = [line for line in (points(rows, key, score) for rows in runs) if line[0]]
    if not lines:
        return Band([], [], None, None)
    if len(lines) == 1:
        return Band(*lines[0], None, None)
    grid = grid_of([np.asarray(x) for x, _ in lines])
    table = np.stack([np.interp(grid, x, y) for x, y in lines])
    mean = table.mean(axis=0)
    half = wide(len(lines)) * table.std(axis=0, ddof=1)
    return Band(grid.tolist(), mean.tolist(), (mean - half).tolist(), (mean + half).tolist())


def grid_of(columns: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The places of the seeds' own evaluations while they are few, evenly spaced ones where they are many."""
    low, high = max(x[0] for x in columns), min(x[-1] for x in columns)
    own = np.unique(np.concatenate([x[(x >= low) & (x <= high)] for x in columns]))
    return own if len(own) <= POINTS else np.linspace(low, high, POINTS)
