"""Evaluation: a model's outputs on a set, and what metrics make of them. It only looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from offbeat.numerics.samples import Samples
from offbeat.numerics.vector import FlatModel

BATCH = 2048  # samples at once
Measure: TypeAlias = Callable[[Tensor, Tensor], Tensor | None]  # (outputs, targets) of a batch -> their mean, if any


class Metric(NamedTuple):
    """A mean over samples."""

    name: str
    of: Measure


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """The share of samples whose largest score is that of their class; None where there are no such scores."""
    if outputs.dim() != 2 or outputs.shape[1] < 2 or targets.is_floating_point() or targets.dim() != 1:
        return None
    return (outputs.argmax(dim=1) == targets).double().mean()


class Evaluation:
    """The metrics of a model on one set of samples."""

    def __init__(self, model: FlatModel, x: Tensor, y: Tensor, metrics: tuple[Metric, ...] | None = None) -> None:
        self.model, self.x, self.y = model, x, y
        self.metrics = metrics or (Metric("loss", model.mean_loss), Metric("accuracy", accuracy))

    def __call__(self, flat: Tensor) -> dict[str, Any]:
        """Each metric of the model with these parameters: a number, or None where it says nothing of such outputs."""
        sums: dict[str, Tensor | None] = {
            metric.name: torch.zeros((), dtype=torch.float64, device=self.x.device) for metric in self.metrics
        }
        for first in range(0, len(self.x), BATCH):
            targets = self.y[first : first + BATCH]
            outputs = self.model.outputs(flat, self.x[first : first + BATCH])
            for metric in self.metrics:
                value, total = metric.of(outputs, targets), sums[metric.name]
                missing = value is None or total is None
                sums[metric.name] = None if missing else total + value.double() * len(targets)  # type: ignore[operator, union-attr]
        return {name: None if total is None else float(total) / len(self.x) for name, total in sums.items()}


def training_loss(model: FlatModel, samples: Samples, flat: Tensor) -> float:
    """The mean over clients of their mean losses over their shards."""
    total = 0.0
    for client, size in enumerate(samples.sizes):
        rows = samples.order[int(samples.first[client]) : int(samples.first[client]) + size]
        for part in torch.split(rows, BATCH):
            outputs = model.outputs(flat, samples.x[part])
            total += float(model.mean_loss(outputs, samples.y[part])) * len(part) / size
    return total / samples.clients
