"""The contract: `Method(when, what)`.

*When* is a `Policy`: a frozen value that opens a `Conductor`, a state machine without I/O, clock or tensor.
*What* is a `Rule`: pure functions on flat vectors, written for ONE client; the engine adds the client axis.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from offbeat.errors import ConfigError
from offbeat.records import Arrived, Command, Joined, Left, Woke

if TYPE_CHECKING:
    import torch

Vector: TypeAlias = "torch.Tensor"
State: TypeAlias = "dict[str, torch.Tensor]"  # the server's vectors; always has "model"
Update: TypeAlias = "dict[str, torch.Tensor]"  # what a job brings back, by name
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
    def speaks_of(self) -> str:
        """Who starts and reports: "clients" or "clusters"."""

    @property
    def options(self) -> tuple[str, ...]:
        """The options of methods that say how it is to be; with a policy in their place they have no effect."""


# ---- what ---------------------------------------------------------------------------------------
class Job(NamedTuple):
    """The numbers of one job that a local rule may use; scalars to the rule, columns to the engine."""

    lr: Vector  # client rate at the job's version
    steps: Vector  # K_i, as a number of the model's type
    epoch: Vector  # steps in one pass over the client's shard
    calibration: Vector  # a second rate at the job's version, for methods that have one (FedaGrac's lambda)


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
    rate: Callable[[int], float]  # version -> client rate
    sends: tuple[str, ...] = ("delta",)  # vectors
    tells: tuple[str, ...] = ()  # numbers beside them
    remembers: tuple[str, ...] = ()  # vectors that stay with the client
    looks: bool = False  # `begin` also gets "gradient": over the whole shard, at the model the job starts from
    mark: Callable[[Carry, Job], Carry] | None = None  # looks at the carry once on its way ...
    pause: Literal["first", "epoch"] = "first"  # ... after the first step, or after the first pass over the shard
    calibration: Callable[[int], float] = lambda version: 1.0  # version -> the second rate


@dataclass(frozen=True)
class Rule:
    """The numerics of a method: the client's side, and how a commit changes the server's state.

    Where the server `keeps` vectors of each client, `commit` finds those of its cohort among the updates, and gives
    them back renewed beside the state. With `prime` a run opens with every client's gradient over its whole shard at
    version 0: all that is remembered or kept of a client starts from it (else from zeros), and `prime` is told the
    mean by `share`.
    """

    local: Local
    commit: Callable[[State, Update, Cohort], State]
    init: Callable[[Vector], State]
    broadcasts: tuple[str, ...] = ("model",)
    keeps: tuple[str, ...] = ()
    share: Callable[[Cohort], Vector] | None = None  # each update's weight in the mean; they sum to one
    prime: Callable[[State, Vector], State] | None = None
    clients: int | None = None  # it is made for so many, where it has a number for each
    lossless: bool = False  # it needs every update that a client has finished
    # What travels, where it is not each vector named above: the most of them down and up, and those in each update.
    down: int | None = None
    up: int | None = None
    uplink: Callable[[Cohort], Vector] | None = None

    @property
    def traffic(self) -> tuple[int, int]:
        """Vectors in a broadcast, and in an update at most."""
        return self.down or len(self.broadcasts), self.up or len(self.local.sends)

    @property
    def personal(self) -> tuple[str, ...]:
        """The vectors that there are of each client."""
        return (*self.local.remembers, *self.keeps)


@dataclass(frozen=True)
class Method:
    """One paper: a policy and a rule."""

    name: str
    when: Policy
    what: Rule


def covered(method: str, default: Policy, when: Policy | None, experimental: bool) -> Policy:
    """The policy a method runs under: its paper's own kind, or any other only when told `experimental`."""
    if when is None or when.kind == default.kind or experimental:
        return when or default
    raise ConfigError(
        [
            f"{method} is defined for the policy '{default.kind}', not for '{when.kind}': its paper says nothing "
            "about that composition. Pass experimental = true to run it all the same."
        ]
    )
