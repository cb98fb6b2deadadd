"""Step laws: their numbers, their refusals, and what they do to time, traces and runs."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from offbeat import ConfigError, Experiment, cli, replay, resume, run
from offbeat.config import toml
from offbeat.experiments.assemble import build
from offbeat.fleets.distributions import LAST
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.make import build as build_fleet
from offbeat.fleets.steps import STEP_LAWS, Drawn, Fixed, step_plan, uniform_steps
from offbeat.methods import METHODS
from offbeat.records import Arrived, Begun, Start
from offbeat.runs.loop import Interrupted
from offbeat.runs.stored import read_trace
from offbeat.schedule.device import OWN_STEPS
from stopped_runs import InterruptAt, same_bits

DIGITS = {"name": "digits", "model": "logistic", "clients": 6, "split": "iid"}
AVERAGE = {"name": "local-sgd", "n": None}
GAUSSIAN = {"law": "gaussian", "mean": 5, "variance": 16}
UNIFORM = {"law": "uniform", "low": 2, "high": 5}
RANDOM = UNIFORM | {"mode": "random"}


def plan(spec: Any, clients: int = 4, seed: int = 0, seconds: Any = None) -> Any:
    return step_plan(spec, np.ones(clients) if seconds is None else np.asarray(seconds), seed)


def fixed(spec: Any, clients: int = 4, seed: int = 0, seconds: Any = None) -> np.ndarray:
    made = plan(spec, clients, seed, seconds)
    assert isinstance(made, Fixed)
    assert all(type(steps) is int for steps in made.steps)
    return np.array(made.steps)


def drawn(spec: Any, clients: int = 4, jobs: int = 500, seed: int = 0) -> np.ndarray:
    made = plan(spec, clients, seed)
    assert isinstance(made, Drawn)
    return np.array([[made(client, job) for job in range(jobs)] for client in range(clients)])


def refused(spec: Any, name: str = "equal", clients: int = 3, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build_fleet(name, clients, local_steps=spec, **options)
    return caught.value.problems


def experiment(**given_here: Any) -> Experiment:
    usual = {"method": AVERAGE, "task": DIGITS, "fleet": "equal", "device": "cpu", "until": {"commits": 4}}
    return Experiment(**usual | {"evaluate": {"every_commits": 2}} | given_here)


def problems(**given_here: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        build(experiment(**given_here))
    return caught.value.problems


def begun(directory: Path) -> list[Begun]:
    return [record for _, record in read_trace(directory) if isinstance(record, Begun)]


# ---- numbers ------------------------------------------------------------------------------------
def test_a_number_and_a_list_are_short_for_laws() -> None:
    assert plan(7, 3) == plan({"law": "constant", "value": 7}, 3) == Fixed((7, 7, 7))
    assert plan([3, 1, 2], 3) == plan((3, 1, 2), 3) == plan({"law": "given", "values": [3, 1, 2]}, 3)
    assert plan([3, 1, 2], 3) == Fixed((3, 1, 2))


def normal_moments(mean: float, variance: float, most: int = 400) -> tuple[float, float]:
    """Mean and variance of a normal number rounded, what falls below 1 being 1."""
    k = np.arange(1, most + 1)
    above = ndtr((k + 0.5 - mean) / variance**0.5)
    weight = np.diff(np.concatenate([[0.0], above]))
    first = float(weight @ k)
    return first, float(weight @ (k - first) ** 2)


@pytest.mark.parametrize("mode", ["fixed", "random"])
@pytest.mark.parametrize(("mean", "variance"), [(50, 9), (5, 16), (1, 100.0), (20.4, 0.5)])
def test_gaussian_numbers_are_normal_rounded_and_at_least_one(mean: float, variance: float, mode: str) -> None:
    spec = {"law": "gaussian", "mean": mean, "variance": variance, "mode": mode}
    found = fixed(spec, 20000, seed=3) if mode == "fixed" else drawn(spec, 8, 1000, seed=3).ravel()
    first, second = normal_moments(mean, variance)
    assert found.min() >= 1
    assert abs(found.mean() - first) < 5 * (second / len(found)) ** 0.5
    assert abs(found.var() / second - 1) < 0.15
    if mean < 10:
        assert (found == 1).mean() == pytest.approx(ndtr((1.5 - mean) / variance**0.5), abs=0.02)


def test_a_gaussian_without_variance_is_constant() -> None:
    for mode in ("fixed", "random"):
        made = plan({"law": "gaussian", "mean": 6.4, "variance": 0, "mode": mode})
        assert {made(client, job) for client in range(4) for job in range(9)} == {6}


@pytest.mark.parametrize("mode", ["fixed", "random"])
def test_uniform_numbers_take_both_ends_and_all_between_equally(mode: str) -> None:
    spec = UNIFORM | {"mode": mode}
    found = fixed(spec, 8000) if mode == "fixed" else drawn(spec, 8, 1000).ravel()
    values, counts = np.unique(found, return_counts=True)
    assert values.tolist() == [2, 3, 4, 5]
    assert np.abs(counts / 2000 - 1).max() < 0.12
    assert set(fixed({"law": "uniform", "low": 3, "high": 3}, 50)) == {3}


def test_no_draw_is_above_the_high_end() -> None:
    for low, high in ((1, 9), (100, 109), (1, 10**6)):
        ends = np.floor(uniform_steps(low, high)(np.array([1 - LAST, LAST])))
        assert ends.tolist() == [low, high]


@pytest.mark.parametrize(("clients", "wanted"), [(1, [2]), (2, [2, 10]), (5, [2, 4, 6, 8, 10]), (9, range(2, 11))])
def test_linear_numbers_run_from_end_to_end(clients: int, wanted: Any) -> None:
    assert fixed({"law": "linear", "low": 2, "high": 10}, clients).tolist() == list(wanted)


def test_linear_numbers_are_the_nearest_whole_ones() -> None:
    assert fixed({"law": "linear", "low": 1, "high": 2}, 4).tolist() == [1, 1, 2, 2]
    assert np.all(np.diff(fixed({"law": "linear", "low": 1, "high": 500}, 37)) >= 0)


def test_the_extreme_law_has_one_fast_client() -> None:
    spec = {"law": "extreme", "slow": 2, "fast": 90}
    for client in range(4):
        found = fixed(spec | {"client": client})
        assert (found[client], sorted(found)) == (90, [2, 2, 2, 90])
    chosen = [int(fixed(spec, seed=seed).argmax()) for seed in range(60)]
    assert all(sorted(fixed(spec, seed=seed)) == [2, 2, 2, 90] for seed in range(9))
    assert set(chosen) == {0, 1, 2, 3}
    assert chosen == [int(fixed(spec, seed=seed).argmax()) for seed in range(60)]
    assert fixed({"law": "extreme", "slow": 9, "fast": 1, "client": 1}).tolist() == [9, 1, 9, 9]
    assert fixed(spec, 1).tolist() == [90]


def test_a_deadline_gives_steps_in_proportion_to_speed() -> None:
    seconds = [0.1, 0.2, 0.05, 0.3]
    assert fixed({"law": "deadline", "seconds": 0.6}, 4, 0, seconds).tolist() == [6, 3, 12, 2]
    assert fixed({"law": "deadline", "seconds": 0.3}, 4, 0, seconds).tolist() == [3, 1, 6, 1]
    assert fixed({"law": "deadline", "seconds": 1}, 4, 0, seconds).tolist() == [10, 5, 20, 3]
    fleet = build_fleet("lognormal", 300, local_steps={"law": "deadline", "seconds": 5.0})
    assert isinstance(fleet.local_steps, Fixed)
    used = np.array(fleet.local_steps.steps) * fleet.step_seconds
    assert np.all((used <= 5.0 + 1e-9) & (used > 5.0 - fleet.step_seconds - 1e-9))


# ---- keys ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", [GAUSSIAN, UNIFORM, {"law": "extreme", "slow": 1, "fast": 9}])
def test_a_fixed_law_says_the_same_for_every_job_and_follows_from_the_seed(spec: Any) -> None:
    made = plan(spec, 50, seed=4)
    for client in (0, 7, 49):
        assert {made(client, job) for job in range(20)} == {made.steps[client]}
    assert plan(spec, 50, seed=4) == made != plan(spec, 50, seed=5)


def test_a_fixed_number_does_not_depend_on_how_many_clients_there_are() -> None:
    assert fixed(GAUSSIAN, 100)[:30].tolist() == fixed(GAUSSIAN, 30).tolist()


def test_a_random_law_is_keyed_by_seed_client_and_job() -> None:
    table = drawn(RANDOM, 5, 40, seed=1)
    again = plan(RANDOM, 5, seed=1)
    order = [(client, job) for job in reversed(range(40)) for client in reversed(range(5))]
    assert all(again(client, job) == table[client, job] for client, job in order)
    assert not np.array_equal(table, drawn(RANDOM, 5, 40, seed=2))
    assert all(len(set(row)) > 1 for row in table.tolist())
    assert len({tuple(row) for row in table.tolist()}) == 5
    assert np.array_equal(table, drawn(RANDOM, 9, 40, seed=1)[:5])


@given(low=st.integers(1, 60), more=st.integers(0, 60), clients=st.integers(1, 30), seed=st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_every_law_stays_within_its_ends(low: int, more: int, clients: int, seed: int) -> None:
    for law in ("uniform", "linear"):
        found = fixed({"law": law, "low": low, "high": low + more}, clients, seed)
        assert len(found) == clients
        assert low <= found.min() <= found.max() <= low + more
    one = plan({"law": "uniform", "low": low, "high": low + more, "mode": "random"}, clients, seed)
    assert low <= one(clients - 1, 3) <= low + more


# ---- refusals -----------------------------------------------------------------------------------
BAD: list[tuple[Any, str]] = [
    (0, "value = 0; a job needs at least 1 step"),
    (-3, "value = -3; a job needs at least 1 step"),
    ({"law": "constant", "value": 0, "mode": "random"}, "value = 0; a job needs at least 1 step"),
    ({"law": "constant", "value": 2.0}, "value = 2.0; it must be a whole number"),
    ({"law": "gaussian", "mean": 0.9, "variance": 1}, "mean = 0.9; a job needs at least 1 step"),
    ({"law": "gaussian", "mean": float("inf"), "variance": 1}, "mean = inf"),
    ({"law": "gaussian", "mean": float("nan"), "variance": 1}, "mean = nan; it must be a number"),
    ({"law": "gaussian", "mean": 5, "variance": -1}, "variance = -1; it must be a finite number >= 0"),
    ({"law": "gaussian", "mean": 5, "variance": float("inf")}, "variance = inf"),
    ({"law": "gaussian", "mean": 5}, "variance is missing; it has no default"),
    ({"law": "gaussian", "mean": 5, "variance": 1, "varience": 1}, "'varience': did you mean 'variance'?"),
    ({"law": "uniform", "low": 0, "high": 3}, "low = 0; a job needs at least 1 step"),
    ({"law": "uniform", "low": 5, "high": 3}, "low = 5 is above high = 3; swap them"),
    ({"law": "uniform", "low": 1, "high": 3.5}, "high = 3.5; it must be a whole number"),
    ({"law": "uniform", "low": 1, "high": True}, "high = True; it must be a whole number"),
    ({"law": "uniform", "low": 1, "high": 2, "seed": 3}, "unknown option of local_steps (law 'uniform') 'seed'"),
    ({"law": "linear", "low": 0, "high": 3}, "low = 0; a job needs at least 1 step"),
    ({"law": "linear", "low": 4, "high": 3}, "low = 4 is above high = 3; swap them"),
    ({"law": "linear", "low": 1, "high": 3, "mode": "random"}, "mode = 'random' goes with constant, gaussian, uniform"),
    ({"law": "deadline", "seconds": 1.0, "mode": "random"}, "mode = 'random' goes with constant, gaussian, uniform"),
    ({"law": "extreme", "slow": 0, "fast": 3}, "slow = 0; a job needs at least 1 step"),
    ({"law": "extreme", "slow": 1, "fast": 0}, "fast = 0; a job needs at least 1 step"),
    ({"law": "extreme", "slow": 1, "fast": 3, "client": 3}, "client = 3; clients are numbered 0 to 2"),
    ({"law": "extreme", "slow": 1, "fast": 3, "client": -1}, "client = -1; clients are numbered 0 to 2"),
    ({"law": "extreme", "slow": 1, "fast": 3, "client": 1.0}, "client = 1.0; it must be a whole number or none"),
    ({"law": "deadline", "seconds": 0}, "seconds = 0; it must be a finite number > 0"),
    ({"law": "deadline", "seconds": -1.0}, "seconds = -1.0; it must be a finite number > 0"),
    ({"law": "deadline", "seconds": float("inf")}, "seconds = inf; it must be a finite number"),
    ({"law": "deadline", "seconds": 0.009}, "client 0 (0.01 s per step) does not finish one step in 0.009 s"),
    ([1, 2], "2 numbers for 3 clients; give one for each"),
    ([], "0 numbers for 3 clients; give one for each"),
    ([1, 2, 3, 4], "4 numbers for 3 clients; give one for each"),
    ([1, 0, 3], "client 1 has 0; a job needs at least 1"),
    ([1, 2.5, 3], "give a list of whole numbers"),
    ([1, True, 3], "give a list of whole numbers"),
    ([1, "2", 3], "give a list of whole numbers"),
    ({"law": "given", "values": 3}, "values = 3; it must be a list"),
    ({"law": "given"}, "values is missing; it has no default"),
    ({"law": "gausian", "mean": 5, "variance": 1}, "unknown law of local_steps 'gausian': did you mean 'gaussian'?"),
    ({"law": "uniform", "low": 1, "high": 2, "mode": "randm"}, "mode = 'randm'; it is 'fixed' (once per client)"),
    ({"law": "uniform", "low": 1, "high": 2, "mode": ["random"]}, "mode = ['random']; it is 'fixed'"),
    (True, "local_steps = True; give a number, a list, or a table"),
    (2.5, "local_steps = 2.5; give a number, a list, or a table"),
    ("ten", "local_steps = 'ten'; give a number, a list, or a table"),
]


@pytest.mark.parametrize(("spec", "said"), BAD, ids=[str(spec)[:50] for spec, _ in BAD])
def test_each_bad_law_gets_one_sentence(spec: Any, said: str) -> None:
    (sentence,) = refused(spec)
    assert sentence.startswith("fleet 'equal': ") or "unknown option" in sentence
    assert said in sentence


def test_a_step_that_takes_no_time_has_no_deadline() -> None:
    (sentence,) = refused({"law": "deadline", "seconds": 1.0}, step_seconds=0.0)
    assert "client 0 (0 s per step) takes no time at all for a step" in sentence


def test_many_clients_without_steps_are_counted() -> None:
    (sentence,) = refused([0, 1, 0, -2, 0, 0], clients=6)
    assert "client 0 has 0, client 2 has 0, client 3 has -2 and 2 more have too few" in sentence


def test_several_problems_are_named_together() -> None:
    found = refused({"law": "extreme", "slow": 0, "fast": 0, "fats": 2})
    assert len(found) == 1  # what has no place in the law comes first
    found = refused({"law": "unifrom", "low": 1, "high": 2}, latency="x")
    assert len(found) == 2
    assert "did you mean 'uniform'" in found[1]


@pytest.mark.parametrize(
    "spec",
    [
        10**30,
        [1, 2, 10**30],
        {"law": "gaussian", "mean": 1e30, "variance": 0},
        {"law": "gaussian", "mean": 5, "variance": 1e60},
        {"law": "deadline", "seconds": 1e300},
    ],
    ids=str,
)
def test_a_number_of_steps_that_nobody_could_take_is_refused(spec: Any) -> None:
    (sentence,) = refused(spec)
    assert "local_steps" in sentence


def test_a_law_that_is_no_name_is_refused() -> None:
    (sentence,) = refused({"law": ["uniform"], "low": 1, "high": 2})
    assert "law" in sentence


def test_a_table_without_a_law_is_told_so() -> None:
    (sentence,) = refused({"low": 1, "high": 2})
    assert "None" not in sentence


@pytest.mark.parametrize("spec", [[1, 2, 3], {"law": "extreme", "slow": 1, "fast": 2, "client": 2}], ids=str)
def test_a_good_law_is_not_blamed_for_another_mistake(spec: Any) -> None:
    (sentence,) = refused(spec, latensy=1.0)
    assert "did you mean 'latency'?" in sentence


@pytest.mark.parametrize("seed", ["a", 1.5])
def test_a_bad_seed_beside_a_law_is_refused(seed: Any) -> None:
    (sentence,) = refused(UNIFORM, seed=seed)
    assert "seed" in sentence


# ---- through fleets and configs -----------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["custom", "dlsgd-cifar10", "equal", "exponential", "lognormal", "straggling", "uniform"]
)
@pytest.mark.parametrize("spec", [3, UNIFORM, RANDOM, {"law": "linear", "low": 1, "high": 8}], ids=str)
def test_every_fleet_takes_a_law(name: str, spec: Any) -> None:
    fleet = build_fleet(name, 8, 5, local_steps=spec)
    assert fleet.problems() == []
    assert fleet.local_steps == plan(spec, 8, 5) or isinstance(fleet.local_steps, Drawn)
    durations = fleet.durations(5, 1.0, 1.0)
    assert durations.own_steps is fleet.local_steps


def test_the_law_is_drawn_by_the_seed_of_the_run() -> None:
    found = {seed: build(experiment(fleet={"name": "equal", "local_steps": GAUSSIAN}, seed=seed)) for seed in (0, 1)}
    assert all(made.fleet.local_steps == plan(GAUSSIAN, 6, seed) for seed, made in found.items())


def test_a_law_that_does_not_suit_the_task_is_refused_at_build() -> None:
    (sentence,) = problems(fleet={"name": "equal", "local_steps": [1, 2]})
    assert sentence == "fleet 'equal': local_steps: 2 numbers for 6 clients; give one for each"


@pytest.mark.parametrize("name", ["local-sgd", "scaffold", "fedbuff", "dlsgd-homo", "fedlin", "fedasync", "fedagrac"])
def test_steps_from_both_sides_are_refused(name: str) -> None:
    options = {"local-sgd": {"n": 3}, "fedbuff": {"buffer_size": 2}, "dlsgd-homo": {"n": 2}}.get(name, {})
    method = {"name": name, "local_steps": 4, **options}
    (sentence,) = problems(method=method, fleet={"name": "equal", "local_steps": 4})
    assert sentence == (
        f"{name} orders local_steps = 4 of everyone, but the fleet has a step law of its own; "
        "leave out the one or the other"
    )
    build(experiment(method=method))


@pytest.mark.parametrize("as_object", [False, True])
def test_steps_that_the_policy_orders_conflict_with_a_law_too(as_object: bool) -> None:
    method: Any = {"name": "local-sgd", "when": {"policy": "rounds", "size": 2, "steps": 5}}
    if as_object:
        method = METHODS["local-sgd"](n=2, local_steps=5)
    (sentence,) = problems(method=method, fleet={"name": "equal", "local_steps": 3})
    assert "step law" in sentence


@pytest.mark.parametrize("name", ["minibatch-sgd", "asysg"])
def test_methods_of_one_gradient_keep_one_step_under_a_law(name: str, tmp_path: Path) -> None:
    options = {"n": 2} if name == "asysg" else {}
    run(experiment(method={"name": name, **options}, fleet={"name": "equal", "local_steps": 7}), tmp_path)
    assert {record.steps for record in begun(tmp_path)} == {1}


def test_without_a_law_clients_take_the_usual_number(tmp_path: Path) -> None:
    run(experiment(), tmp_path)
    assert {record.steps for record in begun(tmp_path)} == {OWN_STEPS}


# ---- time and trace -----------------------------------------------------------------------------
@pytest.mark.parametrize("spec", [GAUSSIAN, {"law": "deadline", "seconds": 0.5}, [1, 9, 2, 4, 4, 3]], ids=str)
@pytest.mark.parametrize("name", ["uniform"])
def test_a_round_lasts_as_long_as_its_longest_job(spec: Any, name: str, tmp_path: Path) -> None:
    chosen = experiment(fleet={"name": name, "local_steps": spec})
    made = run(chosen, tmp_path)
    fleet = build(chosen).fleet
    steps = fleet.local_steps.steps  # type: ignore[union-attr]
    assert made.virtual_seconds == pytest.approx(4 * max(steps * fleet.step_seconds))
    assert made.client_steps == 4 * sum(steps)
    rows = read_trace(tmp_path)
    assert {record.steps for _, record in rows if isinstance(record, Start)} == {0}
    assert {(r.client, r.steps) for _, r in rows if isinstance(r, Begun | Arrived)} == set(enumerate(steps))


def test_a_random_law_makes_rounds_of_different_length(tmp_path: Path) -> None:
    chosen = experiment(fleet={"name": "equal", "local_steps": RANDOM}, until={"commits": 12})
    made = run(chosen, tmp_path)
    law = plan(RANDOM, 6)
    found = begun(tmp_path)
    assert all(record.steps == law(record.client, record.job) for record in found)
    assert made.virtual_seconds == pytest.approx(0.01 * sum(max(law(c, j) for c in range(6)) for j in range(12)))
    assert made.client_steps == sum(record.steps for record in found)
    assert made.samples == 10 * made.client_steps


@pytest.mark.parametrize("fleet", ["plain", "coming"])
@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedagrac", "n": 3},
        {"name": "fedbuff", "buffer_size": 2},
        {"name": "dlsgd-hetero", "n": 2},
    ],
    ids=lambda method: method["name"],
)
def test_resumed_and_replayed_runs_of_a_random_law_have_the_same_bits(method: Any, fleet: str, tmp_path: Path) -> None:
    away = {"drop_out": 0.1, "mean_on": 0.5, "mean_off": 0.2} if fleet == "coming" else {}
    spec = {"name": "custom", "step_seconds": {"law": "uniform", "low": 0.01, "high": 0.05}, "latency": 0.02, **away}
    chosen = experiment(method=method, fleet=spec | {"local_steps": RANDOM}, until={"commits": 10})
    straight = run(chosen, tmp_path / "straight")
    with pytest.raises(Interrupted):
        run(chosen, tmp_path / "halted", InterruptAt(4))
    resumed = resume(tmp_path / "halted")
    assert (tmp_path / "halted/trace.parquet").read_bytes() == (tmp_path / "straight/trace.parquet").read_bytes()
    assert same_bits(resumed.model, straight.model)
    assert resumed.metrics == straight.metrics
    assert same_bits(replay(tmp_path / "straight").model, straight.model)
    again = run(Experiment.of(toml.read(tmp_path / "straight/config.toml")), tmp_path / "again")
    assert same_bits(again.model, straight.model)
    assert len({record.steps for record in begun(tmp_path / "again")}) == 4


def test_a_changed_law_is_refused_at_resume(tmp_path: Path) -> None:
    chosen = experiment(fleet={"name": "equal", "local_steps": {"law": "uniform", "low": 2, "high": 5}})
    with pytest.raises(Interrupted):
        run(chosen, tmp_path, InterruptAt(2))
    written = (tmp_path / "config.toml").read_text()
    assert "high = 5" in written
    (tmp_path / "config.toml").write_text(written.replace("high = 5", "high = 90"))
    with pytest.raises(Exception, match="was changed since the run began"):
        resume(tmp_path)


# ---- the command line ---------------------------------------------------------------------------
@pytest.fixture
def offbeat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """`offbeat ARGUMENTS` in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("warnings.showwarning", lambda *_: None)
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["offbeat", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    yield call
    signal.signal(signal.SIGTERM, handler)


CONFIG = (
    'device = "cpu"\n[method]\nname = "fednova"\n[task]\nname = "digits"\nmodel = "logistic"\nclients = 6\n'
    '[fleet]\nname = "equal"\nlocal_steps = {law = "linear", low = 1, high = 6}\n[until]\ncommits = 2\n'
)
Call = Callable[..., tuple[Any, str, str]]


def test_a_config_file_and_the_command_line_say_a_law(offbeat: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CONFIG)
    laws: dict[str, tuple[tuple[str, ...], list[int]]] = {
        "file": ((), [1, 2, 3, 4, 5, 6]),
        "number": (("--set", "fleet.local_steps=4"), [4] * 6),
        "list": (("--set", "fleet.local_steps=[6, 5, 4, 3, 2, 1]"), [6, 5, 4, 3, 2, 1]),
        "table": (("--set", "fleet.local_steps={law = 'extreme', slow = 1, fast = 9, client = 2}"), [1, 1, 9, 1, 1, 1]),
        "part": (("--set", "fleet.local_steps.high=11"), [1, 3, 5, 7, 9, 11]),
    }
    for name, (sets, wanted) in laws.items():
        code, out, err = offbeat("run", "mine.toml", *sets, "--out", name, "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["client_steps"] == 2 * sum(wanted)
        assert {(r.client, r.steps) for r in begun(tmp_path / name)} == set(enumerate(wanted))
        assert json.loads(offbeat("replay", name, "--json")[1])["same_bits"] is True


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ("fleet.local_steps=0", "fleet 'equal': local_steps: value = 0; a job needs at least 1 step"),
        ("fleet.local_steps=[1, 2]", "fleet 'equal': local_steps: 2 numbers for 6 clients; give one for each"),
        ("fleet.local_steps.law=linaer", "unknown law of local_steps 'linaer': did you mean 'linear'?"),
        ("fleet.local_steps.hihg=3", "unknown option of local_steps (law 'linear') 'hihg': did you mean 'high'?"),
        ("method.local_steps=3", "fednova orders local_steps = 3 of everyone, but the fleet has a step law of its own"),
        ("fleet.local_step=3", "unknown option of fleet 'equal' 'local_step'"),
    ],
)
def test_a_bad_law_on_the_command_line_is_one_sentence(offbeat: Call, tmp_path: Path, sets: str, said: str) -> None:
    (tmp_path / "mine.toml").write_text(CONFIG)
    code, out, err = offbeat("run", "mine.toml", "--set", sets)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_near_miss_of_local_steps_is_guessed() -> None:
    with pytest.raises(ConfigError, match="did you mean 'local_steps'"):
        build_fleet("equal", 3, local_step=3)


def test_a_fleet_object_may_carry_a_plan() -> None:
    from dataclasses import replace

    plain: Fleet = build_fleet("equal", 6)
    assert build(experiment(fleet=replace(plain, local_steps=Fixed((1, 2, 3, 4, 5, 6))))).fleet.local_steps is not None
    (sentence,) = problems(fleet=replace(plain, local_steps=Fixed((1, 2))))
    assert "2 numbers for 6 clients" in sentence


def test_every_law_is_under_test() -> None:
    assert set(STEP_LAWS) == {spec["law"] for spec, _ in BAD if isinstance(spec, dict)} - {"gausian"}
