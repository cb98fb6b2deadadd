"""Fleets from tables: columns and units, devices in order or drawn whole, and every bad cell by row and column."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from offbeat import Experiment, run
from offbeat.cli import app
from offbeat.config import toml
from offbeat.errors import ConfigError
from offbeat.fleets.make import build
from offbeat.fleets.measured import read_table

GOOD = "device,model,step_ms,down_mbyte,up_kbit,latency_s,on_min,off_h\na,x,10,1,8000,0.5,2,1\nb,y,20.5,2,4000,0,1,2\n"


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "phones.csv"
    path.write_text(text)
    return path


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_table(table(tmp_path, text))
    return list(caught.value.problems)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_units_become_seconds_and_megabits(tmp_path: Path, mark: str) -> None:
    found = read_table(table(tmp_path, "\ufeff" + GOOD.replace(",", mark)))
    assert found.options == {
        "step_seconds": [0.01, 0.0205], "down_mbit": [8.0, 16.0], "up_mbit": [8.0, 4.0], "latency": [0.5, 0.0],
        "mean_on": [120.0, 60.0], "mean_off": [3600.0, 7200.0],
    }  # fmt: skip
    assert found.ignored == ("model",)
    fleet = build("measured", 2, **found.options)
    assert fleet.step_seconds.tolist() == [0.01, 0.0205]
    assert fleet.down_bandwidth.tolist() == [1e6, 2e6]
    asked = fleet.durations(0, 1e6, 1e6)
    assert (asked.download(0, 0), asked.upload(1, 0)) == (1.5, 2.0)


def test_devices_are_drawn_whole_and_by_seed() -> None:
    options = {"step_seconds": [1.0, 2.0, 3.0], "up_mbit": [10.0, 20.0, 30.0]}
    fleet, same, other = (build("measured", 500, seed, **options) for seed in (0, 0, 1))
    assert np.array_equal(fleet.up_bandwidth / fleet.step_seconds, np.full(500, 1.25e6))
    assert np.array_equal(fleet.step_seconds, same.step_seconds)
    assert not np.array_equal(fleet.step_seconds, other.step_seconds)
    assert all(100 < (fleet.step_seconds == s).sum() < 240 for s in (1.0, 2.0, 3.0))


def test_devices_come_and_go_each_at_its_own_pace() -> None:
    fleet = build("measured", 400, step_seconds=[1.0, 1.0], mean_on=[1.0, 9.0], mean_off=[9.0, 1.0])
    there, until = fleet.presence.opening(400)
    firsts = [next(fleet.presence(client)) for client in range(400)]
    assert there == [state for _, state in firsts]
    assert all(time > 0 for time in until)
    means = np.array([one.mean_on for one in fleet.presence.each])
    assert np.mean(np.array(there)[means == 9.0]) > 0.8 > 0.2 > np.mean(np.array(there)[means == 1.0])


def test_bad_cells_are_named_by_row_and_column(tmp_path: Path) -> None:
    text = "step_ms,up_mbit,on_h,off_h\n1,2,3,1\n,-4,x,2\n5,9e9,0,nan\n7\n"
    assert problems(tmp_path, text) == [
        "phones.csv, row 2, column 'step_ms': the cell is empty; give a number, or leave the device out",
        "phones.csv, row 2, column 'up_mbit': -4; it must be a finite number above 0",
        "phones.csv, row 2, column 'on_h': 'x' is no number; write it with a point and without a unit",
        "phones.csv, row 3, column 'up_mbit': 9e9 is 9e+09 Mbit/s, and no link carries that; is it of another unit?",
        "phones.csv, row 3, column 'on_h': 0; it must be a finite number above 0",
        "phones.csv, row 3, column 'off_h': nan; it must be a finite number above 0",
        "phones.csv, row 4: 1 cells under 4 columns",
    ]
    many = problems(tmp_path, "step_s\n" + "-1\n" * 40)
    assert len(many) == 13
    assert many[-1] == "... and 28 more cells of the kind"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "up_mbit\n3\n",
            "has no column for the time of a local step; name it step_s or step_ms (its columns: up_mbit)",
        ),
        ("step_sec\n3\n", "column 'step_sec': its unit is not known; write it as one of step_s, step_ms"),
        ("step_s,down_bananas\n3,4\n", "column 'down_bananas': its unit is not known"),
        ("step_s,step_ms\n3,4\n", "columns 'step_s' and 'step_ms' both give the step; keep one"),
        ("step_s,on_s\n3,4\n", "give on_s and off_s"),
        ("step_s\n", "has no row under its header"),
        ("", "has no row under its header"),
        ('step_s\n"3', "is no table of comma-separated values"),
    ],
)
def test_bad_tables_get_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    assert said in " ".join(problems(tmp_path, text))


def test_the_command_writes_what_every_fleet_flag_takes(tmp_path: Path) -> None:
    path, picture = table(tmp_path, GOOD), tmp_path / "p.png"
    done = CliRunner().invoke(app, ["fleet", "from-csv", str(path), "--picture", str(picture)])
    assert done.exit_code == 0, done.output
    assert "idle" in done.output
    assert "columns left out: model" in done.output
    assert picture.stat().st_size > 5000
    written = tmp_path / "phones.toml"
    assert toml.read(written)["fleet"]["name"] == "measured"
    words = (
        f"run --fleet {written} --set task.clients=2 --set method.buffer_size=2 --until commits=2 --device cpu --json"
    )
    ran = CliRunner().invoke(app, [*words.split(), "--json"])
    assert ran.exit_code == 0, ran.output
    assert '"fleet": "measured"' in ran.output


def test_the_summary_says_idle_as_a_run_does(tmp_path: Path) -> None:
    """Of the devices' time in rounds of all of them: transfers are not computing."""
    text = "step_ms,down_mbit,up_mbit,latency_ms\n2,0.05,0.01,40\n7,0.2,0.02,10\n20,1,0.5,5\n"
    numbers = 64 * 10 + 10  # of the logistic model, in float32
    words = ["fleet", "from-csv", str(table(tmp_path, text)), "--steps", "5", "--megabytes", str(4e-6 * numbers)]
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    task = {"name": "digits", "clients": 3, "model": "logistic"}
    made = run(
        Experiment(
            {"name": "local-sgd", "n": 3, "local_steps": 5}, task, toml.read(Path(told["fleet"]))["fleet"],
            until={"commits": 3}, device="cpu",
        )
    )  # fmt: skip
    assert told["idle_in_rounds"] == pytest.approx(made.idle_share, abs=1e-6)
    assert 0.5 < made.idle_share < 1


def test_lists_of_a_config_are_checked() -> None:
    with pytest.raises(ConfigError) as caught:
        build("measured", 2, step_seconds=[1.0, -2.0], up_mbit=[3.0])
    assert any("unequal lengths (step_seconds 2, up_mbit 1)" in problem for problem in caught.value.problems)
    assert any("step_seconds, device 1 = -2.0" in problem for problem in caught.value.problems)


def test_a_fleet_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = table(tmp_path, GOOD)
    mine = tmp_path / "phones.toml"
    mine.write_text("# mine\n")
    done = CliRunner().invoke(app, ["fleet", "from-csv", str(path)])
    assert isinstance(done.exception, ConfigError)
    assert "phones.toml is there already; give another name by --out, or --overwrite" in str(done.exception)
    assert mine.read_text() == "# mine\n"
    assert CliRunner().invoke(app, ["fleet", "from-csv", str(path), "--overwrite"]).exit_code == 0
    assert "measured" in mine.read_text()
