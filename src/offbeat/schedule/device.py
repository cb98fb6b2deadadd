"""What the clock asks a fleet: how long things take on a client, and when it is there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

OWN_STEPS = 10  # local steps of a client that may choose, where its fleet says nothing of them

Columns: TypeAlias = tuple[Sequence[float], Sequence[float], Sequence[float]]


class Durations(Protocol):
    """What the clock asks a fleet; seconds, keyed by client and job, so that the order of asking is no matter."""

    @property
    def clients(self) -> int: ...
    @property
    def download_bound(self) -> float:
        """No download takes longer."""

    def download(self, client: int, job: int) -> float: ...
    def compute(self, client: int, job: int, steps: int) -> float: ...
    def upload(self, client: int, job: int) -> float: ...
    def fails(self, client: int, job: int) -> float | None:
        """The share of the computing after which the job is lost, or None."""

    def presence(self, client: int) -> Iterator[tuple[float, bool]] | None:
        """Changes of presence as (time, there), the first at time 0; None: always there."""


def steady(durations: Durations) -> Columns | None:
    """Seconds per client for a download, a local step and an upload, from a fleet that says it has no more to tell."""
    columns: Columns | None = getattr(durations, "steady", None)
    return columns


def own_steps(durations: Durations) -> Callable[[int, int], int]:
    """How many local steps a client's job takes when the order leaves it to the client: the fleet's step law."""
    law: Callable[[int, int], int] | None = getattr(durations, "own_steps", None)
    return law or (lambda client, job: OWN_STEPS)


def opening(durations: Durations) -> Iterable[tuple[int, bool, float]]:
    """The clients that come and go: whether each is there at time 0, and when that changes (infinity: never).

    A fleet may tell it for all at once (`durations.opening`); otherwise each client's presence is looked at.
    """
    changes: Iterable[tuple[int, bool, float]] | None = durations.opening() if hasattr(durations, "opening") else None
    return each_presence(durations) if changes is None else changes


def each_presence(durations: Durations) -> Iterator[tuple[int, bool, float]]:
    for client in range(durations.clients):
        changes = durations.presence(client)
        if changes is not None:
            _, there = next(changes)
            yield client, there, next(changes, (math.inf, there))[0]
