"""Each law can fail: a method or policy that breaks it, and the sentence that says so."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from offbeat import Buffer, Local, Method, Rounds, Rule
from offbeat.laws import Alone, Case, check, check_policy, law_cases
from offbeat.numerics import local
from offbeat.records import Commit
from offbeat.schedule.buffer import BufferConductor
from offbeat.schedule.pool import Pool

GLOBAL = {"calls": 0}


def method(commit: Callable[..., Any] | None = None, client: Local | None = None, **rule: Any) -> Method:
    """A buffered mean, sound but for what is given."""

    def mean(w: Any, updates: Any, cohort: Any) -> Any:
        return {"model": w["model"] - updates["delta"].mean(dim=0)}

    given = {"init": lambda model: {"model": model}, "commit": commit or mean, **rule}
    made = Rule(client or local.sgd(0.1, None), **given)
    return Method("on trial", Buffer(3, 2), made)


def plain(**changes: Any) -> Local:
    def begin(given: Any, job: Any) -> Any:
        return (given["model"],)

    def step(walk: Any, g: Any, job: Any) -> Any:
        return (walk[0] - job.lr * g,)

    def finish(given: Any, walk: Any, job: Any) -> Any:
        return {"delta": given["model"] - walk[0]}

    return Local(**{"begin": begin, "step": step, "finish": finish, "rates": {"lr": lambda version: 0.1}, **changes})


def sound() -> Method:
    return method()


def lost_name() -> Method:
    return method(broadcasts=("model", "c"))


def asks_for_more() -> Method:
    return method(client=plain(begin=lambda given, job: (given["control"],)))


def sends_less() -> Method:
    return method(client=plain(finish=lambda given, walk, job: {"end": walk[0]}))


def stands_still() -> Method:
    return method(commit=lambda w, updates, cohort: {"model": w["model"].clone()})


def explodes() -> Method:
    return method(commit=lambda w, updates, cohort: {"model": w["model"] + 1e200 * updates["delta"].sum(dim=0)})


def draws_in_the_step() -> Method:
    return method(client=plain(step=lambda walk, g, job: (walk[0] - job.lr * (g + torch.randn_like(g)),)))


def draws_in_the_commit() -> Method:
    def commit(w: Any, updates: Any, cohort: Any) -> Any:
        return {"model": w["model"] - updates["delta"].mean(dim=0) + float(np.random.rand())}  # noqa: NPY002

    return method(commit=commit)


def first_row_counts_more() -> Method:
    return method(commit=lambda w, updates, cohort: {"model": w["model"] - updates["delta"][0]})


def keeps_state_in_a_closure() -> Method:
    calls = [0]

    def commit(w: Any, updates: Any, cohort: Any) -> Any:
        calls[0] += 1
        return {"model": w["model"] - updates["delta"].mean(dim=0) / calls[0]}

    return method(commit=commit)


def keeps_state_in_the_module() -> Method:
    def commit(w: Any, updates: Any, cohort: Any) -> Any:
        GLOBAL["calls"] += 1
        return {"model": w["model"] - updates["delta"].mean(dim=0) / GLOBAL["calls"]}

    return method(commit=commit)


def counts_its_calls() -> Method:
    """A client that walks the farther, the more often the function was called: it depends on how waves are cut."""
    calls = [0]

    def begin(given: Any, job: Any) -> Any:
        calls[0] += 1
        return (given["model"] * (1 + 0.001 * calls[0]),)

    return method(client=plain(begin=begin))


def half_for_one() -> Method:
    half = method(commit=lambda w, updates, cohort: {"model": w["model"] - updates["delta"].mean(dim=0) / 2}).what
    return Method("on trial", Buffer(1, 2), half)


@dataclass(frozen=True)
class Drawing(Buffer):
    """Draws what no seed decides."""

    def conductor(self, clients: int, rng: random.Random) -> Any:
        return super().conductor(clients, random.SystemRandom())  # type: ignore[arg-type]


def another_schedule_each_time() -> Method:
    return Method("on trial", Drawing(3, 2, concurrency=5), method().what)


BROKEN: dict[Callable[[], Method], dict[str, str]] = {
    lost_name: {"names": "'c', which is broadcast, is not among them"},
    asks_for_more: {"names": "asks for 'control'"},
    sends_less: {"names": "'delta', which it should send or remember, is not among them"},
    stands_still: {"finite": "have not moved the model"},
    explodes: {"finite": "BadNumbers"},
    draws_in_the_step: {"unkeyed": "drew from PyTorch's generator"},
    draws_in_the_commit: {"unkeyed": "generator of numpy.random", "again": "something is drawn or kept"},
    first_row_counts_more: {"order": "in another order the model differs by"},
    keeps_state_in_a_closure: {"resumed": "all state must go through the server's"},
    keeps_state_in_the_module: {"again": "something is drawn or kept", "replayed": "ReplayDiffers"},
    counts_its_calls: {
        "twin": "(mode = 'twin') the model differs by",
        "cut": "waves of one job each the model",
    },
    another_schedule_each_time: {"replayed": "replay: ", "resumed": ""},  # the policy or the clock is met first
}


def laws_of(make: Callable[[], Method], alone: Any = None) -> dict[str, Case]:
    return {str(case): case for case in law_cases(make, alone)}


def test_a_sound_method_passes() -> None:
    for case in law_cases(sound):
        case()


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_a_law_that_is_broken_says_so(make: Callable[[], Method]) -> None:
    cases = laws_of(make)
    for name, said in BROKEN[make].items():
        finding = cases[name].finding()
        assert finding.holds is False, (name, finding)
        assert said in finding.said
        with pytest.raises(AssertionError, match="It fails"):
            cases[name]()


def test_one_client_that_should_be_plain_sgd_and_is_not() -> None:
    finding = laws_of(sound, Alone(half_for_one))["alone"].finding()
    assert finding.holds is False
    assert "away from plain SGD with the rate 0.1" in finding.said
    finding = laws_of(half_for_one)["alone"].finding()
    assert finding.holds is None  # nobody has said that it should be


# ---- policies -----------------------------------------------------------------------------------
class Twisted(BufferConductor):
    """Changes the commits of a sound conductor."""

    def commit(self) -> list[Any]:
        orders = super().commit()
        jobs = orders[0].jobs
        self.past = getattr(self, "past", jobs)
        return [Commit(type(self.policy).twist(jobs, self.past)), *orders[1:]]


@dataclass(frozen=True)
class Repeating(Buffer):
    size: int = 3
    steps: int | None = 2
    twist = staticmethod(lambda jobs, past: (*jobs[:-1], past[0]))

    def conductor(self, clients: int, rng: random.Random) -> Any:
        return Twisted(self, clients, rng, Pool(clients))


@dataclass(frozen=True)
class Early(Repeating):
    twist = staticmethod(lambda jobs, past: tuple((client, job + 1) for client, job in jobs))


@dataclass(frozen=True)
class Lying(Rounds):
    size: int | None = 4
    steps: int | None = 2
    orders = 3


def failures(policy: Any) -> dict[str, str]:
    return {finding.law: finding.said for finding in check_policy(policy) if finding.holds is False}


@pytest.mark.parametrize(
    ("policy", "law", "said"),
    [
        (Repeating(), "A commit takes jobs", "a second time"),
        (Early(), "A commit takes jobs", "which has not arrived"),
        (Lying(), "It does what it says", "`orders` is 3, but jobs of [2] steps were begun"),
        (Drawing(3, 2, concurrency=5), "The same events give", "the second time row"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_policy_that_breaks_a_law(policy: Any, law: str, said: str) -> None:
    told = next(text for name, text in failures(policy).items() if name.startswith(law))
    assert said in told


@pytest.mark.parametrize("name", ["buffer", "rounds", "sampled"])
def test_shipped_policies_keep_the_laws(name: str) -> None:
    findings = check(name, {"steps": 3})
    assert [finding for finding in findings if not finding.holds] == []
    hybrid = check("hybrid", {"between": {"policy": name, "size": 2, "steps": 3}}) if name == "rounds" else []
    assert all(finding.holds for finding in hybrid)
