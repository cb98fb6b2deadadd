"""Waves: many jobs, even from different versions, as one batched computation.

A wave turns `(starts, jobs)` into updates and agrees with the reference loop (`numerics/reference_loop.py`) to
rounding. The engine owns the loop over local steps, so a rule never sees the client axis: `begin`, `step` and `finish`
are mapped over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat import keys
from offbeat.method import Carry, ClientRate, Job, Local, State, StepRate, Update
from offbeat.numerics.buffers import Values
from offbeat.numerics.draws import Keyed, compiled
from offbeat.numerics.local import Descent
from offbeat.numerics.samples import KEYED, ROUNDS, Samples
from offbeat.numerics.trial import unmoved
from offbeat.numerics.vector import FlatModel
from offbeat.records import VERSION, Begun

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


class Work(NamedTuple):
    """n jobs as columns: whose, with which keys, and the numbers that the rule may use."""

    client: Tensor
    key: Tensor  # of the batches and of what the model draws
    job: Job
    earlier: Tensor  # steps of the client's earlier jobs that it finished
    tables: dict[str, Tensor]  # [n, steps]: rates that differ from step to step


class Clients(NamedTuple):
    """Where n clients of a wave are: the carry of the rule, whose first field is the iterate, and the buffers."""

    carry: Carry
    buffers: Values

    @property
    def iterate(self) -> Tensor:
        return self.carry[0]  # type: ignore[no-any-return]

    def at(self, iterate: Tensor) -> Clients:
        """The same clients with another iterate."""
        return self._replace(carry=self.carry._replace(**{self.carry._fields[0]: iterate}))


class Tally(NamedTuple):
    """Running sums of a wave."""

    loss: Tensor  # [n]
    bad: Tensor  # [n]


class Advance(Protocol):
    """Takes n clients `count` steps of `width` samples further; the plain loop below, or an engine's captured graph."""

    def __call__(
        self, problem: Problem, clients: Clients, work: Work, tally: Tally, begin: int, count: int, width: int, /
    ) -> tuple[Clients, Tally]: ...


def one_step(
    problem: Problem, clients: Clients, job: Job, x: Tensor, y: Tensor, noise: Tensor
) -> tuple[Clients, Tensor]:
    """One local step of n clients on their batches: take gradients, apply the rule; and the losses `[n]`.

    A rule of the form y - lr (g + c) moves the iterate in its place.
    """
    step, model, (carry, values) = problem.local.step, problem.model, clients
    if isinstance(step, Descent):
        losses, values = model.descend(clients.iterate, values, job.lr, step.correction(carry), x, y, noise)
        return Clients(carry, values), losses
    losses, gradient, values = model.gradient_step(clients.iterate, values, x, y, noise)
    return Clients(torch.vmap(problem.local.step)(carry, gradient, job), values), losses


def job_at(work: Work, step: Tensor, place: int | Tensor) -> Job:
    """The numbers of n jobs at local step `step [n]`, whose rates stand at `place` in the tables."""
    if not work.tables:
        return work.job._replace(step=step)
    rates = {name: table[:, place] for name, table in work.tables.items()}
    return work.job._replace(step=step, rates={**work.job.rates, **rates})


def numbered(begin: int | Tensor, count: int, work: Work) -> Tensor:
    """The numbers `[count, n]` of steps from `begin` on."""
    numbers = torch.arange(count, device=work.key.device) + begin
    return numbers[:, None].expand(count, len(work.key))


def advance(
    problem: Problem, clients: Clients, work: Work, tally: Tally, begin: int, count: int, width: int
) -> tuple[Clients, Tally]:
    """The plain loop over the steps."""
    if isinstance(problem.local.step, Descent):
        clients = clients.at(clients.iterate.clone())  # steps move it where it lies
    rows, noise = draw(problem, work, begin, count, width)
    losses = []
    for k, step in enumerate(numbered(begin, count, work)):
        job = job_at(work, step, begin + k)
        clients, loss = one_step(problem, clients, job, *problem.samples.batch_of(rows[:, k]), noise[:, k])
        losses.append(loss)
    return clients, tallied(tally, torch.stack(losses, dim=1), begin)


def draw(problem: Problem, work: Work, begin: int | Tensor, count: int, width: int) -> tuple[Tensor, Tensor]:
    """What steps `begin .. begin + count` of n jobs take from chance: rows of the data set `[n, count, width]`, and
    keys `[n, count]` for what the model itself draws. All of it follows from the job's key and the step."""
    samples = problem.samples
    if work.key.is_cuda and samples.batch is not None and samples.sampling in KEYED and compiled():
        from offbeat.numerics.fast import kernels

        at = torch.as_tensor(begin, device=work.key.device)
        shards = (samples.order, samples.first, samples.size, work.client, work.key)
        rounds = ROUNDS if samples.sampling == "shuffle" else 0
        rows, noise = kernels.draw(*shards, at, count, width, rounds)
        return rows.transpose(0, 1), noise.T
    steps = torch.arange(count, device=work.key.device)[None] + begin
    noise = keys.fold(keys.fold(work.key, -1)[:, None], steps)  # slots of batches are not negative
    return samples.rows(work.client, work.key, begin, count, width, work.earlier), noise


def tallied(tally: Tally, losses: Tensor, begin: int | Tensor) -> Tally:
    """With the losses `[n, count]` of steps from `begin` on."""
    wrong = ~losses.isfinite()
    first = torch.where(wrong.any(1), wrong.int().argmax(1) + begin, -1)
    return Tally(tally.loss + losses.sum(1), torch.where(tally.bad < 0, first, tally.bad))


def columns(problem: Problem, jobs: Sequence[Begun], device: torch.device) -> Work:
    """Jobs as columns, made on the host and sent at once."""
    who = np.array([job[:3] for job in jobs], dtype=np.int64).T
    client, number, version = who
    batch, rule = (keys.key(problem.seed, purpose, client, number) for purpose in ("batch", "rule"))
    earlier = np.array([job.steps_before for job in jobs], dtype=np.int64)
    whole = torch.from_numpy(np.stack([client, batch, rule, version & VERSION, np.zeros_like(client), earlier]))
    rows, key, own, start, first, read = whole.to(device, non_blocking=True)
    local, epoch = problem.local, problem.samples.epoch
    means = [rates_of(rate, jobs) for rate in local.rates.values()]
    numbers = [[job.steps for job in jobs], [epoch(job.client) for job in jobs], *means]
    floats = torch.tensor(numbers, dtype=torch.float64).to(problem.model.dtype).to(device, non_blocking=True)
    steps, passes, *rates = floats
    tables = {name: table(rate, jobs).to(floats) for name, rate in local.rates.items() if isinstance(rate, StepRate)}
    job = Job(dict(zip(local.rates, rates, strict=True)), steps, passes, start, own, first)
    return Work(rows, key, job, read, tables)


def rates_of(rate: ClientRate, jobs: Sequence[Begun]) -> list[float]:
    """The rate of each job: at its version, or the mean over its steps."""
    if isinstance(rate, StepRate):
        means = {pair: rate.mean(*pair) for pair in {job[2:4] for job in jobs}}
        return [means[job[2:4]] for job in jobs]
    values = {version: rate(version) for version in {job.version for job in jobs}}
    return [values[job.version] for job in jobs]


def table(rate: StepRate, jobs: Sequence[Begun]) -> Tensor:
    """The rates `[n, steps]` of each step; behind a job's last step they are zero."""
    most = max(job.steps for job in jobs)
    lines = {(version, steps): [rate.at(version, k, steps) for k in range(steps)] + [0.0] * (most - steps)
             for version, steps in {job[2:4] for job in jobs}}  # fmt: skip
    return torch.tensor([lines[job[2:4]] for job in jobs], dtype=torch.float64)


@unmoved
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
    work = whole = columns(problem, jobs, starts["model"].device)
    starts, clients = begun(problem, starts, work)
    tally = Tally(torch.zeros_like(work.job.steps), torch.full_like(work.client, -1))
    done: list[Any] = []  # (clients, tally) of those that have left, the last leaver first
    active, begin, width = len(jobs), 0, sizes[0]
    while True:
        count = max(1, min(jobs[active - 1].steps - begin, CHUNK // (active * width)))
        clients, tally = advance(problem, clients, work, tally, begin, count, width)
        begin += count
        stay = sum(j.steps > begin for j in jobs[:active])
        if not stay:
            done.insert(0, (clients, tally))
            break
        if stay < active:
            done.insert(0, pytree.tree_map(lambda t, s=stay: t[s:], (clients, tally)))
            clients, tally, work = pytree.tree_map(lambda t, s=stay: t[:s], (clients, tally, work))
            active = stay
    clients, tally = pytree.tree_map(lambda *parts: torch.cat(parts), *done) if len(done) > 1 else done[0]
    return outcome_of(finished(problem, starts, clients, whole), tally, whole.job)


def begun(problem: Problem, starts: State, work: Work) -> tuple[State, Clients]:
    """Return what n jobs start from, with the gradients that the rule asks for, and the clients at their first step."""
    ruled = problem.model.ruled
    values = () if ruled is None else ruled.starts(starts, len(work.client))
    if problem.local.full_gradient:
        starts = starts | {"gradient": full_gradients(problem, starts["model"], work.client, values)}
    return starts, Clients(torch.vmap(problem.local.begin)(starts, work.job), values)


def finished(problem: Problem, starts: State, clients: Clients, work: Work) -> Update:
    """Return the updates of n jobs."""
    updates: Update = torch.vmap(problem.local.finish)(starts, clients.carry, ended(work.job))
    return updates if problem.model.ruled is None else updates | problem.model.ruled.ends(clients.buffers)


def ended(job: Job) -> Job:
    """As `finish` sees it."""
    return job._replace(step=job.steps.long())


@torch.no_grad()
def full_gradients(problem: Problem, flat: Tensor, clients: Tensor, values: Values = ()) -> Tensor:
    """The gradients `[n, d]` of n clients at `flat [n, d]`, each over its whole shard, a batch's width at a time, with
    these buffers (by default the initial ones)."""
    samples = problem.samples
    sizes = samples.size[clients].to(flat.dtype)
    total = torch.zeros_like(flat)
    for width, rows, begin in pieces(samples, clients.tolist()):
        row, at = (torch.tensor(numbers, device=flat.device) for numbers in (rows, begin))
        mine = clients[row]
        x, y = samples.batch_of(samples.part(mine, at, width))
        own = tuple(vector[row] for vector in values)
        _, gradient, _ = problem.model.gradient_step(flat[row], own, x, y, full_noise(problem, mine, at))
        total.index_add_(0, row, gradient * (width / sizes[row])[:, None])
    return total


def pieces(samples: Samples, clients: Sequence[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Shards cut into pieces of at most a batch: (width, places in `clients`, where each piece begins), those of one
    width and number together."""
    full: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for row, client in enumerate(clients):
        size, width = samples.sizes[client], samples.per_step(client)
        for begin in range(0, size, width):
            last = size - begin < width
            group = full.setdefault((size - begin, -1) if last else (width, begin), ([], []))
            group[0].append(row)
            group[1].append(begin)
    for (width, _), (rows, begins) in full.items():
        yield width, rows, begins


def full_noise(problem: Problem, client: Tensor, begin: Tensor) -> Tensor:
    """Keys of what the model draws while a piece of a shard is looked at."""
    root = torch.full_like(client, keys.key(problem.seed, "full gradient"))
    noise: Tensor = keys.fold(keys.fold(root, client), begin)
    return noise


def outcome_of(updates: Update, tally: Tally, job: Job) -> Outcome:
    rows = [u.reshape(len(u), -1) for u in updates.values() if u.is_floating_point() and u[0].numel()]
    ends = [end for u in rows for end in (u.amin(1), u.amax(1))]  # NaN is both
    finite = torch.stack(ends).isfinite().all(dim=0)
    bad = torch.where((tally.bad < 0) & ~finite, job.steps.long(), tally.bad)
    return Outcome(updates, tally.loss / job.steps, bad)


@torch.enable_grad()
def bytes_per_job(problem: Problem) -> int:
    """An estimate of the memory that one job takes inside a wave: vectors, activations and their gradients."""
    samples, model = problem.samples, problem.model
    outputs = 0

    def count(_module: Any, _args: Any, out: Any) -> None:
        nonlocal outputs
        outputs += sum(t.numel() for t in pytree.tree_leaves(out) if isinstance(t, Tensor))

    hooks = [m.register_forward_hook(count) for m in model.module.modules() if not list(m.children())]
    with Keyed(torch.zeros((), dtype=torch.int64, device=samples.x.device)):
        views = model.views(model.initial().requires_grad_())
        model.call(views, model.inputs(samples.x[:2].clone()))  # it may change its input
    for hook in hooks:
        hook.remove()
    unfolded = 26 if any(isinstance(m, torch.nn.Conv2d) for m in model.module.modules()) else 1
    activations = samples.width * (outputs / 2 * (3 + unfolded) + samples.x[0].numel())
    return int(model.dtype.itemsize * (activations + 8 * model.dimension))
