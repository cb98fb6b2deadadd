"""The comparison with the oracle detects rules that are broken on purpose: each of these runs, and is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from method_draws import NAMES, Case, both, drawn
from method_oracle import rate
from offbeat import Method
from offbeat.errors import ConfigError
from offbeat.experiments.assemble import build_method
from offbeat.method import Cohort, StepRate

DRAWS = 15  # of each method, at most
Change = Callable[[Method, Case], Method]


# ---- tools ----------------------------------------------------------------------------------------
def with_rule(method: Method, **parts: Any) -> Method:
    return replace(method, what=replace(method.what, **parts))


def with_local(method: Method, **parts: Any) -> Method:
    return with_rule(method, local=replace(method.what.local, **parts))


def weighed(change: Callable[[torch.Tensor, Cohort], torch.Tensor]) -> Change:
    """The method with other weights in its sums."""

    def broken(method: Method, case: Case) -> Method:
        weigh = method.what.weigh
        assert weigh is not None

        def other(cohort: Cohort) -> Any:
            weights = weigh(cohort)
            if isinstance(weights, dict):
                return {name: change(column, cohort) for name, column in weights.items()}
            return change(weights, cohort)  # type: ignore[arg-type]

        return with_rule(method, weigh=other)

    return broken


def cohorts(change: Callable[[Cohort], Cohort]) -> Change:
    """The method, told something else of its cohorts."""

    def broken(method: Method, case: Case) -> Method:
        rule = method.what
        if rule.commit is not None:
            commit = rule.commit
            return with_rule(method, commit=lambda w, updates, cohort: commit(w, updates, change(cohort)))
        weigh, apply = rule.weigh, rule.apply
        assert weigh is not None
        assert apply is not None
        return with_rule(method, weigh=lambda cohort: weigh(change(cohort)),
                         apply=lambda w, sums, cohort: apply(w, sums, change(cohort)))  # fmt: skip

    return broken


def applied(change: Callable[[Any, Any, Cohort, Case], Any]) -> Change:
    """The method, whose new state is changed, given the old one."""

    def broken(method: Method, case: Case) -> Method:
        rule = method.what
        if rule.commit is not None:
            commit = rule.commit
            return with_rule(method, commit=lambda w, u, cohort: change(w, commit(w, u, cohort), cohort, case))
        apply = rule.apply
        assert apply is not None
        return with_rule(method, apply=lambda w, sums, cohort: change(w, apply(w, sums, cohort), cohort, case))

    return broken


def starts(change: Callable[[Any, Any], Any]) -> Change:
    """The method, whose clients begin from something else."""

    def broken(method: Method, case: Case) -> Method:
        begin = method.what.local.begin
        return with_local(method, begin=lambda given, job: begin(change(given, job), job))

    return broken


def ends(change: Callable[[Any, Any, Any], Any]) -> Change:
    """The method, whose clients send or remember something else."""

    def broken(method: Method, case: Case) -> Method:
        finish = method.what.local.finish
        return with_local(method, finish=lambda given, carry, job: change(given, finish(given, carry, job), job))

    return broken


def client_rates(change: Callable[[Any], Any]) -> Change:
    def broken(method: Method, case: Case) -> Method:
        local = method.what.local
        return with_local(method, rates={**local.rates, "lr": change(local.rates["lr"])})

    return broken


def options(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """The method of other options than those that the oracle has."""
    return lambda method, case: build_method(change(dict(case.method)))


# ---- rules ----------------------------------------------------------------------------------------
def a_version_late(given: Any) -> Any:
    if isinstance(given, StepRate):
        return StepRate(lambda version, step, steps: given.at(max(0, version - 1), step, steps))
    return lambda version: given(max(0, version - 1))


def first_step_only(given: Any) -> Any:
    return StepRate(lambda version, step, steps: given.at(version, 0, steps)) if isinstance(given, StepRate) else given


def server_lr_twice(old: Any, new: Any, cohort: Cohort, case: Case) -> Any:
    lr = rate(case.method.get("server_lr", 1.0), cohort.version)
    return {**new, "model": old["model"] + lr * (new["model"] - old["model"])}


def whole_cohort_moves_c(old: Any, new: Any, cohort: Cohort, case: Case) -> Any:
    return {**new, "c": old["c"] + (new["c"] - old["c"]) * cohort.clients / len(cohort.steps)}


def once_each(weights: torch.Tensor, cohort: Cohort) -> torch.Tensor:
    """A client that was drawn several times counts once."""
    clients = cohort.client.tolist()
    first = torch.tensor([float(client not in clients[:place]) for place, client in enumerate(clients)])
    return first.to(weights) / first.sum().to(weights)


def shared_noise(method: Method, case: Case) -> Method:
    """Every job draws the noise of its stage from one key."""
    stages = case.method["stages"]
    up = stages.get("up") if isinstance(stages, dict) and "name" not in stages else stages
    assert up is not None
    local = build_method({name: value for name, value in case.method.items() if name != "stages"}).what.local
    stage = method.what.up
    assert stage is not None

    def finish(given: Any, carry: Any, job: Any) -> Any:
        update = local.finish(given, carry, job)
        return update | {n: stage.decode(stage.encode(update[n], 0 * job.key)).to(update[n]) for n in local.sends}

    return with_local(method, finish=finish)


def adds_up(weights: torch.Tensor, cohort: Cohort) -> torch.Tensor:
    return weights * len(weights)


def equal_parts(weights: torch.Tensor, cohort: Cohort) -> torch.Tensor:
    return torch.full_like(weights, float(weights.sum()) / len(weights))


def by_steps(weights: torch.Tensor, cohort: Cohort) -> torch.Tensor:
    return weights * cohort.steps / cohort.steps.mean()


RULES: dict[str, tuple[tuple[str, ...], Change]] = {
    "a sum where a mean belongs": (("dlsgd-homo", "minibatch-sgd", "hl-sgd"), weighed(adds_up)),
    "weights forgotten": (("fedprox", "local-sgd", "fednova", "hl-sgd"), weighed(equal_parts)),
    "weights by size where they are given": (
        ("scaffold", "fedagrac", "fedlin"), options(lambda o: o | {"weights": "size" if "weights" in o else "uniform"}),
    ),
    "weights by steps": (("fedbuff", "dlsgd-hetero"), weighed(by_steps)),
    "weights by the sizes of shards": (
        ("dlsgd-hetero", "dlsgd-homo", "asysg"),
        weighed(lambda weights, cohort: cohort.samples / cohort.samples.sum() * weights.sum()),
    ),
    "staleness one too large": (
        ("fedbuff", "async-hl-sgd", "fedasync"),
        cohorts(lambda cohort: cohort._replace(staleness=cohort.staleness + 1)),
    ),
    "staleness not looked at": (
        ("fedbuff", "async-hl-sgd", "fedasync"),
        cohorts(lambda cohort: cohort._replace(staleness=0 * cohort.staleness)),
    ),
    "server_lr twice": (("local-sgd", "dlsgd-homo", "asysg", "fednova"), applied(server_lr_twice)),
    "the server rate of the next version": (
        ("minibatch-sgd", "fedbuff", "hl-sgd"), cohorts(lambda cohort: cohort._replace(version=cohort.version + 1)),
    ),
    "client rate a version late": (("local-sgd", "fedbuff", "gossip-pga"), client_rates(a_version_late)),
    "every step at the rate of the first": (("fedprox", "dlsgd-hetero", "hl-sgd"), client_rates(first_step_only)),
    "server momentum that forgets": (
        ("local-sgd", "asysg"),
        applied(lambda old, new, cohort, case: {**new, **{n: 0 * v for n, v in new.items() if n != "model"}}),
    ),
    "an optimiser that begins anew where it should go on": (
        ("fedbuff", "dlsgd-homo", "fedasync"),
        starts(lambda given, job: {n: 0 * v if n.startswith("own ") else v for n, v in given.items()}),
    ),
    "proximal term forgotten": (("fedprox", "fednova", "fedasync"), options(lambda o: o | {"proximal": 0.0})),
    "momentum not counted in |a|": (("fednova",), ends(lambda given, u, job: u | {"reach": job.lr * job.steps})),
    "c moved as if all took part": (("scaffold",), applied(whole_cohort_moves_c)),
    "c_i that clients do not renew": (("scaffold",), ends(lambda given, u, job: u | {"c_i": given["c_i"]})),
    "a correction without the client's own part": (
        ("scaffold", "fedlin", "fedagrac"),
        starts(lambda given, job: {n: 0 * v if n in ("c_i", "g_i", "nu_i") else v for n, v in given.items()}),
    ),
    "the correction's sign": (
        ("scaffold", "fedagrac-avg"),
        starts(lambda given, job: {n: -v if n in ("c", "c_i", "nu", "nu_i") else v for n, v in given.items()}),
    ),
    "slow clients send their first gradient": (
        ("fedagrac", "fedagrac-reverse"),
        options(lambda o: o | {"name": "fedagrac" if o["name"].endswith("reverse") else "fedagrac-reverse"}),
    ),
    "calibration of version 0": (
        ("fedagrac-avg", "fedagrac-first"),
        options(lambda o: o | {"calibration": 0.2 if isinstance(o["calibration"], dict) else o["calibration"]}),
    ),
    "one exchange too many": (
        ("hl-sgd", "gossip-pga", "gossip-sgd", "async-hl-sgd"),
        options(lambda o: o | {"gossip_rounds": o["gossip_rounds"] + 1}),
    ),
    "all devices report": (("hl-sgd", "async-hl-sgd"), options(lambda o: o | {"p": 1.0})),
    "a client drawn twice counts once": (("dlsgd-hetero", "local-sgd"), weighed(once_each)),
    "clusters counted alike": (
        ("async-hl-sgd", "hl-sgd"), cohorts(lambda cohort: cohort._replace(devices=torch.ones_like(cohort.devices))),
    ),
    "momentum that looks ahead": (
        ("local-sgd", "fedbuff"), options(lambda o: o | {"client_options": {**o["client_options"], "nesterov": True}}),
    ),
    "clipping forgotten": (
        ("fedprox", "dlsgd-homo"),
        options(lambda o: o | {"client_options": {k: v for k, v in o["client_options"].items() if k != "clip"}}),
    ),
    "noise that all jobs share": (("fedbuff", "local-sgd", "dlsgd-homo"), shared_noise),
    "the mix of FedAsync without alpha": (("fedasync",), options(lambda o: o | {"alpha": 1.0})),
    "deltas too large by 1e-7": (
        ("dlsgd-homo", "fedbuff"), ends(lambda given, u, job: u | {"delta": u["delta"] * (1 + 1e-7)}),
    ),
}  # fmt: skip


def tried(names: tuple[str, ...], change: Change) -> Iterator[str | None]:
    """What the comparison finds in draws of these methods that take the change."""
    for number in range(DRAWS * len(NAMES)):
        case = drawn(number)
        if case.name not in names:
            continue
        try:
            found = both(case, change)
        except (AssertionError, KeyError, ConfigError):  # this run has no such part
            continue
        yield found.difference


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_detected(rule: str) -> None:
    names, change = RULES[rule]
    assert any(tried(names[:1], change)), f"{names[0]} ran with {rule}, and nobody saw it"


@pytest.mark.soak
@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_detected_in_every_method(rule: str) -> None:
    names, change = RULES[rule]
    assert [name for name in names if not any(tried((name,), change))] == []
