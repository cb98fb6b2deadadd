"""What travels: stages by themselves, chained, and around methods."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat import ConfigError, Experiment, keys, replay, resume, run
from offbeat.experiments.assemble import build, build_method
from offbeat.method import passed
from offbeat.methods import METHODS
from offbeat.schedule.hybrid import Hybrid
from offbeat.stages import STAGES, Chain, bfloat16, float16, int8, received, staged
from worlds import final, play, quadratic_world, times

WORLD = times(8, steps=(3, 1, 4, 2, 6, 3, 5, 2))
every_stage = pytest.mark.parametrize("name", sorted(STAGES))
SMALL = {"name": "digits", "clients": 6, "model": "logistic"}
NUMBERS = 64 * 10 + 10


def vector(size: int = 300, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Largest:
    """A stage from outside: the `k` largest numbers, and where they stand."""

    k: int
    size: int
    name: str = "largest"

    def encode(self, vector: Tensor, key: Any) -> tuple[Tensor, ...]:
        _, places = vector.abs().topk(min(self.k, vector.shape[0]))
        return vector[places], places.int()

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        values, places = parts
        return values.new_zeros(self.size).scatter(0, places.long(), values)

    def bytes(self, dimension: int) -> int:
        return self.k * (4 + 4)


# ---- by themselves ------------------------------------------------------------------------------
@every_stage
@pytest.mark.parametrize("size", [1, 5, 2048, 2049, 5000])
def test_bytes_are_those_of_what_is_encoded(name: str, size: int) -> None:
    stage = STAGES[name]()
    parts = stage.encode(vector(size).float(), 3)
    assert stage.bytes(size) == sum(part.nbytes for part in parts)
    assert stage.decode(parts).shape == (size,)


@every_stage
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_vectors_at_once_are_as_one_by_one(name: str, dtype: torch.dtype) -> None:
    stage, rows, key = STAGES[name](), torch.stack([vector(seed=i) for i in range(4)]).to(dtype), torch.arange(4)
    together = received(stage, rows, key)
    assert together.dtype == dtype
    for i in range(4):
        assert torch.equal(together[i], passed(stage, rows[i], key[i]))
        assert torch.equal(together[i], passed(stage, rows[i], i))


@pytest.mark.parametrize(("stage", "bits"), [(float16(), 11), (bfloat16(), 8)])
def test_short_floats_are_near(stage: Any, bits: int) -> None:
    x = vector()
    assert ((passed(stage, x, 0) - x).abs() <= x.abs() * 2.0**-bits).all()
    assert not torch.equal(passed(stage, x, 0), x)


def test_int8_is_right_in_the_mean_and_within_a_level() -> None:
    """Each number is one of its two neighbours, and the mean over keys is the number."""
    x, stage, draws = vector(64), int8(32), 4000
    level = (x.reshape(2, 32).abs().amax(1) / 127).repeat_interleave(32)
    found = received(stage, x.expand(draws, -1), keys.key(1, "test", torch.arange(draws)))
    assert ((found - x).abs() <= level * 1.001).all()
    error = found.mean(dim=0) - x
    assert (error.abs() < 4.5 * level * 0.5 / draws**0.5 + 1e-7).all()
    assert found.std(dim=0).max() > 0.3 * level.min()  # it does draw


def test_int8_follows_its_key_alone() -> None:
    x, stage = vector(), int8()
    assert torch.equal(passed(stage, x, 5), passed(stage, x, 5))
    assert not torch.equal(passed(stage, x, 5), passed(stage, x, 6))
    assert torch.equal(passed(stage, torch.zeros(10), 1), torch.zeros(10))
    assert passed(stage, torch.tensor([-2.0, 2.0, 0.0]), 1).tolist() == [-2.0, 2.0, 0.0]


@every_stage
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_numbers_stay_visible(name: str, bad: float) -> None:
    x = vector(10)
    x[3] = bad
    assert not passed(STAGES[name](), x, 0).isfinite().all()


def test_a_chain_encodes_what_the_stage_before_gave() -> None:
    x = vector(5000).float()
    chain = Chain((Largest(100, 5000), bfloat16(), int8(16)))
    parts = chain.encode(x, 9)
    assert [part.dtype for part in parts] == [torch.int8, torch.float32, torch.int32]
    assert chain.bytes(5000) == sum(part.nbytes for part in parts) == 100 + 4 * 7 + 4 * 100
    found = chain.decode(parts)
    largest = x.abs().topk(100).indices
    assert torch.allclose(found[largest], x[largest], rtol=0, atol=x.abs().max() / 60)
    assert int((found != 0).sum()) <= 100
    assert torch.equal(received(chain, x[None], torch.tensor([9]))[0], found)
    assert chain.name == "largest > bfloat16 > int8"


# ---- around methods -----------------------------------------------------------------------------
SPECS: dict[str, dict[str, Any]] = {name: {} for name in METHODS if name != "gossip-sgd"}
SPECS |= {"scaffold": {"option": "I"}, "fedagrac-avg": {"n": 5}, "dlsgd-homo": {"n": 3}, "dlsgd-hetero": {"n": 3}}


@pytest.mark.parametrize("name", SPECS)
def test_every_method_takes_stages_and_its_waves_equal_the_twin(name: str) -> None:
    spec = {"name": name, **SPECS[name], "stages": {"up": {"name": "int8", "block": 3}, "down": "float16"}}
    task = quadratic_world(24 if isinstance(build_method(spec).when, Hybrid) else 8)
    wave, twin = (final(spec, task, WORLD, 3, mode=mode) for mode in ("wave", "reference"))
    assert torch.allclose(wave, twin, rtol=0, atol=1e-12)
    plain = final({"name": name, **SPECS[name]}, task, WORLD, 3)
    assert not torch.equal(wave, plain)
    assert (wave - plain).norm() < 0.3 * plain.norm()


def test_clients_start_from_what_they_decode_and_the_server_stays_exact() -> None:
    made, task = build_method({"name": "local-sgd", "n": 4, "stages": {"down": "bfloat16"}}), quadratic_world()
    engine, _ = play(made, task, WORLD, commits=3)
    model, sent = engine.server.state["model"], engine.server.versions[3]["model"]
    assert torch.equal(sent, model.bfloat16().double())
    assert not torch.equal(sent, model)


def test_the_server_sees_updates_as_it_decodes_them() -> None:
    plain, task = build_method({"name": "local-sgd", "n": 4}), quadratic_world()
    seen: list[Tensor] = []

    def commit(w: Any, updates: Any, cohort: Any) -> Any:
        seen.append(updates["delta"])
        return w

    rule = replace(plain.what, weigh=None, apply=None, commit=commit)
    play(staged(replace(plain, what=rule), {"up": "float16"}), task, WORLD, commits=1)
    assert torch.equal(seen[0], seen[0].half().double())
    assert seen[0].norm() > 0


def test_without_stages_nothing_changes() -> None:
    plain = build_method("fedbuff")
    assert staged(plain, {"up": None}).what.local is plain.what.local
    assert (plain.what.up, plain.what.down) == (None, None)


@pytest.mark.parametrize("name", ["scaffold", "fedagrac"])
def test_first_gradients_travel_too(name: str) -> None:
    spec = {"name": name, "start": "gradients", "stages": "bfloat16"}
    engine, _ = play(spec, quadratic_world(), WORLD, commits=0)
    assert engine.solver.memory is not None
    c, c_i = ("c", "c_i") if name == "scaffold" else ("nu", "nu_i")
    own = engine.solver.memory.read((c_i,), torch.arange(8))[c_i]
    assert not torch.equal(own, own.bfloat16().double())  # clients have them exactly
    rounded = own.bfloat16().double().mean(dim=0)
    assert torch.allclose(engine.server.state[c], rounded, rtol=0, atol=1e-12)


# ---- bytes, times and run directories -----------------------------------------------------------
@pytest.mark.parametrize(
    ("stages", "up", "down"),
    [
        (None, 4 * NUMBERS, 4 * NUMBERS),
        ("float16", 2 * NUMBERS, 2 * NUMBERS),
        ({"up": "int8"}, NUMBERS + 4, 4 * NUMBERS),
        ({"up": ["bfloat16", {"name": "int8", "block": 100}], "down": "bfloat16"}, NUMBERS + 4 * 7, 2 * NUMBERS),
    ],
)
def test_bytes_and_transfer_times_are_those_of_encoded_vectors(stages: Any, up: int, down: int) -> None:
    fleet = {"name": "custom", "step_seconds": 0.01, "down_mbit": 0.008, "up_mbit": 0.008}
    method = {"name": "local-sgd", "n": 3, "local_steps": 2, "stages": stages}
    made = Experiment(method=method, task=SMALL, fleet=fleet, device="cpu", until={"commits": 4})
    last = run(made).metrics[-1]
    assert (last["bytes_up"], last["bytes_down"]) == (12 * up, 12 * down)
    assert last["virtual_seconds"] == pytest.approx(4 * (0.02 + (up + down) / 1000), abs=1e-6)


def test_where_a_paper_states_bytes_a_stage_takes_its_share() -> None:
    fleet = {"name": "custom", "step_seconds": 0.01}
    made = build(Experiment(method={"name": "scaffold", "stages": "float16"}, task=SMALL, fleet=fleet, device="cpu"))
    stated = replace(made, fleet=replace(made.fleet, payload_bytes=1e6))
    assert (stated.traffic.down, stated.traffic.up) == (1e6, 1e6)  # two vectors, half of each
    assert (made.traffic.down, made.traffic.up) == (4.0 * NUMBERS, 4.0 * NUMBERS)


def test_runs_with_stages_resume_and_replay(tmp_path: Any) -> None:
    made = Experiment(method={"name": "fedbuff", "buffer_size": 3, "stages": ["int8"]}, task=SMALL, device="cpu",
                      until={"commits": 6})  # fmt: skip
    straight = run(made, tmp_path / "straight")
    run(replace(made, until={"commits": 3}), tmp_path / "parted")
    again = resume(tmp_path / "parted", until={"commits": 6})
    repeated = replay(tmp_path / "straight")
    for name, values in straight.model.items():
        assert torch.equal(again.model[name], values)
        assert torch.equal(repeated.model[name], values)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ({"name": "fedbuff", "stages": "int9"}, "unknown stage 'int9'"),
        ({"name": "fedbuff", "stages": ["int8", 3]}, "stages = 3; it is a name"),
        ({"name": "fedbuff", "stages": 3}, "fedbuff: stages = 3; it must be"),
        ({"name": "fedbuff", "stages": {"upp": "int8"}}, "unknown way in stages 'upp'"),
        ({"name": "fedbuff", "stages": {"up": {"name": "int8", "bloc": 3}}}, "unknown option of stage 'int8' 'bloc'"),
        ({"name": "fedbuff", "stages": {"up": {"name": "int8", "block": 0}}}, "int8: block = 0; give 1 or more"),
        ({"name": "fedagrac", "saving": True, "stages": "int8"}, "must have updates exactly as they were"),
    ],
)
def test_bad_stages(method: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_method(method)


def test_without_a_server_there_are_no_stages() -> None:
    method, fleet = {"name": "gossip-sgd", "stages": "int8"}, {"name": "equal", "clusters": 1}
    made = Experiment(method=method, task=SMALL, fleet=fleet, device="cpu")
    with pytest.raises(ConfigError, match="without a server nothing travels through stages"):
        build(made)
