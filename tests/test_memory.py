"""What there is of each client: the order of its jobs, checkpoints, where it lies, what it costs, and bad input."""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import step_oracle as oracle
from offbeat import ConfigError, Experiment, replay, resume, run
from offbeat.engines import memory
from offbeat.engines.engine import Engine
from offbeat.experiments.assemble import build, build_method
from offbeat.fleets.fleet import Fleet
from offbeat.fleets.make import build as build_fleet
from offbeat.keys import generator
from offbeat.method import Method
from offbeat.methods import METHODS
from offbeat.numerics.reference_loop import reference
from offbeat.records import Begun, Commit, Finished, Overwritten
from offbeat.runs.loop import Interrupted
from offbeat.runs.stored import Stored, read_model, read_trace
from offbeat.schedule.buffer import Buffer
from offbeat.schedule.clock import VirtualClock
from offbeat.schedule.horizon import Horizon
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled
from offbeat.tasks.quadratic import quadratic, random_quadratic
from stopped_runs import InterruptAt, figures, same_bits
from worlds import play, quadratic_world, times

CPU = torch.device("cpu")
STEPS = [3, 1, 4, 2, 6, 3, 5, 2]
SPEED = {"law": "uniform", "low": 0.01, "high": 0.05}
JITTER = {"law": "lognormal", "median": 1.0, "sigma": 1.0}
FLEETS: dict[str, dict[str, Any]] = {
    "quick-links": {"latency": 0.02},
    "jitter": {"latency": 0.1, "jitter": JITTER},
    "coming-and-going": {"latency": 0.1, "drop_out": 0.15, "mean_on": 0.8, "mean_off": 0.2},
}
POLICIES: dict[str, Any] = {
    "rounds": Rounds(size=4),
    "deadline": Rounds(size=4, deadline=0.3),
    "over-selection": Rounds(size=3, over_selection=2.0),
    "buffer": Buffer(3),
    "few-at-work": Buffer(2, concurrency=4),
    "fresh": Buffer(3, restart="fresh"),
    "broadcast": Buffer(3, restart="fresh", overlap=True),
    "sampled": Sampled(3),
    "sampled-in-turn": Sampled(3, overlap=False),
}
COMMITS = 14


def cases() -> list[Any]:
    made = []
    for fleet in FLEETS:
        for policy in POLICIES:
            if isinstance(POLICIES[policy], Rounds) and fleet != "coming-and-going":
                continue  # one job of each client at a time, and all of it is used
            made.append(pytest.param(fleet, policy))
    return made


def fleet_of(name: str, seed: int = 0) -> Fleet:
    return build_fleet("custom", 8, seed, step_seconds=SPEED, local_steps=STEPS, **FLEETS[name])


def clock_of(method: Method, fleet: Fleet, seed: int = 0) -> VirtualClock:
    return VirtualClock(method.when, fleet.durations(seed, 1.0, 1.0), generator(seed, "policy"))


def engine_of(method: Method, mode: Any = "wave", task: Any = None, **options: Any) -> Engine:
    return Engine(method, task or quadratic_world(), 0, CPU, "float64", mode, capture=False, **options)


def ahead(method: Method, fleet: Fleet, limit: int | None = None, mode: Any = "wave", window: int = 256) -> Engine:
    """As runs are made: looking ahead, in waves."""
    engine = engine_of(method, mode)
    engine.solver.limit = limit or engine.solver.limit
    list(engine.commits(Horizon(clock_of(method, fleet), window, COMMITS, memory=bool(method.what.local.remembers))))
    return engine


def eager(method: Method, fleet: Fleet, commits: int = COMMITS) -> Engine:
    """By hand, without looking ahead: each job alone at the moment when its client has finished it."""
    engine, rule = engine_of(method, "reference"), method.what
    server, held = engine.server, engine.solver.memory
    versions, begun, updates = [server.broadcast()], {}, {}
    for _, record in clock_of(method, fleet):
        if isinstance(record, Begun):
            begun[record[:2]] = record
        elif isinstance(record, Finished):
            job = begun[record[:2]]
            client = torch.tensor([job.client])
            start = {name: versions[job.version][name][None] for name in rule.broadcasts}
            if held is not None:
                start |= held.read(rule.local.remembers, client)
            made = reference(engine.solver.problem, start, [job]).updates
            if held is not None:
                held.write(client, {name: made.pop(name) for name in rule.local.remembers})
            updates[record[:2]] = made
        elif isinstance(record, Commit):
            jobs = [begun[name] for name in record.jobs]
            server.commit(
                jobs, {name: torch.cat([updates[job][name] for job in record.jobs]) for name in rule.local.sends}
            )
            versions.append(server.broadcast())
            if engine.version == commits:
                break
    return engine


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-12) -> None:
    assert torch.allclose(a, b, rtol=0, atol=atol), (a - b).abs().max()


def composed(name: str, policy: str) -> Method:
    return METHODS[name](when=POLICIES[policy], experimental=True)


# ---- the order of jobs --------------------------------------------------------------------------
@pytest.mark.parametrize(("fleet", "policy"), cases())
def test_looking_ahead_gives_what_a_plain_loop_gives(fleet: str, policy: str) -> None:
    """Finished jobs move the memory in the order in which they were finished, consumed or not."""
    method, world = composed("scaffold", policy), fleet_of(fleet)
    wanted, found = eager(method, world).server.state, ahead(method, world).server.state
    for vector in wanted:
        close(found[vector], wanted[vector])


@pytest.mark.parametrize(("fleet", "policy"), [("quick-links", "buffer"), ("coming-and-going", "fresh")])
def test_how_jobs_are_cut_into_waves_does_not_matter(fleet: str, policy: str) -> None:
    method, world = composed("fedagrac", policy), fleet_of(fleet)
    wanted = eager(method, world).server.state
    for options in ({}, {"limit": 1}, {"limit": 2}, {"limit": 3}, {"window": 1}):
        found = ahead(method, world, **options).server.state
        for vector in wanted:
            close(found[vector], wanted[vector])


@pytest.mark.parametrize("policy", ["rounds", "buffer", "sampled"])
def test_waves_equal_the_twin_in_any_composition(policy: str) -> None:
    method, world = composed("fedagrac", policy), fleet_of("coming-and-going")
    wave, twin = ahead(method, world), ahead(method, world, mode="reference")
    close(wave.server.state["model"], twin.server.state["model"])
    assert (wave.solver.waves, wave.jobs_computed) == (twin.solver.waves, twin.jobs_computed)


@pytest.mark.parametrize(("fleet", "policy"), cases())
def test_jobs_of_one_client_are_computed_once_and_in_order(fleet: str, policy: str) -> None:
    """And each as soon as a later one of that client is: no finished job is passed over."""
    method, world = composed("scaffold", policy), fleet_of(fleet)
    engine, waves = engine_of(method), []
    solve = engine.solve

    def noted(jobs: list[Begun]) -> Any:
        waves.append(jobs)
        return solve([job._replace(steps=1) for job in jobs])  # who computes what is a matter of the schedule alone

    engine.solve = noted  # type: ignore[method-assign]
    list(engine.commits(Horizon(clock_of(method, world), 256, COMMITS, memory=True)))
    assert all(len({job.client for job in wave}) == len(wave) for wave in waves)
    computed, finished = defaultdict(list), defaultdict(list)
    for job in (job for wave in waves for job in wave):
        computed[job.client].append(job.job)
    commits = 0
    for _, record in clock_of(method, world):
        if isinstance(record, Finished):
            finished[record.client].append(record.job)
        commits += isinstance(record, Commit)
        if commits == 8 * COMMITS:  # waves know no limit: the last one looked beyond it
            break
    for client, jobs in computed.items():
        assert jobs == finished[client][: len(jobs)]


def test_an_overwritten_job_moves_the_memory_and_a_lost_one_does_not() -> None:
    """The fleet that comes and goes has both, beside uploads that are lost on the way."""
    method, world = composed("scaffold", "fresh"), fleet_of("coming-and-going")
    begun, finished, overwritten, commits = set(), set(), set(), 0
    for _, record in clock_of(method, world):
        for kind, names in ((Begun, begun), (Finished, finished), (Overwritten, overwritten)):
            if isinstance(record, kind):
                names.add(record[:2])
        commits += isinstance(record, Commit)
        if commits == COMMITS:
            break
    assert overwritten & finished
    assert overwritten - finished
    engine = ahead(method, world)
    wanted = eager(method, world)
    close(engine.server.state["model"], wanted.server.state["model"])
    assert engine.solver.memory is not None
    assert wanted.solver.memory is not None
    for client, last in enumerate(engine.solver.last.tolist()):  # those whose memory has seen all that they finished
        assert (client, last) in finished
        if last == max(job for c, job in finished if c == client):
            close(engine.solver.memory.held["c_i"][client], wanted.solver.memory.held["c_i"][client])


def test_a_job_that_no_commit_consumes_leaves_no_result_behind() -> None:
    engine = ahead(composed("scaffold", "sampled-in-turn"), fleet_of("quick-links"))
    assert len(engine.results) <= 8
    assert engine.jobs_computed > 0
    assert len(engine.server.versions) < COMMITS


@given(
    steps=st.lists(st.integers(1, 7), min_size=2, max_size=5),
    seed=st.integers(0, 1000),
    name=st.sampled_from(["scaffold", "fedagrac", "fedagrac-avg", "fedagrac-reverse", "fedagrac-first"]),
    saving=st.booleans(),
    sampled=st.booleans(),
    start=st.sampled_from(["zeros", "gradients"]),
)
@settings(max_examples=12, deadline=None, database=None)
def test_waves_equal_the_twin_and_the_second_implementation(
    steps: list[int], seed: int, name: str, saving: bool, sampled: bool, start: str
) -> None:
    clients = len(steps)
    matrices, linear = random_quadratic(clients, 3, seed=seed)
    task, world = quadratic(matrices, linear, np.ones(3)), times(clients, steps=steps, seed=seed)
    options = {"weights": "uniform", "start": start, "n": clients - 1 if sampled else None}
    if name != "scaffold":
        options |= {"saving": saving, "calibration": 0.8}
    spec = {"name": name, "client_lr": 0.04, **options}
    engine, done = play(spec, task, world, commits=6)
    close(
        engine.server.state["model"],
        play(spec, task, world, commits=6, mode="reference")[0].server.state["model"],
        1e-10,
    )
    drawn = [[client for client, _ in commit.step.commit.jobs] for commit in done]
    parts = [1 / clients] * clients
    setting = (matrices, linear, parts, np.ones(3), [steps] * 6)
    if name != "scaffold":
        variant = {"fedagrac": "fedagrac"}.get(name, name.removeprefix("fedagrac-"))
        wanted = oracle.fedagrac(*setting, 0.04, 0.8, variant, 6, init=start, participants=drawn)[-1]
    elif start == "zeros":
        wanted = oracle.scaffold(*setting, 0.04, 6, 2, 1.0, participants=drawn)[-1]
    else:
        return
    close(engine.server.state["model"], torch.tensor(wanted), 1e-10)


@pytest.mark.parametrize("policy", [Rounds(), Rounds(size=4)], ids=["all", "n"])
def test_saving_changes_nothing_while_every_finished_update_arrives(policy: Rounds) -> None:
    plain, saving = (METHODS["fedagrac"](saving=saves, when=policy) for saves in (False, True))
    world = fleet_of("quick-links")
    close(ahead(plain, world).server.state["model"], ahead(saving, world).server.state["model"])


@pytest.mark.parametrize("policy", [Rounds(size=3, over_selection=2.0), Rounds(deadline=1.0)], ids=["over", "late"])
def test_saving_is_refused_where_finished_updates_are_lost(policy: Rounds) -> None:
    with pytest.raises(ConfigError, match="saving needs rounds that wait"):
        METHODS["fedagrac"](saving=True, when=policy)


def test_saving_is_refused_where_clients_leave_with_their_updates() -> None:
    with pytest.raises(ConfigError, match="saving needs every finished update"):
        build(experiment(method={"name": "fedagrac", "n": 3, "saving": True}, fleet=moving("coming-and-going")))


def test_a_sampled_fedagrac_is_the_same_however_it_is_said() -> None:
    world = fleet_of("quick-links").durations(0, 1.0, 1.0)
    by_n = play({"name": "fedagrac", "n": 4}, quadratic_world(), world)[0]
    by_when = play({"name": "fedagrac", "when": {"policy": "rounds", "size": 4}}, quadratic_world(), world)[0]
    close(by_n.server.state["nu"], by_when.server.state["nu"])
    close(by_n.server.state["model"], by_when.server.state["model"])


def test_fedlin_stands_still_while_its_rate_is_zero() -> None:
    spec = {"name": "fedlin", "client_lr": {"schedule": "stages", "values": [0.1, 0.0], "at": [1]}}
    world = fleet_of("quick-links").durations(0, 1.0, 1.0)
    one, two = (play(spec, quadratic_world(), world, commits=commits)[0].server.state["model"] for commits in (2, 4))
    close(one, two)


# ---- going on -----------------------------------------------------------------------------------
BATCH = 70  # large, so that a look at a whole shard takes few steps; no shard is a whole number of batches
TASK = {"name": "digits", "model": "logistic", "clients": 8, "split": "iid", "batch_size": BATCH}
RANDOM = {"law": "uniform", "low": 1, "high": 5, "mode": "random"}
KEEPERS: dict[str, dict[str, Any]] = {
    "scaffold": {"name": "scaffold", "n": 3},
    "scaffold-I": {"name": "scaffold", "n": 3, "option": "I", "start": "gradients"},
    "fedagrac": {"name": "fedagrac", "n": 3},
    "fedagrac-saving": {"name": "fedagrac", "n": 3, "saving": True, "calibration": 0.5},
    "fedagrac-zeros": {"name": "fedagrac", "start": "zeros", "first": "epoch"},
    "fedlin": {"name": "fedlin", "n": 3, "probes": 2},
}
AHEAD: dict[str, dict[str, Any]] = {
    "buffer": {"name": "fedagrac", "when": {"policy": "buffer", "size": 2}},
    "few-at-work": {"name": "scaffold", "when": {"policy": "buffer", "size": 2, "concurrency": 5}},
    "broadcast": {"name": "scaffold", "when": {"policy": "buffer", "size": 2, "restart": "fresh", "overlap": True}},
    "in-turn": {"name": "scaffold", "when": {"policy": "sampled", "size": 2, "overlap": False}},
}


def experiment(**given_here: Any) -> Experiment:
    usual = {"method": "scaffold", "task": TASK, "fleet": "equal", "device": "cpu", "until": {"commits": 12}}
    return Experiment(**usual | {"evaluate": {"every_commits": 3}} | given_here)


def moving(name: str) -> dict[str, Any]:
    return {"name": "custom", "step_seconds": SPEED, "local_steps": RANDOM, **FLEETS[name]}


def away(name: str) -> str:
    """Clients come and go where the method can bear it."""
    return "quick-links" if "saving" in name else "coming-and-going"


def halted_and_resumed(chosen: Experiment, path: Path, commits: tuple[int, ...]) -> None:
    straight = run(chosen, path / "straight")
    for at in commits:
        halted = path / f"halted-{at}"
        with pytest.raises(Interrupted):
            run(chosen, halted, InterruptAt(at))
        resumed = resume(halted)
        assert (halted / "trace.parquet").read_bytes() == (path / "straight/trace.parquet").read_bytes()
        assert same_bits(resumed.model, straight.model)
        assert figures(resumed) == figures(straight)
        assert resumed.metrics == straight.metrics
        ends = [Stored(directory).checkpoint().tensors for directory in (halted, path / "straight")]
        assert same_bits(*ends)
        assert any(name.startswith("memory/") for name in ends[0])


@pytest.mark.parametrize("name", KEEPERS)
def test_a_resumed_run_with_memory_is_the_straight_run_bit_for_bit(name: str, tmp_path: Path) -> None:
    method = KEEPERS[name] | {"client_lr": 0.02}
    halted_and_resumed(experiment(method=method, fleet=moving(away(name))), tmp_path, (5,))


@pytest.mark.parametrize("name", AHEAD)
def test_a_run_halted_while_waves_ran_ahead_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    fleet = "quick-links" if name == "broadcast" else "coming-and-going"
    method = AHEAD[name] | {"experimental": True, "client_lr": 0.02}
    halted_and_resumed(experiment(method=method, fleet=moving(fleet)), tmp_path, (5,))


@pytest.mark.parametrize(
    ("when", "fleet"),
    [
        ({"policy": "sampled", "size": 2}, "jitter"),
        ({"policy": "buffer", "size": 2, "restart": "fresh", "overlap": True}, "jitter"),
    ],
    ids=["sampled", "broadcast"],
)
def test_a_run_whose_uploads_overtake_each_other_can_be_resumed(when: Any, fleet: str, tmp_path: Path) -> None:
    method = {"name": "scaffold", "when": when, "experimental": True, "client_lr": 0.02}
    halted_and_resumed(experiment(method=method, fleet=moving(fleet), until={"commits": 16}), tmp_path, (7,))


def test_what_was_computed_ahead_is_in_the_checkpoint(tmp_path: Path) -> None:
    """Else the test above would test nothing."""
    chosen = experiment(method=AHEAD["buffer"] | {"experimental": True}, fleet=moving("quick-links"))
    with pytest.raises(Interrupted):
        run(chosen, tmp_path, InterruptAt(5))
    held = Stored(tmp_path).checkpoint().tensors
    kinds = {name.split("/")[0] for name in held}
    assert kinds >= {"server", "version", "result", "memory", "last"}
    assert not [name for name in held if name.startswith("result/") and name.endswith("/nu_i")]
    ahead_of = [name for name in held if name.startswith("result/") and name.endswith("/delta")]
    assert len(ahead_of) >= 2
    for name in ahead_of:
        client, job = map(int, name.split("/")[1:3])
        assert held["last"][client] >= job


@pytest.mark.parametrize("name", ["fedagrac-saving", "fedlin"])
def test_a_finished_run_with_memory_may_be_prolonged(name: str, tmp_path: Path) -> None:
    short = experiment(method=KEEPERS[name] | {"client_lr": 0.02}, fleet=moving("quick-links"), precision="float64")
    longer = run(experiment(**vars(short) | {"until": {"commits": 20}}), tmp_path / "longer")
    run(short, tmp_path / "short")
    prolonged = resume(tmp_path / "short", {"commits": 20})
    assert (tmp_path / "short/trace.parquet").read_bytes() == (tmp_path / "longer/trace.parquet").read_bytes()
    assert same_bits(prolonged.model, longer.model)


def test_a_replay_with_memory_has_the_same_bits(tmp_path: Path) -> None:
    for name in ("fedagrac-saving", "scaffold", "fedlin"):
        chosen = experiment(method=KEEPERS[name], fleet=moving(away(name)))
        made = run(chosen, tmp_path / name)
        assert same_bits(replay(tmp_path / name).model, made.model)


# ---- where it lies ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["scaffold", "fedagrac-saving", "fedlin"])
def test_the_place_of_the_memory_does_not_matter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    chosen = {"method": KEEPERS[name], "fleet": moving(away(name))}
    made = {place: run(experiment(**chosen, client_memory=place)) for place in ("auto", "device", "host", "file")}
    assert all(same_bits(made["device"].model, outcome.model) for outcome in made.values())
    assert list(scratch.iterdir()) == []


def test_a_run_may_go_on_with_its_memory_elsewhere(tmp_path: Path) -> None:
    chosen = experiment(method=KEEPERS["fedagrac"], fleet=moving("quick-links"), client_memory="file")
    straight = run(chosen)
    with pytest.raises(Interrupted):
        run(chosen, tmp_path, InterruptAt(5))
    written = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(written.replace('client_memory = "file"', 'client_memory = "host"'))
    with pytest.warns(UserWarning, match="was changed: client_memory"):
        resumed = resume(tmp_path)
    assert same_bits(resumed.model, straight.model)


@pytest.mark.parametrize("place", ["device", "host", "file"])
def test_rows_are_read_as_copies_and_written_by_client(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = memory.Memory(dict.fromkeys("ab", (3, torch.float64)), 5, CPU, place)
    assert held.place == place
    assert list(tmp_path.iterdir()) == []  # a file has no name from the start
    assert all(t.eq(0).all() and t.dtype == torch.float64 and t.shape == (5, 3) for t in held.held.values())
    rows = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    held.write(torch.tensor([3, 1]), {"a": rows})
    found = held.read(("a", "b"), torch.tensor([1, 3, 1, 0]))
    assert torch.equal(found["a"], torch.stack([rows[1], rows[0], rows[1], torch.zeros(3, dtype=torch.float64)]))
    assert found["b"].eq(0).all()
    found["a"].fill_(9)
    rows.fill_(7)
    assert held.held["a"].max() == 5
    assert held.read((), torch.tensor([1])) == {}


def rooms(monkeypatch: pytest.MonkeyPatch, **free: float) -> None:
    monkeypatch.setattr(memory, "free", lambda place, device: free[place])


def test_memory_goes_to_the_first_place_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    need = 5 * 3 * 8
    for free, place in (
        ({"device": 4 * need, "host": 0, "file": 0}, "device"),
        ({"device": 4 * need - 1, "host": 2 * need, "file": 0}, "host"),
        ({"device": 0, "host": 2 * need - 1, "file": 1.25 * need}, "file"),
    ):
        rooms(monkeypatch, **free)
        assert memory.Memory({"a": (3, torch.float64)}, 5, CPU).place == place


@pytest.mark.parametrize("place", ["auto", "device", "host", "file"])
def test_memory_that_fits_nowhere_is_refused_with_its_size_and_the_choices(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms(monkeypatch, device=1000, host=1000, file=1000)
    size = 2 * 8 * 650 * 4 / 2**30
    method = {"name": "fedagrac", "n": 3}
    with pytest.raises(ConfigError) as caught:
        build(experiment(method=method, client_memory=place))
    (sentence,) = caught.value.problems
    assert sentence.startswith(f"client_memory = '{place}': nu_i, kept sent of 8 clients take {size:.3g} GiB; ")
    for part in ("25% of what is free in the device's memory", "50% of what is free in the host's memory", "TMPDIR"):
        assert part in sentence
    with pytest.raises(ConfigError, match="take"):
        engine_of(build_method(method), client_memory=place, task=build_task())
    build(experiment(method={"name": "fednova"}, client_memory=place))  # remembers nothing


def build_task() -> Any:
    return build(experiment(method={"name": "fednova"})).task


def test_a_place_that_was_asked_for_is_not_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms(monkeypatch, device=1e12, host=1000, file=1e12)
    build(experiment(client_memory="device"))
    build(experiment(client_memory="file"))
    with pytest.raises(ConfigError, match="client_memory = 'host': c_i of 8 clients take"):
        build(experiment(client_memory="host"))


@pytest.mark.parametrize("place", ["disk", "", 3, True, ["file"]])
def test_a_place_that_is_none_is_refused(place: Any) -> None:
    with pytest.raises(ConfigError, match=r"client_memory = .*; it must be one of 'auto', 'device', 'host', 'file'"):
        build(experiment(client_memory=place))


def test_host_memory_is_a_plausible_number() -> None:
    assert 2**20 < memory.host_memory() < 2**50
    assert memory.free("device", CPU) == pytest.approx(memory.free("host", CPU), rel=0.5)


# ---- accounts -----------------------------------------------------------------------------------
FOUR = TASK | {"clients": 4}
OWN = [1, 2, 4, 6]  # two above their mean, two below
VECTOR = 650 * 4
ROUNDS = 3


def spent(method: dict[str, Any], commits: int = ROUNDS, **fleet: Any) -> Any:
    """A run where a vector takes 1 s up and nothing down, and a step 0.01 s."""
    slow = {"name": "custom", "step_seconds": 0.01, "up_mbit": VECTOR * 8e-6, "local_steps": OWN}
    method = {"n": None, "weights": "uniform", **method}
    return run(experiment(method=method, task=FOUR, fleet=slow | fleet, until={"commits": commits}))


SIZES = [len(shard) for shard in build(experiment(task=FOUR)).task.shards]
LOOKS = [math.ceil(size / BATCH) for size in SIZES]


@pytest.mark.parametrize(
    ("method", "down", "up", "opening", "looked"),
    [
        ({"name": "local-sgd"}, 1, [1, 1, 1, 1], 0, False),
        ({"name": "fedprox"}, 1, [1, 1, 1, 1], 0, False),
        ({"name": "fednova", "momentum": 0.5}, 1, [1, 1, 1, 1], 0, False),
        ({"name": "scaffold"}, 2, [2, 2, 2, 2], 0, False),
        ({"name": "scaffold", "start": "gradients"}, 2, [2, 2, 2, 2], 1, False),
        ({"name": "scaffold", "option": "I"}, 2, [2, 2, 2, 2], 0, True),
        ({"name": "fedagrac"}, 2, [2, 2, 2, 2], 1, False),
        ({"name": "fedagrac", "start": "zeros"}, 2, [2, 2, 2, 2], 0, False),
        ({"name": "fedagrac", "saving": True}, 2, [1, 1, 2, 2], 1, False),
        ({"name": "fedagrac", "saving": True, "start": "zeros"}, 2, [1, 1, 2, 2], 0, False),
        ({"name": "fedagrac-reverse", "saving": True}, 2, [2, 2, 1, 1], 1, False),
        ({"name": "fedagrac-avg", "saving": True}, 2, [1, 1, 1, 1], 1, False),
        ({"name": "fedagrac-first", "saving": True}, 2, [2, 2, 2, 2], 1, False),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_bytes_samples_and_time_by_hand(
    method: dict[str, Any], down: int, up: list[int], opening: int, looked: bool
) -> None:
    made = spent(method)
    looks = LOOKS if looked else [0] * 4
    assert made.bytes_up == VECTOR * (ROUNDS * sum(up) + 4 * opening)
    assert made.bytes_down == VECTOR * (ROUNDS * 4 * down + 4 * opening)
    assert made.client_steps == ROUNDS * sum(OWN)
    assert made.samples == ROUNDS * (BATCH * sum(OWN) + (sum(SIZES) if looked else 0)) + opening * sum(SIZES)
    longest = max(0.01 * (k + look) + vectors for k, look, vectors in zip(OWN, looks, up, strict=True))
    assert made.virtual_seconds == pytest.approx(ROUNDS * longest)


def test_fedlin_sends_one_vector_each_way_in_each_half() -> None:
    made = spent({"name": "fedlin", "probes": 3}, commits=2 * ROUNDS)
    assert made.bytes_up == made.bytes_down == 2 * ROUNDS * 4 * VECTOR
    assert made.client_steps == ROUNDS * (sum(OWN) + 4 * 3)
    assert made.samples == BATCH * made.client_steps
    assert made.virtual_seconds == pytest.approx(ROUNDS * (0.03 + 1 + 0.06 + 1))


def test_the_opening_counts_before_the_first_commit() -> None:
    first = spent({"name": "fedagrac"}, commits=1).metrics[0]
    assert (first["commit"], first["samples"]) == (0, sum(SIZES))
    assert first["bytes_up"] == first["bytes_down"] == 4 * VECTOR
    made = run(experiment(method="fedagrac", task=FOUR, until={"samples": sum(SIZES)}))
    assert made.commits == 0
    assert made.ended.startswith("samples")


def test_with_sampled_clients_who_is_fast_depends_on_the_cohort(tmp_path: Path) -> None:
    """Bytes are counted by the cohort's own mean, commit by commit."""
    fleet = {"name": "equal", "local_steps": OWN}
    method = {"name": "fedagrac", "n": 2, "saving": True, "weights": "uniform", "start": "zeros"}
    made = run(experiment(method=method, task=FOUR, fleet=fleet, until={"commits": 9}), tmp_path)
    jobs = [record.jobs for _, record in read_trace(tmp_path) if isinstance(record, Commit)]
    vectors = 0
    for commit in jobs:
        steps = [OWN[client] for client, _ in commit]
        vectors += sum(1 + (k > sum(steps) / len(steps)) for k in steps)
    assert made.bytes_up == VECTOR * vectors


def test_an_upload_without_a_step_law_takes_the_time_of_what_is_sent() -> None:
    fleet = {"name": "custom", "step_seconds": 0.01, "up_mbit": VECTOR * 8e-6}
    method = {"name": "fedagrac", "saving": True, "start": "zeros"}
    made = run(experiment(method=method, task=FOUR, fleet=fleet, until={"commits": 1}))
    assert made.bytes_up == 4 * VECTOR
    assert made.virtual_seconds == pytest.approx(0.1 + 1)


def test_bytes_of_a_resumed_saving_run_are_those_of_the_straight_one(tmp_path: Path) -> None:
    chosen = experiment(method=KEEPERS["fedagrac-saving"], fleet=moving("quick-links"))
    straight = run(chosen)
    with pytest.raises(Interrupted):
        run(chosen, tmp_path, InterruptAt(6))
    assert json.loads((tmp_path / "result.json").read_text())["bytes_up"] < straight.bytes_up
    resumed = resume(tmp_path)
    assert (resumed.bytes_up, resumed.bytes_down, resumed.samples) == (
        straight.bytes_up, straight.bytes_down, straight.samples,
    )  # fmt: skip


# ---- bad input ----------------------------------------------------------------------------------
STAGES = {"schedule": "stages", "values": [0.1, 0.5, 1.0], "at": [3, 7]}
BUFFER = {"policy": "buffer", "size": 2}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"name": "scaffold", "weights": [0.25] * 7 + [0.2]}, "weights sum to 1.95; they must sum to one"),
    ({"name": "fednova", "weights": []}, "weights sum to 0; they must sum to one"),
    ({"name": "fednova", "weights": [0.5, 0.5]}, "fednova: weights of 2 clients for a task of 8; give one for each"),
    ({"name": "fedlin", "weights": [1.0]}, "fedlin: weights of 1 clients for a task of 8"),
    ({"name": "fedprox", "weights": [-0.5, 1.5]}, "weights: client 0 has -0.5; a weight is a number, 0 or more"),
    ({"name": "fedprox", "weights": [0.5, "x"]}, "weights: client 1 has 'x'; a weight is a number"),
    ({"name": "fedprox", "weights": [0.5, math.inf]}, "weights: client 1 has inf; a weight is a number"),
    ({"name": "fedprox", "weights": [math.nan, 1.0]}, "weights: client 0 has nan; a weight is a number"),
    ({"name": "fedprox", "weights": [True, 0.0]}, "weights: client 0 has True; a weight is a number"),
    ({"name": "fedagrac", "weights": "sizes"}, "fedagrac: weights = 'sizes'; it must be one of 'size', 'uniform'"),
    ({"name": "fedagrac", "weights": 1}, "fedagrac: weights = 1; it must be one of 'size', 'uniform' or a list"),
    ({"name": "fedagrac", "calibration": -0.1}, "calibration = -0.1; a rate must be a positive number, or 0"),
    ({"name": "fedagrac", "calibration": math.inf}, "calibration = inf; it must be a finite number"),
    ({"name": "fedagrac", "calibration": "1"}, "calibration = '1'; it must be a number or a table"),
    ({"name": "fedagrac", "calibration": STAGES | {"at": [3]}}, "3 values for 1 changes; give one value more"),
    ({"name": "fedagrac", "calibration": STAGES | {"values": [1.0]}}, "1 values for 2 changes; give one value more"),
    ({"name": "fedagrac", "calibration": STAGES | {"values": [1, -1, 1]}}, "values has -1; give finite numbers, 0"),
    ({"name": "fedagrac", "calibration": STAGES | {"values": [1, "a", 1]}}, "values has 'a'; give finite numbers"),
    ({"name": "fedagrac", "calibration": STAGES | {"at": [3, 7.5]}}, "at = [3, 7.5]; it must be a list of versions"),
    ({"name": "fedagrac", "calibration": {"schedule": "stages", "values": [1]}}, "at is missing; it has no default"),
    ({"name": "fedagrac", "calibration": STAGES | {"schedule": "stage"}}, "did you mean 'stages'?"),
    ({"name": "scaffold", "client_lr": STAGES | {"values": [0, 1, 1]}}, "client_lr = 0; a rate must be a positive"),
    ({"name": "scaffold", "client_lr": 0}, "client_lr = 0.0; a rate must be a positive number"),
    ({"name": "fedagrac", "saving": True, "when": BUFFER, "experimental": True}, "saving needs rounds"),
    ({"name": "fedagrac", "saving": 1}, "fedagrac: saving = 1; it must be true or false"),
    ({"name": "fedagrac", "transit": "by_steps"}, "transit = 'by_steps'; it must be one of 'by-steps', 'mean'"),
    ({"name": "fedagrac", "transit": 2}, "transit = 2; it must be one of"),
    ({"name": "fedagrac-avg", "transit": "mean"}, "unknown option of fedagrac-avg 'transit'"),
    ({"name": "fedagrac", "first": "epochs"}, "first = 'epochs'; it must be one of 'gradient', 'epoch'"),
    ({"name": "fedagrac", "start": "zero"}, "start = 'zero'; it must be one of 'gradients', 'zeros'"),
    ({"name": "scaffold", "option": "i"}, "option = 'i'; it must be one of 'I', 'II'"),
    ({"name": "scaffold", "option": 2}, "option = 2; it must be one of 'I', 'II'"),
    ({"name": "scaffold", "option": ["I"]}, "option = ['I']; it must be one of 'I', 'II'"),
    ({"name": "scaffold", "when": BUFFER}, "scaffold is defined for the policy 'rounds', not for 'buffer'"),
    ({"name": "fedlin", "probes": 0}, "probes = 0; a job needs at least 1"),
    ({"name": "fedlin", "probes": 1.5}, "probes = 1.5; it must be a whole number"),
    ({"name": "fednova", "momentum": 1}, "momentum = 1; it must be below 1"),
    ({"name": "fednova", "momentum": -0.1}, "momentum = -0.1; it must be a number that is not negative"),
    ({"name": "fedprox", "proximal": -1}, "proximal = -1; it must be a number that is not negative"),
    ({"name": "scaffold", "n": 9}, "9 distinct clients asked for in a round"),
    ({"name": "fedagrac", "n": 3, "when": {"policy": "rounds"}}, "n has no effect with when"),
]


@pytest.mark.parametrize(("method", "said"), BAD, ids=[str(method)[:60] for method, _ in BAD])
def test_each_bad_option_gets_one_sentence(method: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(experiment(method=method))
    (sentence,) = caught.value.problems
    assert said in sentence


def test_good_weights_and_schedules_are_taken() -> None:
    build(experiment(method={"name": "fedagrac", "weights": [0.125] * 8, "calibration": STAGES}))
    build(experiment(method={"name": "fedagrac", "weights": [0.0, *[1 / 7] * 7], "calibration": 0}))
    build(experiment(method={"name": "fedagrac", "calibration": {"schedule": "stages", "values": [0.5], "at": []}}))


@pytest.mark.parametrize("name", ["local-sgd", "scaffold", "fednova", "fedagrac"])
def test_a_cohort_without_weight_does_not_spoil_the_model(name: str, tmp_path: Path) -> None:
    method = {"name": name, "n": 1, "weights": [0.0] * 7 + [1.0]}
    run(experiment(method=method, until={"commits": 4}), tmp_path)
    assert all(value.isfinite().all() for value in read_model(tmp_path).values())


def test_a_schedule_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError):
        build(experiment(method={"name": "fedagrac", "calibration": {"schedule": ["stages"]}}))


def test_probes_that_a_policy_makes_void_are_named() -> None:
    with pytest.raises(ConfigError, match="probes has no effect with when"):
        build(experiment(method={"name": "fedlin", "probes": 3, "when": {"policy": "rounds"}}))


@pytest.mark.parametrize(
    "calibration",
    [
        {"schedule": "step", "value": 0.5, "at": [2], "factor": -1.0},
        {"schedule": "cosine", "value": 0.5, "versions": 3, "floor": -1.0},
    ],
    ids=["step", "cosine"],
)
def test_a_calibration_that_turns_negative_is_refused(calibration: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build(experiment(method={"name": "fedagrac", "calibration": calibration}))


def test_bad_numbers_in_a_memory_stop_the_run_and_name_the_job(tmp_path: Path) -> None:
    from offbeat.errors import BadNumbers

    rate = {"schedule": "stages", "values": [0.05, 1e38], "at": [2]}
    with pytest.raises(BadNumbers, match="version 2"):
        run(experiment(method={"name": "scaffold", "client_lr": rate}), tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["commits"] == 2
    with pytest.raises(BadNumbers, match="version 2"):
        resume(tmp_path)
