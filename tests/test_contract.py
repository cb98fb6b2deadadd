"""The contract: weighted sums and rows, keys, local steps, rates by step, and what a rule may not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from offbeat import ConfigError, Experiment, keys, run
from offbeat.engines.captured import GraphAdvance
from offbeat.engines.engine import Engine
from offbeat.experiments.assemble import build, build_method
from offbeat.method import Cohort, Local, Method, Rule
from offbeat.methods import METHODS
from offbeat.numerics import local, optimisers
from offbeat.numerics.rates import client_rate, every, rate
from offbeat.records import Begun
from offbeat.schedule.rounds import Rounds
from worlds import final, play, quadratic_world, times

WORLD = times(8, steps=(3, 1, 4, 2, 6, 3, 5, 2))
COSINE = {"schedule": "local-cosine", "value": 0.05, "floor": 0.01}
ROWS = {"fedasync"}  # mixes one update after the other
SUMS = sorted(set(METHODS) - ROWS)
JOBS = [Begun(client, client % 3, 1, 1 + client) for client in range(6)]


def of(name: str, **options: Any) -> Method:
    return build_method({"name": name, **options})


def identity(model: Tensor) -> dict[str, Tensor]:
    return {"model": model}


# ---- sums and rows ------------------------------------------------------------------------------
def test_commits_that_are_weighted_sums_never_see_rows() -> None:
    assert [name for name in METHODS if of(name).what.commit is not None] == sorted(ROWS)
    assert of("fedagrac", n=3).what.commit is not None  # it keeps what each client sent
    assert of("fedagrac", saving=True).what.commit is not None


@pytest.mark.parametrize("name", SUMS)
def test_sums_made_piece_by_piece_give_the_same_commit(name: str) -> None:
    """The same as of all rows at once, to rounding: so they may be streamed, or made where the updates are."""
    rule, rng = of(name).what, torch.Generator().manual_seed(0)
    model = torch.randn(5, generator=rng, dtype=torch.float64)
    updates = {key: torch.randn(6, 5, generator=rng, dtype=torch.float64) for key in rule.local.sends}
    stale, steps, samples = (1 + 5 * torch.rand(3, 6, generator=rng, dtype=torch.float64)).floor()
    numbers = {key: 1 + torch.rand(6, generator=rng, dtype=torch.float64) for key in rule.local.numbers}
    one = torch.ones(6, dtype=torch.float64)
    cohort = Cohort(stale, steps, samples, torch.arange(6), one, 3, 8, 40, 8, 0, numbers)
    assert rule.weigh is not None
    assert rule.apply is not None
    weights = rule.weigh(cohort)
    sums = {key: torch.zeros(5, dtype=torch.float64) for key in updates}
    for row in (4, 0, 5, 2, 1, 3):
        for key in updates:
            sums[key] += (weights[key] if isinstance(weights, dict) else weights)[row] * updates[key][row]
    state = rule.init(model)
    pieces, whole = rule.apply(state, sums, cohort), rule.renew(state, updates, cohort)
    for vector in whole:
        assert torch.allclose(pieces[vector], whole[vector], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("asysg", lambda u, c: {"gradient": u["gradient"].mean(dim=0)}),
        ("minibatch-sgd", lambda u, c: {"gradient": u["gradient"].mean(dim=0)}),
        ("dlsgd-homo", lambda u, c: {"delta": u["delta"].mean(dim=0)}),
        ("dlsgd-hetero", lambda u, c: {"delta": u["delta"].mean(dim=0)}),
    ],
)
def test_means_by_weights_are_the_means_of_rows(name: str, form: Any) -> None:
    """Sums replaced `mean` in these: equal to 1e-12 over a whole run."""
    made, task = of(name, n=3), quadratic_world()
    inner = made.what.apply
    assert inner is not None
    rows = replace(made.what, weigh=None, apply=None, commit=lambda w, u, c: inner(w, form(u, c), c))
    found, wanted = final(made, task, WORLD, 12), final(replace(made, what=rows), task, WORLD, 12)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


def test_fedagrac_by_sums_is_fedagrac_by_rows() -> None:
    made, task = of("fedagrac"), quadratic_world()
    weigh = made.what.weigh
    assert weigh is not None

    def commit(w: Any, updates: Any, cohort: Cohort) -> Any:
        parts: Any = weigh(cohort)
        sent = torch.where((parts["first"] > 0)[:, None], updates["first"], updates["mean"])
        return {"model": w["model"] - parts["delta"] @ updates["delta"], "nu": parts["delta"] @ sent}

    rows = replace(made.what, weigh=None, apply=None, commit=commit)
    found, wanted = final(made, task, WORLD, 12), final(replace(made, what=rows), task, WORLD, 12)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("forms", "sentence"),
    [
        ({}, "was given no way to commit; give weigh and apply"),
        ({"weigh": len}, "was given weigh; give weigh and apply"),
        ({"apply": len}, "was given apply; give weigh and apply"),
        ({"weigh": len, "apply": len, "commit": len}, "was given weigh and apply and commit; give"),
        ({"weigh": len, "commit": len}, "was given weigh and commit; give"),
        ({"weigh": len, "apply": len, "keeps": ("sent",)}, "keeps sent of each client, but weigh and apply never see"),
    ],
)
def test_a_rule_has_one_form_of_commit(forms: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Rule(local.sgd(0.1), init=identity, **forms)


# ---- keys, versions and steps -------------------------------------------------------------------
class Diary(NamedTuple):
    y: Tensor
    steps: Tensor
    draws: Tensor
    rates: Tensor


def diary() -> Local:
    """A client that does not move and notes what its job says at each step, step k at place k."""

    def begin(given: Any, job: Any) -> Diary:
        y = given["model"]
        return Diary(y, torch.zeros_like(y) - 1, torch.zeros_like(y), torch.zeros_like(y))

    def step(notes: Diary, g: Tensor, job: Any) -> Diary:
        here = torch.arange(notes.y.shape[0], device=g.device) == job.step
        drawn = (keys.fold(job.key, job.step) % 1000).to(g.dtype)
        return Diary(notes.y, *(torch.where(here, now.to(g.dtype), was) for now, was in zip(
            (job.step, drawn, job.lr), notes[1:], strict=True)))  # fmt: skip

    def finish(given: Any, notes: Diary, job: Any) -> Any:
        end = torch.stack([job.step.to(notes.y.dtype), job.version.to(notes.y.dtype), job.lr])
        return {"steps": notes.steps, "draws": notes.draws, "rates": notes.rates, "end": end}

    lr = client_rate(lambda version, step, steps: 0.1 + version + step / steps)
    return Local(begin, step, finish, {"lr": lr}, ("steps", "draws", "rates", "end"))


@pytest.mark.parametrize("steps", ["plain", "traced", "in buffers"])
def test_a_job_knows_its_version_step_rate_and_key(steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the twin, in waves, in traced steps, and in the buffers that CUDA graphs are captured from."""
    monkeypatch.setattr("offbeat.engines.tiles.WORTH", 1)
    rule = Rule(diary(), init=identity, commit=lambda state, updates, cohort: state)
    made, task = Method("diary", Rounds(), rule), quadratic_world(dimension=8)
    cpu = torch.device("cpu")
    twin, wave = (
        Engine(made, task, 7, cpu, "float64", mode, capture=steps == "traced") for mode in ("reference", "wave")
    )
    if steps == "in buffers":
        monkeypatch.setattr("offbeat.engines.captured.WORTH", 10**9)
        wave.solver.advance, wave.solver.rung = GraphAdvance(), "captured"
    for engine in (twin, wave):
        engine.server.versions[1] = engine.server.versions[0]
    want = twin.solve(JOBS).updates
    for row, job in enumerate(JOBS):
        own, many = keys.key(7, "rule", job.client, job.job), job.steps
        rates = [1.1 + step / many for step in range(many)]
        assert want["steps"][row].tolist() == [*range(many), *[-1] * (8 - many)]
        assert want["draws"][row, :many].tolist() == [keys.fold(own, step) % 1000 for step in range(many)]
        assert want["rates"][row, :many].tolist() == pytest.approx(rates)
        assert want["end"][row].tolist() == pytest.approx([many, 1, sum(rates) / many])
    for _ in range(4):
        found = wave.solve(JOBS).updates
        assert all(torch.equal(found[name], want[name]) for name in want)


def test_a_commit_has_a_key_of_its_own_and_the_numbers_of_its_clients() -> None:
    seen: list[Any] = []

    def weigh(cohort: Cohort) -> Tensor:
        seen.append((cohort.version, cohort.key, cohort.numbers["far"].tolist()))
        return torch.zeros_like(cohort.steps)

    def finish(given: Any, path: Any, job: Any) -> Any:
        return {"delta": given["model"] - path.y, "far": job.steps * 2}

    steps = replace(local.sgd(0.1), finish=finish, numbers=("far",))
    rule = Rule(steps, init=identity, weigh=weigh, apply=lambda state, sums, cohort: state)
    play(Method("numbers", Rounds(3), rule), quadratic_world(), WORLD, commits=3)
    assert seen == [(version, keys.key(0, "commit", version), [6.0] * 8) for version in range(3)]


# ---- rates by local step ------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fedbuff", "fedagrac", "fedlin", "fednova", "hl-sgd", "scaffold"])
def test_waves_equal_the_twin_with_a_rate_by_local_step(name: str) -> None:
    hybrid = name == "hl-sgd"
    task = quadratic_world(24 if hybrid else 8)
    wave, twin, constant = (
        final({"name": name, "client_lr": lr}, task, WORLD, 4, mode=mode)
        for lr, mode in ((COSINE, "wave"), (COSINE, "reference"), (0.05, "wave"))
    )
    assert torch.allclose(wave, twin, rtol=0, atol=1e-12)
    assert not torch.allclose(wave, constant, rtol=0, atol=1e-6)


def test_a_traced_step_follows_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.engines.tiles.WORTH", 1)
    made, task = of("local-sgd", client_lr=COSINE), quadratic_world()
    ours, twin = (Engine(made, task, 0, torch.device("cpu"), "float64", mode) for mode in ("wave", "reference"))
    jobs = [Begun(client, 0, 0, 4 + client % 2) for client in range(8)]
    want = twin.solve(jobs).updates["delta"]
    for _ in range(4):
        assert torch.allclose(ours.solve(jobs).updates["delta"], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["scaffold", "fedagrac"])
def test_means_of_gradients_are_weighted_by_the_rates_of_their_steps(name: str) -> None:
    """Where every gradient is the same, c_i and nu_i are it, whatever the rates of the steps."""
    import numpy as np

    from offbeat.tasks.quadratic import quadratic

    linear = np.arange(8.0).reshape(4, 2)
    task = quadratic(np.zeros((4, 2, 2)), linear, np.ones(2))
    spec = {"name": name, "client_lr": {"schedule": "warm-up", "value": 0.1, "steps": 3}, "start": "zeros"}
    engine, _ = play(spec, task, times(4, steps=(2, 3, 5, 4)), commits=3)
    assert engine.solver.memory is not None
    kept = engine.solver.memory.read(("c_i" if name == "scaffold" else "nu_i",), torch.arange(4))
    for rows in kept.values():
        assert torch.allclose(rows, -torch.from_numpy(linear), rtol=0, atol=1e-12)


def test_functions_of_version_and_step_are_rates() -> None:
    both: Any = client_rate(lambda version, step: 1.0 + version + 10 * step)
    assert (both.at(2, 3, 9), both.mean(1, 3)) == (33.0, 12.0)
    slow: Any = every(2, both)
    assert [slow.at(version, 0, 1) for version in range(4)] == [1.0, 1.0, 2.0, 2.0]
    assert client_rate(lambda version: 2.0 + version)(3) == 5.0  # type: ignore[operator]
    assert client_rate(lambda version, scale=3.0: scale + version)(1) == 4.0  # type: ignore[operator]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: rate(COSINE), "server_lr depends on the local step"),
        (lambda: optimisers.server_optimiser(lambda version, step: 0.1), "server_lr depends on the local step"),
        (lambda: of("fedagrac", calibration=COSINE), "calibration depends on the local step"),
        (lambda: of("fedagrac", client_lr=COSINE, saving=True), "saving needs a client_lr that is the same"),
        (lambda: client_rate({"schedule": "warm-up", "value": 1.0, "steps": 0}), "client_lr: steps = 0; it must be"),
        (lambda: client_rate(lambda version, step: 0.0), "client_lr = 0.0; a rate must be a positive number"),
    ],
)
def test_rates_that_make_no_sense(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


# ---- what a run is charged ----------------------------------------------------------------------
def test_what_travels_is_asked_of_the_method() -> None:
    """FedLin sends one vector each way in each half; FedaGrac two; with saving only fast clients send two."""
    task = {"name": "digits", "clients": 6, "model": "logistic"}
    steps = {"name": "custom", "step_seconds": 0.01, "local_steps": [1, 1, 1, 1, 1, 7]}
    vector = 4 * (64 * 10 + 10)
    grac = {"name": "fedagrac", "start": "zeros", "weights": "uniform"}
    for method, sent in (({"name": "fedlin"}, 6), (grac, 12), (grac | {"saving": True}, 7)):
        made = Experiment(method=method, task=task, fleet=steps, device="cpu", until={"commits": 3})
        assert run(made).metrics[-1]["bytes_up"] == 3 * sent * vector
        up = build(made).traffic.uploads(build(made).fleet.local_steps)
        assert up == ([vector] * 5 + [2 * vector] if method.get("saving") else vector * sent / 6)


@pytest.mark.parametrize(
    "wrong", [lambda w, u, c: w["model"], lambda w, u, c: {"model": u["delta"]}], ids=["tensor", "matrix"]
)
def test_a_commit_that_makes_no_state_is_said_so(wrong: Any) -> None:
    made = build_method({"name": "local-sgd", "n": 4})
    broken = replace(made, what=replace(made.what, weigh=None, apply=None, commit=wrong))
    with pytest.raises(Exception, match="its commit must give the vectors"):
        play(broken, quadratic_world(), times(8), 2)
