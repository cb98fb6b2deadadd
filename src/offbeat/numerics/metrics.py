"""Metrics: what can be said of a model's outputs on a set. Each says whether more of it is better.

One of one's own is a function of (outputs, targets) of a whole set that gives a number. Those that ship know class
targets (`[n]` whole numbers), token targets (`[n, t]` whole numbers, negative ones left out), soft targets (`[n, c]`
shares of the classes) and real targets; where a metric says nothing of such a task it gives None.

Scores of tokens are `[n, t, c]` or `[n, c, t]`. The shapes tell which, except where c = t: there a metric needs
`axis`, the axis of the classes (`Metric.classes_on`). A run takes the axis, and the label that is left out, from the
loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Whole: TypeAlias = Callable[[Any, Any], Any]  # (outputs, targets) of a set -> a number, or None
Sums: TypeAlias = tuple[Tensor, Tensor]  # for each sample a sum, and of how many things it is one


@dataclass(frozen=True, eq=False)
class Metric:
    """A figure of a whole set. Where it is a mean, `each` gives every sample's part, so that no outputs are kept and
    many clients are looked at together; `ending` turns the mean into the figure."""

    of: Whole
    more_is_better: bool | None = None  # None: nobody said, so that it cannot be a target
    each: Callable[[Any, Any], Sums | None] | None = None
    ending: Callable[[float], float] = float
    share: bool = False  # it lies between 0 and 1
    of_scores: bool = False  # `of` and `each` take the axis of the classes

    def __post_init__(self) -> None:
        for name in ("__doc__", "__module__"):
            of = self.of.func if isinstance(self.of, partial) else self.of
            object.__setattr__(self, name, getattr(of, name, None))

    def __call__(self, outputs: Any, targets: Any) -> Any:
        return self.of(outputs, targets)

    def classes_on(self, axis: int | None, ignored: int | None = None) -> Metric:
        """Return the metric for scores `[n, ...]` whose classes are on this axis, 1 or -1 (None: as the shapes tell),
        without targets of the class `ignored`."""
        if not self.of_scores:
            return self
        of: Callable[..., Any] = self.of
        each: Callable[..., Sums | None] | None = self.each
        reading = {"axis": axis, "ignored": ignored}
        return replace(self, of=partial(of, **reading), each=each and partial(each, **reading), of_scores=False)


def metric(more_is_better: bool, share: bool = False) -> Callable[[Whole], Metric]:
    """Makes a function of (outputs, targets) a metric that says whether more of it is better.

    >>> @metric(more_is_better=False)
    ... def largest_error(outputs, targets):
    ...     return (outputs - targets).abs().max()
    >>> largest_error.more_is_better
    False
    """
    return lambda of: Metric(of, more_is_better, share=share)


def as_metric(given: Any) -> Metric:
    """A metric from one, or from a function that may say `more_is_better`."""
    return given if isinstance(given, Metric) else Metric(given, getattr(given, "more_is_better", None))


def mean_of(
    each: Callable[..., Sums | None], more: bool, ending: Callable[[float], float] = float, share: bool = False,
    of_scores: bool = True,
) -> Metric:  # fmt: skip
    def of(outputs: Any, targets: Any, **reading: int | None) -> float | None:
        sums = each(outputs, targets, **reading)
        if sums is None or not float(sums[1].sum()):
            return None
        return ending(float(sums[0].double().sum()) / float(sums[1].sum()))

    of.__doc__ = each.__doc__
    return replace(Metric(of, more), each=each, ending=ending, share=share, of_scores=of_scores)


# ---- what targets are ---------------------------------------------------------------------------
def scored(
    outputs: Any, targets: Any, axis: int | None = None, ignored: int | None = None
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return scores `[..., c]` and the classes `[...]` that they are for, or None where there are no such scores. A
    class below 0 stands for none.

    Raise ValueError where `axis` is not given and the shapes fit classes on axis 1 and on the last.
    """
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None  # of several parts
    if targets.is_floating_point():
        soft = outputs.dim() == 2 and outputs.shape[1] > 1 and targets.shape == outputs.shape
        return (outputs, targets.argmax(dim=1)) if soft and shares(targets) else None
    axes = class_axes(outputs, targets)
    if axis is None and len(axes) > 1:
        raise ValueError(
            f"scores of shape {list(outputs.shape)} for targets of shape {list(targets.shape)} may have their classes "
            "on axis 1 or on the last, and the loss does not show which; give the metric as, for example, "
            "offbeat.METRICS['accuracy'].classes_on(1)"
        )
    axes = [each for each in axes if axis is None or each == axis]
    if ignored is not None and ignored >= 0:
        targets = targets.long().masked_fill(targets == ignored, -1)
    return (outputs.movedim(axes[0], -1), targets) if axes else None


def class_axes(outputs: Tensor, targets: Tensor) -> list[int]:
    """Return the axes (-1, 1) on which scores may have their classes, by their shapes alone."""
    if outputs.dim() != targets.dim() + 1 or not targets.dim():
        return []
    axes = (-1, 1) if outputs.dim() > 2 else (-1,)
    fit = [axis for axis in axes if outputs.movedim(axis, -1).shape[:-1] == targets.shape]
    return [axis for axis in fit if outputs.shape[axis] > 1]


def shares(targets: Tensor) -> bool:
    """Whether rows are shares of a whole."""
    return bool((targets >= 0).all()) and bool(((targets.sum(dim=1) - 1).abs() < 1e-3).all())


def per_sample(values: Tensor, classes: Tensor) -> Sums:
    """Sums over what belongs to a sample, without classes below 0, which stand for nothing."""
    there = (classes >= 0).reshape(len(classes), -1)
    return (values.double().reshape(len(classes), -1) * there).sum(dim=1), there.sum(dim=1)


# ---- those that ship ----------------------------------------------------------------------------
def hits(outputs: Any, targets: Any, axis: int | None = None, ignored: int | None = None) -> Sums | None:
    """The share of samples (or tokens) whose largest score is that of their class."""
    scores = scored(outputs, targets, axis, ignored)
    return None if scores is None else per_sample(scores[0].argmax(dim=-1) == scores[1], scores[1])


def near_hits(outputs: Any, targets: Any, axis: int | None = None, ignored: int | None = None) -> Sums | None:
    """The share of samples (or tokens) whose class is among the five with the largest scores."""
    scores = scored(outputs, targets, axis, ignored)
    if scores is None:
        return None
    largest = scores[0].topk(min(5, scores[0].shape[-1]), dim=-1).indices
    return per_sample((largest == scores[1][..., None]).any(dim=-1), scores[1])


def surprise(outputs: Any, targets: Any, axis: int | None = None, ignored: int | None = None) -> Sums | None:
    """exp of the mean cross-entropy of scores with classes, tokens or soft targets."""
    scores = scored(outputs, targets, axis, ignored)
    if scores is None:
        return None
    logs = functional.log_softmax(scores[0].double(), dim=-1)
    if targets.is_floating_point():
        return -(logs * targets).sum(dim=1), torch.ones(len(targets), device=targets.device)
    if bool((scores[1] >= logs.shape[-1]).any()):
        return None  # whole numbers that are no classes: counts, groups
    picked = logs.gather(-1, scores[1].clamp(min=0)[..., None]).squeeze(-1)
    return per_sample(-picked, scores[1])


def distances(outputs: Any, targets: Any) -> Sums | None:
    """The mean absolute error of real targets."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or not targets.is_floating_point():
        return None
    if sides(outputs) != sides(targets):
        raise ValueError(
            f"mae takes outputs and targets of one shape (sides of 1 aside); here are outputs of shape "
            f"{list(outputs.shape)} and targets of shape {list(targets.shape)}"
        )
    apart = (outputs.reshape(targets.shape) - targets).abs().double().reshape(len(targets), -1)
    return apart.sum(dim=1), torch.full((len(targets),), apart.shape[1], device=targets.device)


def sides(values: Tensor) -> list[int]:
    """Return the number of rows, and the sides behind it that are not 1."""
    return [*values.shape[:1], *(side for side in values.shape[1:] if side != 1)]


def f1(outputs: Any, targets: Any, axis: int | None = None, ignored: int | None = None) -> float | None:
    """The mean over classes of the harmonic mean of precision and recall (macro F1); of one score, that of class 1."""
    outcomes, single = scored(outputs, targets, axis, ignored), binary(outputs, targets)
    if outcomes is None and single is None:
        return None
    if outcomes is None:
        assert single is not None
        guess, true, classes = (single[0] > 0).long(), single[1], [1]
    else:
        there = outcomes[1].reshape(-1) >= 0
        guess, true = outcomes[0].argmax(dim=-1).reshape(-1)[there], outcomes[1].reshape(-1)[there]
        classes = torch.unique(torch.cat([guess, true])).tolist()
    scores = []
    for each in classes:
        both = float(((guess == each) & (true == each)).sum())
        either = float((guess == each).sum() + (true == each).sum())
        scores.append(2 * both / either if either else 0.0)
    return sum(scores) / len(scores) if scores else None


def auc(outputs: Any, targets: Any, axis: int | None = None, ignored: int | None = None) -> float | None:
    """The area under the ROC curve; of several classes the mean over each against the rest. None where only one is."""
    scores, single = scored(outputs, targets, axis, ignored), binary(outputs, targets)
    if single is not None:
        return area(single[0].double(), single[1] == 1)
    if scores is None:
        return None
    there = scores[1].reshape(-1) >= 0
    odds = log_odds(scores[0].double().flatten(0, -2)[there])
    true = scores[1].reshape(-1)[there]
    if odds.shape[1] == 2:
        return area(odds[:, 1], true == 1)
    areas = [area(odds[:, each], true == each) for each in torch.unique(true).tolist()]
    seen = [value for value in areas if value is not None]
    return sum(seen) / len(seen) if seen else None


def log_odds(scores: Tensor) -> Tensor:
    """Return log(p / (1 - p)) `[n, c]` of each class's share p under softmax. It orders samples as p does, and differs
    where p rounds to 1."""
    if scores.shape[1] == 2:
        return scores - scores.flip(1)
    largest = scores.argmax(dim=1, keepdim=True)
    every = scores.logsumexp(dim=1, keepdim=True)
    others = every + torch.log1p(-(scores - every).exp().clamp(max=0.5))  # of classes that are not the largest
    behind = scores.scatter(1, largest, -math.inf).logsumexp(dim=1, keepdim=True)
    return scores - others.scatter(1, largest, behind)


def binary(outputs: Any, targets: Any) -> tuple[Tensor, Tensor] | None:
    """One score for each sample, above 0 for class 1, and the classes 0 and 1; None where they are not that."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if outputs.numel() != len(outputs) or targets.numel() != len(outputs):
        return None
    true = targets.reshape(-1)
    return (outputs.reshape(-1), true.long()) if bool(((true == 0) | (true == 1)).all()) else None


def area(score: Tensor, positive: Tensor) -> float | None:
    """The chance that a positive sample has a larger score than a negative one, ties counting half."""
    many, others = int(positive.sum()), int((~positive).sum())
    if not many or not others:
        return None
    _, place, counts = torch.unique(score, return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts - 1) / 2  # the mean rank of those that tie, from 1 on
    return (float(ranks[place][positive].sum()) - many * (many + 1) / 2) / (many * others)


def exponential(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


METRICS: Mapping[str, Metric] = {
    "accuracy": mean_of(hits, True, share=True),
    "top-5": mean_of(near_hits, True, share=True),
    "perplexity": mean_of(surprise, False, exponential),
    "f1": Metric(f1, True, share=True, of_scores=True),
    "auc": Metric(auc, True, share=True, of_scores=True),
    "mae": mean_of(distances, False, of_scores=False),
}
