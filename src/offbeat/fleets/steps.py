"""Step laws: how many local steps each client takes where the order leaves it to the client (step asynchronism).

A law either draws a number for a client (`constant`, `gaussian`, `uniform`), once (`fixed`) or for every job
(`random`), or says it of the fleet as a whole (`linear`, `extreme`, `deadline`, `given`), once for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from scipy.special import ndtri

from offbeat.config.options import STEPS, fits, option_problems
from offbeat.errors import ConfigError, unknown
from offbeat.fleets.distributions import NAMED, Array, number_problems
from offbeat.keys import fold, key, uniform

Mode = Literal["fixed", "random"]

StepSpec: TypeAlias = int | Sequence[int] | Mapping[str, Any]


class StepPlan(Protocol):
    """The local steps of a client's job."""

    def __call__(self, client: int, job: int) -> int: ...
    def problems(self, clients: int) -> list[str]: ...


@dataclass(frozen=True)
class Fixed:
    """The same number for every job of a client."""

    steps: tuple[int, ...]

    def __call__(self, client: int, job: int) -> int:
        return self.steps[client]

    def problems(self, clients: int) -> list[str]:
        if len(self.steps) != clients:
            return [f"local_steps: {len(self.steps)} numbers for {clients} clients; give one for each"]
        few = [client for client, steps in enumerate(self.steps) if steps < 1]
        if not few:
            return []
        named = ", ".join(f"client {client} has {self.steps[client]}" for client in few[:NAMED])
        more = f" and {len(few) - NAMED} more have too few" if len(few) > NAMED else ""
        return [f"local_steps: {named}{more}; a job needs at least 1"]


@dataclass(frozen=True)
class Drawn:
    """A number for each job, keyed by (seed, client, job)."""

    quantile: Callable[[Array], Array]
    seed: int

    def __call__(self, client: int, job: int) -> int:
        u = uniform(fold(fold(key(self.seed, "local steps"), client), job))
        return int(whole(self.quantile(np.array([u])))[0])

    def problems(self, clients: int) -> list[str]:
        return []


@dataclass(frozen=True)
class StepsOf:
    """The numbers of some clients of a fleet."""

    plan: StepPlan
    clients: Sequence[int]

    def __call__(self, client: int, job: int) -> int:
        return self.plan(self.clients[client], job)

    def problems(self, clients: int) -> list[str]:
        return [] if clients == len(self.clients) else [f"local_steps: of {len(self.clients)} clients, not {clients}"]


def steps_of(plan: StepPlan, clients: Sequence[int]) -> StepPlan:
    """The plan of some clients of a fleet, numbered anew."""
    return Fixed(tuple(plan.steps[each] for each in clients)) if isinstance(plan, Fixed) else StepsOf(plan, clients)


def whole(values: Array) -> Any:
    """The nearest whole numbers, none below 1."""
    return np.clip(np.rint(values), 1, STEPS).astype(np.int64)


# ---- laws that draw: options -> quantile function -----------------------------------------------
def constant(value: int) -> Callable[[Array], Array]:
    """Everyone takes `value` steps."""
    refuse(few("value", value))
    return lambda u: value + 0.0 * u


def gaussian(mean: float, variance: float) -> Callable[[Array], Array]:
    """Normal with this mean and variance, rounded; what falls below 1 is 1 (the FedaGrac paper's law)."""
    problems = few("mean", mean) + number_problems("local_steps: variance", variance)
    refuse(problems or few("the root of variance", 1.0 + math.sqrt(variance)))
    return lambda u: mean + math.sqrt(variance) * ndtri(u)


def uniform_steps(low: int, high: int) -> Callable[[Array], Array]:
    """Each whole number from `low` to `high` is as likely as any other."""
    refuse(few("low", low) or ordered(low, high))
    return lambda u: np.minimum(np.floor(low + (high - low + 1) * u), high)


# ---- laws of the whole fleet: (seconds per step, seed, options) -> a number per client ----------
def linear(step_seconds: Array, seed: int, low: int, high: int) -> Array:
    """From `low` for the first client to `high` for the last, in equal strides."""
    refuse(few("low", low) or ordered(low, high))
    return np.linspace(low, high, len(step_seconds))


def extreme(step_seconds: Array, seed: int, slow: int, fast: int, client: int | None = None) -> Array:
    """One client takes `fast` steps, all others `slow`; it is drawn by the seed unless its number is given."""
    refuse(few("slow", slow) + few("fast", fast))
    clients = len(step_seconds)
    if client is not None and not 0 <= client < clients:
        refuse([f"local_steps: client = {client}; clients are numbered 0 to {clients - 1}"])
    steps = np.full(clients, float(slow))
    steps[key(seed, "the fast client") % clients if client is None else client] = fast
    return steps


def deadline(step_seconds: Array, seed: int, seconds: float) -> Array:
    """As many whole steps as a client computes within `seconds`: proportional to its speed."""
    refuse(number_problems("local_steps: seconds", seconds, positive=True))
    with np.errstate(divide="ignore"):
        steps = np.floor(seconds / step_seconds + 1e-9)
    for bad, reason in ((np.isinf(steps), "takes no time at all for a step, so no deadline bounds its steps"),
                        (steps > STEPS, f"takes more than {STEPS:,} steps in {seconds} s; give an earlier deadline"),
                        (steps < 1, f"does not finish one step in {seconds} s; give a later deadline")):  # fmt: skip
        if bad.any():
            client = int(np.argmax(bad))
            refuse([f"local_steps: client {client} ({step_seconds[client]:g} s per step) {reason}"])
    return steps


def given(step_seconds: Array, seed: int, values: list[int]) -> Array:
    """These numbers, one for each client."""
    if not all(fits(value, int) and value <= STEPS for value in values):
        refuse([f"local_steps: values = {values!r:.60}; give a list of whole numbers"])
    return np.array(values, dtype=np.float64)


DRAWN: dict[str, Callable[..., Callable[[Array], Array]]] = {
    "constant": constant,
    "gaussian": gaussian,
    "uniform": uniform_steps,
}
WHOLE: dict[str, Callable[..., Array]] = {
    "deadline": deadline,
    "extreme": extreme,
    "given": given,
    "linear": linear,
}
OF_SPEEDS = (deadline,)  # ask for the seconds of a step; the others only count clients
STEP_LAWS: dict[str, Callable[..., Any]] = dict(sorted((DRAWN | WHOLE).items()))


def step_plan(spec: StepSpec, step_seconds: Array, seed: int) -> StepPlan:
    """Read a step law: a number is for everyone, a list has one per client, a table names its law.

    >>> step_plan({"law": "linear", "low": 1, "high": 5}, np.ones(3), 0)
    Fixed(steps=(1, 3, 5))
    """
    if fits(spec, int):
        table: dict[str, Any] = {"law": "constant", "value": spec}
    elif isinstance(spec, list | tuple):
        table = {"law": "given", "values": list(spec)}
    elif isinstance(spec, Mapping):
        table = dict(spec)
    else:
        raise ConfigError(
            [f'local_steps = {spec!r}; give a number, a list, or a table like {{law = "uniform", low = 1, high = 9}}']
        )
    law, mode = table.pop("law", None), table.pop("mode", "fixed")
    if law is None:
        raise ConfigError([f"local_steps: the table has no key 'law'; known laws: {', '.join(STEP_LAWS)}"])
    if not isinstance(law, str) or law not in STEP_LAWS:
        raise ConfigError([unknown("law of local_steps", str(law), STEP_LAWS)])
    where = f"local_steps (law '{law}')"
    problems = option_problems(where, STEP_LAWS[law], table, ("step_seconds", "seed"))
    if mode not in get_args(Mode):
        problems.append(f"{where}: mode = {mode!r}; it is 'fixed' (once per client) or 'random' (anew for every job)")
    elif mode == "random" and law in WHOLE:
        problems.append(f"{where} fixes each client's number; mode = 'random' goes with {', '.join(DRAWN)}")
    refuse(problems)
    if law in WHOLE:
        steps = WHOLE[law](np.asarray(step_seconds), seed, **table)
        return Fixed(tuple(np.rint(np.minimum(steps, STEPS)).astype(np.int64).tolist()))
    quantile = DRAWN[law](**table)
    if mode == "random":
        return Drawn(quantile, seed)
    u = uniform(key(seed, "local steps", np.arange(len(step_seconds), dtype=np.int64)))
    return Fixed(tuple(whole(quantile(u)).tolist()))


def asks_speeds(spec: StepSpec) -> bool:
    """Whether a step law needs to know how fast clients are."""
    return isinstance(spec, Mapping) and STEP_LAWS.get(str(spec.get("law"))) in OF_SPEEDS


def few(name: str, steps: float) -> list[str]:
    """The sentence on a number of steps that makes no job."""
    if steps <= STEPS:
        return [] if steps >= 1 else [f"local_steps: {name} = {steps}; a job needs at least 1 step"]
    return [f"local_steps: {name} = {steps}; a job takes at most {STEPS:,} steps"]


def ordered(low: int, high: int) -> list[str]:
    return [f"local_steps: low = {low} is above high = {high}; swap them"] if low > high else few("high", high)


def refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)
