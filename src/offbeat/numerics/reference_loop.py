"""The reference loop: one client after the other, each step by the user's own module and `backward()`.

It is the oracle for waves and the last step mode: slow, and right for every model that trains in a plain PyTorch loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.errors import OffbeatError
from offbeat.method import Job, State, Update
from offbeat.numerics.blame import blamed
from offbeat.numerics.mixing import Blocks
from offbeat.numerics.snapshot import attribute, head
from offbeat.numerics.trial import trial_key, unmoved
from offbeat.numerics.wave import Outcome, Problem, Tally, columns, draw, ended, full_noise, job_at, outcome_of, tallied
from offbeat.numerics.wave import pieces as pieces_of
from offbeat.records import Begun

_DRAWN = 64  # steps whose samples are drawn at once


@unmoved
@torch.no_grad()
def reference(problem: Problem, starts: State, jobs: Sequence[Begun], blocks: Blocks | None = None) -> Outcome:
    """Compute the jobs one by one, or cluster by cluster: its devices step together and mix after every few steps.

    `starts` has a row per client, or per device in the order of `blocks.rows`.
    """
    outcomes: list[Any] = []
    rows, replica, samples = iter(range(len(starts["model"]))), problem.model.replica, problem.samples
    first = samples.first_rows(samples.per_step(0))
    usual = replica.usual_changes(samples.x[first], samples.y[first], trial_key(samples.x.device))
    before = replica.attributes()
    for job in jobs:
        devices = [job] if blocks is None else blocks.rows([job])
        clients = [
            ClientJob(problem, {name: state[row] for name, state in starts.items()}, device, keep=True)
            for device, row in zip(devices, rows, strict=False)
        ]
        try:
            for k in range(job.steps):
                for client in clients:
                    client.step(k)
                if blocks is not None and (w := blocks.matrix_after(job, k)) is not None:
                    _mix(clients, w)
            outcomes += [client.finish() for client in clients]
            unusual = {head(path) for path in before.changed(replica.attributes())} - usual
        finally:
            before.restore()
        if unusual:
            raise OffbeatError(
                f"client {job.client}, version {job.version}: the model or its loss changed {attribute(min(unusual))}, "
                "though not in its first step, so it would not be the same for all clients: keep it out of the model, "
                "or make it a buffer (register_buffer) and give batch_norm"
            )
    return Outcome(*pytree.tree_map(lambda *parts: torch.cat(parts), *map(tuple, outcomes)))


class ClientJob:
    """One client's job, step by step, on plain vectors."""

    def __init__(self, problem: Problem, start: State, begun: Begun, keep: bool = False) -> None:
        """With `keep`, the attributes of the model stay as a step leaves them for the next."""
        self.problem, self.begun, self.keep = problem, begun, keep
        self.work = columns(problem, [begun], start["model"].device)
        self.job: Job = pytree.tree_map(lambda column: column[0], self.work.job)
        self.buffers: dict[str, Tensor] = {}
        if (ruled := problem.model.ruled) is not None:
            own = {name: vector[None] for name, vector in start.items()}
            self.buffers = ruled.layout.tensors(tuple(values[0] for values in ruled.starts(own, 1)))
        if problem.local.full_gradient:
            start = start | {"gradient": full_gradient(problem, start["model"], self.work.client, self.buffers)}
        self.start = start
        self.carry = problem.local.begin(start, self.job)
        self.losses: list[Tensor] = []
        self.drawn: tuple[Tensor, Tensor]  # rows and noise of some steps

    @property
    def iterate(self) -> Tensor:
        return self.carry[0]  # type: ignore[no-any-return]

    @iterate.setter
    def iterate(self, y: Tensor) -> None:
        self.carry = self.carry._replace(**{self.carry._fields[0]: y})

    def step(self, k: int) -> None:
        """Draw rows and key, take the gradient, apply the rule."""
        problem, client = self.problem, self.begun.client
        if not k % _DRAWN:
            count = min(_DRAWN, self.begun.steps - k)
            self.drawn = draw(problem, self.work, k, count, problem.samples.per_step(client))
        rows, noise = (t[0, k % _DRAWN] for t in self.drawn)
        where = f"client {client}, version {self.begun.version}, local step {k}"
        loss, gradient, self.buffers = _slope(problem, self.iterate, self.buffers, rows, noise, where, self.keep)
        job = job_at(self.work, torch.full_like(self.work.client, k), k)
        self.carry = problem.local.step(self.carry, gradient, pytree.tree_map(lambda column: column[0], job))
        self.losses.append(loss)

    def finish(self) -> Outcome:
        model = self.problem.model
        model.replica.check_constants()
        own = self.problem.local.finish(self.start, self.carry, ended(self.job))
        update: Update = {name: value[None] for name, value in own.items()}
        if model.ruled is not None:
            update |= model.ruled.ends(tuple(vector[None] for vector in model.joined(self.buffers)))
        empty = Tally(torch.zeros_like(self.work.job.steps), torch.full_like(self.work.client, -1))
        return outcome_of(update, tallied(empty, torch.stack(self.losses)[None], 0), self.work.job)


def _mix(clients: Sequence[ClientJob], w: Any) -> None:
    """Replace each device's model and real buffers by the weighted means of its neighbours'."""

    def means(each: Sequence[Tensor]) -> list[Tensor]:
        zero = torch.zeros_like(each[0])
        return [sum((float(w[i, j]) * t for j, t in enumerate(each)), zero) for i in range(len(each))]

    layout = clients[0].problem.model.layout
    for client, model in zip(clients, means([client.iterate for client in clients]), strict=True):
        client.iterate = model
    for name in layout.real if layout is not None else ():
        for client, buffer in zip(clients, means([client.buffers[name] for client in clients]), strict=True):
            client.buffers[name] = buffer


def _slope(
    problem: Problem,
    flat: Tensor,
    buffers: dict[str, Tensor],
    rows: Tensor,
    noise: Tensor,
    where: str,
    keep: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return loss, gradient and buffers of one client on these rows; an error names the sample."""
    samples = problem.samples

    def at(rows: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        rows = rows.to(noise.device)
        return problem.model.replica.gradient(flat, buffers, samples.x[rows], samples.y[rows], noise, keep)

    try:
        return at(rows)
    except (OffbeatError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model of one's own raises
        raise blamed(where, "the training data", rows.tolist(), at, error) from error


def full_gradient(problem: Problem, flat: Tensor, client: Tensor, buffers: dict[str, Tensor] | None = None) -> Tensor:
    """Return the gradient `[d]` of one client `[1]` over its whole shard, a batch's width at a time, with these buffers
    (by default the initial ones)."""
    samples, total = problem.samples, torch.zeros_like(flat)
    buffers = problem.model.buffers() if buffers is None else buffers
    for width, _, begin in pieces_of(samples, client.tolist()):
        at = torch.tensor(begin, device=flat.device)
        rows = samples.part(client, at, width)[0]
        where = f"the gradient of client {int(client)} over its shard"
        gradient = _slope(problem, flat, buffers, rows, full_noise(problem, client, at)[0], where)[1]
        total += gradient * (width / samples.sizes[int(client)])
    return total
