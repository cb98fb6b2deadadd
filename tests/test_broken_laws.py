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
from offbeat.laws import Alone, Case, check, check_policy, check_stage, law_cases
from offbeat.numerics import local
from offbeat.records import Commit, Start, WakeAt
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


def begins_with_a_vector() -> Method:
    return method(client=plain(begin=lambda given, job: given["model"]))


def says_a_vector() -> Method:
    def finish(given: Any, walk: Any, job: Any) -> Any:
        return {"delta": given["model"] - walk[0], "length": walk[0]}

    return method(client=plain(finish=finish, numbers=("length",)))


def has_a_number_for_a_rate() -> Method:
    return method(client=plain(rates={"lr": 0.1}))


def asks_for_a_rate() -> Method:
    return method(client=plain(rates={"eta": lambda version: 0.1}))


def steps_in_place() -> Method:
    def step(walk: Any, g: Any, job: Any) -> Any:
        walk[0].sub_(job.lr * g)
        return walk

    return method(client=plain(step=step))


def begins_in_place() -> Method:
    return method(client=plain(begin=lambda given, job: (given["model"].mul_(0.99),)))


def applies_in_place() -> Method:
    def apply(w: Any, sums: Any, cohort: Any) -> Any:
        w["model"] -= sums["delta"]
        return w

    given = {"init": lambda model: {"model": model}, "weigh": lambda cohort: torch.ones_like(cohort.staleness) / 3}
    return Method("on trial", Buffer(3, 2), Rule(plain(), apply=apply, **given))


def weighs_too_few() -> Method:
    given = {"init": lambda model: {"model": model}, "weigh": lambda cohort: torch.ones(2) / 2}
    return Method("on trial", Buffer(3, 2), Rule(plain(), apply=lambda w, sums, cohort: w, **given))


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
    begins_with_a_vector: {"names": "it must give a tuple of vectors, of which the first is the iterate"},
    says_a_vector: {"names": "'length' of an update is no single number"},
    has_a_number_for_a_rate: {"names": "the rate 'lr' is 0.1; it must be a function of the version"},
    asks_for_a_rate: {"names": "asks for 'lr', but it is given 'model' and the rates 'eta'"},
    steps_in_place: {"untouched": "`step` changes the carry or the gradient"},
    begins_in_place: {"untouched": "`begin` or `finish` changes the vectors"},
    applies_in_place: {"untouched": "`commit` (or `apply`) changes what it is given"},
    weighs_too_few: dict.fromkeys(  # said of every run, not of the directory that the first one left
        ("finite", "reference", "cut", "order", "unkeyed", "again", "resumed", "replayed"),
        "`weigh` must give a tensor of 3 weights of the type torch.float64 for 'delta', one for each update",
    ),
    stands_still: {"finite": "have not moved the model"},
    explodes: {"finite": "BadNumbers"},
    draws_in_the_step: {"unkeyed": "drew from PyTorch's generator"},
    draws_in_the_commit: {"unkeyed": "generator of numpy.random", "again": "something is drawn or kept"},
    first_row_counts_more: {"order": "in another order the model differs by"},
    keeps_state_in_a_closure: {"resumed": "all state must go through the server's"},
    keeps_state_in_the_module: {"again": "something is drawn or kept", "replayed": "ReplayDiffers"},
    counts_its_calls: {
        "reference": "(mode = 'reference') the model differs by",
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


class Answering(BufferConductor):
    """Its answers to arrivals are another one's."""

    def arrived(self, now: float, event: Any) -> Any:
        return type(self.policy).answer(now, super().arrived(now, event))


@dataclass(frozen=True)
class Silent(Buffer):
    size: int = 3
    steps: int | None = 2
    answer = staticmethod(lambda now, orders: None)

    def conductor(self, clients: int, rng: random.Random) -> Any:
        return Answering(self, clients, rng, Pool(clients))


@dataclass(frozen=True)
class Negative(Silent):
    answer = staticmethod(lambda now, orders: [*orders, Start(-1, 0, 2)])


@dataclass(frozen=True)
class Halved(Silent):
    answer = staticmethod(lambda now, orders: [*orders, Start(0, 0, 2.5)])


@dataclass(frozen=True)
class Talking(Silent):
    answer = staticmethod(lambda now, orders: [*orders, "commit"])


@dataclass(frozen=True)
class Waking(Silent):
    answer = staticmethod(lambda now, orders: [*orders, WakeAt(now - 1, 0)])


@dataclass(frozen=True)
class Never(Silent):
    answer = staticmethod(
        lambda now, orders: [Start(order.client, 0, 2) for order in orders if isinstance(order, Start)]
    )


class Deaf(BufferConductor):
    """Is not told of those who leave, and starts them all the same."""

    def left(self, now: float, event: Any) -> Any:
        return []

    def joined(self, now: float, event: Any) -> Any:
        return [Start(client, self.version, 2) for client in range(self.idle.clients)]


@dataclass(frozen=True)
class Careless(Silent):
    def conductor(self, clients: int, rng: random.Random) -> Any:
        return Deaf(self, clients, rng, Pool(clients))


def failures(policy: Any) -> dict[str, str]:
    return {finding.law: finding.said for finding in check_policy(policy) if finding.holds is False}


@pytest.mark.parametrize(
    ("policy", "law", "said"),
    [
        (Repeating(), "A commit takes jobs", "a second time"),
        (Early(), "A commit takes jobs", "which has not arrived"),
        (Lying(), "It does what it says", "`orders` is 3, but jobs of [2] steps were begun"),
        (Drawing(3, 2, concurrency=5), "The same events give", "the second time row"),
        (Silent(), "It goes on making", "`arrived` answers None; it must be a list of commands"),
        (Negative(), "Work begins", "it speaks of client -1, and there are 0 to 7"),
        (Halved(), "Work begins", "it orders 2.5 steps; give a whole number"),
        (Talking(), "It goes on making", "'commit' is no command"),
        (Waking(), "It goes on making", "s, which is past"),
        (Never(), "It goes on making", "it has made 0 commits"),
        (Careless(), "It goes on when clients", "which has left and not come back"),
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
    assert not any(finding.holds is False for finding in hybrid)


# ---- stages -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Halves:
    """Numbers in two bytes, sound but for what is given."""

    twist: Callable[..., Any] = lambda vector, key: (vector.half(),)
    back: Callable[..., Any] = lambda parts: parts[0].float()
    each: int = 2
    name: str = "halves"

    def encode(self, vector: Any, key: Any) -> Any:
        return self.twist(vector, key)

    def decode(self, parts: Any) -> Any:
        return self.back(parts)

    def bytes(self, dimension: int) -> int:
        return self.each * dimension


STAGES = {
    "counts too few": (Halves(each=1), "`bytes` is the size", "`bytes(1)` is 1, but the encoded tensors have 2 bytes"),
    "gives no tuple": (Halves(lambda vector, key: vector.half()), "`bytes` is the size", "it must give a tuple"),
    "turns round": (Halves(back=lambda parts: -parts[0].float()), "What is decoded", "lies 2 times the vector's"),
    "cuts off": (Halves(back=lambda parts: parts[0].float()[1:]), "What is decoded", "`decode` gives the shape (0,)"),
    "draws": (
        Halves(lambda vector, key: ((vector + 0.1 * torch.randn_like(vector)).half(),)), "The same vector and key",
        "it draws from the global generator of torch",
    ),
    "asks for a number": (
        Halves(lambda vector, key: ((vector * (1 if vector[0].item() > 0 else 0.5)).half(),)), "Vectors of many",
        "calling .item()",
    ),
    "changes the vector": (Halves(lambda vector, key: (vector.mul_(0.5).half(),)), "What it is given", "`encode`"),
    "hides NaN": (Halves(lambda vector, key: (vector.nan_to_num().half(),)), "A vector with a number", "with nan all"),
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_breaks_a_law(stage: str) -> None:
    broken, law, said = STAGES[stage]
    found = {finding.law: finding.said for finding in check_stage(broken) if finding.holds is False}
    told = next(text for name, text in found.items() if name.startswith(law))
    assert said in told


@pytest.mark.parametrize("name", ["bfloat16", "float16", "int8"])
def test_shipped_stages_keep_the_laws(name: str) -> None:
    assert [finding for finding in check(name, {}) if not finding.holds] == []
