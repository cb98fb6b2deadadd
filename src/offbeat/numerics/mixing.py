"""Blocks: clients that step together and mix. A job is a whole cluster's, X <- W (X - lr G), batched over clusters.

A block enters a wave whole. Inside, its devices are rows like any others; after every few steps the rows of each
cluster are multiplied by its mixing matrix, neighbouring clusters of one size in one product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.method import State, Update
from offbeat.numerics import wave as waves
from offbeat.numerics.buffers import WHOLE
from offbeat.numerics.trial import unmoved
from offbeat.numerics.wave import CHUNK, Advance, Clients, Outcome, Problem, Tally, Work, columns, outcome_of
from offbeat.records import Begun


class Blocks(NamedTuple):
    """The clusters: who belongs to each, how its models mix at the end of a phase, and who reports."""

    members: tuple[tuple[int, ...], ...]  # clients
    mixing: tuple[tuple[np.ndarray, ...], ...]  # of each cluster: matrices [n, n], used in turn; none: models stay
    every: int  # local steps before each mixing
    reporters: Callable[[int, int], list[int]]  # cluster, job -> places among its members

    def size(self, job: Begun) -> int:
        return len(self.members[job.client])

    def rows(self, jobs: Sequence[Begun]) -> list[Begun]:
        """The jobs of clusters as jobs of their devices, cluster after cluster."""
        return [job._replace(client=device) for job in jobs for device in self.members[job.client]]

    def reported(self, updates: Update, jobs: Sequence[Begun]) -> Update:
        """What clusters send: the mean over the devices of each that report."""
        first = [0, *accumulate(map(self.size, jobs))]
        weights = np.zeros((len(jobs), first[-1]))
        for row, job in enumerate(jobs):
            chosen = self.reporters(job.client, job.job)
            weights[row, [first[row] + place for place in chosen]] = 1 / len(chosen)
        means = {}
        for name, vectors in updates.items():
            if name == WHOLE:
                means[name] = torch.stack([vectors[row.nonzero()[0]].amax(0) for row in weights])
                continue
            by = torch.from_numpy(weights).to(vectors.dtype).to(vectors.device, non_blocking=True)
            with exact_products():
                means[name] = by @ vectors
        return means

    def matrix_after(self, job: Begun, k: int) -> np.ndarray | None:
        """The matrix by which the devices of a cluster mix after local step k of a job; None where they do not."""
        turns = self.mixing[job.client]
        if not turns or (k + 1) % self.every:
            return None
        return turns[(job.job * (job.steps // self.every) + k // self.every) % len(turns)]


class Mixer:
    """The mixing of some clusters, whose rows stand one after the other, on the device that they are on."""

    def __init__(self, blocks: Blocks, jobs: Sequence[Begun], like: Tensor) -> None:
        self.groups: list[tuple[int, list[Tensor]]] = []  # rows, and W - I [clusters, n, n] for each phase in turn
        for size, group in groupby(jobs, key=blocks.size):
            # Matrices go on in turn from job to job.
            each = [(blocks.mixing[job.client], job.job * (job.steps // blocks.every)) for job in group]
            period = math.lcm(*(len(matrices) for matrices, _ in each))
            turns = [np.stack([matrices[(since + phase) % len(matrices)] for matrices, since in each])
                     for phase in range(min(period, max(1, jobs[0].steps // blocks.every)))]  # fmt: skip
            self.groups.append((size * len(each), [moves(turn, like) for turn in turns]))

    def __call__(self, y: Tensor, phase: int) -> Tensor:
        parts = []
        for rows, (_, turns) in zip(torch.split(y, [rows for rows, _ in self.groups]), self.groups, strict=True):
            w = turns[phase % len(turns)]
            models = rows.reshape(len(w), w.shape[1], -1)
            with exact_products():
                parts.append(torch.baddbmm(models, w, models).reshape(rows.shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def moves(matrices: np.ndarray, like: Tensor) -> Tensor:
    """W - I in the precision and place of the models, with columns that sum to zero exactly: otherwise the mean would
    drift by the same rounding at every step. In float32 weights are multiples of 2^-24, of which sums are exact."""
    apart = torch.from_numpy(matrices).double().clone()
    if like.dtype == torch.float32:
        apart = torch.round(apart * 2**24) / 2**24
    diagonal = torch.diagonal(apart, dim1=-2, dim2=-1)
    diagonal -= apart.sum(-2)
    return apart.to(like.dtype).to(like.device, non_blocking=True)


@contextmanager
def exact_products() -> Iterator[None]:
    """Models are averaged in the full precision of their type, whatever gradients are computed in: a mean that is
    rounded to ten bits at every step is noise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@unmoved
@torch.no_grad()
def block_wave(
    problem: Problem, blocks: Blocks, starts: State, jobs: Sequence[Begun], advance: Advance = waves.advance
) -> Outcome:
    """The devices' outcomes of some clusters' jobs. `starts` holds a row per device, in the order of `blocks.rows`."""
    order = sorted(range(len(jobs)), key=lambda i: (jobs[i].steps, blocks.size(jobs[i])))
    first = [0, *accumulate(map(blocks.size, jobs))]
    if len({job.steps for job in jobs}) > 1 or order != list(range(len(jobs))):
        outcomes: list[Any] = []
        rows = [list(range(first[i], first[i + 1])) for i in order]
        for _, group in groupby(range(len(order)), key=lambda place: jobs[order[place]].steps):
            places = list(group)
            mine = [row for place in places for row in rows[place]]
            own = {name: state[mine] for name, state in starts.items()}
            outcomes.append(tuple(block_wave(problem, blocks, own, [jobs[order[place]] for place in places], advance)))
        back = torch.tensor([row for block in rows for row in block], device=starts["model"].device).argsort()
        return Outcome(*pytree.tree_map(lambda *parts: torch.cat(parts)[back], *outcomes))
    devices = blocks.rows(jobs)
    work = columns(problem, devices, starts["model"].device)
    lanes = lanes_of([problem.samples.per_step(job.client) for job in devices], work.client)
    mixer = Mixer(blocks, jobs, starts["model"]) if blocks.mixing[jobs[0].client] else None
    starts, clients = waves.begun(problem, starts, work)
    tally = Tally(torch.zeros_like(work.job.steps), torch.full_like(work.client, -1))
    done, steps = 0, jobs[0].steps
    while done < steps:
        phase_end = done - done % blocks.every + blocks.every if mixer else steps
        count = max(1, min(phase_end - done, steps - done, CHUNK // (len(devices) * max(width for _, width in lanes))))
        clients, tally = abreast(problem, clients, work, tally, done, count, lanes, advance)
        done += count
        if mixer and done % blocks.every == 0:
            phase = done // blocks.every - 1
            clients = clients.at(mixer(clients.iterate, phase))
            if clients.buffers:
                real, whole = clients.buffers
                clients = clients._replace(buffers=(mixer(real, phase), whole))
    return outcome_of(waves.finished(problem, starts, clients, work), tally, work.job)


Lane = tuple[Tensor | None, int]  # rows (None: all of them) whose steps use so many samples


def lanes_of(widths: list[int], like: Tensor) -> list[Lane]:
    """Rows by the samples of a step: where shards are used whole, devices of a cluster differ."""
    distinct = sorted(set(widths))
    if len(distinct) == 1:
        return [(None, distinct[0])]
    wide = torch.tensor(widths, device=like.device)
    return [((wide == width).nonzero()[:, 0], width) for width in distinct]


def abreast(
    problem: Problem, clients: Clients, work: Work, tally: Tally, begin: int, count: int, lanes: list[Lane],
    advance: Advance,
) -> tuple[Clients, Tally]:  # fmt: skip
    """All rows `count` steps further, those of one width together."""
    for rows, width in lanes:
        if rows is None:
            return advance(problem, clients, work, tally, begin, count, width)
        own, whose, sums = pytree.tree_map(lambda t, rows=rows: t[rows], (clients, work, tally))
        moved = advance(problem, own, whose, sums, begin, count, width)
        clients, tally = pytree.tree_map(lambda t, new, rows=rows: t.index_copy(0, rows, new), (clients, tally), moved)
    return clients, tally
