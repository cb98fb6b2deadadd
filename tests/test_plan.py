"""What more devices would bring, by arithmetic, and from rates of this machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from offbeat import Experiment
from offbeat.cli import app
from offbeat.studies.plan import Rates, Work, plan, table, wave_seconds

TILING = {"parts": 16, "least": 4, "most": 64, "limit": 4096}
FLAT = Rates((1, 64), (1000.0, 1000.0))  # each job takes as long, whatever its tile


def work(jobs: int, **others: Any) -> Work:
    return Work(jobs, 10, 4e6, tiling=TILING, **others)


def test_a_wave_that_divides_evenly_and_costs_nothing_to_send_scales_as_workers() -> None:
    alone = FLAT.seconds(160, 10)
    for workers in (1, 2, 4, 8, 16):
        wave = wave_seconds(work(160), FLAT, workers, gbit=1e9, call=0.0)
        assert wave["seconds"] == pytest.approx(alone / workers)
    assert wave_seconds(work(160), FLAT, 32, 1e9, 0.0)["seconds"] == pytest.approx(alone / 16)  # 16 tiles


def test_messages_and_the_link_bound_what_workers_bring() -> None:
    assert wave_seconds(work(160), FLAT, 16, 1e9, call=0.5)["seconds"] >= 16 * 0.5
    slow = wave_seconds(work(160), FLAT, 2, gbit=0.008)  # a megabyte a second: 16 sums and 2 versions of 4 MB
    assert slow["seconds"] == slow["link"] == pytest.approx(18 * 4)
    assert wave_seconds(work(160, rows=True), FLAT, 2, gbit=0.008)["link"] == pytest.approx(162 * 4)
    rows = table(work(160), FLAT, 6, gbit=0.008)
    assert [row["workers"] for row in rows] == [1, 2, 4, 6]
    assert {row["bound by"] for row in rows} == {"link"}


def test_rates_are_measured_here() -> None:
    experiment = Experiment(method={"name": "local-sgd", "local_steps": 2}, task={"name": "digits"}, device="cpu")
    found = plan(experiment, 4, 100.0, jobs=32, seconds=0.01)
    assert found["travels back"] == "sums"
    assert found["tiles"] == len(range(0, 32, found["jobs in a tile"]))
    assert all(rate > 0 for rate in found["rates"].values())
    assert [row["workers"] for row in found["table"]] == [1, 2, 4]


def test_the_command_prints_json() -> None:
    words = [
        "plan",
        "--method",
        "fedasync",
        "--gpus",
        "2",
        "--jobs",
        "16",
        "--seconds",
        "0.1",
        "--device",
        "cpu",
        "--json",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["travels back"] == "rows"
    assert len(found["table"]) == 2
