"""Evaluation: a model's outputs on a set, or on the sets of many clients, and what metrics make of them. It only looks.

Outputs of at most BATCH samples are there at once, but for metrics that are no means, which see a whole set (of one
client, where there are many).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.errors import OffbeatError
from offbeat.numerics.blame import blamed, first_line
from offbeat.numerics.forms import scores_in
from offbeat.numerics.metrics import METRICS, Metric, Sums, class_axes
from offbeat.numerics.outputs import cloned, cut, in_rows, joined, parts
from offbeat.numerics.samples import Samples
from offbeat.numerics.set_loss import TOGETHER, Denominators, SetLoss, class_axis, count, ignored_label, losses_of_sets
from offbeat.numerics.threads import threads
from offbeat.numerics.vector import FlatModel
from offbeat.numerics.windows import Windows

BATCH = 2048  # samples at once ...
TOKENS = 1 << 16  # ... and tokens, each of which layers make many numbers of
LEAST = 3  # samples at once, however many tokens they have: then no equal part has one alone
TRIED = 8  # samples that show whether those of a batch change one another's outputs
ROUNDING = 3.0  # times the root of the machine's precision: outputs that differ by less are the same
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

    def note(self, name: str, said: str) -> None:
        """Mark a figure that is kept."""
        if name not in self.first:
            self.first[name] = said
            warnings.warn(f"{name}: {said}", stacklevel=2)

    def whole(self, name: str, metric: Metric, outputs: Any, targets: Any) -> float | None:
        try:
            return self.number(name, metric.of(cloned(outputs), cloned(targets)))  # it may write to them
        except Exception as error:  # whatever a metric of one's own raises
            self.mark(name, f"{type(error).__name__}: {error}")
            return None


class Figures:
    """The loss and the metrics of a model on sets of samples of one data set, `data` in words."""

    doubled = False  # one sample is computed as a batch of two of it: some models take no batch of one

    def __init__(
        self, model: FlatModel, x: Set, y: Set, metrics: Mapping[str, Metric], data: str, faults: Faults | None,
        column: str = "loss",
    ) -> None:  # fmt: skip
        self.model, self.x, self.y, self.data, self.metrics = model, x, y, data, metrics
        self.faults, self.column = faults or Faults(), column
        self.placed = False

    def of_set(self, flat: Tensor, rows: Tensor | None = None) -> dict[str, Any]:
        """Return each figure of one set: these rows, or all. A number, or None where a metric says nothing."""
        many = len(self.x) if rows is None else len(rows)
        batches = chunks(many, at_once(self.model, self.x))
        sizes = [end - begin for begin, end in batches]
        loss = SetLoss(self.model.mean_loss, sizes)
        sums: dict[str, list[tuple[Tensor, Tensor]] | None] = {n: [] for n, m in self.metrics.items() if m.each}
        kept: list[Any] = []
        for begin, end in batches:
            part = slice(begin, end) if rows is None else rows[begin:end]
            outputs, targets, seen = self.part(flat, part)
            self.blamed(flat, part, loss.add, outputs, targets, seen)
            scores = scores_in(outputs)
            for name, taken in sums.items():
                of_part = self.sums(name, scores, targets)
                if of_part is None or taken is None:
                    sums[name] = None
                else:
                    taken.append((of_part[0].sum(), of_part[1].sum()))
            if len(sums) < len(self.metrics):
                kept.append(scores)
        whole = slice(None) if rows is None else rows
        value = self.blamed(flat, whole, loss.value, lambda: self.model.targets(self.y[whole]))
        if loss.caveat is not None:
            self.faults.note(self.column, loss.caveat)
        values: dict[str, Any] = {"loss": float(value)}
        together = joined(kept, sizes) if kept else None
        for name, metric in self.metrics.items():
            if name not in sums:
                values[name] = self.faults.whole(name, metric, together, self.model.targets(self.y[whole]))
                continue
            below = sum(float(count) for _, count in sums[name] or ())
            mean = sum(float(total) for total, _ in sums[name] or ()) / below if below else None
            values[name] = None if mean is None else self.faults.number(name, metric.ending(mean))
        return values

    def part(self, flat: Tensor, rows: Any) -> tuple[Any, Any, Denominators]:
        """Return outputs and targets of these rows, and the cross-entropies that the model itself computed."""
        doubled = self.doubled and len(rows) == 1
        with Denominators() as seen:
            batch = rows.expand(2) if doubled else rows
            outputs = self.blamed(flat, rows, outputs_of, self.model, flat, self.x, batch)
        outputs = cut(outputs, 0, 1, 2) if doubled else outputs
        targets = self.model.targets(self.y[rows])
        if not self.placed:
            self.metrics = self.blamed(flat, rows, as_the_loss, self.metrics, self.model.mean_loss, outputs, targets)
            self.placed = True
        return outputs, targets, seen

    def blamed(self, flat: Tensor, rows: Any, of: Callable[..., Any], *given: Any) -> Any:
        """Return `of(*given)`, or raise a sentence that names the first of the rows on which model or loss fails."""

        def at(rows: Tensor) -> None:
            rows = rows.to(self.x.device)
            outputs = outputs_of(self.model, flat, self.x, rows)
            self.model.mean_loss(outputs, self.model.targets(self.y[rows]))

        try:
            return of(*given)
        except (OffbeatError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a model of one's own raises
            every = range(*rows.indices(len(self.x))) if isinstance(rows, slice) else rows.tolist()
            raise blamed(f"looking at {self.data}", self.data, every, at, error) from error

    def sums(self, name: str, scores: Any, targets: Any) -> Sums | None:
        """Return each sample's part of a metric that is a mean."""
        try:
            return self.metrics[name].each(scores, targets)  # type: ignore[misc]
        except Exception as error:  # whatever a metric of one's own raises
            self.faults.mark(name, f"{type(error).__name__}: {error}")
            return None


class Evaluation(Figures):
    """The loss and the metrics of a model on one set of samples."""

    def __init__(
        self, model: FlatModel, x: Set, y: Set, metrics: Mapping[str, Metric] | None = None,
        data: str = "the test set", faults: Faults | None = None,
    ) -> None:  # fmt: skip
        metrics = {"accuracy": METRICS["accuracy"]} if metrics is None else metrics
        super().__init__(model, x, y, metrics, data, faults)

    def figures(self) -> dict[str, Figure]:
        own = {name: Figure(self.data, m.more_is_better, m.share) for name, m in self.metrics.items()}
        return {"loss": Figure(self.data, False), **own}

    def __call__(self, flat: Tensor) -> dict[str, Any]:
        """Each figure of the model with these parameters: a number, or None where a metric says nothing."""
        with threads(1 if len(self.x) * self.x[:1].numel() <= SMALL else None):
            return self.of_set(flat)

    def not_finite(self, flat: Tensor) -> int | None:
        """The first sample whose loss by itself is no finite number; None where there is none."""
        for row in range(len(self.x)):
            outputs, targets, _ = self.part(flat, slice(row, row + 1))
            if not bool(self.model.mean_loss(outputs, targets).isfinite()):
                return row
        return None


class ClientEvaluation(Figures):
    """The same on a set of each client: the mean over clients, the worst, percentiles, and means by speed.

    `rows[i]` are those of client i in `x`, `y`; clients without any do not count. `speed[i]`, where given, is 0, 1 or
    2 for the fast, the middle and the slow third.
    """

    def __init__(
        self, name: str, data: str, model: FlatModel, x: Set, y: Set, rows: Sequence[Any],
        metrics: Mapping[str, Metric], speed: Sequence[int] | None = None, faults: Faults | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, x, y, metrics, data, faults, f"{name}_loss")
        self.name = name
        self.clients = [client for client, own in enumerate(rows) if len(own)]
        own = [np.asarray(rows[client], dtype=np.int64) for client in self.clients]
        self.sizes = [len(each) for each in own]
        self.order = torch.from_numpy(np.concatenate(own) if own else np.zeros(0, np.int64)).to(x.device)
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

    @cached_property
    def together(self) -> int:
        """Number of samples whose clients are computed together: 0 where the outputs of a sample depend on its batch,
        so that a batch has rows of one client only."""
        rows = self.order[:: max(1, len(self.order) // TRIED)][:TRIED]
        width = numbers_of_each(self.model, self.x, rows)
        return 0 if width is None else max(at_once(self.model, self.x), TOGETHER // max(1, width))

    @property
    def doubled(self) -> bool:  # type: ignore[override]
        return self.together > 0

    def each(self, flat: Tensor) -> dict[str, list[float | None]]:
        """Return every figure of every client. The model computes clients together where its outputs do not depend on
        the batch; the loss and metrics that are no means get the outputs of one client at a time."""
        values: dict[str, list[float | None]] = {name: [None] * len(self.clients) for name in ("loss", *self.metrics)}
        for group, begin, end in groups(self.sizes, self.together):
            rows = self.order[begin:end]
            own = [self.of_client(flat, rows, group[0])] if len(group) == 1 else self.of_group(flat, rows, group)
            for client, figures in zip(group, own, strict=True):
                for name, value in figures.items():
                    values[name][client] = value
        return values

    def of_client(self, flat: Tensor, rows: Tensor, client: int) -> dict[str, float | None]:
        """Return each figure of one client."""
        if len(rows) == 1 and not self.together and (said := self.fails_alone(flat, rows)):
            who = f"client {self.clients[client]} has one sample, which the model does not take as a batch"
            self.faults.mark(self.column, f"{who}: {said}")
            return {}
        values = self.of_set(flat, rows)
        return values | {"loss": self.finite(client, values["loss"])}

    def finite(self, client: int, loss: float) -> float | None:
        """Return the loss of a client, or None and a mark where it is no finite number."""
        if math.isfinite(loss):
            return loss
        self.faults.mark(
            self.column, f"client {self.clients[client]} has the loss {loss}; its labels may all be ignored"
        )
        return None

    def fails_alone(self, flat: Tensor, rows: Tensor) -> str:
        """Return why the model does not take one sample, but two of it; empty where it does."""
        try:
            outputs_of(self.model, flat, self.x, rows)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model of one's own raises
            self.blamed(flat, rows, outputs_of, self.model, flat, self.x, rows.expand(2))
            return first_line(error)
        return ""

    def of_group(self, flat: Tensor, rows: Tensor, group: range) -> list[dict[str, float | None]]:
        """Return each figure of clients whose rows are computed together."""
        batches = chunks(len(rows), at_once(self.model, self.x))
        outputs = [self.part(flat, rows[begin:end])[0] for begin, end in batches]
        outputs, targets = joined(outputs, [end - begin for begin, end in batches]), self.model.targets(self.y[rows])
        sizes = [self.sizes[client] for client in group]
        losses = self.blamed(flat, rows, losses_of_sets, self.model.mean_loss, outputs, targets, sizes).tolist()
        values = [{"loss": self.finite(client, loss)} for client, loss in zip(group, losses, strict=True)]
        scores, ends = scores_in(outputs), [0, *accumulate(sizes)]
        owner = torch.repeat_interleave(torch.tensor(sizes)).to(self.x.device)
        for name, metric in self.metrics.items():
            if metric.each is None:
                for place, (begin, end) in enumerate(pairwise(ends)):
                    own = cut((scores, targets), begin, end, len(rows))
                    values[place][name] = self.faults.whole(name, metric, *own)
            elif (sums := self.sums(name, scores, targets)) is not None:
                totals = torch.zeros(2, len(group), dtype=torch.float64, device=self.x.device)
                for side in (0, 1):
                    totals[side].index_add_(0, owner, sums[side].double())
                for place, (total, below) in enumerate(totals.T.tolist()):
                    if below:
                        values[place][name] = self.faults.number(name, metric.ending(total / below))
        return values


def outputs_of(model: FlatModel, flat: Tensor, x: Set, rows: Any) -> Any:
    """Return the outputs for these rows of `x`, as one batch."""
    return model.outputs(flat, x[rows])


@torch.no_grad()
def numbers_of_each(model: FlatModel, x: Set, rows: Tensor) -> int | None:
    """Return the numbers in the outputs for a sample; None where they depend on the other samples of its batch, or have
    parts that are for a batch.

    The first model shows it, so that the answer is the same when a run is resumed.
    """
    if model.evaluates_by_batch or any(map(by_batch, model.module.modules())):
        return None
    try:
        among, twice = (outputs_of(model, model.initial(), x, own) for own in (rows, rows[:1].expand(2)))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it is blamed on a sample where it is looked at
        return None
    if not in_rows(among, len(rows)) or not in_rows(twice, 2):
        return None
    pairs = zip(parts(cut(among, 0, 1, len(rows))), parts(cut(twice, 0, 1, 2)), strict=True)
    return count(among) // len(rows) if all(alike(*pair) for pair in pairs) else None


def by_batch(part: nn.Module) -> bool:
    """Return whether a part normalises by the statistics of a batch in evaluation too."""
    normalises = isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)
    return normalises and part.running_mean is None


def alike(one: Any, two: Any) -> bool:
    """Return whether outputs are the same but for rounding."""
    if not isinstance(one, Tensor):
        return bool(one == two)
    if not one.is_floating_point():
        return torch.equal(one, two)
    near = ROUNDING * torch.finfo(one.dtype).eps ** 0.5
    largest = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    return torch.allclose(one, two, rtol=0.0, atol=near * largest, equal_nan=True)


def as_the_loss(metrics: Mapping[str, Metric], loss: Any, outputs: Any, targets: Any) -> dict[str, Metric]:
    """Return the metrics, which take from the loss the label that is left out and, where shapes leave it open, the axis
    of the classes."""
    scores = scores_in(outputs)
    if not (isinstance(scores, Tensor) and isinstance(targets, Tensor)) or targets.is_floating_point():
        return dict(metrics)
    axis = class_axis(loss, scores, targets) if len(class_axes(scores, targets)) > 1 else None
    ignored = ignored_label(loss, outputs, targets)
    if axis is None and (ignored is None or ignored < 0):
        return dict(metrics)
    return {name: metric.classes_on(axis, ignored) for name, metric in metrics.items()}


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
    """Return clients one after another, as many as have `most` samples together (or one that has more), with the
    first and the last of their rows.

    >>> groups([3, 4, 9, 2, 8], 8)
    [(range(0, 2), 0, 7), (range(2, 3), 7, 16), (range(3, 4), 16, 18), (range(4, 5), 18, 26)]
    """
    groups: list[tuple[range, int, int]] = []
    place = 0
    for client, size in enumerate(sizes):
        if groups and place + size - groups[-1][1] <= most:
            groups[-1] = (range(groups[-1][0].start, client + 1), groups[-1][1], place + size)
        else:
            groups.append((range(client, client + 1), place, place + size))
        place += size
    return groups


def training_loss(model: FlatModel, samples: Samples, flat: Tensor) -> float:
    """Return the mean over clients of the losses of their shards."""
    shards = samples.order.cpu().numpy()
    rows = [shards[first : first + size] for first, size in zip(samples.first.tolist(), samples.sizes, strict=True)]
    losses = ClientEvaluation("training", "the training data", model, samples.x, samples.y, rows, {}).each(flat)["loss"]
    return sum(math.nan if loss is None else loss for loss in losses) / samples.clients
