"""Updates between a solver and the server: what a solver answers, and what waits for its commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.records import Begun, JobName


class Answer(NamedTuple):
    """What a solver has computed of what it was asked for: some of the jobs, in any order."""

    jobs: Sequence[Begun]
    updates: Any  # their updates, a row each: rows by name, or whatever their solver knows them by
    bad: Sequence[int] | Tensor  # of each job, or each device of these clusters: the first bad local step, or -1


class Plan(NamedTuple):
    """A commit that takes some of the jobs that are asked for: so that their updates can be added up at once."""

    version: int  # that it will replace
    jobs: Sequence[JobName]
    weights: Mapping[str, Tensor]  # of each job, by the name of what is sent


@dataclass
class Result:
    """A computed update that waits for its commit: one row of an answer."""

    updates: Any
    row: int
    job: Begun
    bad: int  # the first local step that went wrong, or -1 ...
    client: int  # ... and on which client


def gathered(results: Sequence[Result], name: str) -> Tensor:
    """One vector of each update, in order; rows of the same answer are taken together."""
    waves: dict[int, list[int]] = {}  # places in `results`, by answer
    for place, result in enumerate(results):
        waves.setdefault(id(result.updates), []).append(place)
    order = [place for places in waves.values() for place in places]
    rows = [results[place].row for place in order]
    vectors = [results[places[0]].updates[name] for places in waves.values()]
    if len(vectors) == 1 and rows == list(range(len(vectors[0]))):
        return vectors[0]  # type: ignore[no-any-return]
    back = sorted(range(len(order)), key=order.__getitem__)
    which, home = torch.tensor([rows, back]).to(vectors[0].device, non_blocking=True)
    parts = zip(vectors, which.split([len(places) for places in waves.values()]), strict=True)
    together = [wave.index_select(0, mine) for wave, mine in parts]
    return together[0] if len(together) == 1 else torch.cat(together).index_select(0, home)
