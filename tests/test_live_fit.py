"""Fleets from runs: what is fitted to the trace of a known fleet is that fleet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live_world import digits
from offbeat import Experiment, run
from offbeat.errors import ConfigError, OffbeatError
from offbeat.fleets.make import build
from offbeat.live import fit
from offbeat.records import Joined, Left
from offbeat.runs.stored import read_trace

FLEET = {
    "name": "custom", "step_seconds": {"law": "uniform", "low": 0.01, "high": 0.05},
    "down_mbit": {"law": "uniform", "low": 1.0, "high": 4.0}, "up_mbit": {"law": "uniform", "low": 0.5, "high": 2.0},
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "fedbuff": {"name": "fedbuff", "buffer_size": 3, "local_steps": 4},
    "rounds": {"name": "local-sgd", "n": None, "local_steps": 4},
    "dlsgd-hetero": {"name": "dlsgd-hetero", "n": 3, "local_steps": 4},
}
SIZE = 65 * 10 * 4  # bytes of a logistic regression on digits


@pytest.mark.parametrize("method", METHODS)
def test_a_fleet_is_found_again_in_its_trace(method: str, tmp_path: Path) -> None:
    table = digits(METHODS[method], 5, fleet=FLEET, until={"commits": 12})
    run(Experiment.of(table), tmp_path / "run")
    was = build(FLEET["name"], 5, 0, **{name: value for name, value in FLEET.items() if name != "name"})  # type: ignore[arg-type]
    facts = {"clients": {}, "sizes": {"down": SIZE, "up": SIZE}}
    rows = read_trace(tmp_path / "run")
    found = fit.table(fit.observe(rows, {}), 5, facts, "run")
    assert np.allclose(found["step_seconds"], was.step_seconds, rtol=1e-6)
    assert np.allclose(found["up_bandwidth"], was.up_bandwidth, rtol=1e-4)
    assert found["error"]["compute"] < 1e-6
    assert found["jitter"] < 1e-6
    if method == "dlsgd-hetero":  # a simulation does not say how long a model lay in the receive buffer
        return
    assert np.allclose(found["down_bandwidth"], was.down_bandwidth, rtol=1e-4)
    (tmp_path / "fleet.json").write_text(json.dumps(found))
    again = digits(
        METHODS[method], 5, fleet={"name": "recorded", "file": str(tmp_path / "fleet.json")}, until={"commits": 12}
    )
    run(Experiment.of(again), tmp_path / "again")
    for (now, record), (then, other) in zip(rows, read_trace(tmp_path / "again"), strict=True):
        assert record == other
        assert now == pytest.approx(then, abs=1e-4)
    what_if = again | {"fleet": again["fleet"] | {"bandwidth": 2.0}}
    faster = run(Experiment.of(what_if))
    assert faster.virtual_seconds < rows[-1][0]


def test_presence_and_lost_jobs() -> None:
    rows: list[Any] = [(0.0, Left(1)), (2.0, Joined(1)), (3.0, Left(0)), (3.0, Joined(0)), (5.0, Left(1))]
    seen = fit.observe(rows, {})
    assert seen[1].changes == [(0.0, False), (2.0, True), (5.0, False)]
    assert seen[0].lost == 1
    assert seen[0].changes == [(0.0, True)]


def test_what_is_no_such_file_or_run_is_refused(tmp_path: Path) -> None:
    for text, said in (("", "none of"), ("[]", "none of"), ('{"clients": 2}', "none of")):
        (tmp_path / "fleet.json").write_text(text)
        with pytest.raises(ConfigError, match=said):
            build("recorded", 2, 0, file=str(tmp_path / "fleet.json"))
    with pytest.raises(ConfigError, match="from-run RUN --out"):
        build("recorded", 2, 0, file=str(tmp_path / "nowhere.json"))
    run(Experiment.of(digits(METHODS["fedbuff"], until={"commits": 1})), tmp_path / "run")
    with pytest.raises(OffbeatError, match="holds no live run"):
        fit.fit(tmp_path / "run")
