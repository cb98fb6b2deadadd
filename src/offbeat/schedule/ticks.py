"""The unit of time: every duration is rounded once, to whole ticks, when it enters the clock.

A tick is 10 ns, a decimal part of a second, so that what people write (0.1 s, 2.2 MB at 400 Mbit/s) has no rounding at
all, and 0.1 + 0.2 is 0.3. The clock adds and compares whole numbers of ticks, kept as floats, which is exact; so
multiplying all ticks by a number changes no order, and what ties, ties. What takes time at all takes at least one tick.
Rows, policies and fleets speak of seconds; up to `END` every tick has a float of seconds of its own. A policy that sets
an alarm adds with `after`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from offbeat.schedule.device import Columns, Durations

PER_SECOND = 1e8
END = 2.0**25 * PER_SECOND  # 388 days: nothing happens later
NEAREST = 2.0**52  # x + NEAREST - NEAREST is the whole number nearest to x >= 0: quicker than `round`


def whole(x: float) -> float:
    """The nearest whole number of ticks, but 1 for less than half a tick.

    >>> [whole(x) for x in (0.0, 0.01, 0.9, 2.4)]
    [0.0, 1.0, 1.0, 2.0]
    """
    return (x + NEAREST - NEAREST) or float(x > 0.0)


def ticks(seconds: float) -> float:
    """
    >>> ticks(0.1) + ticks(0.2) == ticks(0.3)
    True
    """
    return whole(seconds * PER_SECOND)


def after(now: float, seconds: float) -> float:
    """The moment so many seconds after `now`, to the tick; in seconds.

    >>> after(0.1, 0.2)
    0.3
    """
    return (ticks(now) + ticks(seconds)) / PER_SECOND


class InTicks:
    """A fleet's durations in ticks."""

    __slots__ = ("durations",)

    def __init__(self, durations: Durations) -> None:
        self.durations = durations

    def download(self, client: int, job: int) -> float:
        return ticks(self.durations.download(client, job))

    def compute(self, client: int, job: int, steps: int) -> float:
        return ticks(self.durations.compute(client, job, steps))

    def upload(self, client: int, job: int) -> float:
        return ticks(self.durations.upload(client, job))

    def failure(self, client: int, job: int, steps: int) -> float | None:
        """After how long the job is lost; None: it is not."""
        share = self.durations.fails(client, job)
        return None if share is None else ticks(share * self.durations.compute(client, job, steps))


class SteadyInTicks:
    """The same for a fleet whose jobs are all alike. A job's computing is rounded as a whole, so `step` is not."""

    __slots__ = ("down", "step", "up")

    def __init__(self, columns: Columns) -> None:
        down, step, up = columns
        self.down, self.up = each(down), each(up)
        self.step = array("d", [seconds * PER_SECOND for seconds in step])

    def download(self, client: int, job: int) -> float:
        return self.down[client]

    def compute(self, client: int, job: int, steps: int) -> float:
        exact = self.step[client] * steps
        return (exact + NEAREST - NEAREST) or float(exact > 0.0)  # `whole`, without a call

    def upload(self, client: int, job: int) -> float:
        return self.up[client]

    def failure(self, client: int, job: int, steps: int) -> float | None:
        return None


def each(column: Sequence[float]) -> array[float]:
    return array("d", map(ticks, column))
