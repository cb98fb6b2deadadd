"""Waves: many jobs, even from different versions, as one batched computation; and the slow twin beside it.

Both turn `(starts, jobs)` into updates and agree to rounding. The engine owns the loop over local steps, so a rule
never sees the client axis: `begin`, `step` and `finish` are mapped over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat import keys
from offbeat.method import Carry, Job, Local, State, Update
from offbeat.numerics.samples import Samples
from offbeat.numerics.vector import FlatModel
from offbeat.records import Begun

CHUNK = 1 << 22  # sample rows drawn at once for a wave


class Outcome(NamedTuple):
    """Updates `[n, d]` in the order of the jobs, their mean training losses `[n]`, and where numbers went bad."""

    updates: Update
    losses: Tensor
    bad: Tensor  # [n]: the first local step whose loss was not finite, `steps` if only the update is bad, else -1


class Problem(NamedTuple):
    """What the numerics need to know of a run."""

    model: FlatModel
    samples: Samples
    local: Local
    seed: int


class Tally(NamedTuple):
    """Running sums of a wave."""

    loss: Tensor  # [n]
    bad: Tensor  # [n]


class Advance(Protocol):
    """Takes n clients some steps further; the plain loop below, or an engine's captured graph."""

    def __call__(
        self, problem: Problem, carry: Carry, job: Job, rows: Tensor, begin: int, tally: Tally
    ) -> tuple[Carry, Tally]: ...


Solve: TypeAlias = Callable[[Problem, State, Sequence[Begun]], Outcome]


def one_step(
    problem: Problem, carry: Carry, job: Job, rows: Tensor, number: Tensor | int, tally: Tally
) -> tuple[Carry, Tally]:
    """One local step of n clients: gather the batch, take gradients, apply the rule."""
    samples = problem.samples
    with torch.enable_grad():
        flat = carry[0].detach().requires_grad_()
        losses = problem.model.losses(flat, samples.x[rows], samples.y[rows])
        (gradient,) = torch.autograd.grad(losses.sum(), flat)
    losses = losses.detach()
    carry = torch.vmap(problem.local.step)(carry, gradient, job)
    first_bad = (tally.bad < 0) & ~losses.isfinite()
    return carry, Tally(tally.loss + losses, torch.where(first_bad, number, tally.bad))


def advance(problem: Problem, carry: Carry, job: Job, rows: Tensor, begin: int, tally: Tally) -> tuple[Carry, Tally]:
    """The plain loop over `rows [n, count, b]`."""
    for k in range(rows.shape[1]):
        carry, tally = one_step(problem, carry, job, rows[:, k], begin + k, tally)
    return carry, tally


def job_columns(problem: Problem, jobs: Sequence[Begun], device: torch.device) -> tuple[Tensor, Tensor, Job]:
    """Client numbers, keys and the rule's numbers of n jobs as columns."""
    client = torch.tensor([job.client for job in jobs], device=device)
    number = torch.tensor([job.job for job in jobs], device=device)
    key = keys.key(problem.seed, "batch", client, number)
    rates = {job.version: problem.local.rate(job.version) for job in jobs}
    kind = {"dtype": problem.model.dtype, "device": device}
    lr = torch.tensor([rates[job.version] for job in jobs], **kind)  # type: ignore[arg-type]
    return client, key, Job(lr, torch.tensor([job.steps for job in jobs], **kind))  # type: ignore[arg-type]


@torch.no_grad()
def wave(problem: Problem, starts: State, jobs: Sequence[Begun], advance: Advance = advance) -> Outcome:
    """Compute n jobs together. `starts` holds one row per job; jobs with fewer steps leave the batch early.

    Nothing is padded: where shards are used whole, clients with shards of another size make a wave of their own.
    """
    samples = problem.samples
    sizes = [samples.per_step(job.client) for job in jobs]
    order = sorted(range(len(jobs)), key=lambda i: (sizes[i], -jobs[i].steps))
    groups = [list(group) for _, group in groupby(order, key=lambda i: sizes[i])]
    if order != list(range(len(jobs))) or len(groups) > 1:
        outcomes: list[Any] = []
        for group in groups:
            own = {name: state[group] for name, state in starts.items()}
            outcomes.append(tuple(wave(problem, own, [jobs[i] for i in group], advance)))
        back = torch.tensor(order, device=starts["model"].device).argsort()
        return Outcome(*pytree.tree_map(lambda *parts: torch.cat(parts)[back], *outcomes))
    client, key, columns = job_columns(problem, jobs, starts["model"].device)
    carry, job = torch.vmap(problem.local.begin)(starts, columns), columns
    tally = Tally(torch.zeros_like(job.lr), torch.full_like(client, -1))
    done: list[Any] = []  # (carry, tally) of those that have left, the last leaver first
    active, begin = len(jobs), 0
    while active:
        count = max(1, min(jobs[active - 1].steps - begin, CHUNK // (active * sizes[0])))
        rows = problem.samples.rows(client[:active], key[:active], begin, count)
        carry, tally = advance(problem, carry, job, rows, begin, tally)
        begin += count
        stay = sum(j.steps > begin for j in jobs[:active])
        if stay < active:
            done.insert(0, pytree.tree_map(lambda t, s=stay: t[s:], (carry, tally)))
            carry, tally, job = pytree.tree_map(lambda t, s=stay: t[:s], (carry, tally, job))
            active = stay
    carry, tally = pytree.tree_map(lambda *parts: torch.cat(parts), *done) if len(done) > 1 else done[0]
    updates: Update = torch.vmap(problem.local.finish)(starts, carry, columns)
    return outcome_of(updates, tally, columns)


@torch.no_grad()
def twin(problem: Problem, starts: State, jobs: Sequence[Begun]) -> Outcome:
    """The slow twin: one client after the other, no vmap, no padding, no unfolding. Oracle and debug engine."""
    updates: list[Update] = []
    losses: list[Tensor] = []
    bad: list[Tensor] = []
    device = starts["model"].device
    clients, key, columns = job_columns(problem, jobs, device)
    samples = problem.samples
    for i, work in enumerate(jobs):
        start = {name: state[i] for name, state in starts.items()}
        job = Job(columns.lr[i], columns.steps[i])
        carry = problem.local.begin(start, job)
        total, wrong = torch.zeros_like(job.lr), torch.full_like(clients[i], -1)
        for k in range(work.steps):
            rows = samples.rows(clients[i : i + 1], key[i : i + 1], k, 1)[0, 0]
            with torch.enable_grad():
                flat = carry[0].detach().requires_grad_()
                loss = problem.model.one(flat, samples.x[rows], samples.y[rows])
                (gradient,) = torch.autograd.grad(loss, flat)
            carry = problem.local.step(carry, gradient, job)
            total = total + loss.detach()
            wrong = torch.where((wrong < 0) & ~loss.detach().isfinite(), k, wrong)
        updates.append(problem.local.finish(start, carry, job))
        losses.append(total)
        bad.append(wrong)
    together = {name: torch.stack([u[name] for u in updates]) for name in updates[0]}
    return outcome_of(together, Tally(torch.stack(losses), torch.stack(bad)), columns)


def outcome_of(updates: Update, tally: Tally, job: Job) -> Outcome:
    finite = torch.stack([u.isfinite().all(dim=1) for u in updates.values()]).all(dim=0)
    bad = torch.where((tally.bad < 0) & ~finite, job.steps.long(), tally.bad)
    return Outcome(updates, tally.loss / job.steps, bad)


@torch.no_grad()
def bytes_per_job(problem: Problem) -> int:
    """An estimate of the memory that one job takes inside a wave: vectors, activations and their gradients."""
    samples, model = problem.samples, problem.model
    outputs = 0

    def count(_module: Any, _args: Any, out: Any) -> None:
        nonlocal outputs
        outputs += sum(t.numel() for t in pytree.tree_leaves(out) if isinstance(t, Tensor))

    hooks = [m.register_forward_hook(count) for m in model.module.modules() if not list(m.children())]
    model.module(samples.x[:2])
    for hook in hooks:
        hook.remove()
    unfolded = 26 if any(isinstance(m, torch.nn.Conv2d) for m in model.module.modules()) else 1
    activations = samples.width * (outputs / 2 * (3 + unfolded) + samples.x[0].numel())
    return int(samples.x.element_size() * (activations + 8 * model.dimension))
