"""The schedule of a run that is taken up: run again from the seed up to the checkpoint, held against what was recorded.

The clock has to pass every row again; whoever looked ahead need not, for what it knew goes into the checkpoint. Nor are
the recorded rows read: a digest that rolls over them says whether these are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from operator import itemgetter
from typing import Any

import torch

from offbeat.records import COMMANDS, EVENTS, Row
from offbeat.schedule.horizon import Horizon

BLOCK = 256  # few enough to be gone before Python looks for garbage among them
NUMBER = {kind: number for number, kind in enumerate((*COMMANDS, *EVENTS))}


class Digest:
    """A digest of rows, whatever stretches they come in. Python's hash of numbers and tuples of them is the same in
    every process, and quick enough for tens of millions of rows."""

    def __init__(self) -> None:
        self.past = 0
        self.block: list[Row] = []
        self.count = 0

    def add(self, rows: Iterable[Row]) -> None:
        before = len(self.block)
        self.block += rows
        self.count += len(self.block) - before
        while len(self.block) >= BLOCK:
            self.past = self.rolled(self.block[:BLOCK])
            del self.block[:BLOCK]

    def rolled(self, rows: list[Row]) -> int:
        kinds = tuple(map(NUMBER.__getitem__, map(type, map(itemgetter(1), rows))))
        return hash((self.past, kinds, tuple(rows)))

    def value(self) -> list[int]:
        """How many rows, and the digest of them."""
        return [self.count, self.rolled(self.block)]


def horizon_state(horizon: Horizon) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What a horizon knows, as tensors and facts; nothing where it broke off between two commits."""
    known = horizon.known()
    tensors = {f"horizon/{name}": torch.tensor(rows, dtype=torch.int64) for name, rows in known.items()}
    return tensors, {"commits": horizon.read} if known else {}


def restore_horizon(horizon: Horizon, tensors: dict[str, torch.Tensor], facts: dict[str, Any], version: int) -> None:
    """Put a fresh horizon, whose rows of `version` commits have been passed, where another was after those."""
    head = "horizon/"
    known = {name.removeprefix(head): t.tolist() for name, t in tensors.items() if name.startswith(head)}
    horizon.restore(known, version, facts["commits"])


def pass_rows(horizon: Horizon, digest: Digest, count: int, between: Callable[[], None]) -> None:
    """Read so many rows of the schedule and let them go."""
    while digest.count < count:
        block = list(islice(horizon.source, min(BLOCK, count - digest.count)))
        if not block:
            return
        digest.add(block)
        between()
