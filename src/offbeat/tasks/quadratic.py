"""Quadratic clients with known everything: f_i(w) = 1/2 w' A_i w - b_i' w.

Each sample is one `(A, b)`; a client with a single sample has exact gradients, one with several has noise that
averages to its own quadratic. The mean of the clients is minimised at `optimum`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.errors import ConfigError
from offbeat.tasks.task import Task


class Quadratic(nn.Module):
    """The value of a sample's quadratic at the parameter vector."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())

    def forward(self, sample: Tensor) -> Tensor:
        d = self.w.shape[-1]
        a = sample[..., : d * d].reshape(*sample.shape[:-1], d, d)
        b = sample[..., d * d :]
        return 0.5 * ((a @ self.w) * self.w).sum(-1) - (b * self.w).sum(-1)


def value(outputs: Tensor, targets: Tensor) -> Tensor:
    """The 'loss' of a quadratic is its value; targets are not used."""
    return outputs.mean()


def quadratic(
    matrices: Sequence[np.ndarray],
    linear: Sequence[np.ndarray],
    start: np.ndarray | None = None,
    noise: float = 0.0,
    samples: int = 1,
    seed: int = 0,
) -> Task:
    """One client per `(A_i, b_i)`; with `noise` each has `samples` copies whose b is off by noise that sums to zero."""
    d = len(linear[0])
    if any(a.shape != (d, d) for a in matrices) or len(matrices) != len(linear):
        raise ConfigError([f"quadratic: give as many {d} x {d} matrices as vectors of length {d}"])
    rng = np.random.default_rng(seed)
    rows: list[np.ndarray] = []
    shards = []
    for a, b in zip(matrices, linear, strict=True):
        off = noise * rng.standard_normal((samples, d))
        off -= off.mean(axis=0)
        shards.append(np.arange(len(rows), len(rows) + samples))
        rows += [np.concatenate([a.ravel(), b + o]) for o in off]
    x = torch.tensor(np.array(rows), dtype=torch.float64)
    model = Quadratic(torch.tensor(np.zeros(d) if start is None else start, dtype=torch.float64))
    return Task(model, value, (x, torch.zeros(len(x))), shards, batch_size=1, name="quadratic")


def optimum(matrices: Sequence[np.ndarray], linear: Sequence[np.ndarray]) -> np.ndarray:
    """Where the mean of the clients is least: (sum A_i) w = sum b_i."""
    result: np.ndarray = np.linalg.solve(sum(matrices), sum(linear))
    return result


def random_quadratic(
    clients: int = 10, dimension: int = 5, spread: float = 1.0, noise: float = 0.0, seed: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Positive definite A_i with eigenvalues in [1/2, 2] about a common mean, and b_i that differ by `spread`."""
    rng = np.random.default_rng([seed, 7])
    matrices, linear = [], []
    for _ in range(clients):
        q, _ = np.linalg.qr(rng.standard_normal((dimension, dimension)))
        matrices.append(q @ np.diag(rng.uniform(0.5, 2.0, dimension)) @ q.T)
        linear.append(spread * rng.standard_normal(dimension))
    return matrices, linear
