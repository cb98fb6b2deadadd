"""Policies of one's own: methods and clusters ask what a policy says of itself, not which class it is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from offbeat import ConfigError, Experiment, Method, OffbeatError, run
from offbeat.config import registry
from offbeat.experiments import cluster_views
from offbeat.experiments.assemble import build, build_method, build_policy
from offbeat.fleets.make import build as build_fleet
from offbeat.laws import check_policy
from offbeat.method import ClusterPolicy, Policy, inner_policies
from offbeat.methods import METHODS
from offbeat.records import Drop, Fetch, Offer, Start, WakeAt
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.commands import command_problem
from offbeat.schedule.guard import Guard
from offbeat.schedule.hybrid import Hybrid
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled
from worlds import final, quadratic_world, times


@dataclass(frozen=True)
class Everyone(Rounds):
    """Rounds of all, under another name."""


class Wrapped:
    """Another policy, of which nothing but its answers is known."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["policy"], name)


@pytest.mark.parametrize("policy", [Everyone(3), Wrapped(Rounds(3))])
def test_fedagrac_takes_any_policy_that_waits_for_everyone(policy: Policy) -> None:
    shipped, own = (METHODS["fedagrac"](when=when) for when in (Rounds(3), policy))
    assert own.what.keeps == shipped.what.keeps == ("kept sent",)
    task, durations = quadratic_world(), times(8)
    assert torch.equal(final(own, task, durations, 8), final(shipped, task, durations, 8))


@pytest.mark.parametrize("policy", [Everyone(3), Wrapped(Rounds(3)), Rounds(3, size=4, replacement=True), Rounds(3)])
def test_saving_takes_any_rounds_that_drop_nobody_and_changes_nothing_else(policy: Policy) -> None:
    task, durations = quadratic_world(), times(8)
    plain, saved = (final(METHODS["fedagrac"](when=policy, saving=s), task, durations, 8) for s in (False, True))
    assert torch.allclose(plain, saved, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("policy", [Rounds(3, deadline=1.0), Wrapped(Rounds(3, 4, over_selection=1.5)), Buffer(3, 3)])
def test_saving_refuses_what_drops_jobs_or_makes_them_stale(policy: Policy) -> None:
    with pytest.raises(ConfigError, match="saving needs rounds that wait for all their updates"):
        METHODS["fedagrac"](when=policy, saving=True, experimental=True)


# ---- clusters -----------------------------------------------------------------------------------
class Blocks:
    """A policy that speaks of clusters and cannot say what devices do inside."""

    kind, holds, overlaps, orders, cohort, drops, synchronous = "blocks", False, False, 3, None, False, True
    speaks_of = "clusters"
    options: Mapping[str, str] = {}

    def problems(self, clients: int) -> list[str]:
        return []

    def conductor(self, clients: int, rng: random.Random) -> Any:
        return Rounds(3).conductor(clients, rng)


class WholeBlocks(Blocks):
    """And one that can."""

    every, rounds, edge, server, sample, gossips = 1, 1, False, True, 1.0, True

    def exchanges(self, steps: int) -> int:
        return steps

    def reports(self, devices: int) -> int:
        return devices

    def reporters(self, seed: int, cluster: int, job: int, devices: int) -> list[int]:
        return list(range(devices))


def clustered(policy: Any) -> Experiment:
    rule = METHODS["hl-sgd"]().what
    return Experiment(
        method=Method("in blocks", policy, rule), task=quadratic_world(8), device="cpu", precision="float64",
        fleet={"name": "equal", "clusters": 2}, until={"commits": 4}, evaluate={"every_commits": 4},
    )  # fmt: skip


def test_a_policy_of_clusters_that_lacks_an_answer_is_told_which() -> None:
    with pytest.raises(ConfigError) as error:
        build(clustered(Blocks()))
    lacks = "every, rounds, edge, server, sample, gossips, exchanges, reports, reporters"
    assert f"a ClusterPolicy also has {lacks}" in str(error.value)
    problems: list[str] = []
    assert build_policy(Blocks(), problems) is None
    assert lacks in problems[0]


def test_a_policy_of_clusters_of_ones_own_runs_as_hybrid_does() -> None:
    assert registry.misfit("policy", WholeBlocks()) is None
    own, shipped = run(clustered(WholeBlocks())), run(clustered(Hybrid(Rounds(3))))
    assert all(torch.equal(own.model[name], shipped.model[name]) for name in own.model)
    members = set(registry.members(ClusterPolicy))
    assert {"every", "reporters", "kind", "synchronous"} <= members
    assert all(finding.holds is not False for finding in check_policy(WholeBlocks()))


def test_what_is_no_policy_is_told_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="`when` = None; it must be a Policy, and a Policy also has kind, holds"):
        build_method(Method("short", None, METHODS["fedbuff"]().what))  # type: ignore[arg-type]


class Blocked(Blocks):
    """Rounds of clients, told by their answers alone."""

    speaks_of = "clients"


def test_rounds_of_ones_own_share_uplinks_as_rounds_do() -> None:
    fleet = build_fleet("hlsgd", 8, clusters={"count": 2, "shared_uplink": True})
    assert fleet.clusters is not None
    assert fleet.clusters.shared_uplink
    rounds, own, buffer = (
        cluster_views.sharing(fleet, policy).up_latency.tolist() for policy in (Rounds(3), Blocked(), Buffer(2, 3))
    )
    assert rounds == own != buffer


# ---- policies inside policies -------------------------------------------------------------------
@dataclass(frozen=True)
class Within:
    """Hands all to the policy inside."""

    inside: Policy
    spare: Policy | None = None
    every: int = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inside"], name)


def test_a_policy_says_by_its_types_which_of_its_options_are_policies() -> None:
    assert inner_policies(Hybrid) == {"between": False}
    assert inner_policies(Within) == {"inside": False, "spare": True}
    assert inner_policies(Rounds) == {}
    name, problems = f"{__name__}:Within", list[str]()
    table = {"policy": name, "inside": {"policy": "rounds", "steps": 2}}
    built = build_policy(table, problems)
    assert (problems, built) == ([], Within(Rounds(2)))
    assert build_policy({"policy": name, "inside": None}, problems) is None
    assert build_policy({"policy": name, "inside": {"policy": "rounds", "steps": "two"}}, problems) is None
    none, two = problems
    assert none.startswith(f"policy '{name}': inside = none; it is a policy")
    assert two.startswith("policy 'rounds': steps = 'two'")
    written = Experiment(method={"name": "local-sgd", "when": Within(Rounds(2)), "experimental": True}).table()
    assert written["method"]["when"]["inside"]["policy"] == "rounds"
    assert written["method"]["when"]["spare"] is None


def test_values_of_the_wrong_kind_in_a_policy_of_ones_own_are_named() -> None:
    def problems(policy: Any) -> str:
        method = Method("own", policy, METHODS["local-sgd"]().what)
        with pytest.raises(ConfigError) as error:
            build(Experiment(method=method, device="cpu"))
        return str(error.value)

    assert f"policy '{__name__}:Everyone': steps = 'three'; it must be a whole number" in problems(Everyone("three"))  # type: ignore[arg-type]
    assert "policy 'rounds': steps = 'two'" in problems(Within(Rounds("two")))  # type: ignore[arg-type]
    assert "policy 'hybrid': between = 3; it is a policy" in problems(Hybrid(3))  # type: ignore[arg-type]


# ---- commands that nobody can obey --------------------------------------------------------------
class Saying:
    """A conductor that says something else in the place of its first start, or of its first one after a commit."""

    def __init__(self, conductor: Any, command: Any, later: bool) -> None:
        self.conductor, self.command, self.later = conductor, command, later

    def __getattr__(self, name: str) -> Any:
        def heard(now: float, event: Any) -> Any:
            answer = getattr(self.conductor, name)(now, event)
            if self.command is None or (self.later and name == "begin"):
                return answer
            place = next((i for i, command in enumerate(answer) if isinstance(command, Start | Fetch | Offer)), None)
            if place is not None:
                answer[place], self.command = self.command, None
            return answer

        return heard


@dataclass(frozen=True)
class Misled:
    """Another policy that says one thing that nobody can obey."""

    policy: Policy
    command: Any
    later: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["policy"], name)

    def conductor(self, clients: int, rng: random.Random) -> Any:
        return Saying(self.policy.conductor(clients, rng), self.command, self.later)


NOBODY = {
    "a client below 0": (Start(-1, 0, 3), "it speaks of client -1, and there are 0 to 7"),
    "a client beyond the fleet": (Start(8, 0, 3), "it speaks of client 8, and there are 0 to 7"),
    "a version that is not there": (Start(1, 99, 3), "it starts from version 99, and there are 0 to "),
    "a version below 0": (Start(1, -1, 3), "it starts from version -1, and there are 0 to "),
    "steps below 0": (Start(1, 0, -3), "it orders -3 steps; give a whole number"),
    "a fetch of nobody": (Fetch(-2), "it speaks of client -2, and there are 0 to 7"),
    "a drop of nobody": (Drop(40), "it speaks of client 40, and there are 0 to 7"),
    "an offer of what is not there": (Offer(5, 3), "it offers version 5, and the newest is "),
    "an alarm that is past": (WakeAt(-1.0, 0), "it wants to be woken at -1.0 s, which is past"),
    "no command": ("start", "'start' is no command"),
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "policy", [Rounds(3), Buffer(2, 3), Buffer(2, 3, restart="fresh", overlap=True), Sampled(2, 3)]
)
@pytest.mark.parametrize("case", NOBODY)
def test_a_run_ends_with_a_sentence_on_a_command_that_nobody_can_obey(case: str, policy: Policy, later: bool) -> None:
    command, problem = NOBODY[case]
    method = Method("misled", Misled(policy, command, later), METHODS["local-sgd"]().what)
    with pytest.raises(OffbeatError) as error:
        run(Experiment(method=method, task=quadratic_world(8), fleet="equal", device="cpu", until={"commits": 5}))
    assert f"policy '{policy.kind}' (Misled) answers {command!r} at " in str(error.value)
    assert problem in str(error.value)


def test_a_guard_ends_with_the_same_sentence() -> None:
    guard = Guard(Misled(Rounds(3), Start(-1, 0, 3), False), 8, random.Random(0))
    with pytest.raises(OffbeatError, match=r"\(Misled\) answers Start\(client=-1.*it speaks of client -1"):
        guard.begin(0.0, range(8))


def test_numbers_of_numpy_are_numbers() -> None:
    assert command_problem(0.0, Start(np.int64(3), np.int64(0), np.int64(2)), 8, 0) is None  # type: ignore[arg-type]
