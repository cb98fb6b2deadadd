"""Evaluation: a model's outputs on a set, or on the sets of many clients, and what metrics make of them. It only looks.

Outputs of at most BATCH samples are there at once, but for metrics that are no means, which see a whole set (of one
client, where there are many).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.numerics.blame import blamed
from offbeat.numerics.forms import scores_in
from offbeat.numerics.metrics import METRICS, Metric
from offbeat.numerics.outputs import cloned, cut, joined, of_samples
from offbeat.numerics.samples import Samples
from offbeat.numerics.threads import threads
from offbeat.numerics.vector import FlatModel
from offbeat.numerics.windows import Windows

BATCH = 2048  # samples at once ...
TOKENS = 1 << 16  # ... and tokens, each of which layers make many numbers of
LEAST = 3  # samples at once, however many tokens they have: then no equal part has one alone
SMALL = 1 << 18  # numbers in a set for which one thread is enough
PERCENTILES = (10, 50, 90)
SPEEDS = ("fast", "middle", "slow")
Set: TypeAlias = Tensor | Windows


@dataclass(frozen=True)
class Figure:
    """What a column of the metrics is: which data it comes from, and whether more of it is better."""

    data: str
    more_is_better: bool | None
    share: bool = False


@dataclass
class Faults:
    """Metrics that raised or gave no number: what they said first, and at which version."""

    first: dict[str, str] = field(default_factory=dict)

    def number(self, name: str, value: Any) -> float | None:
        """A value as a number, or None and a mark."""
        if value is None:
            return None
        try:
            plain = value.item() if isinstance(value, Tensor | np.generic) else value
            number = float(plain) if isinstance(plain, int | float) else math.nan
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if math.isfinite(number):
            return number
        self.mark(name, f"it gave {value!r:.60}, which is no finite number")
        return None

    def mark(self, name: str, said: str) -> None:
        if name not in self.first:
            self.first[name] = said
            warnings.warn(f"metric '{name}' is left out where it fails, and the run goes on: {said}", stacklevel=2)

    def whole(self, name: str, metric: Metric, outputs: Any, targets: Any) -> float | None:
        try:
            return self.number(name, metric.of(cloned(outputs), cloned(targets)))  # it may write to them
        except Exception as error:  # whatever a metric of one's own raises
            self.mark(name, f"{type(error).__name__}: {error}")
            return None


class Evaluation:
    """The loss and the metrics of a model on one set of samples, `data` in words."""

    def __init__(
        self, model: FlatModel, x: Set, y: Set, metrics: Mapping[str, Metric] | None = None,
        data: str = "the test set", faults: Faults | None = None,
    ) -> None:  # fmt: skip
        self.model, self.x, self.y, self.data = model, x, y, data
        self.metrics = {"accuracy": METRICS["accuracy"]} if metrics is None else metrics
        self.faults = faults or Faults()

    def figures(self) -> dict[str, Figure]:
        own = {name: Figure(self.data, m.more_is_better, m.share) for name, m in self.metrics.items()}
        return {"loss": Figure(self.data, False), **own}

    def __call__(self, flat: Tensor) -> dict[str, Any]:
        """Each figure of the model with these parameters: a number, or None where a metric says nothing."""
        with threads(1 if len(self.x) * self.x[:1].numel() <= SMALL else None):
            return self.values(flat)

    def values(self, flat: Tensor) -> dict[str, Any]:
        loss = torch.zeros((), dtype=torch.float64, device=self.x.device)
        sums: dict[str, list[tuple[Tensor, Tensor]] | None] = {n: [] for n, m in self.metrics.items() if m.each}
        kept: list[Any] = []
        batches = chunks(len(self.x), at_once(self.model, self.x))
        for begin, end in batches:
            outputs, targets, of_batch = self.batch(flat, begin, end)
            loss = loss + of_batch.double() * (end - begin)
            for name in sums:
                part = self.metrics[name].each(outputs, targets)  # type: ignore[misc]
                parts = sums[name]
                sums[name] = None if part is None or parts is None else [*parts, (part[0].sum(), part[1].sum())]
            if len(sums) < len(self.metrics):
                kept.append(outputs)
        values: dict[str, Any] = {"loss": float(loss) / len(self.x)}
        together = joined(kept, [end - begin for begin, end in batches]) if kept else None
        for name, metric in self.metrics.items():
            if name not in sums:
                values[name] = self.faults.whole(name, metric, together, self.model.targets(self.y[:]))
                continue
            parts = sums[name]
            many = sum(float(count) for _, count in parts or ())
            mean = sum(float(total) for total, _ in parts or ()) / many if many else None
            values[name] = None if mean is None else self.faults.number(name, metric.ending(mean))
        return values

    def batch(self, flat: Tensor, begin: int, end: int) -> tuple[Any, Any, Tensor]:
        """Scores, targets and the mean loss of samples `begin .. end`; or a sentence that names the sample."""

        def at(rows: Any) -> tuple[Any, Any, Tensor]:
            outputs, targets = self.model.outputs(flat, self.x[rows]), self.model.targets(self.y[rows])
            return scores_in(outputs), targets, self.model.mean_loss(outputs, targets)

        try:
            return at(slice(begin, end))
        except (OffbeatError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a model of one's own raises
            raise blamed(f"looking at {self.data}", self.data, range(begin, end), at, error) from error

    def not_finite(self, flat: Tensor) -> int | None:
        """The first sample whose loss by itself is no finite number; None where there is none."""
        for row in range(len(self.x)):
            if not bool(self.batch(flat, row, row + 1)[2].isfinite()):
                return row
        return None


class ClientEvaluation:
    """The same on a set of each client: the mean over clients, the worst, percentiles, and means by speed.

    `rows[i]` are those of client i in `x`, `y`; clients without any do not count. `speed[i]`, where given, is 0, 1 or
    2 for the fast, the middle and the slow third.
    """

    def __init__(
        self, name: str, data: str, model: FlatModel, x: Set, y: Set, rows: Sequence[Any],
        metrics: Mapping[str, Metric], speed: Sequence[int] | None = None, faults: Faults | None = None,
    ) -> None:  # fmt: skip
        self.name, self.data, self.model, self.x, self.y = name, data, model, x, y
        self.clients = [client for client, own in enumerate(rows) if len(own)]
        own = [np.asarray(rows[client], dtype=np.int64) for client in self.clients]
        self.sizes = [len(each) for each in own]
        self.order = torch.from_numpy(np.concatenate(own) if own else np.zeros(0, np.int64)).to(x.device)
        self.metrics, self.faults = metrics, faults or Faults()
        self.speed = None if speed is None else np.array([speed[client] for client in self.clients])
        self.last: dict[str, list[float | None]] = {}  # of each client, at the last look

    def figures(self) -> dict[str, Figure]:
        figures = {}
        ends = ["mean", "worst", *(f"p{each}" for each in PERCENTILES), *(SPEEDS if self.speed is not None else ())]
        named = {"loss": (False, False), **{name: (m.more_is_better, m.share) for name, m in self.metrics.items()}}
        for name, (more, share) in named.items():
            for end in ends:
                if end != "worst" or more is not None:
                    figures[f"{self.name}_{name}_{end}"] = Figure(self.data, more, share)
        return figures

    def __call__(self, flat: Tensor) -> dict[str, Any]:
        self.last = self.each(flat)
        values: dict[str, Any] = dict.fromkeys(self.figures())
        for name, seen in self.last.items():
            there = np.array([place for place, value in enumerate(seen) if value is not None], dtype=np.int64)
            if not len(there):
                continue
            numbers = np.array([seen[place] for place in there], dtype=np.float64)
            more = False if name == "loss" else self.metrics[name].more_is_better
            ends = {"mean": numbers.mean(), **{f"p{p}": np.percentile(numbers, p) for p in PERCENTILES}}
            if more is not None:
                ends["worst"] = numbers.min() if more else numbers.max()
            if self.speed is not None:
                for number, speed in enumerate(SPEEDS):
                    mine = numbers[self.speed[there] == number]
                    ends[speed] = mine.mean() if len(mine) else None
            values |= {f"{self.name}_{name}_{end}": None if v is None else float(v) for end, v in ends.items()}
        return values

    def each(self, flat: Tensor) -> dict[str, list[float | None]]:
        """Every figure of every client. Means are summed over batches that hold many clients; other metrics get the
        outputs of one client at a time."""
        many = len(self.clients)
        owner = torch.repeat_interleave(torch.arange(many), torch.tensor(self.sizes, dtype=torch.long)).to(
            self.x.device
        )
        means = {name: metric for name, metric in self.metrics.items() if metric.each}
        totals = {name: torch.zeros(2, many, dtype=torch.float64, device=self.x.device) for name in ("loss", *means)}
        silent: set[str] = set()
        others = {name: metric for name, metric in self.metrics.items() if name not in means}
        values: dict[str, list[float | None]] = {name: [None] * many for name in ("loss", *self.metrics)}
        batch = at_once(self.model, self.x)
        for group, begin, end in groups(self.sizes, batch):
            rows, owners = self.order[begin:end], owner[begin:end]
            batches, kept = chunks(len(rows), batch), []
            for first, last in batches:
                part, mine = rows[first:last], owners[first:last]
                outputs, targets = self.model.outputs(flat, self.x[part]), self.model.targets(self.y[part])
                scores = scores_in(outputs)
                ones = torch.ones(len(part), dtype=torch.float64, device=self.x.device)
                for name, sums in (
                    ("loss", (of_samples(self.model.mean_loss, outputs, targets), ones)),
                    *((name, metric.each(scores, targets)) for name, metric in means.items()),  # type: ignore[misc]
                ):
                    if sums is None:
                        silent.add(name)
                        continue
                    for side in (0, 1):
                        totals[name][side].index_add_(0, mine, sums[side].double())
                kept += [scores] if others else []
            if others:
                together = joined(kept, [last - first for first, last in batches])
                targets = self.model.targets(self.y[rows])
                place = 0
                for client in group:
                    size = self.sizes[client]
                    for name, metric in others.items():
                        piece, true = cut((together, targets), place, place + size, len(rows))
                        values[name][client] = self.faults.whole(name, metric, piece, true)
                    place += size
        for name, (sums, counts) in ((name, total.tolist()) for name, total in totals.items()):
            if name in silent:
                continue
            ending = float if name == "loss" else self.metrics[name].ending
            for client in range(many):
                if counts[client]:
                    values[name][client] = self.faults.number(name, ending(sums[client] / counts[client]))
        return values


def at_once(model: FlatModel, x: Set) -> int:
    """Samples that are looked at together."""
    form = model.forms.inputs
    tokens = x.length if isinstance(x, Windows) else form.tokens if form is not None else None
    return max(LEAST, min(BATCH, TOKENS // (tokens or 1)))


def chunks(many: int, most: int) -> list[tuple[int, int]]:
    """The first and the last rows of parts of at most so many, which are as equal as can be.

    >>> chunks(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    number = -(-many // most)
    ends = [-(-many * part // number) for part in range(number + 1)]
    return list(pairwise(ends))


def groups(sizes: Sequence[int], most: int) -> list[tuple[range, int, int]]:
    """Clients one after another, as many as have `most` samples together (or one that has more), and their rows. A
    sample is never alone in a group: some models take no batch of one.

    >>> groups([3, 4, 9, 2, 8, 1], 8)
    [(range(0, 2), 0, 7), (range(2, 3), 7, 16), (range(3, 4), 16, 18), (range(4, 6), 18, 27)]
    """
    parts: list[tuple[range, int, int]] = []
    place = 0
    for client, size in enumerate(sizes):
        held = parts[-1][2] - parts[-1][1] if parts else most
        alone = held == 1 or (size == 1 and client == len(sizes) - 1)
        if parts and (held + size <= most or alone):
            parts[-1] = (range(parts[-1][0].start, client + 1), parts[-1][1], place + size)
        else:
            parts.append((range(client, client + 1), place, place + size))
        place += size
    return parts


def training_loss(model: FlatModel, samples: Samples, flat: Tensor) -> float:
    """The mean over clients of their mean losses over their shards."""
    total = 0.0
    for client, size in enumerate(samples.sizes):
        rows = samples.order[int(samples.first[client]) : int(samples.first[client]) + size]
        for begin, end in chunks(size, at_once(model, samples.x)):
            part = rows[begin:end]
            outputs = model.outputs(flat, samples.x[part])
            total += float(model.mean_loss(outputs, model.targets(samples.y[part]))) * len(part) / size
    return total / samples.clients
