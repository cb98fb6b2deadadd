"""A task: the learning problem. Model, loss, data and who has which samples; yours takes five lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from offbeat.errors import ConfigError
from offbeat.numerics.samples import Samples, Sampling
from offbeat.numerics.vector import FlatModel, Loss, refusals


@dataclass(frozen=True, eq=False)
class Task:
    """`data` is `(x, y)` tensors or a `Dataset` of such pairs; `shards[i]` are the rows of client i.

    The model's parameters as given are version 0. `loss(outputs, targets)` is the mean over a batch. `batch_size` may
    be a number for each client; None means the whole shard, exactly. Outputs with one score per class and integer
    targets give an accuracy.
    """

    model: nn.Module
    loss: Loss
    data: Any
    shards: Sequence[Any]
    test: Any = None
    batch_size: int | Sequence[int] | None = 10
    sampling: Sampling = "replacement"
    name: str = "custom"

    def problems(self) -> list[str]:
        """Everything that would stop a run, found without training."""
        found = refusals(self.model)
        if isinstance(self.batch_size, Sequence) and len(self.batch_size) != self.clients:
            found.append(f"batch_size has {len(self.batch_size)} numbers for {self.clients} clients; give one for each")
        if self.least_batch is not None and self.least_batch < 1:
            found.append(f"batch_size = {self.batch_size}; give at least 1, or None for the whole shard")
        if self.sampling not in get_args(Sampling):
            known = ", ".join(f"'{name}'" for name in get_args(Sampling))
            found.append(f"sampling = '{self.sampling}'; it is one of {known}")
        trainable = not found
        for kind, data in (("training", self.data), ("test", self.test)):
            if kind == "test" and data is None:
                continue
            try:
                x, y = tensors(data)
            except (TypeError, ValueError, RuntimeError) as error:
                found.append(f"the {kind} data must be a pair (x, y) of tensors or a Dataset of such pairs ({error})")
                continue
            found += shard_problems(self.shards, len(x)) if kind == "training" else []
            found += data_problems(kind, x, y, self.model) if trainable else []
        return found

    @property
    def has_accuracy(self) -> bool:
        """Whether outputs are one score per class and targets are classes."""
        x, y = tensors(self.data)
        return not y.is_floating_point() and y.dim() == 1 and scores(self.model, x) is not None

    @property
    def clients(self) -> int:
        return len(self.shards)

    @property
    def batches(self) -> tuple[int, ...] | None:
        """The batch size of each client, where they differ."""
        return tuple(self.batch_size) if isinstance(self.batch_size, Sequence) else None

    @property
    def least_batch(self) -> int | None:
        """The smallest batch of any client; None where shards are used whole."""
        return min(self.batch_size, default=1) if isinstance(self.batch_size, Sequence) else self.batch_size

    def samples(self, dtype: torch.dtype) -> Samples:
        x, y = tensors(self.data)
        shards = [np.asarray(shard, dtype=np.int64) for shard in self.shards]
        batch = self.batch_size if isinstance(self.batch_size, int) else self.batches
        return Samples.of(cast(x, dtype), cast(y, dtype), shards, batch, self.sampling)

    def evaluation(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The test set, or the training set where there is none."""
        x, y = tensors(self.data if self.test is None else self.test)
        return cast(x, dtype), cast(y, dtype)

    def flat_model(self, dtype: torch.dtype, rounded: bool = False) -> FlatModel:
        return FlatModel(self.model, self.loss, dtype, rounded)


def tensors(data: Any) -> tuple[Tensor, Tensor]:
    """`(x, y)` tensors from tensors, arrays or a `Dataset`."""
    if isinstance(data, Dataset):
        pairs = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
        return torch.stack([torch.as_tensor(x) for x, _ in pairs]), torch.stack([torch.as_tensor(y) for _, y in pairs])
    x, y = data
    return torch.as_tensor(x), torch.as_tensor(y)


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if values.is_floating_point() else values


def shard_problems(shards: Sequence[Any], rows: int) -> list[str]:
    found = []
    if not len(shards):
        found.append("shards is empty; a task needs at least one client")
    for client, shard in enumerate(shards):
        index = np.asarray(shard)
        if index.size and not np.issubdtype(index.dtype, np.integer):
            found.append(f"client {client} has samples {shard!r:.60}; samples are row numbers, whole and from 0 on")
        elif index.size == 0:
            found.append(f"client {client} has an empty shard; give it samples or leave it out")
        elif index.min() < 0 or index.max() >= rows:
            found.append(
                f"client {client} has sample {index.max()} (or a negative one); the data has rows 0..{rows - 1}"
            )
        if len(found) >= 5:
            return [*found, "and more"]
    return found


def data_problems(kind: str, x: Tensor, y: Tensor, model: nn.Module) -> list[str]:
    if len(x) != len(y):
        return [f"the {kind} data has {len(x)} inputs and {len(y)} targets; they must be as many"]
    if len(x) == 0:
        return [f"the {kind} data is empty"]
    found = []
    for name, values in (("inputs", x), ("targets", y)):
        if values.is_floating_point() and not bool(values.isfinite().all()):
            first = int((~values.reshape(len(values), -1).isfinite()).any(dim=1).nonzero()[0])
            found.append(f"the {kind} {name} hold NaN or infinity, first in row {first}; clean the data")
    try:
        classes = scores(model, x)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        shape = tuple(x.shape[1:])
        return [*found, f"the model does not take the {kind} inputs, of shape {shape} and type {x.dtype}: {error}"]
    labels = not y.is_floating_point() and y.dim() == 1
    if labels and classes is not None and (int(y.min()) < 0 or int(y.max()) >= classes):
        found.append(
            f"the {kind} labels run from {int(y.min())} to {int(y.max())}; the model has {classes} outputs, "
            f"so they must be 0..{classes - 1}"
        )
    return found


@torch.no_grad()
def scores(model: nn.Module, x: Tensor) -> int | None:
    """How many scores the model gives a sample; None if its outputs are no rows of several."""
    parameter = next(model.parameters())
    out = model(x[:2].to(parameter.device, parameter.dtype) if x.is_floating_point() else x[:2].to(parameter.device))
    return int(out.shape[1]) if out.dim() == 2 and out.shape[1] > 1 else None


def require(task: Task) -> Task:
    problems = task.problems()
    if problems:
        raise ConfigError(problems)
    return task
