"""Waves in tiles, in this process: the same laws on bits as for whole waves, and from one engine to the other."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import METHODS, digest, drawn, keeps_the_law, short
from offbeat import Experiment, replay, resume, run
from offbeat.cli.flags import engine_of
from offbeat.engines import ray_crew
from offbeat.engines.tile_solver import TileSolver
from offbeat.engines.tile_worker import Sum
from offbeat.engines.tiling import Arrays, Span, joined, pieces, tile_size
from offbeat.errors import ConfigError
from offbeat.experiments.assemble import build
from offbeat.records import Begun

SEVERAL = ("fedbuff", "scaffold", "fednova", "async-hl-sgd")


def trace(path: Path) -> bytes:
    return (path / "trace.parquet").read_bytes()


@pytest.mark.parametrize(
    "number",
    [pytest.param(i, id=name, marks=() if i % 2 else pytest.mark.soak) for i, name in enumerate(sorted(METHODS))],
)
def test_tiles_agree_with_whole_waves(number: int) -> None:
    experiment = replace(drawn(number), checkpoint_seconds=60.0, until={"commits": 4})
    whole, tiles = run(experiment), run(replace(experiment, engine="tiles"))
    tolerance = 1e-12 if experiment.precision == "float64" else 1e-5
    for name, value in whole.model.items():
        assert torch.allclose(tiles.model[name], value, rtol=tolerance, atol=tolerance), name
    assert tiles.jobs_computed == whole.jobs_computed


@pytest.mark.parametrize("name", SEVERAL)
def test_runs_in_tiles_keep_the_law_on_bits(name: str, tmp_path: Path) -> None:
    number = sorted(METHODS).index(name)
    keeps_the_law(replace(short(number), engine="tiles"), tmp_path, number)


@pytest.mark.parametrize("name", ["fedbuff", "scaffold"])
def test_a_run_goes_from_engine_to_engine(name: str, tmp_path: Path) -> None:
    """Begun with whole waves, gone on with in tiles, finished by the first: its trace is that of a straight run, its
    model near, and its replay has its bits. Begun in tiles and finished by the other: the bits of tiles throughout."""
    number = sorted(METHODS).index(name)
    whole = replace(drawn(number), until={"commits": 6}, checkpoint_seconds=60.0)
    own: dict[str, Any] = {"task": whole.task}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        straight, tiled = run(whole, tmp_path / "whole"), run(replace(whole, engine="tiles"), tmp_path / "tiles")
        run(replace(whole, until={"commits": 2}), tmp_path / "mixed")
        resume(tmp_path / "mixed", until={"commits": 4}, engine="tiles", **own)
        mixed = resume(tmp_path / "mixed", until={"commits": 6}, engine="local", **own)
        again = replay(tmp_path / "mixed", **own)
        run(replace(whole, until={"commits": 3}, engine="tiles"), tmp_path / "other")
        other = resume(tmp_path / "other", until={"commits": 6}, engine="local", **own)
    assert digest(mixed.model) == digest(again.model)
    assert digest(other.model) == digest(tiled.model)
    assert (
        trace(tmp_path / "mixed") == trace(tmp_path / "other") == trace(tmp_path / "tiles") == trace(tmp_path / "whole")
    )
    for key, value in straight.model.items():
        assert torch.allclose(mixed.model[key], value, rtol=1e-5, atol=1e-5)


def test_the_rule_of_tiles_knows_jobs_and_sizes_alone() -> None:
    built = build(Experiment(method="fedbuff", device="cpu", engine="tiles"))
    solver = built.engine().solver
    assert isinstance(solver, TileSolver)
    solver.tiling |= {"least": 2, "most": 8}
    jobs = [Begun(client, 0, 0, 5) for client in range(100)]
    tiles = solver.cut(jobs)
    assert [job for _, own in tiles for job in own] == jobs
    assert [len(own) for _, own in tiles] == [len(piece) for piece in pieces(jobs, tile_size(100, solver.tiling))]
    remembering = build(Experiment(method="scaffold", device="cpu", engine="tiles")).engine().solver
    homes = {job.client: home for home, own in remembering.cut(jobs) for job in own}
    assert len(homes) == 100
    assert len(set(homes.values())) == 16
    assert homes == {job.client: home for home, own in remembering.cut(jobs[::-1]) for job in own}


@pytest.mark.parametrize("seed", range(8))
def test_sums_of_tiles_have_the_same_bits_whoever_adds_them_and_when(seed: int) -> None:
    """Workers with any tiles of a wave, which answer in any order, some of them lost and computed again by others."""
    rng = random.Random(seed)
    values = np.random.default_rng(seed).standard_normal((16, 50)).astype(np.float32)

    def of(numbers: Iterable[int]) -> dict[Span, Arrays]:
        return {(number, 1): {"delta": values[number].copy()} for number in numbers}

    taken = [number for number in range(16) if rng.random() < 0.8]  # tiles that the commit takes something of
    (want,) = joined(of(taken)).values()
    solver = build(Experiment(method="local-sgd", device="cpu", engine="tiles")).engine().solver
    assert isinstance(solver, TileSolver)
    answers = []
    for _ in range(2):  # once, and again
        hands: dict[int, set[int]] = {}
        for number in range(16):
            hands.setdefault(rng.randrange(1 + seed % 4) if rng.random() < 0.5 else 0, set()).add(number)
        for mine in hands.values():
            own = of(number for number in mine if number in taken)
            answers += [Sum(0, 7, span, vectors) for span, vectors in joined(own, mine).items()]
    first, again = answers[: len(answers) // 2], answers[len(answers) // 2 :]
    rng.shuffle(first)
    for each in [*answers, *first, *again]:
        solver.keep(each._replace(vectors={"delta": each.vectors["delta"].copy()}))
    (found,) = joined(solver.added[0, 7]).values()
    assert np.array_equal(found["delta"], want["delta"])


def test_sums_move_fewer_bytes_than_rows() -> None:
    """Of a commit of 48 updates in tiles one sum for each tile goes back; FedAsync's rule needs every row."""
    task = {"name": "digits", "clients": 48}
    common: dict[str, Any] = {"task": task, "device": "cpu", "engine": "tiles", "until": {"commits": 3}}
    rounds = run(Experiment(method={"name": "local-sgd", "n": 48, "local_steps": 2}, **common))
    numbers = sum(value.numel() for value in rounds.model.values())
    assert rounds.bytes_moved["rows"] == 0
    assert 0 < rounds.bytes_moved["sums"] <= 3 * 16 * 4 * numbers < 3 * 48 * 4 * numbers
    rows = run(Experiment(method={"name": "fedasync", "local_steps": 2}, **common))
    assert rows.bytes_moved["sums"] == 0
    assert 3 * 4 * numbers <= rows.bytes_moved["rows"] <= 4 * numbers * rows.jobs_computed


def test_engines_are_checked_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"engine = 'grid'; it must be one of 'local', 'tiles', 'ray'"):
        run(Experiment(engine="grid"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"workers = 0; it must be"):
        run(Experiment(engine="tiles", workers=0))
    monkeypatch.setattr(ray_crew, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"Ray is not installed; pip install 'offbeat\[ray\]'"):
        run(Experiment(engine="ray"))


def test_flags_of_workers_mean_ray() -> None:
    assert engine_of(None, None, None) == {}
    assert engine_of("tiles", None, None) == {"engine": "tiles"}
    assert engine_of(None, 2, None) == {"engine": "ray", "workers": 2}
    assert engine_of("ray", None, "auto") == {"engine": "ray", "address": "auto"}
