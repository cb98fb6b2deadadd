"""A commit that gives NaN or infinity of finite updates: the server says so, and no client is blamed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat import Buffer, Cohort, Experiment, Method, Rule, resume, run
from offbeat.cli import EXITS
from offbeat.engines import server
from offbeat.engines.company import Company, common
from offbeat.engines.server import finite
from offbeat.errors import BadNumbers
from offbeat.experiments.assemble import build
from offbeat.keys import generator
from offbeat.numerics import local
from offbeat.numerics.weights import mean
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.horizon import Horizon
from worlds import quadratic_world, times

BAD = 3  # the commit that goes wrong
SAID = f"commit {BAD} gives numbers that are not finite, though every update that went into it was finite"


def method(form: str, value: float = float("nan")) -> Method:
    """Plain steps, whose commits go wrong from version BAD - 1 on."""

    def wrong(cohort: Cohort) -> float:
        return value if cohort.version >= BAD - 1 else 1.0

    def weigh(cohort: Cohort) -> torch.Tensor:
        return mean(cohort) * (wrong(cohort) if form == "weigh" else 1.0)

    def apply(state: Any, sums: Any, cohort: Cohort) -> Any:
        return {"model": state["model"] - sums["delta"] * (wrong(cohort) if form == "apply" else 1.0)}

    def commit(state: Any, updates: Any, cohort: Cohort) -> Any:
        kept = {"kept sent": updates["delta"] * wrong(cohort)} if form == "keeps" else {}
        factor = wrong(cohort) if form == "commit" else 1.0
        return {"model": state["model"] - updates["delta"].mean(0) * factor, **kept}

    ways: dict[str, Any] = {"weigh": weigh, "apply": apply} if form in ("weigh", "apply") else {"commit": commit}
    keeps = ("kept sent",) if form == "keeps" else ()
    rule = Rule(local.sgd(0.05, None), init=lambda model: {"model": model}, keeps=keeps, **ways)
    return Method("wrong", Buffer(3, 2), rule)


def experiment(form: str, value: float = float("nan"), **changes: Any) -> Experiment:
    plain = Experiment(
        method=method(form, value), task=quadratic_world(8), device="cpu", precision="float64", until={"commits": 9},
        evaluate={"every_commits": 100}, checkpoint_seconds=1e-9,
    )  # fmt: skip
    return replace(plain, **changes)


@pytest.mark.parametrize("form", ["weigh", "apply", "commit", "keeps"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_commit_is_named_and_the_version_before_it_kept(form: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(BadNumbers, match=SAID) as error:
        run(experiment(form, value), tmp_path)
    assert EXITS[type(error.value)] == 3
    assert ("`commit`" if form in ("commit", "keeps") else "`weigh` or `apply`") in str(error.value)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["commits"] == BAD - 1
    good = run(experiment("nothing", until={"commits": BAD - 1})).model
    kept = error.value.outcome.model
    assert all(torch.allclose(kept[name], good[name], rtol=1e-12) for name in good)
    with pytest.raises(BadNumbers, match=SAID):
        resume(tmp_path, method=method(form, value), task=quadratic_world(8))


def test_where_commits_are_not_looked_at_the_next_wave_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a look at every commit would mean to wait for it."""
    monkeypatch.setattr(server, "finite", lambda vectors: isinstance(vectors, tuple) or finite(vectors))
    with pytest.raises(BadNumbers, match=SAID):
        run(experiment("apply"))


def test_large_numbers_are_finite_though_their_sum_is_not() -> None:
    assert finite([torch.full((4,), 3e38)])
    assert not finite([torch.ones(3), torch.tensor([1.0, float("inf"), -float("inf")])])
    assert not finite([torch.tensor([1.0, float("nan")])])


def test_a_trial_in_company_ends_with_the_same_sentence() -> None:
    methods = [method("nothing"), method("apply")]
    made = build(experiment("nothing", method=common(methods)))
    company = Company(made.engine(), methods)
    clock = VirtualClock(methods[0].when, times(8), generator(0, "policy"))
    assert len(list(company.commits(Horizon(clock, 256, 6)))) == 6
    assert SAID in company.failed[1]
    assert company.servers[1].version == BAD - 1
