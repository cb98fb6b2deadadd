"""The clients' samples: one resident data set, shards as index ranges, and keyed draws of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from offbeat import keys
from offbeat.numerics.windows import Windows

Sampling = Literal["replacement", "shuffle", "in-order", "in-order-continued"]
KEYED = ("replacement", "shuffle")  # samplings that draw
ROUNDS = 24  # of the keyed permutation; each doubles as a fair coin for every pair of places


@dataclass(frozen=True, eq=False)
class Samples:
    """`order[first[i] : first[i] + size[i]]` are the rows of client i in `x`, `y`.

    `batch` samples per step, a number for each client, or None for the whole shard. `sampling`: "replacement" draws
    every sample anew (the papers' independent draws), "shuffle" runs through a job's own permutations of the shard
    without a break; "in-order" reads the shard as it is stored, from its start in every job, and "in-order-continued"
    from where the client's last finished job ended, so that nothing comes twice before all was read: a single pass over
    a stream, as long as the shard lasts.
    """

    x: Tensor | Windows
    y: Tensor | Windows
    order: Tensor
    first: Tensor
    size: Tensor
    batch: int | tuple[int, ...] | None
    sampling: Sampling = "replacement"

    @staticmethod
    def of(
        x: Tensor | Windows, y: Tensor | Windows, shards: Sequence[np.ndarray], batch: int | tuple[int, ...] | None,
        sampling: Sampling = "replacement",
    ) -> Samples:  # fmt: skip
        size = torch.tensor([len(shard) for shard in shards])
        order = torch.from_numpy(np.concatenate([np.asarray(shard, dtype=np.int64) for shard in shards]))
        return Samples(x, y, order, size.cumsum(0) - size, size, batch, sampling)

    def to(self, device: torch.device | str) -> Samples:
        moved = {name: getattr(self, name).to(device) for name in ("x", "y", "order", "first", "size")}
        return replace(self, **moved)

    @property
    def clients(self) -> int:
        return int(self.size.numel())

    @cached_property
    def sizes(self) -> list[int]:
        """The shard sizes on the host."""
        sizes: list[int] = self.size.tolist()
        return sizes

    @property
    def width(self) -> int:
        """The most samples that a step of any client uses."""
        return max(self.batch) if isinstance(self.batch, tuple) else self.batch or max(self.sizes)

    def per_step(self, client: int) -> int:
        """Samples that one step of a client uses."""
        return self.batch[client] if isinstance(self.batch, tuple) else self.batch or self.sizes[client]

    def epoch(self, client: int) -> int:
        """Steps in which a client sees as many samples as it has."""
        return -(-self.sizes[client] // self.per_step(client))

    def first_rows(self, many: int) -> Tensor:
        """Rows of `x`: so many of the first client's, to try a model with."""
        return self.order[int(self.first[0]) :][: min(many, self.sizes[0])]

    def part(self, client: Tensor, begin: Tensor, width: int) -> Tensor:
        """Rows of `x` of a piece of n shards, in the shards' own order: `[n, width]`."""
        place = begin[:, None] + torch.arange(width, device=client.device)[None]
        return self.order[self.first[client][:, None] + place]

    def rows(
        self, client: Tensor, key: Tensor, begin: int | Tensor, count: int, width: int | None = None,
        earlier: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Rows of `x` for steps `begin .. begin + count` of n jobs: `[n, count, width]`, from the job's key alone, or
        from the steps that the clients took in `earlier` finished jobs.

        Where shards are used whole, or batches differ, all of the n clients must use `width` samples.
        """
        size, width = self.size[client][:, None], width or self.width
        if self.batch is None:
            place = torch.arange(width, device=size.device)[None]
        else:
            slot = torch.arange(count * width, device=size.device)[None] + begin * width
            if self.sampling not in KEYED:
                read = 0 if earlier is None or self.sampling == "in-order" else earlier[:, None] * width
                place = (slot + read) % size
            elif self.sampling == "replacement":
                place = (keys.word(key[:, None], slot) * size) >> 32
            else:
                place = permuted(keys.fold(key[:, None], slot // size), slot % size, size)
        rows = self.order[self.first[client][:, None] + place]
        if self.batch is None:
            return rows[:, None].expand(-1, count, -1)
        return rows.reshape(len(client), count, width)

    def batch_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Samples and targets of rows of any shape; whole rows are copied at once."""
        return gathered(self.x, rows), gathered(self.y, rows)


def gathered(values: Tensor | Windows, rows: Tensor) -> Tensor:
    if isinstance(values, Windows):
        return values[rows]
    return values.index_select(0, rows.flatten()).reshape(*rows.shape, *values.shape[1:])


def permuted(key: Tensor, place: Tensor, size: Tensor) -> Tensor:
    """A keyed permutation of `0 .. size` at `place`: the swap-or-not shuffle (Hoang, Morris, Rogaway, 2012)."""
    for number in range(ROUNDS):
        once = keys.fold(key, number)
        partner = ((((once >> 32) & keys.MASK) * size >> 32) - place) % size
        coin = keys.word(once, torch.maximum(place, partner)) & 1
        place = torch.where(coin == 1, partner, place)
    return place
