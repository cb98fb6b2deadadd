"""Gradients and Hessian-vector products of all clients at once, in groups that fit; what they cost is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.keys import key, unsigned
from offbeat.numerics import buffers, local, wave
from offbeat.numerics.evaluation import TRIED, at_once, groups, numbers_of_each, outputs_of
from offbeat.numerics.outputs import mapped
from offbeat.numerics.samples import Samples
from offbeat.numerics.set_loss import losses_of_sets
from offbeat.numerics.vector import FlatModel
from offbeat.records import Begun

PIECE = 128  # samples of a client that are looked at in one go


@dataclass
class Gauge:
    """The clients of f = mean of the F_i. Each F_i is over its shard, or over `most` samples of it, drawn once; where
    the loss of a batch is not the mean of the losses of its samples, in one batch.

    A group of `limit` clients is computed together; nothing holds more gradients than that. `looked` counts samples.
    With `batch` every gradient is of a fresh batch of so many samples of each client, drawn with replacement: what
    comes of them has the noise of batches in it.
    """

    model: FlatModel
    samples: Samples
    limit: int
    seed: int = 0
    most: int | None = None
    looked: int = 0
    job: int = 0  # of the local steps taken on the way
    advance: wave.Advance = wave.advance  # takes them
    over_shards: Callable[[wave.Problem, Tensor, Tensor], Tensor] = wave.full_gradients  # or a solver's
    tell: Callable[[float], None] = lambda passes: None  # is told of progress
    batch: int | None = None
    draws: int = 0  # batches drawn so far
    whole: Samples = field(init=False)
    of_samples: bool = field(init=False)  # the loss of a batch is the mean of the losses of its samples

    def __post_init__(self) -> None:
        buffers.require(self.model.ruled)
        looked_at = fewer(self.samples, self.most, self.seed)
        self.whole = replace(looked_at, batch=max(looked_at.sizes))
        self.of_samples = is_of_samples(self.model, self.whole)
        if self.of_samples:
            self.whole = replace(self.whole, batch=min(PIECE, self.whole.width))
        self.problem = wave.Problem(self.model, self.whole, local.sgd(1.0), self.seed)

    @property
    def clients(self) -> int:
        return self.samples.clients

    @property
    def passes(self) -> float:
        """What was looked at, in passes over all samples of all clients."""
        return self.looked / sum(self.samples.sizes)

    def groups(self) -> Iterator[Tensor]:
        yield from torch.split(torch.arange(self.clients, device=self.samples.order.device), self.limit)

    def gradients(self, points: Tensor, clients: Tensor) -> Tensor:
        """grad F_i `[n, d]` of n clients, at one point `[d]` or at one for each `[n, d]`."""
        self.tell(self.passes)
        at = points if points.dim() == 2 else points.expand(len(clients), -1)
        if self.batch is not None:
            return self.batch_gradients(at, clients, self.batch)
        self.looked += sum(self.whole.sizes[client] for client in clients.tolist())
        return self.over_shards(self.problem, at, clients)

    def batch_gradients(self, at: Tensor, clients: Tensor, width: int) -> Tensor:
        """Gradients `[n, d]` of one fresh batch of each client."""
        who = clients.cpu().numpy()
        drawn = torch.from_numpy(np.asarray(key(self.seed, "estimate", who, self.draws))).to(clients.device)
        fresh = replace(self.samples, batch=width, sampling="replacement")
        inputs, targets = self.samples.batch_of(fresh.rows(clients, drawn, 0, 1, width)[:, 0])
        self.draws += 1
        self.looked += width * len(clients)
        return self.model.gradient(at, inputs, targets, drawn)[1]

    def gradient(self, x: Tensor) -> Tensor:
        """grad f at a point."""
        total = torch.zeros_like(x)
        for clients in self.groups():
            total += self.gradients(x, clients).sum(0)
        return total / self.clients

    @torch.no_grad()
    def values(self, x: Tensor) -> list[float]:
        """F_i at a point, of each client."""
        total, samples = torch.zeros(self.clients, dtype=torch.float64), self.whole
        for clients in self.groups():
            views = self.model.views(x.expand(len(clients), -1))
            for width, rows, begin in wave.pieces(samples, clients.tolist()):
                row, at = (torch.tensor(numbers, device=x.device) for numbers in (rows, begin))
                mine = clients[row]
                inputs, targets = samples.batch_of(samples.part(mine, at, width))
                own = {name: view[row] for name, view in views.items()}
                losses = self.model.losses(own, inputs, targets, wave.full_noise(self.problem, mine, at))
                total.index_add_(0, mine.cpu(), (losses * (width / samples.size[mine])).double().cpu())
        self.looked += sum(samples.sizes)
        return [float(value) for value in total]

    def value(self, x: Tensor) -> float:
        """f at a point."""
        return sum(self.values(x)) / self.clients

    def products(self, x: Tensor, v: Tensor, clients: Tensor) -> Tensor:
        """H_i v `[n, d]` at a point, for one v or one for each: the gradient of <grad F_i, v>. It costs about as much
        as two gradients and is counted so."""
        self.tell(self.passes)
        samples, total = self.whole, torch.zeros(len(clients), len(x), dtype=x.dtype, device=x.device)
        at, along = x.expand(len(clients), -1), v.expand(len(clients), -1)
        for width, rows, begin in wave.pieces(samples, clients.tolist()):
            row, place = (torch.tensor(numbers, device=x.device) for numbers in (rows, begin))
            mine = clients[row]
            inputs, targets = samples.batch_of(samples.part(mine, place, width))
            noise = wave.full_noise(self.problem, mine, place)
            products = self.model.hessian_product(at[row], along[row], inputs, targets, noise)
            total.index_add_(0, row, products * (width / samples.size[mine].to(x.dtype))[:, None])
        self.looked += 2 * sum(samples.sizes[client] for client in clients.tolist())
        return total

    def product(self, x: Tensor, v: Tensor) -> Tensor:
        """H v, where H is the mean of the H_i."""
        total = torch.zeros_like(x)
        for clients in self.groups():
            total += self.products(x, v, clients).sum(0)
        return total / self.clients

    def walked(self, x: Tensor, clients: Tensor, steps: int, lr: float) -> Tensor:
        """Where clients stand `[n, d]` after so many local steps of SGD from a point, with their own batches."""
        jobs = [Begun(client, self.job, 0, steps, self.job * steps) for client in clients.tolist()]
        self.looked += sum(steps * self.samples.per_step(job.client) for job in jobs)
        problem = wave.Problem(self.model, self.samples, local.sgd(lr), self.seed)
        outcome = wave.wave(problem, {"model": x.expand(len(jobs), -1)}, jobs, self.advance)
        return x - outcome.updates["delta"]

    def batches(self, x: Tensor, clients: Tensor, rows: Tensor, number: int) -> Tensor:
        """Return gradients `[n, d]` of batches `[n, b]` of clients, given by rows of the data."""
        self.looked += rows.numel()
        inputs, targets = self.samples.batch_of(rows)
        noise = wave.full_noise(self.problem, clients, torch.full_like(clients, -1 - number))
        return self.model.gradient(x.expand(len(rows), -1), inputs, targets, noise)[1]

    def single(self, x: Tensor, clients: Tensor, rows: Tensor) -> Tensor:
        """Gradients `[n, d]` of single samples, given by rows of the data."""
        self.looked += len(rows)
        inputs, targets = self.samples.batch_of(rows[:, None])
        noise = wave.full_noise(self.problem, clients, rows)
        return self.model.gradient(x.expand(len(rows), -1), inputs, targets, noise)[1]


@torch.no_grad()
def is_of_samples(model: FlatModel, samples: Samples) -> bool:
    """Return whether the loss of each client's samples is the mean of their losses one by one.

    It is not with weights of classes, ignored labels, or outputs or losses that mix the samples of a batch. Outputs are
    those of the first model with noise added, because losses that are all the same show no difference.
    """
    flat, generator = model.initial(), torch.Generator().manual_seed(0)

    def moved(part: Any) -> Any:
        if not isinstance(part, Tensor) or not part.is_floating_point():
            return part
        noise = torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part)
        return part + noise * part.abs().nan_to_num(0.0, 0.0, 0.0).amax().clamp(min=1.0)

    try:
        if numbers_of_each(model, samples.x, samples.first_rows(TRIED)) is None:
            return False
        pieces = [min(PIECE, size - begin) for size in samples.sizes for begin in range(0, size, PIECE)]
        for group, begin, end in groups(pieces, at_once(model, samples.x)):
            rows, sizes = samples.order[begin:end], pieces[group.start : group.stop]
            targets = model.targets(samples.y[rows])
            outputs = mapped(moved, outputs_of(model, flat, samples.x, rows))
            wholes = losses_of_sets(model.mean_loss, outputs, targets, sizes)
            ones = losses_of_sets(model.mean_loss, outputs, targets, [1] * len(rows))
            means = torch.stack([part.mean() for part in torch.split(ones, sizes)])
            near = 100 * torch.finfo(model.dtype).eps
            if not torch.allclose(means, wholes, rtol=near, atol=near * float(ones.abs().mean())):
                return False
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a model or a loss of one's own that takes no single sample
        return False
    return True


def fewer(samples: Samples, most: int | None, seed: int) -> Samples:
    """At most so many samples of each client, drawn without replacement, keyed by the client."""
    if most is None or max(samples.sizes) <= most:
        return samples
    order, first = samples.order.cpu().numpy(), samples.first.cpu().numpy()
    shards = []
    for client, size in enumerate(samples.sizes):
        shard = order[first[client] : first[client] + size]
        rng = np.random.default_rng(unsigned(key(seed, "measured", client)))
        shards.append(shard if size <= most else np.sort(rng.choice(shard, most, replace=False)))
    made = Samples.of(samples.x, samples.y, shards, samples.batch, samples.sampling)
    return made.to(samples.order.device)
