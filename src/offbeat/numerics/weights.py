"""Weights of clients: each client's part in the objective, and so in the mean of a commit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from offbeat.config.options import fits
from offbeat.errors import ConfigError
from offbeat.method import Cohort

Weights: TypeAlias = Literal["size", "uniform"] | list[float]


@dataclass(frozen=True)
class Shares:
    """The parts of clients: by size of shard, equal, or one given for each."""

    given: str | tuple[float, ...]

    @property
    def clients(self) -> int | None:
        return len(self.given) if isinstance(self.given, tuple) else None

    def of(self, cohort: Cohort) -> Tensor:
        """Each update's part of the cohort; they sum to one."""
        weights, _ = self.weights(cohort)
        return weights / weights.sum().clamp(min=1e-30)  # a cohort without weight moves nothing

    def once(self, cohort: Cohort) -> Tensor:
        """Return each client's part of the whole fleet at its newest update, and 0 at its others.

        The sum of these parts times the changes of the clients' vectors is the change of their mean over all clients.
        """
        weights, whole = self.weights(cohort)
        return cohort.newest * weights / whole

    def weights(self, cohort: Cohort) -> tuple[Tensor, float]:
        """Weights of the updates, and what those of all clients sum to."""
        if self.given == "size":
            return cohort.samples, cohort.total
        if self.given == "uniform":
            return cohort.devices, cohort.clients
        table = torch.tensor(self.given, dtype=cohort.samples.dtype, device=cohort.samples.device)
        return table[cohort.client], 1.0


def mean(cohort: Cohort) -> Tensor:
    """The weight of each update in their plain mean."""
    return torch.full_like(cohort.steps, 1 / len(cohort.steps))


def shares(weights: str | Sequence[float]) -> Shares:
    """From "size" (of the shard), "uniform", or a number for each client; numbers sum to one."""
    if isinstance(weights, str):
        if weights not in ("size", "uniform"):
            raise ConfigError(
                [f"weights = '{weights}'; it is 'size' (of the shard), 'uniform', or a list with one per client"]
            )
        return Shares(weights)
    bad = [client for client, weight in enumerate(weights) if not (fits(weight, float) and 0 <= weight < math.inf)]
    if bad:
        raise ConfigError([f"weights: client {bad[0]} has {weights[bad[0]]!r}; a weight is a number, 0 or more"])
    total = math.fsum(weights)
    if abs(total - 1) > 1e-6:
        raise ConfigError([f"weights sum to {total:.6g}; they must sum to one: divide each by their sum"])
    return Shares(tuple(float(weight) for weight in weights))
