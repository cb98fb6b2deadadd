"""What must hold of every method, whoever wrote it. A law gives a sentence on what fails, or None."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from offbeat.config.options import fits
from offbeat.engines.server import Server
from offbeat.errors import ConfigError, in_words
from offbeat.laws.worlds import COMMITS, TOLERANCE, Alone, Passed, Trial, distance, generators, network, same_bits
from offbeat.method import Conductor, Job, Policy, Rule, State, StepRate
from offbeat.records import Begun, Command, Commit, Row
from offbeat.runs.stored import read_trace
from offbeat.tasks.quadratic import quadratic, random_quadratic

MODEL = torch.ones(3, dtype=torch.float64)  # on which single functions are tried


# ---- what a rule says of itself -----------------------------------------------------------------
def names(trial: Trial) -> str | None:
    """What is broadcast, sent and remembered has the names that the functions use."""
    rule = trial.make().what
    local = rule.local
    state: Any = rule.init(MODEL.clone())
    if not isinstance(state, dict):
        return f"`init` gives {in_words(state)}; it must give a dictionary of vectors, with 'model' among them"
    if lost := {"model", *rule.broadcasts} - state.keys():
        return f"`init` gives {listed(state)}; {listed(lost)}, which is broadcast, is not among them"
    for name, rate in local.rates.items():
        value = rate.at(0, 0, 1) if isinstance(rate, StepRate) else rate(0) if callable(rate) else None
        if not fits(value, float):
            return f"the rate '{name}' is {in_words(rate)}; it must be a function of the version that gives a number"
    given, job = handed(rule)
    try:
        carry = local.begin(given, job)
        if not isinstance(carry, tuple) or getattr(carry[0], "shape", None) != MODEL.shape:
            return (
                f"`begin` gives {in_words(carry)}; it must give a tuple of vectors, of which the first is the iterate"
            )
        moved = local.step(carry, torch.ones_like(MODEL), job)
        update: Any = local.finish(given, moved, job._replace(step=torch.tensor(1)))
    except KeyError as error:
        return f"a client asks for {error}, but it is given {listed(given)} and the rates {listed(local.rates)}"
    if type(moved) is not type(carry) or len(moved) != len(carry):
        return f"`begin` gives a {type(carry).__name__} and `step` a {type(moved).__name__}; they must be of one kind"
    if not isinstance(update, dict):
        return f"`finish` gives {in_words(update)}; it must give a dictionary of vectors"
    wanted = {*local.sends, *local.numbers, *local.remembers}
    if lost := wanted - update.keys():
        return f"`finish` gives {listed(update)}; {listed(lost)}, which it should send or remember, is not among them"
    if wide := [name for name in (*local.sends, *local.remembers) if update[name].shape != MODEL.shape]:
        return f"{listed(wide)} of an update is no vector as long as the model"
    many = [name for name in local.numbers if update[name].shape != ()]
    return f"{listed(many)} of an update is no single number" if many else None


def handed(rule: Rule) -> tuple[State, Job]:
    """What a client is given for a first job of one step."""
    state = rule.init(MODEL.clone())
    given = {name: state[name] for name in rule.broadcasts}
    given |= {name: torch.zeros_like(MODEL) for name in rule.local.remembers}
    given |= {"gradient": torch.ones_like(MODEL)} if rule.local.full_gradient else {}
    one, zero = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0)
    return given, Job(dict.fromkeys(rule.local.rates, one), one, one, zero, zero, zero)


def untouched(trial: Trial) -> str | None:
    """What a function is given stays as it was: it gives vectors of its own."""
    method = trial.make()
    rule, local = method.what, method.what.local
    given, job = handed(rule)
    carry, changed = touched(local.begin, given, job)
    if not changed:
        moved, changed = touched(local.step, carry, torch.ones_like(MODEL), job)
        if changed:
            return "`step` changes the carry or the gradient in its place; other jobs may start from the same vectors"
        update, changed = touched(local.finish, given, moved, job._replace(step=torch.tensor(1)))
    if changed:
        return "`begin` or `finish` changes the vectors that it is given in their place; give new ones"
    clients = list(range(rule.clients or 3))
    server = Server(method, MODEL.clone(), 0, [4] * len(clients), None)
    cohort = server.cohort(clients, [0] * len(clients), [1] * len(clients))
    rows = {name: torch.stack([value] * len(clients)) for name, value in update.items()}
    cohort = cohort._replace(numbers={name: rows[name] for name in local.numbers})
    vectors = {name: rows[name] for name in local.sends} | dict.fromkeys(rule.keeps, 0 * rows[local.sends[0]])
    if touched(rule.renew, server.state, vectors, cohort)[1]:
        return "`commit` (or `apply`) changes what it is given in its place; clients still start from older versions"
    return None


def touched(call: Callable[..., Any], *given: Any) -> tuple[Any, bool]:
    """What a call gives, and whether a vector that it was given is another one afterwards."""
    before = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, given)
    made = call(*given)
    pairs = zip(pytree.tree_leaves(before), pytree.tree_leaves(given), strict=True)
    return made, any(isinstance(a, torch.Tensor) and not torch.equal(a, b) for a, b in pairs)


def listed(given: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(given)) or "nothing"


# ---- numbers ------------------------------------------------------------------------------------
def finite(trial: Trial) -> str | None:
    """A run stays finite and moves the model."""
    model = trial.straight.model
    if not all(t.isfinite().all() for t in model.values()):
        return "the model has numbers that are not finite"
    start = trial.experiment.task.model.state_dict()
    if all(torch.equal(t.double(), start[name].double()) for name, t in model.items()):
        return f"{COMMITS} commits have not moved the model"
    return None


def reference(trial: Trial) -> str | None:
    """Clients computed together come to what each comes to alone, on quadratics and on a network."""
    if fault := apart(
        distance(trial.straight, trial.run(mode="reference")), "jobs computed one by one (mode = 'reference')"
    ):
        return fault
    if trial.straight.result.get("notes"):
        return f"it cannot be computed in waves: {trial.straight.result['notes'][0]}"
    task = network(trial.experiment.task.clients)
    waves = trial.run(task=task)
    return apart(distance(waves, trial.run(task=task, mode="reference")), "jobs of a network computed one by one")


def cut(trial: Trial) -> str | None:
    """How jobs are cut into waves does not matter."""
    return apart(distance(trial.straight, trial.run(memory_gib=1e-12)), "waves of one job each")


def order(trial: Trial) -> str | None:
    """The order of the updates in a commit does not matter."""
    largest = max(len(row.jobs) for _, row in trial.trace if isinstance(row, Commit))
    if largest == 1:
        raise Passed("its commits are of one update each")
    method = trial.make()
    turned = replace(method, when=Backwards(method.when))
    return apart(distance(trial.straight, trial.run(method=turned)), "the updates of each commit in another order")


def apart(gap: float, what: str) -> str | None:
    return None if gap <= TOLERANCE else f"with {what} the model differs by {gap:.2g}; {TOLERANCE:g} is allowed"


# ---- the same again -----------------------------------------------------------------------------
def unkeyed(trial: Trial) -> str | None:
    """Nothing is drawn but by key: the generators of torch, numpy and Python stay as they are."""
    before = generators()
    trial.run()
    trial.run(mode="reference")
    after = generators()
    drawn = [name for name, state in before.items() if state != after[name]]
    return f"it draws from the global generator of {' and of '.join(drawn)}; draw by key instead" if drawn else None


def again(trial: Trial) -> str | None:
    """The same seed gives the same trace and the same bits."""
    outcome = trial.run("again")
    if not same_bits(trial.straight, outcome):
        return f"the same run again ends {distance(trial.straight, outcome):.2g} away; something is drawn or kept"
    other = read_trace(trial.path / "again")
    return None if other == trial.trace else "the same run again has another trace"


def resumed(trial: Trial) -> str | None:
    """A run that was stopped and resumed ends with the bits of the one that was not."""
    outcome = trial.resumed()
    if not same_bits(trial.straight, outcome):
        gap = distance(trial.straight, outcome)
        return f"a resumed run ends {gap:.2g} away from the straight one; all state must go through the server's"
    return None if read_trace(trial.path / "resumed") == trial.trace else "a resumed run has another trace"


def replayed(trial: Trial) -> str | None:
    """A replay of the trace gives the same commands and the same bits."""
    trial.replayed()  # raises where it does not
    return None


# ---- one client ---------------------------------------------------------------------------------
def alone(trial: Trial) -> str | None:
    """With one client it is plain SGD."""
    single = trial.alone or Alone(trial.make)
    method = single.make()
    if problems := method.when.problems(1):
        raise Passed(f"its policy cannot run with one client ({problems[0]}); say with which options it can")
    matrices, linear = random_quadratic(1, 3, seed=5)
    fleet: Any = {"name": "equal"} | ({"local_steps": 4} if method.when.orders is None else {})
    if method.when.speaks_of == "clusters":
        fleet["clusters"] = {"sizes": [1], "graph": "complete"}
    try:
        outcome = trial.run("alone", method=method, task=quadratic(matrices, linear, np.ones(3)), fleet=fleet)
    except ConfigError as error:
        raise Passed(f"it cannot run with one client: {error.problems[0]}") from None
    given = method.what.local.rates.get("lr")
    if isinstance(given, StepRate) or given is None:
        raise Passed("its client rate is not the same at all steps")
    rate = single.rate or given(0)
    w = np.ones(3)
    for _ in range(single.steps or committed_steps(read_trace(trial.path / "alone"))):
        w = w - rate * (matrices[0] @ w - linear[0])
    gap = float(np.abs(next(iter(outcome.model.values())).numpy() - w).max())
    if gap <= TOLERANCE:
        return None
    if trial.alone is None:
        raise Passed(f"with these options it ends {gap:.2g} away from plain SGD; say with which it should be that")
    return f"with one client it ends {gap:.2g} away from plain SGD with the rate {rate:g}"


def committed_steps(rows: list[Row]) -> int:
    steps = {row[:2]: row.steps for _, row in rows if isinstance(row, Begun)}
    return sum(steps[job] for _, row in rows if isinstance(row, Commit) for job in row.jobs)


# ---- commits turned round -----------------------------------------------------------------------
@dataclass(frozen=True)
class Backwards:
    """The same policy, whose commits name their updates in the other order."""

    policy: Policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["policy"], name)

    def conductor(self, clients: int, rng: random.Random) -> Conductor:
        return BackwardsConductor(self.policy.conductor(clients, rng))


@dataclass
class BackwardsConductor:
    conductor: Conductor

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self.__dict__["conductor"], name)

        def turned(*event: Any) -> list[Command]:
            return [Commit(each.jobs[::-1]) if isinstance(each, Commit) else each for each in ask(*event)]

        return turned


LAWS: tuple[Callable[[Trial], str | None], ...] = (
    names, untouched, finite, reference, cut, order, unkeyed, again, resumed, replayed, alone,
)  # fmt: skip
