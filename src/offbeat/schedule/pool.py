"""Clients in an order of their own, from which one of a million is drawn, or struck off, without a walk through all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import isqrt


class Pool:
    """A list of distinct clients below `clients`.

    It is one block until somebody is struck off; then it is cut, and to strike one off is a walk through one block.
    """

    def __init__(self, clients: int, members: Iterable[int] = ()) -> None:
        self.clients = clients
        self.blocks = [list(members)]
        self.size = len(self.blocks[0])
        self.starts = [0]  # the place where each block begins
        self.width = clients  # of a block, about
        self.home: list[int] = []  # client -> its block, -1: not in the pool; empty before the first cut

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> int:
        at = bisect_right(self.starts, place) - 1
        return self.blocks[at][place - self.starts[at]]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.blocks)

    def append(self, client: int) -> None:
        last = self.blocks[-1]
        if len(last) >= self.width:
            self.starts.append(self.size)
            self.blocks.append(last := [])
        last.append(client)
        self.size += 1
        if self.home:
            self.home[client] = len(self.blocks) - 1

    def exchange(self, client: int, bits: Callable[[int], int]) -> int:
        """Append a client and take out one drawn uniformly, who may be the same; the last one moves to its place.

        Where there is no other, nothing is drawn.
        `bits` is the `getrandbits` of a generator; the draw is that of its `randrange`, at a quarter of the cost.
        """
        size = self.size
        if not size:
            return client
        width = (size + 1).bit_length()
        place = bits(width)
        while place > size:
            place = bits(width)
        if place == size:
            return client
        at, home = 0, self.home
        if home:
            at = bisect_right(self.starts, place) - 1
            place -= self.starts[at]
            home[client] = at
        block = self.blocks[at]
        drawn = block[place]
        block[place] = client
        if home:
            home[drawn] = -1
        return drawn

    def draw(self, bits: Callable[[int], int]) -> int:
        """Take out a client drawn uniformly; the last one moves to its place."""
        last = self.blocks[-1].pop()
        self.size -= 1
        if self.home:
            self.home[last] = -1
        self.trim()
        return self.exchange(last, bits)

    def remove(self, client: int) -> bool:
        """Strike off a client, and say whether it was there; the others keep their order."""
        if not self.size:
            return False
        if not self.home or len(self.blocks) > 4 * self.width:
            self.home = self.cut()
        at = self.home[client]
        if at < 0:
            return False
        self.home[client] = -1
        self.blocks[at].remove(client)
        self.size -= 1
        self.starts[at + 1 :] = [start - 1 for start in self.starts[at + 1 :]]
        self.trim()
        return True

    def empty(self) -> list[int]:
        """Take out all, in order."""
        everyone = list(self)
        for client in everyone if self.home else ():
            self.home[client] = -1
        self.blocks, self.starts, self.size = [[]], [0], 0
        return everyone

    def trim(self) -> None:
        """The last block is not empty, unless it is the only one."""
        while len(self.blocks) > 1 and not self.blocks[-1]:
            self.blocks.pop()
            self.starts.pop()

    def cut(self) -> list[int]:
        everyone = list(self)
        self.width = max(16, isqrt(len(everyone)))
        self.starts = list(range(0, len(everyone), self.width)) or [0]
        self.blocks = [everyone[start : start + self.width] for start in self.starts]
        home = [-1] * self.clients
        for at, block in enumerate(self.blocks):
            for client in block:
                home[client] = at
        return home
