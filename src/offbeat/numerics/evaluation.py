"""Evaluation: a model's outputs on a set, and what metrics make of them. It only looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from offbeat.numerics.samples import Samples
from offbeat.numerics.vector import FlatModel
from offbeat.numerics.windows import Windows

BATCH = 2048  # samples at once ...
TOKENS = 1 << 16  # ... and tokens, each of which layers make many numbers of
Measure: TypeAlias = Callable[[Any, Any], Tensor | None]  # (outputs, targets) of a batch -> their mean, if any


class Metric(NamedTuple):
    """A mean over samples."""

    name: str
    of: Measure


def accuracy(outputs: Any, targets: Any) -> Tensor | None:
    """The share of samples (or of their places, in sequences) whose largest score is that of their class; None where
    there are no such scores."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return None
    if outputs.dim() < 2 or outputs.shape[-1] < 2 or targets.is_floating_point() or targets.shape != outputs.shape[:-1]:
        return None
    return (outputs.argmax(dim=-1) == targets).double().mean()


class Evaluation:
    """The metrics of a model on one set of samples."""

    def __init__(
        self, model: FlatModel, x: Tensor | Windows, y: Tensor | Windows, metrics: tuple[Metric, ...] | None = None
    ) -> None:
        self.model, self.x, self.y = model, x, y
        self.metrics = metrics or (Metric("loss", model.mean_loss), Metric("accuracy", accuracy))

    def __call__(self, flat: Tensor) -> dict[str, Any]:
        """Each metric of the model with these parameters: a number, or None where it says nothing of such outputs."""
        sums: dict[str, Tensor | None] = {
            metric.name: torch.zeros((), dtype=torch.float64, device=self.x.device) for metric in self.metrics
        }
        batch = at_once(self.model, self.x)
        for first in range(0, len(self.x), batch):
            targets = self.model.targets(self.y[first : first + batch])
            outputs = self.model.outputs(flat, self.x[first : first + batch])
            for metric in self.metrics:
                value, total = metric.of(outputs, targets), sums[metric.name]
                missing = value is None or total is None
                sums[metric.name] = None if missing else total + value.double() * len(self.x[first : first + batch])  # type: ignore[operator, union-attr]
        return {name: None if total is None else float(total) / len(self.x) for name, total in sums.items()}


def at_once(model: FlatModel, x: Tensor | Windows) -> int:
    """Samples that are looked at together."""
    form = model.forms.inputs
    tokens = x.length if isinstance(x, Windows) else form.tokens if form is not None else None
    return max(1, min(BATCH, TOKENS // (tokens or 1)))


def training_loss(model: FlatModel, samples: Samples, flat: Tensor) -> float:
    """The mean over clients of their mean losses over their shards."""
    total = 0.0
    for client, size in enumerate(samples.sizes):
        rows = samples.order[int(samples.first[client]) : int(samples.first[client]) + size]
        for part in torch.split(rows, at_once(model, samples.x)):
            outputs = model.outputs(flat, samples.x[part])
            total += float(model.mean_loss(outputs, model.targets(samples.y[part]))) * len(part) / size
    return total / samples.clients
