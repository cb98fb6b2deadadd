"""The contract: `Method(when, what)`.

*When* is a `Policy`: a frozen value that opens a `Conductor`, a state machine without I/O, clock or tensor.
*What* is a `Rule`: pure functions on flat vectors, written for ONE client; the engine adds the client axis.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import reduce, wraps
from inspect import Parameter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeGuard, get_args, get_type_hints

from offbeat.config.options import hints_of
from offbeat.errors import ConfigError, OffbeatError, in_words
from offbeat.keys import fold
from offbeat.records import Arrived, Command, Joined, Left, Woke

if TYPE_CHECKING:
    import torch

Vector: TypeAlias = "torch.Tensor"
State: TypeAlias = "dict[str, torch.Tensor]"  # the server's vectors; always has "model"
Update: TypeAlias = "dict[str, torch.Tensor]"  # what a job brings back, by name
KEYWORD = Parameter.POSITIONAL_OR_KEYWORD
Carry: TypeAlias = Any  # a named tuple of vectors whose first field is the iterate


# ---- when ---------------------------------------------------------------------------------------
class Conductor(Protocol):
    """Answers what happened with commands. Given the same events it gives the same commands."""

    def begin(self, now: float, present: Collection[int]) -> list[Command]: ...
    def arrived(self, now: float, event: Arrived) -> list[Command]: ...
    def left(self, now: float, event: Left) -> list[Command]: ...
    def joined(self, now: float, event: Joined) -> list[Command]: ...
    def woke(self, now: float, event: Woke) -> list[Command]: ...


class Policy(Protocol):
    """Who starts from which version, and which arrivals make a commit."""

    @property
    def kind(self) -> str:
        """The name of the schedule, as papers distinguish them."""

    @property
    def holds(self) -> bool:
        """Clients keep finished updates in a send buffer until they are fetched."""

    @property
    def overlaps(self) -> bool:
        """Transfers run beside computing (receive and send buffers) instead of in turn with it."""

    def problems(self, clients: int) -> list[str]:
        """What is impossible about this policy with so many clients; empty when it can run."""

    def conductor(self, clients: int, rng: random.Random) -> Conductor: ...

    @property
    def orders(self) -> int | None:
        """The local steps that it orders of everyone; None where clients choose."""

    @property
    def cohort(self) -> int | None:
        """Updates in a commit; None where all who are there report."""

    @property
    def drops(self) -> bool:
        """A job that a client has begun may be left out of every commit, though the client stays."""

    @property
    def synchronous(self) -> bool:
        """All updates of a commit start from the version that it replaces: clients wait for one another."""

    @property
    def speaks_of(self) -> str:
        """Who starts and reports: "clients", or "clusters" (then it is a `ClusterPolicy`)."""

    @property
    def options(self) -> Mapping[str, str]:
        """What a method's user may say of it: an option's name, and the field that it sets ("between.steps": a field of
        the policy inside)."""


class ClusterPolicy(Policy, Protocol):
    """A policy that speaks of clusters, and what devices do inside one."""

    @property
    def every(self) -> int:
        """Local steps between two phases in which devices exchange models."""

    @property
    def rounds(self) -> int:
        """Exchanges in a row in such a phase; 0: models are never exchanged."""

    @property
    def edge(self) -> bool:
        """Models go through an edge server that takes the mean, and not along the links between devices."""

    @property
    def server(self) -> bool:
        """There is a server that clusters report to; else devices carry on from their own models."""

    @property
    def sample(self) -> float:
        """The share of a cluster's devices that report."""

    @property
    def gossips(self) -> bool:
        """Whether devices need links to one another."""

    def exchanges(self, steps: int) -> int:
        """How often models go over a device's links in a job of so many steps."""

    def reports(self, devices: int) -> int:
        """How many devices of a cluster of so many report."""

    def reporters(self, seed: int, cluster: int, job: int, devices: int) -> list[int]:
        """Which of them, by their places in the cluster."""


def conducts_clusters(policy: Policy) -> TypeGuard[ClusterPolicy]:
    """Whether clusters stand in the place of clients. The registry sees to it that such a policy is a ClusterPolicy."""
    return policy.speaks_of == "clusters"


def contract_of(policy: Policy) -> type:
    """What a policy must be, by what it says of itself."""
    return ClusterPolicy if conducts_clusters(policy) else Policy


def inner_policies(make: Callable[..., Any]) -> dict[str, bool]:
    """The options of a policy's maker that are policies themselves, which it says by their type `Policy`; and whether
    each may be None."""
    hints = {name: (hint, *get_args(hint)) for name, hint in hints_of(make).items() if name != "return"}
    return {name: type(None) in types for name, types in hints.items() if Policy in types}


# ---- what ---------------------------------------------------------------------------------------
class StepRate(NamedTuple):
    """A rate that depends on the local step too; one that depends on the version alone is a plain function of it."""

    at: Callable[[int, int, int], float]  # version, local step (from 0), steps of the job

    def mean(self, version: int, steps: int) -> float:
        return math.fsum(self.at(version, step, steps) for step in range(steps)) / steps


ClientRate: TypeAlias = "Callable[[int], float] | StepRate"


class Job(NamedTuple):
    """The numbers of one job that a local rule may use; scalars to the rule, columns to the engine.

    In `step` a rate is that of the step; in `begin` and `finish` it is the mean over the job's steps.
    """

    rates: Mapping[str, Vector]  # by name, at the job's version
    steps: Vector  # K_i, as a number of the model's type
    epoch: Vector  # steps in one pass over the client's shard
    version: Vector  # int64: the version that the job starts from
    key: Vector  # int64: for what the rule draws; `keys.fold(job.key, job.step)` is another key for each step
    step: Vector  # int64: the number of the local step, from 0; in `finish` the number of steps

    @property
    def lr(self) -> Vector:
        """The client rate."""
        return self.rates["lr"]


class Cohort(NamedTuple):
    """What a commit knows about its updates beside their vectors; one entry per update."""

    staleness: Vector  # versions committed since the job's start version
    steps: Vector
    samples: Vector  # size of the client's shard
    client: Vector  # its number; of a cluster that reports as one: the cluster's
    devices: Vector  # clients behind the update: 1, or the size of the cluster
    version: int  # the version being replaced
    clients: int  # in the whole fleet
    total: int  # samples in the whole fleet
    units: int  # who can report: the clients, or their clusters
    key: int  # for what the commit draws
    numbers: Mapping[str, Vector]  # what clients say beside their vectors (`Local.numbers`)


class Stage(Protocol):
    """A step on the way of one vector over a link: the sender encodes, the receiver decodes.

    `encode` gives a tuple: first what another stage may encode further, then what goes along (scales, places). It is
    written for one vector; the engine adds the client axis.
    """

    @property
    def name(self) -> str: ...
    def encode(self, vector: Vector, key: Vector | int) -> tuple[Vector, ...]: ...
    def decode(self, parts: tuple[Vector, ...]) -> Vector: ...

    def bytes(self, dimension: int) -> int:
        """Of the whole tuple, for a vector of so many numbers."""


@dataclass(frozen=True)
class Local:
    """The client's side, for one client on one flat vector.

    `begin` and `finish` are given the broadcast state and, under their names, the vectors that the client `remembers`;
    `finish` gives them back renewed, beside what it sends. A method with memory has one more law: the jobs of a client
    are computed in order, and every job that a client finished moves its memory, whether a commit consumes it or not.
    """

    begin: Callable[[State, Job], Carry]
    step: Callable[[Carry, Vector, Job], Carry]
    finish: Callable[[State, Carry, Job], Update]
    rates: Mapping[str, ClientRate]  # "lr", the client rate, and others by names of their own
    sends: tuple[str, ...] = ("delta",)  # vectors
    numbers: tuple[str, ...] = ()  # single numbers beside them, for the cohort
    remembers: tuple[str, ...] = ()  # vectors that stay with the client
    full_gradient: bool = False  # `begin` also gets "gradient": over the whole shard, at the model the job starts from


@dataclass(frozen=True)
class Rule:
    """The numerics of a method: the client's side, and how a commit changes the server's state.

    Most commits are weighted sums. Then `weigh` gives each update's weight (one column for all that is sent, or one by
    name) and `apply` is given the sums, so that no one need hold the updates side by side. A rule that needs them one
    by one has `commit` instead, with a row per update.

    Where the server `keeps` vectors of each client, `commit` finds those of its cohort among the updates, and gives
    them back renewed beside the state. With `prime` a run opens with every client's gradient over its whole shard at
    version 0: all that is remembered or kept of a client starts from it (else from zeros), and `prime` is given the
    mean by `share`, whose weights sum to one. So are the buffers of clients averaged, where a rule has a `share`.
    """

    local: Local
    _: KW_ONLY
    init: Callable[[Vector], State]
    weigh: Callable[[Cohort], Vector | Mapping[str, Vector]] | None = None
    apply: Callable[[State, Update, Cohort], State] | None = None
    commit: Callable[[State, Update, Cohort], State] | None = None
    broadcasts: tuple[str, ...] = ("model",)
    keeps: tuple[str, ...] = ()
    share: Callable[[Cohort], Vector] | None = None  # each client's weight in a mean, where `weigh` gives other ones
    prime: Callable[[State, Vector], State] | None = None
    clients: int | None = None  # it is made for so many, where it has a number for each
    lossless: bool = False  # it needs every update that a client has finished, exactly as it was
    # How many vectors go down and up for each update, where it is not each one named above: numbers, or columns.
    travels: Callable[[Cohort], tuple[Vector | int, Vector | int]] | None = None
    exact: tuple[str, ...] = ()  # vectors of a broadcast that go through no stage
    down: Stage | None = None  # what broadcasts go through; `offbeat.stages.staged` sets both
    up: Stage | None = None

    def __post_init__(self) -> None:
        sums = (self.weigh is not None, self.apply is not None)
        if sums not in ((True, True), (False, False)) or any(sums) == (self.commit is not None):
            names = [name for name in ("weigh", "apply", "commit") if getattr(self, name) is not None]
            raise ConfigError(
                [
                    f"a Rule was given {' and '.join(names) or 'no way to commit'}; give weigh and apply, if its "
                    "commit is a weighted sum of the updates, or commit alone, if it needs them one by one"
                ]
            )
        if self.keeps and self.commit is None:
            raise ConfigError(
                [
                    f"a Rule keeps {', '.join(self.keeps)} of each client, but weigh and apply never see single "
                    "updates; give commit instead"
                ]
            )

    def renew(self, state: State, updates: Update, cohort: Cohort) -> State:
        """The server's state after a commit of these updates, a row each; in whichever form the rule has."""
        if self.commit is not None:
            return self.commit(state, updates, cohort)
        assert self.apply is not None
        sums = {name: weights @ updates[name] for name, weights in self.weights(cohort).items()}
        return self.apply(state, sums, cohort)

    def weights(self, cohort: Cohort) -> Mapping[str, Vector]:
        """Each update's weight in the sum of each vector that is sent."""
        assert self.weigh is not None
        weights = self.weigh(cohort)
        each = weights if isinstance(weights, Mapping) else dict.fromkeys(self.local.sends, weights)
        column = cohort.staleness
        for name in self.local.sends:
            given: Any = each.get(name)
            if getattr(given, "shape", None) != column.shape or given.dtype != column.dtype:
                raise OffbeatError(
                    f"`weigh` must give a tensor of {len(column)} weights of the type {column.dtype} for '{name}', one "
                    f"for each update, as `cohort.staleness` has; it gave {in_words(given)}"
                )
        return {name: each[name] for name in self.local.sends}

    def broadcast(self, state: State, key: int) -> State:
        """What clients receive of a state."""
        vectors = {name: state[name] for name in self.broadcasts}
        if self.down is None:
            return vectors
        return {
            name: vector if name in self.exact else passed(self.down, vector, fold(key, i))
            for i, (name, vector) in enumerate(vectors.items())
        }

    @property
    def personal(self) -> tuple[str, ...]:
        """The vectors that there are of each client."""
        return (*self.local.remembers, *self.keeps)


def passed(stage: Stage, vector: Vector, key: Vector | int) -> Vector:
    """What the receiver has of a vector that went through a stage."""
    return stage.decode(stage.encode(vector, key)).to(vector.dtype)


@dataclass(frozen=True)
class Method:
    """One paper: a policy and a rule."""

    name: str
    when: Policy
    what: Rule


def takes_policy(**names: str | None) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
    """For the maker of a method whose parameter `when` has the paper's policy as its default.

    The policy's options become the method's, by the policy's names or by others given here (None: not an option). After
    the maker's own come two more: `when`, another policy of that kind in its place, and `experimental`: of any kind.
    """

    def decorated(make: Callable[..., Method]) -> Callable[..., Method]:
        plain = inspect.signature(make, eval_str=True)
        default: Policy = plain.parameters["when"].default
        fields = {names.get(name, name) or "": path for name, path in default.options.items()}
        fields.pop("", None)
        parameters = [Parameter(name, KEYWORD, **shape(default, path)) for name, path in fields.items()]
        parameters += [p for p in plain.parameters.values() if p.name != "when"]
        parameters.append(Parameter("when", Parameter.KEYWORD_ONLY, default=None, annotation=Policy | None))
        parameters.append(Parameter("experimental", Parameter.KEYWORD_ONLY, default=False, annotation=bool))
        whole = plain.replace(parameters=parameters)

        @wraps(make)
        def make_under(*given: Any, **options: Any) -> Method:
            chosen = whole.bind(*given, **options).arguments
            when, experimental = chosen.pop("when", None), chosen.pop("experimental", False)
            said = {name: chosen.pop(name) for name in fields if name in chosen}
            if when is None:
                policy = default
                for name, value in said.items():
                    policy = with_field(policy, fields[name], value)
                return make(policy, **chosen)
            if said:
                raise ConfigError([f"{key} has no effect with when; say it in when (size, steps, ...)" for key in said])
            if when.kind != default.kind and not experimental:
                raise ConfigError(
                    [
                        f"{make(default, **chosen).name} is defined for the policy '{default.kind}', not for "
                        f"'{when.kind}': its paper says nothing about that composition. Pass experimental = true to "
                        "run it all the same."
                    ]
                )
            return make(when, **chosen)

        maker: Any = make_under
        maker.__signature__, maker.__annotations__ = whole, {p.name: p.annotation for p in parameters}
        maker.policy_options = tuple(fields)
        return make_under

    return decorated


def policy_options(make: Callable[..., Any]) -> tuple[str, ...]:
    """The options of a method that say how its own policy is to be; where another is given they have no effect."""
    return getattr(make, "policy_options", ())  # `takes_policy` says them


def field_of(policy: Policy, path: str) -> Any:
    return reduce(getattr, path.split("."), policy) if path else policy


def shape(policy: Policy, path: str) -> dict[str, Any]:
    """The default and the annotation of a parameter that stands for this field."""
    inner, _, name = path.rpartition(".")
    return {"default": field_of(policy, path), "annotation": get_type_hints(type(field_of(policy, inner)))[name]}


def with_field(policy: Any, path: str, value: Any) -> Any:
    """The policy, with another value of that field."""
    name, _, rest = path.partition(".")
    return replace(policy, **{name: with_field(getattr(policy, name), rest, value) if rest else value})
