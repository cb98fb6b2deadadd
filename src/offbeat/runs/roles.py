"""What the loop of a run asks of others: of the config, of whoever makes the commits, of what has a name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from offbeat.engines.engine import Done
from offbeat.numerics.evaluation import Figure
from offbeat.schedule.horizon import Horizon


class Config(Protocol):
    """What the loop reads of an experiment."""

    @property
    def seed(self) -> int: ...
    @property
    def until(self) -> Mapping[str, float]: ...
    @property
    def evaluate(self) -> Mapping[str, Any]: ...
    @property
    def targets(self) -> Sequence[float] | Mapping[str, Sequence[float]]: ...
    @property
    def checkpoint_seconds(self) -> float: ...
    def table(self) -> dict[str, Any]: ...


class Model(Protocol):
    """What the logbook asks of whoever has the newest version."""

    @property
    def version(self) -> int: ...
    def evaluate(self) -> Mapping[str, Any]: ...
    @property
    def figures(self) -> Mapping[str, Figure]:
        """What each metric is."""

    def faults(self) -> dict[str, str]:
        """What metrics said that failed."""

    def client_figures(self) -> Mapping[str, Sequence[float | None]]:
        """What the last evaluation found of each client."""

    def finite(self) -> bool: ...
    def model(self) -> dict[str, torch.Tensor]: ...
    def report(self) -> dict[str, Any]:
        """What a result says of how it was computed."""


class Engine(Model, Protocol):
    """What the loop asks of whoever makes the commits."""

    @property
    def settings(self) -> AbstractContextManager[Any]:
        """What is set for the whole process while a run goes on."""

    def commits(self, horizon: Horizon) -> Iterator[Done]: ...
    def settle(self, horizon: Horizon) -> None:
        """Strike off the jobs of a horizon that were computed before a checkpoint."""

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and facts from which it can go on."""

    def close(self) -> None:
        """The run has ended."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Parts(Protocol):
    @property
    def method(self) -> Named: ...
    @property
    def task(self) -> Named: ...
    @property
    def fleet(self) -> Named: ...
