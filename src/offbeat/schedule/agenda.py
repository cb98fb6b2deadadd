"""The agenda of the clock: what happens when, in order of time, and at one moment in the order in which it was put.

A heap of a million entries costs twenty comparisons an entry, all over the memory. Here entries lie as they come until
they are among the earlier half of those known; that half is sorted at once, in C. Only what is put before its end needs
a heap, which stays small.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from operator import itemgetter
from typing import Any, TypeAlias

from offbeat.errors import OffbeatError
from offbeat.schedule.ticks import END, PER_SECOND

Entry: TypeAlias = tuple[float, Callable[[Any, Any, int], None], Any, int]  # tick, what to do, with what, token
TIME = itemgetter(0)


class Agenda:
    """Put entries, iterate to get them back; entries may be put while it goes on, from its present time on."""

    __slots__ = ("later", "serial", "soon", "until")

    def __init__(self) -> None:
        self.later: list[Entry] = []  # not before `until`; of equal times the first put comes first
        self.soon: list[tuple[float, int, Entry]] = []  # a heap: put before `until` since the last sort
        self.until = 0.0
        self.serial = 0

    def put(self, entry: Entry) -> None:
        if entry[0] < self.until:
            self.serial += 1
            heappush(self.soon, (entry[0], self.serial, entry))
        else:
            self.later.append(entry)

    def __iter__(self) -> Iterator[Entry]:
        later, soon = self.later, self.soon
        while later:
            later.sort(key=TIME)  # stable
            half = len(later) + 1 >> 1
            if later[half - 1][0] > END:
                half = bisect_right(later, END, key=TIME)
            if not half:
                raise OffbeatError(
                    f"the clock has come to its end: the next event is {later[0][0] / PER_SECOND:.6g} s after the "
                    f"start, and times are exact up to {END / PER_SECOND:.0f} s (388 days); make the fleet faster, or "
                    "set an earlier limit"
                )
            run = later[:half]
            del later[:half]
            self.until = run[-1][0]
            run.reverse()
            while run:
                while soon and soon[0][0] < run[-1][0]:
                    yield heappop(soon)[2]
                yield run.pop()
