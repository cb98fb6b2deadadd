"""What the clock asks a fleet: how long things take on a client, and when it is there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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

    # What follows has an answer for whoever derives from this class and says nothing.
    def own_steps(self, client: int, job: int) -> int:
        """How many local steps a client's job takes when the order leaves it to the client: the fleet's step law."""
        return OWN_STEPS

    @property
    def steady(self) -> Columns | None:
        """Seconds per client for a download, a local step and an upload, where that is all; None where jobs differ."""
        return None

    def opening(self) -> Iterable[tuple[int, bool, float]]:
        """The clients that come and go: whether each is there at time 0, and when that changes (infinity: never)."""
        for client in range(self.clients):
            changes = self.presence(client)
            if changes is not None:
                _, there = next(changes)
                yield client, there, next(changes, (math.inf, there))[0]
