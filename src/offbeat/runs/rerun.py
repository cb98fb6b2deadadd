"""The schedule of a run that is taken up: run again from the seed up to the checkpoint, held against what was recorded.

The clock has to pass every row again; whoever looked ahead need not, for what it knew goes into the checkpoint. Nor are
the recorded rows read: a digest that rolls over them says whether these are the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import islice
from operator import itemgetter
from typing import Any

import torch

from offbeat.records import COMMANDS, EVENTS, Begun, Commit, Row
from offbeat.schedule.horizon import Horizon, Step

BLOCK = 256  # few enough to be gone before Python looks for garbage among them
NUMBER = {kind: number for number, kind in enumerate((*COMMANDS, *EVENTS))}
JOBS = ("begun", "wanted")
NAMES = ("pending", "unused", "lost")


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


def horizon_state(horizon: Horizon, version: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What a horizon that has handed out `version` commits knows; nothing where it broke off between two commits."""
    if horizon.closed or (horizon.late and not horizon.steps):
        return {}, {}
    tensors = {name: table([*getattr(horizon, name).values()], 4) for name in JOBS}
    tensors |= {name: table(sorted(getattr(horizon, name)), 2) for name in NAMES}
    tensors["ordered"] = table([(client, v) for client, versions in horizon.ordered.items() for v in versions], 2)
    return {f"horizon/{name}": t for name, t in tensors.items()}, {"commits": version + len(horizon.steps)}


def table(rows: list[Any], width: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, width)


def restore_horizon(
    horizon: Horizon, tensors: dict[str, torch.Tensor], facts: dict[str, Any], version: int, read: Callable[[], Any]
) -> None:
    """Put a fresh horizon where another was after `version` commits. `read` passes the rows of those."""
    read()
    rows: list[Row] = []
    steps: deque[Step] = deque()
    for row in horizon.source if facts["commits"] > version else ():
        rows.append(row)
        if type(row[1]) is Commit:
            steps.append(Step(row[0], row[1], rows))
            rows = []
            if version + len(steps) == facts["commits"]:
                break
    for name in JOBS:
        jobs = [Begun(*job) for job in tensors[f"horizon/{name}"].tolist()]
        setattr(horizon, name, {job[:2]: job for job in jobs})
    for name in NAMES:
        setattr(horizon, name, type(getattr(horizon, name))(map(tuple, tensors[f"horizon/{name}"].tolist())))
    for client, under_way in tensors["horizon/ordered"].tolist():
        horizon.ordered.setdefault(client, []).append(under_way)
    # Every job that is known and not computed holds its start version, and so does every order under way.
    held = [job.version for name in JOBS for job in getattr(horizon, name).values()]
    horizon.held = Counter([*held, *(v for versions in horizon.ordered.values() for v in versions)])
    horizon.steps, horizon.given = steps, version
    horizon.queued = sum(len(step.commit.jobs) for step in steps)


def pass_rows(horizon: Horizon, digest: Digest, count: int, between: Callable[[], None]) -> None:
    """Read so many rows of the schedule and let them go."""
    while digest.count < count:
        block = list(islice(horizon.source, min(BLOCK, count - digest.count)))
        if not block:
            return
        digest.add(block)
        between()
