"""How the steps of a wave are taken: what a solver asks of the plain loop, of captured graphs and of tiles alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol, TypeAlias

from offbeat.numerics import wave as numerics
from offbeat.numerics.wave import Advance, Clients, Problem, Tally, Work

Rung = Literal["captured", "plain", "reference"]
LADDER: tuple[Rung, ...] = ("captured", "plain", "reference")
Size: TypeAlias = tuple[int, int]  # clients, and samples per step
Counts: TypeAlias = Mapping[str, Sequence[Sequence[int]]]  # tables as rows: a size, and its number


class Stepping(Advance, Protocol):
    """An `Advance`, and what a solver must know of it."""

    rung: Rung  # of the ladder

    def fitting(self, ready: int, urgent: int) -> int:
        """How many of the ready jobs to take into a wave, the first `urgent` of which are needed now."""

    def around(self) -> AbstractContextManager[None]:
        """Around a wave that does nothing large beside its steps."""

    def release(self) -> None:
        """Let go of memory that was kept for later waves."""

    def save(self) -> Counts:
        """What was counted, because later waves are cut by it."""

    def restore(self, counts: Counts) -> None: ...
    def follow(self, threads: int) -> None:
        """Cut waves as a run did that went by so many threads."""


class PlainSteps:
    """The plain loop, which takes waves as they come."""

    rung: Rung = "plain"

    def __call__(
        self, problem: Problem, clients: Clients, work: Work, tally: Tally, begin: int, count: int, width: int
    ) -> tuple[Clients, Tally]:
        return numerics.advance(problem, clients, work, tally, begin, count, width)

    def fitting(self, ready: int, urgent: int) -> int:
        return ready

    def around(self) -> AbstractContextManager[None]:
        return nullcontext()

    def release(self) -> None:
        """It holds nothing."""

    def save(self) -> Counts:
        return {}

    def restore(self, counts: Counts) -> None:
        """It counts nothing."""

    def follow(self, threads: int) -> None:
        """It cuts nothing."""


def lower(one: Rung, other: Rung) -> Rung:
    """
    >>> lower("reference", "plain")
    'reference'
    """
    return max(one, other, key=LADDER.index)


def rows_of(table: Counter[Size]) -> list[list[int]]:
    return [[*size, number] for size, number in table.items()]


def table_of(rows: Iterable[Sequence[int]]) -> Counter[Size]:
    return Counter({(clients, width): number for clients, width, number in rows})
