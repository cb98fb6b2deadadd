"""Local steps as captured CUDA graphs: the launches of a wave's steps are recorded once and replayed.

A graph is captured for a number of clients and of steps. Waves of other sizes are padded to the next size on the
ladder with rows whose results are thrown away; a size that keeps coming back gets a graph of its own. What is
replayed is exactly `numerics.wave.one_step`. Capturing costs as much as many steps, so a size is captured when it has
taken enough of them plainly, in the same places and so with the same bits; sizes not used for long are let go.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.engines.stepping import Counts, Rung, Size, rows_of, table_of
from offbeat.numerics.draws import compiled
from offbeat.numerics.wave import Clients, Problem, Tally, Work, draw, job_at, numbered, one_step, tallied

LADDER = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
UNROLL = (5, 1)  # steps in one graph; a job's steps are made up of these
OFTEN = 8  # a size seen so often gets a graph without padding
WORTH = 40  # plain steps after which a size is captured
HELD = 64  # sizes whose graphs are held on to
ALIGN = 32  # numbers: rows of the buffers are so aligned, because matrix products read aligned rows faster


def padded(clients: int) -> int:
    """The size on the ladder that a wave of so many clients is padded to.

    >>> [padded(n) for n in (1, 5, 100, 256, 300)]
    [1, 6, 112, 256, 320]
    """
    if clients > LADDER[-1]:
        return -(-clients // 64) * 64
    return LADDER[bisect_left(LADDER, clients)]


def fitting(ready: int, urgent: int) -> int:
    """How many of the jobs that are ready to take into a wave of which the first `urgent` must be computed now.

    The largest size on the ladder, so that nothing is padded: jobs that nobody waits for go into the next wave.

    >>> fitting(58, 10), fitting(58, 50), fitting(100, 100)
    (48, 58, 100)
    """
    size = padded(ready)
    if size > ready:
        size = LADDER[bisect_left(LADDER, ready) - 1] if ready < LADDER[-1] else size - 64
    return size if size >= urgent else ready


class Buffers(NamedTuple):
    """The fixed places that a graph reads and writes."""

    carry: Any
    work: Work
    tally: Tally
    begin: Tensor  # the number of the next local step


class Graphs(NamedTuple):
    """All there is of one size."""

    buffers: Buffers
    graphs: dict[int, Any]  # by steps in each


@contextmanager
def nothing_freed() -> Iterator[None]:
    """A graph of an earlier run that Python lets go of while another is captured would break that one."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class GraphAdvance:
    """Steps that replay graphs. One per run: graphs hold on to the problem's tensors. Unless it `counts` waves, how one
    is padded does not depend on those before it."""

    rung: Rung = "captured"

    def __init__(self, counts: bool = True) -> None:
        self.counts = counts
        self.graphs: OrderedDict[Size, Graphs] = OrderedDict()
        self.seen: Counter[Size] = Counter()
        self.taken: Counter[Size] = Counter()  # steps
        self.pool: Any = None
        self.worth = WORTH
        self.compiled: set[int] = set()  # samples per step

    def __call__(
        self, problem: Problem, carry: Clients, work: Work, tally: Tally, begin: int, count: int, width: int
    ) -> tuple[Clients, Tally]:
        clients = len(work.client)
        rates = {name: table[:, begin : begin + count] for name, table in work.tables.items()}
        work = work._replace(tables={name: t.new_zeros(clients, UNROLL[0]) for name, t in rates.items()})
        self.seen[clients, width] += self.counts
        size = (clients if self.seen[clients, width] >= OFTEN else padded(clients), width)
        if size not in self.graphs:
            if width not in self.compiled:
                self.compiled.add(width)
                compile_step(problem, carry, work, tally, width)
            self.graphs[size] = Graphs(make_buffers(size[0], carry, work, tally), {})
        self.graphs.move_to_end(size)
        if len(self.graphs) > HELD:
            self.graphs.popitem(last=False)
        at, graphs = self.graphs[size]
        write((at.carry, at.work, at.tally), (carry, work, tally))
        at.begin.fill_(begin)
        captured = self.taken[size] >= self.worth
        self.taken[size] += count
        done = 0
        for steps in UNROLL:
            for _ in range(count // steps):
                for name, table in rates.items():  # a graph has room for the rates of its own steps
                    at.work.tables[name][:clients, :steps].copy_(table[:, done : done + steps])
                done += steps
                if not captured:
                    run_steps(problem, at, steps, width)
                    continue
                if steps not in graphs:
                    graphs[steps] = self.capture(problem, at, steps, width)
                graphs[steps].replay()
            count %= steps
        advanced: tuple[Clients, Tally] = pytree.tree_map(
            lambda place, t: part(place, t).clone(), (at.carry, at.tally), (carry, tally)
        )
        return advanced

    def fitting(self, ready: int, urgent: int) -> int:
        return fitting(ready, urgent)

    def around(self) -> AbstractContextManager[None]:
        return nullcontext()

    def save(self) -> Counts:
        return {"seen": rows_of(self.seen), "taken": rows_of(self.taken)}

    def restore(self, counts: Counts) -> None:
        self.seen, self.taken = table_of(counts["seen"]), table_of(counts["taken"])

    def follow(self, threads: int) -> None:
        """Graphs are padded by the wave alone."""

    def release(self) -> None:
        """Let go of all graphs and their memory; sizes are captured anew when they come again."""
        self.graphs.clear()
        self.pool = None

    def capture(self, problem: Problem, at: Buffers, steps: int, width: int) -> torch.cuda.CUDAGraph:
        kept = pytree.tree_map(torch.clone, (at.carry, at.tally, at.begin))  # warming up must not move anything
        if self.pool is None:  # what happens once, such as compiling, must not be captured
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    run_steps(problem, at, 1, width)
            torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with nothing_freed(), torch.cuda.graph(graph, pool=self.pool):
            run_steps(problem, at, steps, width)
        self.pool = self.pool or graph.pool()
        write((at.carry, at.tally, at.begin), kept)
        return graph


def run_steps(problem: Problem, at: Buffers, steps: int, width: int) -> None:
    """What is captured: some steps, from the buffers into the buffers. All of their batches are drawn first."""
    carry = at.carry
    rows, noise = draw(problem, at.work, at.begin, steps, width)
    rows = rows.transpose(0, 1).contiguous()
    x, y = problem.samples.x[rows], problem.samples.y[rows]
    losses = torch.empty_like(noise, dtype=at.tally.loss.dtype)
    for k, step in enumerate(numbered(at.begin, steps, at.work)):
        carry, losses[:, k] = one_step(problem, carry, job_at(at.work, step, k), x[k], y[k], noise[:, k])
    write((at.carry, at.tally), (carry, tallied(at.tally, losses, at.begin)))
    at.begin.add_(steps)


def compile_step(problem: Problem, carry: Clients, work: Work, tally: Tally, width: int) -> None:
    """Have all kernels of a step compiled at once, rather than each when the first step comes to it."""
    if not compiled():
        return
    from offbeat.numerics.fast.compiling import side_by_side

    at = make_buffers(len(work.client), carry, work, tally)
    write((at.carry, at.work, at.tally), (carry, work, tally))
    with side_by_side() as possible:
        if possible:
            run_steps(problem, at, 1, width)


def make_buffers(size: int, carry: Clients, work: Work, tally: Tally) -> Buffers:
    def room(t: Tensor) -> Tensor:
        """Rows of numbers get a tail of zeros, which stays zero: its gradient is."""
        sides = t.shape[1:] if t.dim() < 2 else (*t.shape[1:-1], -(-t.shape[-1] // ALIGN) * ALIGN)
        return t.new_zeros((size, *sides))

    at_carry, at_work, at_tally = pytree.tree_map(room, (carry, work, tally))
    return Buffers(at_carry, at_work, at_tally, torch.zeros((), dtype=torch.int64, device=work.client.device))


def part(place: Tensor, like: Tensor) -> Tensor:
    """The first rows and columns of a place that a tensor fills."""
    return place[tuple(slice(side) for side in like.shape)]


def write(places: Any, values: Any) -> None:
    """Copy values into the first rows of the places; a tail is zero again."""
    for place, value in zip(pytree.tree_leaves(places), pytree.tree_leaves(values), strict=True):
        if place.data_ptr() != value.data_ptr():
            part(place, value).copy_(value)
            if place.dim() > 1 and place.shape[-1] > value.shape[-1]:
                place[: len(value), ..., value.shape[-1] :].zero_()
