"""Meters against closed forms on quadratics, against autograd on a network, and through `measure` and `advise`."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from typer.testing import CliRunner

from offbeat import Experiment, Task, run
from offbeat.cli import app
from offbeat.errors import ConfigError, OffbeatError
from offbeat.experiments.assemble import build, build_method
from offbeat.runs.progress import Progress
from offbeat.tasks.quadratic import Family, alike, noise_of, nonconvex, opposed, random_quadratic
from offbeat.theory import curvature, hlsgd
from offbeat.theory.advise import advise, opening, schedule_for, with_known
from offbeat.theory.constants import Constants, Plan
from offbeat.theory.divergence import divergence, noise
from offbeat.theory.drift import drift
from offbeat.theory.gauge import Gauge, fewer
from offbeat.theory.measure import Effort, gauge_of, measure
from offbeat.theory.theorems import ADVISED

BRIEF = Effort(samples=20, noise_samples=4, rounds=3, local_steps=3, iterations=3)


def gauge(task: Task, limit: int = 100, most: int | None = None) -> Gauge:
    return Gauge(task.flat_model(torch.float64), task.samples(torch.float64), limit, 0, most)


families = st.builds(
    lambda kind, clients, dimension, seed: {
        "random": lambda: Family(*random_quadratic(clients, dimension, seed=seed)),
        "alike": lambda: alike(clients, dimension, seed=seed),
        "opposed": lambda: opposed(clients, dimension, 0.7, seed=seed),
        "nonconvex": lambda: nonconvex(clients, dimension, seed=seed),
    }[kind](),
    st.sampled_from(["random", "alike", "opposed", "nonconvex"]),
    st.integers(2, 9),
    st.integers(2, 7),
    st.integers(0, 10**6),
)


def point(family: Family, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(len(family.linear[0])))


# ---- closed forms -------------------------------------------------------------------------------
@settings(max_examples=10, deadline=None)
@given(families, st.integers(0, 999), st.sampled_from([4, 100]))
def test_power_iteration_meets_the_tight_constants(family: Family, seed: int, limit: int) -> None:
    meter, x = gauge(family.task(), limit), point(family, seed)
    far: Any = {"iterations": 200, "tolerance": 1e-7}
    assert curvature.global_smoothness(meter, x, **far).value == pytest.approx(family.global_smoothness, rel=1e-3)
    assert curvature.smoothness(meter, x, **far).value == pytest.approx(family.smoothness, rel=1e-3)
    found = curvature.heterogeneity(meter, x, **far).value
    assert found == pytest.approx(family.heterogeneity, rel=1e-3, abs=1e-4)
    assert found <= family.heterogeneity_bound * (1 + 1e-9) + 1e-4


@settings(max_examples=25, deadline=None)
@given(families, st.integers(0, 999), st.integers(1, 6))
def test_the_paths_estimates_never_exceed_the_constants(family: Family, seed: int, steps: int) -> None:
    path = curvature.path(gauge(family.task(), 3), point(family, seed), 4, steps, 0.05)
    room = 1 + 1e-6
    assert max(path.heterogeneity) <= family.heterogeneity**2 * room + 1e-9
    assert max(path.smoothness) <= family.smoothness * room
    assert max(path.global_smoothness) <= family.global_smoothness * room
    assert min(path.smoothness) > 0


@settings(max_examples=25, deadline=None)
@given(families, st.integers(0, 999), st.floats(0.1, 2.0), st.sampled_from([1, 3, 100]))
def test_divergence_and_noise_at_a_point(family: Family, seed: int, spread: float, limit: int) -> None:
    task = family.task(noise=spread, samples=5, seed=seed)
    meter, x = gauge(task, limit), point(family, seed)
    found = divergence(meter, x)
    assert found.zeta2 == pytest.approx(family.divergence(x.numpy()), rel=1e-8, abs=1e-12)
    assert found.gamma2 == pytest.approx(family.mean_divergence(x.numpy()), rel=1e-8, abs=1e-12)
    assert float(found.norms.max()) == pytest.approx(family.gradient(x.numpy()), rel=1e-8)
    assert found.dissimilarity2 == pytest.approx(max(1, family.dissimilarity(x.numpy())), rel=1e-6)
    sigma = noise(meter, x, None)
    assert sigma.of_clients == pytest.approx(noise_of(task), rel=1e-8)
    assert sigma.error == 0


def test_some_samples_estimate_the_noise_and_say_how_well() -> None:
    task = alike(6, 4, seed=1).task(noise=1.0, samples=200, seed=2)
    x = torch.zeros(4, dtype=torch.float64)
    exact, some = noise(gauge(task), x, None), noise(gauge(task), x, 40)
    assert abs(some.mean - exact.mean) < 4 * some.error
    assert 0 < some.error < 0.3 * exact.mean


def test_clusters_differ_inside_and_between() -> None:
    family = Family(*random_quadratic(7, 4, seed=3))
    x = torch.ones(4, dtype=torch.float64)
    gradients = family.gradients(x.numpy())
    groups = [[0, 3, 4], [1, 2, 5, 6]]
    centres = [gradients[group].mean(0) for group in groups]
    want = [np.square(gradients[g] - c).sum(1).mean() for g, c in zip(groups, centres, strict=True)]
    for limit in (2, 100):
        found = divergence(gauge(family.task(), limit), x, groups)
        assert found.inside == pytest.approx(want)
        whole = sum(len(g) / 7 * (c @ c) for g, c in zip(groups, centres, strict=True)) - found.mean
        assert found.between == pytest.approx(whole)
        assert found.gamma2 == pytest.approx(np.average(want, weights=[3, 4]) + found.between)  # it adds up


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_autograd(dtype: torch.dtype) -> None:
    digits = {"name": "digits", "model": {"name": "mlp", "hidden": 12}, "clients": 4}
    task = build(Experiment(method={"name": "local-sgd", "n": 4}, task=digits)).task
    meter = Gauge(task.flat_model(dtype), task.samples(dtype), 100)
    x = meter.model.initial()
    v = torch.randn(3, len(x), dtype=dtype, generator=torch.Generator().manual_seed(0))
    clients = torch.tensor([0, 1, 3])
    found = meter.products(x, v, clients)
    for row, client in enumerate(clients.tolist()):
        shard = torch.as_tensor(task.shards[client])
        xs, ys = meter.samples.x[shard], meter.samples.y[shard]
        _, want = torch.autograd.functional.hvp(lambda w, xs=xs, ys=ys: meter.model.one(w, xs, ys), x, v[row])
        assert float((found[row] - want).norm() / want.norm()) < 1e-5


def test_fewer_samples_are_drawn_once_and_cost_less() -> None:
    task = alike(5, 3, seed=0).task(noise=0.5, samples=50, seed=0)
    samples = task.samples(torch.float64)
    some = fewer(samples, 7, 3)
    assert some.sizes == [7] * 5
    assert torch.equal(some.order, fewer(samples, 7, 3).order)
    assert not torch.equal(some.order, fewer(samples, 7, 4).order)
    assert fewer(samples, None, 0) is samples
    meter = gauge(task, most=7)
    meter.gradient(torch.zeros(3, dtype=torch.float64))
    assert meter.passes == pytest.approx(7 / 50)


# ---- bad input ----------------------------------------------------------------------------------
def test_equal_models_are_a_sentence_not_a_nan() -> None:
    one = random_quadratic(1, 3, seed=0)
    same = Family([one[0][0]] * 4, [one[1][0]] * 4)
    with pytest.raises(ConfigError, match="0 / 0"):
        curvature.path(gauge(same.task()), torch.ones(3, dtype=torch.float64), 1, 3, 0.1)


def test_no_b_at_an_optimum_and_no_noise_of_one_sample() -> None:
    family = alike(4, 3, seed=1)
    optimum = torch.from_numpy(np.linalg.solve(family.hessian, np.mean(family.linear, axis=0)))
    with pytest.raises(ConfigError, match="mean gradient is 0"):
        _ = divergence(gauge(family.task()), optimum).dissimilarity2
    with pytest.raises(ConfigError, match="client 0 and 3 more has one sample"):
        noise(gauge(family.task()), optimum)


DIGITS = Experiment(method="local-sgd", task={"name": "digits", "clients": 10}, fleet="uniform", until={"commits": 12})


def test_a_checkpoint_is_measured_where_it_stands_and_another_models_is_refused(tmp_path: Path) -> None:
    run(DIGITS, tmp_path / "a")
    kept, trained = measure(DIGITS, tmp_path / "a", effort=BRIEF), measure(DIGITS, train=12, effort=BRIEF)
    assert kept.readings == trained.readings
    assert kept.accuracy == trained.accuracy
    other = replace(DIGITS, task={"name": "digits", "clients": 10, "model": "mlp"})
    with pytest.raises(OffbeatError, match="holds another model"):
        measure(other, tmp_path / "a", effort=BRIEF)
    with pytest.raises(ConfigError, match="not both"):
        measure(DIGITS, tmp_path / "a", 3)
    with pytest.raises(OffbeatError, match="cannot be read"):
        measure(DIGITS, tmp_path / "b.safetensors")


def test_efforts_that_make_no_sense_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        measure(DIGITS, effort=Effort(samples=1, rounds=0, client_lr=-1.0))
    assert len(caught.value.problems) == 3


# ---- the whole ----------------------------------------------------------------------------------
def test_a_measurement_has_every_constant_and_says_it_in_words() -> None:
    clustered = replace(DIGITS, method={"name": "hl-sgd", "local_steps": 4, "p": 0.4},
                        fleet={"name": "hlsgd", "clusters": 2})  # fmt: skip
    found = measure(clustered, effort=BRIEF)
    names = {reading.name for reading in found.readings}
    assert names >= {"L_h", "L_g", "L_tilde", "L_h_power", "zeta", "gamma", "B2", "sigma2", "eps_inside", "rho_max"}
    assert all(math.isfinite(reading.value) and reading.said for reading in found.readings)
    assert all(r.low <= r.value <= r.high for r in found.readings if r.low is not None and r.high is not None)
    assert found.constants.clusters == 2
    assert found.passes > 0
    assert "untrained" in found.notes[0]
    json.dumps(found.json())


@pytest.mark.parametrize("method", ["fedbuff", "dlsgd-hetero", "local-sgd"])
def test_the_schedule_is_that_of_the_run(method: str) -> None:
    experiment = replace(DIGITS, method={"name": method, ("buffer_size" if method == "fedbuff" else "n"): 3})
    ran, found = run(experiment), measure(experiment, effort=BRIEF).schedule
    assert found.commits == 12
    assert found.staleness == ran.staleness["max"]
    assert found.staleness_mean == pytest.approx(ran.staleness["mean"])
    assert (found.likely is not None) == (method != "fedbuff")


def test_groups_that_fit_do_not_change_what_is_measured() -> None:
    built = build(replace(DIGITS, precision="float64"))
    engine = built.engine()
    x = engine.solver.problem.model.initial()
    found = []
    for limit in (3, 10):
        meter = gauge_of(engine, 0, 30)
        meter.limit = limit
        path = curvature.path(meter, x, 2, 3, 0.1)
        found.append([*path.heterogeneity, *path.smoothness, divergence(meter, x).zeta2, noise(meter, x, 4).mean])
    assert found[0] == pytest.approx(found[1], rel=1e-9)


# ---- advice -------------------------------------------------------------------------------------
SPECIAL = {f"FedAvg, {name}" for name in ("Theorem 5.5", "Theorem A.1", "Corollary A.3")}
SPECIAL |= {"FedaGrac, Theorem 1", "FedaGrac, Theorem 3"}


@pytest.mark.parametrize("method", ADVISED)
def test_every_theorem_is_asked_and_says_what_fails(method: str) -> None:
    clusters = {"hl-sgd": 2, "gossip-sgd": 1, "gossip-pga": 1}
    fleet = {"name": "hlsgd", "clusters": clusters[method]} if method in clusters else "uniform"
    wild = replace(DIGITS, fleet=fleet, method={"name": method, "local_steps": 5, "client_lr": 50.0})
    found = measure(wild, effort=BRIEF)
    plan, counsels = advise(found, wild, method)
    assert plan.client_lr == 50.0
    assert plan.local_steps == 5
    assert opening(wild, method, plan, counsels).startswith(f"{method} with client_lr 50")
    for name, counsel in counsels.items():
        if name in SPECIAL or name == "HL-SGD, Table 1":
            assert counsel.own or counsel.refused
            continue
        assert counsel.own is not None
        assert counsel.yours is not None
        assert counsel.own.client_lr < 1
        assert counsel.yours.failing


def test_the_theorems_of_local_sgd_depend_on_who_takes_part() -> None:
    found = measure(DIGITS, effort=BRIEF)
    everyone = replace(DIGITS, method={"name": "local-sgd", "n": None})
    names = list(advise(found, everyone, "local-sgd")[1])
    assert names[:2] == ["FedAvg, Theorem 4.3", "FedAvg, Corollary 4.4"]
    assert set(names[2:]) <= SPECIAL
    some = replace(DIGITS, method={"name": "local-sgd", "n": 4})
    assert all("4.5" in name or "4.6" in name for name in advise(found, some, "local-sgd")[1])
    other, _ = advise(found, DIGITS, "fedbuff")  # a method that the experiment does not run: its defaults
    assert other.staleness > 0
    with pytest.raises(ConfigError, match="unknown method"):
        advise(found, DIGITS, "fedavg")


def test_the_command_prints_json_and_a_table(tmp_path: Path) -> None:
    flags = ["measure", "--task", "digits", "--samples", "10", "--rounds", "2", "--iterations", "2", "--set",
             "task.clients=8", "--method", "local-sgd", "--set", "method.n=4", "--advise", "local-sgd"]  # fmt: skip
    made: Any = CliRunner().invoke(app, [*flags, "--json", "--out", str(tmp_path / "m.json")])
    assert made.exit_code == 0, made.output
    told = json.loads(made.stdout)
    assert told == json.loads((tmp_path / "m.json").read_text())
    assert {"readings", "constants", "schedule", "plan", "advice", "verdict"} <= set(told)
    shown = CliRunner().invoke(app, flags)
    assert "L_h" in shown.output
    assert "passes over the data" in shown.output
    assert "Theorem 4.5" in shown.output


def test_quadratics_reach_the_theorems_about_them_and_networks_are_told_why_not() -> None:
    """One Hessian, strongly convex: Theorems 5.5, A.1 and FedaGrac's 1 answer; on digits they say why they do not."""
    family = alike(6, 4, seed=3)
    quadratic = Experiment({"name": "local-sgd", "n": None}, family.task(noise=0.1, samples=20, seed=2), device="cpu",
                           precision="float64", fleet="equal", until={"commits": 50})  # fmt: skip
    found = measure(quadratic, effort=Effort(samples=None, noise_samples=4, rounds=2, local_steps=2, iterations=12))
    eigenvalues = [float(np.linalg.eigvalsh(a).min()) for a in family.matrices]
    assert found.constants.quadratic
    assert found.constants.convexity == pytest.approx(min(eigenvalues), rel=1e-2)
    losses = replace(found.constants, client_losses=(0.0,) * 6)  # these quadratics have no floor at zero
    found = replace(found, constants=replace(losses, gap=1.0))
    _, counsels = advise(found, quadratic, "local-sgd")
    assert counsels["FedAvg, Theorem 5.5"].own is not None
    assert counsels["FedAvg, Theorem A.1"].own is not None
    assert counsels["FedAvg, Corollary A.3"].own is not None
    assert counsels["FedaGrac, Theorem 1"].own is not None
    fedagrac = replace(quadratic, method="fedagrac")
    assert advise(found, fedagrac, "fedagrac")[1]["FedaGrac, Theorem 3"].own is not None
    everyone = replace(DIGITS, method={"name": "local-sgd", "n": None})
    digits = measure(everyone, effort=replace(BRIEF, iterations=0))
    _, counsels = advise(digits, everyone, "local-sgd")
    assert counsels["FedAvg, Theorem 5.5"].refused == ("it is about quadratics, and gradients here are not affine",)
    assert "convexity" in counsels["FedaGrac, Theorem 1"].refused[0]
    told = with_known(digits, {"convexity": 0.1})
    assert advise(told, everyone, "local-sgd")[1]["FedaGrac, Theorem 1"].own is not None
    with pytest.raises(ConfigError, match="unknown constant 'mu'"):
        with_known(digits, {"mu": 1.0})


def test_the_opening_is_a_sentence_to_act_on_and_figures_are_the_methods_own() -> None:
    found = measure(DIGITS, effort=BRIEF)
    calm = replace(DIGITS, method={"name": "local-sgd", "n": None, "local_steps": 2, "client_lr": 1e-6})
    plan, counsels = advise(found, calm, "local-sgd")
    assert "go ahead, FedAvg, Theorem 4.3 covers these rates" in opening(calm, "local-sgd", plan, counsels)
    wild = replace(calm, method={"name": "local-sgd", "n": None, "local_steps": 2, "client_lr": 5.0})
    plan, counsels = advise(found, wild, "local-sgd")
    said = opening(wild, "local-sgd", plan, counsels)
    assert "--set method.client_lr=" in said
    assert "--set method.server_lr=" in said
    buffered = replace(DIGITS, method="fedbuff", until={"commits": 30})
    plan, counsels = advise(found, buffered, "fedbuff")
    assert "run at least" in opening(buffered, "fedbuff", plan, counsels)
    assert schedule_for(found, buffered, "local-sgd").staleness == 0
    assert schedule_for(found, buffered, "fedbuff").staleness > 0


def test_table_1_orders_methods_and_names_the_condition_against_gossip() -> None:
    told = hlsgd.table1(
        Constants(clients=32, gap=1.0, smoothness=1.0, noise=1.0, inside=4.0, between=0.1, between_factor=1.0,
                  mixing=0.9, clusters=4), Plan(local_steps=4, cohort=8, commits=100),
    )  # fmt: skip
    assert told.notes[0].startswith("orders of the bounds on these constants, least first: ")
    assert {"hl-sgd", "local-sgd", "gossip-sgd", "gossip-pga"} == set(re.findall("[a-z]+-[a-z]+", told.notes[0]))
    assert "tau / n = 0.5, rho^2 / (1 - rho) = 8.1: HL-SGD stands before gossip SGD" in told.notes[1]


# ---- what a review found ------------------------------------------------------------------------
def test_json_has_no_infinity() -> None:
    """Corollary 4.6 sets no bound here, and JSON has no word for that."""
    flags = ["measure", "--task", "digits", "--method", "local-sgd", "--set", "method.n=2", "--set", "task.clients=12",
             "--set", 'task.split={name="single-label",percent=90}', "--set", "until.commits=3000", "--samples", "8",
             "--rounds", "1", "--iterations", "0", "--advise", "local-sgd", "--json"]  # fmt: skip
    made = CliRunner().invoke(app, flags)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    told = json.loads(made.stdout, parse_constant=refuse)
    conditions = [c for counsel in told["advice"].values() for c in counsel["own"]["conditions"]]
    assert all({"name", "given", "allowed", "holds"} <= set(condition) for condition in conditions)


def test_advice_counts_gossip_rounds_and_beta() -> None:
    clustered = replace(DIGITS, fleet={"name": "hlsgd", "clusters": 2})
    found = measure(replace(clustered, method="hl-sgd"), effort=BRIEF)
    mixing = []
    for rounds in (0, 1, 3):
        method = {"name": "hl-sgd", "p": 0.4, "gossip_rounds": rounds}
        _, counsels = advise(found, replace(clustered, method=method), "hl-sgd")
        conditions = [c for counsel in counsels.values() if counsel.own for c in counsel.own.conditions]
        mixing.append(next(c.given for c in conditions if c.name == "(7)"))
    assert mixing == pytest.approx([1.0, mixing[1], mixing[1] ** 3])
    buffered = replace(DIGITS, method={"name": "fedbuff", "buffer_size": 4, "beta": 0.5})
    assert advise(found, buffered, "fedbuff")[0].server_lr == 0.5


def test_the_method_asked_about_may_be_an_object() -> None:
    theirs = replace(DIGITS, method=build_method({"name": "fedbuff", "buffer_size": 4}))
    found = measure(theirs, effort=BRIEF)
    assert advise(found, theirs, "local-sgd")[0].staleness == 0
    assert advise(found, theirs, "fedbuff")[0].staleness > 0


def test_noise_from_a_part_of_a_shard_is_not_too_low() -> None:
    task = alike(40, 4, seed=1).task(noise=1.0, samples=200, seed=2)
    x = torch.zeros(4, dtype=torch.float64)
    exact, some = noise(gauge(task), x, None), noise(gauge(task, most=4), x, None)
    assert exact.error == 0 < some.error
    assert abs(some.mean - exact.mean) < 4 * some.error
    assert some.mean > 0.85 * exact.mean  # without its correction it would be 3/4


def test_whole_shards_have_no_noise_and_a_path_that_diverges_is_a_sentence() -> None:
    whole = replace(DIGITS, task={"name": "digits", "clients": 10, "batch_size": None})
    found = measure(whole, effort=BRIEF)
    assert found.constants.noise == 0.0
    with pytest.raises(ConfigError, match="lower rate"):
        measure(DIGITS, effort=replace(BRIEF, client_lr=1e30))


def test_progress_counts_passes_and_is_quiet_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[float, float]] = []

    class Told(Progress):
        def passed(self, passes: float, expected: float) -> None:
            told.append((passes, expected))
            super().passed(passes, expected)

    found = measure(DIGITS, effort=BRIEF, progress=Told("measuring", {}))
    assert [passes for passes, _ in told] == sorted(passes for passes, _ in told)
    assert found.passes == pytest.approx(told[0][1], rel=0.3)  # power iteration may settle sooner
    assert capsys.readouterr().err == ""


# ---- batches and drift ----------------------------------------------------------------------------
def test_batch_gradients_are_unbiased_and_fresh() -> None:
    """Their mean over many draws is the gradient of the shard; two draws differ."""
    family = alike(3, 4, seed=1)
    meter = gauge(family.task(np.zeros(4), 0.5, 8))
    x, clients = point(family, 3), torch.arange(3)
    whole = meter.gradients(x, clients)
    meter.batch = 4
    drawn = torch.stack([meter.gradients(x, clients) for _ in range(400)])
    assert not torch.equal(drawn[0], drawn[1])
    error = drawn.std(0) / math.sqrt(400)
    assert bool(((drawn.mean(0) - whole).abs() < 5 * error + 1e-12).all())
    before = meter.looked
    meter.gradients(x, clients)
    assert meter.looked - before == 12


def test_the_noise_of_batches_is_in_the_paths_estimates() -> None:
    family = alike(4, 3, seed=2)
    task = replace(family.task(np.ones(3), 0.5, 8), batch_size=2)
    exact, noisy = gauge(task), gauge(task)
    noisy.batch = 2
    paths = [curvature.path(meter, torch.ones(3, dtype=torch.float64), 3, 2, 0.01) for meter in (exact, noisy)]
    assert max(paths[0].smoothness) <= family.smoothness * (1 + 1e-9)
    assert min(paths[1].smoothness) > 3 * family.smoothness


def test_drift_is_the_mean_gradient_of_one_step_and_its_closed_form_of_two() -> None:
    """(A.1): one exact step moves the mean by the gradient of f; two by mean_i (2 I - lr H_i) grad F_i, over 2."""
    family = Family(*random_quadratic(4, 3, seed=5))
    meter, x = gauge(replace(family.task(), batch_size=None)), point(family, 1)
    assert drift(meter, x, 1, 0.1) == pytest.approx(float(meter.gradient(x).norm()), rel=1e-12)
    gradients = meter.gradients(x, torch.arange(4)).numpy()
    moved = np.mean([(2 * np.eye(3) - 0.1 * h) @ g for h, g in zip(family.matrices, gradients, strict=True)], axis=0)
    assert drift(meter, x, 2, 0.1) == pytest.approx(np.linalg.norm(moved) / 2, rel=1e-12)


def balanced(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with weights of classes."""
    return functional.cross_entropy(z, y, torch.tensor([5.0, 1.0, 0.2], dtype=z.dtype))


def centred(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits without the mean of their batch."""
    return functional.cross_entropy(z - z.mean(0), y)


@pytest.mark.parametrize("loss", [balanced, centred])
def test_the_noise_of_a_loss_that_is_no_mean_over_samples_is_that_of_batches(loss: Any) -> None:
    """Against every batch of two samples of three clients, drawn with replacement, by autograd; the model starts at
    zero, where all losses are the same."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(18, 4, generator=rng, dtype=torch.float64)
    y = torch.arange(18) % 3
    linear = torch.nn.Linear(4, 3, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(linear.weight)
    task = Task(linear, loss, (x, y), [range(6 * i, 6 * i + 6) for i in range(3)], batch_size=2)
    at = torch.randn(12, generator=rng, dtype=torch.float64)

    def gradient(rows: Any) -> torch.Tensor:
        w = at.reshape(3, 4).clone().requires_grad_()
        return torch.autograd.grad(loss(x[rows] @ w.T, y[rows]), w)[0].flatten()

    exact = [
        float(np.mean([(gradient([i, j]) - gradient(list(shard))).square().sum() for i in shard for j in shard]))
        for shard in task.shards
    ]
    meter = gauge(task)
    found = noise(meter, at, 500, 2)
    assert found.batch == 2
    for value, error, want in zip(found.of_clients, found.errors, exact, strict=True):
        assert abs(value - want) < 4 * error
        assert error < 0.15 * want
    assert torch.allclose(meter.gradient(at), torch.stack([gradient(list(shard)) for shard in task.shards]).mean(0))
    with pytest.raises(ConfigError, match="give a batch_size"):
        noise(meter, at, 10, None)
    plain = gauge(replace(task, loss=functional.cross_entropy))
    assert plain.of_samples
    assert noise(plain, at, None, 2).batch is None


def test_objectives_of_large_shards_are_over_the_whole_shard() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(600, 4, generator=rng, dtype=torch.float64), torch.arange(600) // 250
    task = Task(torch.nn.Linear(4, 3, dtype=torch.float64), balanced, (x, y), [range(300), range(300, 600)])
    meter = gauge(task)
    want = [float(balanced(task.model(x[rows]), y[rows]).detach()) for rows in map(list, task.shards)]
    assert meter.values(meter.model.initial()) == pytest.approx(want, rel=1e-12)


def test_measured_noise_says_that_it_is_of_batches() -> None:
    x, y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    task = Task(torch.nn.Linear(4, 3), balanced, (x, y), [range(10 * i, 10 * i + 10) for i in range(6)], batch_size=4)
    found = measure(Experiment({"name": "local-sgd", "n": 6}, task, device="cpu"), effort=replace(BRIEF, iterations=0))
    readings = {reading.name: reading for reading in found.readings}
    assert "sigma2" not in readings
    assert readings["sigma2_batch"].symbol == "sigma^2 of 4"
    assert found.constants.noise == readings["sigma2_batch"].value
    assert any("batches of 4, and not of single samples" in note for note in found.notes)
