"""What must hold of every method, whoever wrote it. A law gives a sentence on what fails, or None."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from offbeat.errors import ConfigError
from offbeat.laws.worlds import COMMITS, TOLERANCE, Alone, Passed, Trial, distance, generators, network, same_bits
from offbeat.method import Conductor, Job, Policy, StepRate
from offbeat.records import Begun, Command, Commit, Row
from offbeat.runs.stored import read_trace
from offbeat.tasks.quadratic import quadratic, random_quadratic


# ---- what a rule says of itself -----------------------------------------------------------------
def names(trial: Trial) -> str | None:
    """What is broadcast, sent and remembered has the names that the functions use."""
    rule = trial.make().what
    local, model = rule.local, torch.ones(3, dtype=torch.float64)
    state = rule.init(model)
    if lost := {"model", *rule.broadcasts} - state.keys():
        return f"`init` gives {listed(state)}; {listed(lost)}, which is broadcast, is not among them"
    given = {name: state[name] for name in rule.broadcasts} | dict.fromkeys(local.remembers, torch.zeros_like(model))
    given |= {"gradient": torch.ones_like(model)} if local.full_gradient else {}
    one, zero = torch.tensor(1.0, dtype=torch.float64), torch.tensor(0)
    job = Job(dict.fromkeys(local.rates, one), one, one, zero, zero, zero)
    try:
        carry = local.begin(given, job)
        moved = local.step(carry, torch.ones_like(model), job)
        update = local.finish(given, moved, job._replace(step=torch.tensor(1)))
    except KeyError as error:
        return f"a client asks for {error}, but it is given {listed(given)}"
    if type(moved) is not type(carry) or len(moved) != len(carry):
        return f"`begin` gives a {type(carry).__name__} and `step` a {type(moved).__name__}; they must be of one kind"
    wanted = {*local.sends, *local.numbers, *local.remembers}
    if lost := wanted - update.keys():
        return f"`finish` gives {listed(update)}; {listed(lost)}, which it should send or remember, is not among them"
    wide = [name for name in (*local.sends, *local.remembers) if update[name].shape != model.shape]
    return f"{listed(wide)} of an update is no vector as long as the model" if wide else None


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


def twin(trial: Trial) -> str | None:
    """Clients computed together come to what each comes to alone, on quadratics and on a network."""
    if fault := apart(distance(trial.straight, trial.run(mode="twin")), "jobs computed one by one (mode = 'twin')"):
        return fault
    if trial.straight.result.get("notes"):
        return f"it cannot be computed in waves: {trial.straight.result['notes'][0]}"
    task = network(trial.experiment.task.clients)
    waves = trial.run(task=task)
    return apart(distance(waves, trial.run(task=task, mode="twin")), "jobs of a network computed one by one")


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
    trial.run(mode="twin")
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
    names, finite, twin, cut, order, unkeyed, again, resumed, replayed, alone,
)  # fmt: skip
