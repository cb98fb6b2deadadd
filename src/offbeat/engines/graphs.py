"""Local steps as captured CUDA graphs: the launches of a wave's steps are recorded once and replayed.

A graph is captured for a number of clients and of steps. Waves of other sizes are padded to the next size on the
ladder with rows whose results are thrown away; a size that keeps coming back gets a graph of its own. What is
replayed is exactly `numerics.wave.one_step`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.method import Carry, Job
from offbeat.numerics.wave import Problem, Tally, one_step

LADDER = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
UNROLL = 10  # steps in one graph; what is left over is replayed one by one
OFTEN = 24  # a size seen so often gets a graph without padding


def padded(clients: int) -> int:
    """The size on the ladder that a wave of so many clients is padded to.

    >>> [padded(n) for n in (1, 5, 100, 256, 300)]
    [1, 6, 112, 256, 320]
    """
    if clients > LADDER[-1]:
        return -(-clients // 64) * 64
    return LADDER[bisect_left(LADDER, clients)]


class Buffers(NamedTuple):
    """The fixed places that a graph reads and writes."""

    carry: Any
    job: Job
    tally: Tally
    rows: Tensor  # [n, UNROLL, b]
    number: Tensor  # the number of the next local step


class GraphAdvance:
    """An `Advance` that replays graphs. One per run: graphs hold on to the problem's tensors."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[tuple[int, int], int], torch.cuda.CUDAGraph] = {}
        self.buffers: dict[tuple[int, int], Buffers] = {}  # by clients and samples per step
        self.seen: Counter[tuple[int, int]] = Counter()
        self.pool: Any = None

    def __call__(
        self, problem: Problem, carry: Carry, job: Job, rows: Tensor, begin: int, tally: Tally
    ) -> tuple[Carry, Tally]:
        clients, count, width = rows.shape
        self.seen[clients, width] += 1
        own = (clients, width) in self.buffers or self.seen[clients, width] >= OFTEN
        size = (clients if own else padded(clients), width)
        if size not in self.buffers:
            self.buffers[size] = make_buffers(size[0], carry, job, rows, tally)
        at = self.buffers[size]
        write((at.carry, at.job, at.tally), (carry, job, tally))
        at.number.fill_(begin)
        for first in range(0, count, UNROLL):
            steps = min(UNROLL, count - first)
            at.rows[:clients, :steps].copy_(rows[:, first : first + steps])
            if steps == UNROLL:
                self.graph(problem, size, UNROLL).replay()
                continue
            for k in range(steps):  # the one-step graph reads place 0
                at.rows[:clients, 0].copy_(rows[:, first + k])
                self.graph(problem, size, 1).replay()
        result: tuple[Carry, Tally] = pytree.tree_map(lambda t: t[:clients].clone(), (at.carry, at.tally))
        return result

    def graph(self, problem: Problem, size: tuple[int, int], steps: int) -> torch.cuda.CUDAGraph:
        if (size, steps) not in self.graphs:
            self.graphs[size, steps] = self.capture(problem, self.buffers[size], steps)
        return self.graphs[size, steps]

    def capture(self, problem: Problem, at: Buffers, steps: int) -> torch.cuda.CUDAGraph:
        kept = pytree.tree_map(torch.clone, (at.carry, at.tally, at.number))  # warming up must not move anything
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run_steps(problem, at, 1)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            run_steps(problem, at, steps)
        self.pool = self.pool or graph.pool()
        write((at.carry, at.tally, at.number), kept)
        return graph


def run_steps(problem: Problem, at: Buffers, steps: int) -> None:
    """What is captured: some steps, from the buffers into the buffers."""
    carry, tally, number = at.carry, at.tally, at.number
    for k in range(steps):
        carry, tally = one_step(problem, carry, at.job, at.rows[:, k], number + k, tally)
    write((at.carry, at.tally), (carry, tally))
    at.number.add_(steps)


def make_buffers(size: int, carry: Carry, job: Job, rows: Tensor, tally: Tally) -> Buffers:
    def room(t: Tensor) -> Tensor:
        return t.new_zeros((size, *t.shape[1:]))

    table = rows.new_zeros((size, UNROLL, rows.shape[2]))
    at_carry, at_job, at_tally = pytree.tree_map(room, (carry, job, tally))
    number = torch.zeros((), dtype=torch.int64, device=rows.device)
    return Buffers(at_carry, at_job, at_tally, table, number)


def write(places: Any, values: Any) -> None:
    """Copy values into the first rows of the places."""
    for place, value in zip(pytree.tree_leaves(places), pytree.tree_leaves(values), strict=True):
        if place.data_ptr() != value.data_ptr():
            (place[: len(value)] if place.dim() else place).copy_(value)
