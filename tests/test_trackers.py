"""Each tracker against its real package: it receives what the run directory holds, counted."""

from __future__ import annotations

import json
import struct
import sys

import pyarrow.parquet as pq
import pytest

from linear_runs import error, experiment, small
from offbeat import ConfigError, resume, run
from offbeat.runs.trackers import MLflow, TensorBoard, WeightsAndBiases, numbers
from offbeat.runs.watchers import callbacks_of
from stopped_runs import killed_after

pytestmark = [pytest.mark.trackers, pytest.mark.filterwarnings("default")]


def task():
    return small(metrics={"error": error})


def config():
    return experiment(task(), evaluate={"every_commits": 3, "hold_out": 0.2}, checkpoint_seconds=1e-9)


def cells(folder):
    """What a run directory holds: (metric, commit) -> number."""
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    return {(name, row["commit"]): value for row in rows for name, value in numbers(row).items()}


def tensorboard_scalars(folder):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = events.EventAccumulator(str(folder), {"scalars": 0})
    read.Reload()
    return {(name, e.step): e.value for name in read.Tags()["scalars"] for e in read.Scalars(name)}


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    run(config(), tmp_path / "run", callbacks=[TensorBoard(str(tmp_path / "logs"))])
    want = cells(tmp_path / "run")
    assert len(want) > 100
    assert tensorboard_scalars(tmp_path / "logs" / "run") == pytest.approx(want, rel=1e-6)


def test_tensorboard_of_a_killed_and_resumed_run(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = {"callbacks": [TensorBoard(str(tmp_path / "logs"))]}
    killed_after(7, config(), tmp_path / "run", **tracker)
    tracker["callbacks"][0].writer.flush()
    resume(tmp_path / "run", task=task(), callbacks=[TensorBoard(str(tmp_path / "logs"))])
    assert tensorboard_scalars(tmp_path / "logs" / "run") == pytest.approx(cells(tmp_path / "run"), rel=1e-6)


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    run(config(), tmp_path / "run", callbacks=[MLflow(uri=uri)])
    client = mlflow.MlflowClient(uri)
    home = client.get_experiment_by_name("offbeat").experiment_id
    (stored,) = client.search_runs([home])
    assert stored.info.status == "FINISHED"
    assert stored.data.params["method.name"] == "fedbuff"
    assert stored.data.tags["ended"] == json.loads((tmp_path / "run" / "result.json").read_text())["ended"]
    want = cells(tmp_path / "run")
    names = {name for name, _ in want}
    seen = {(n, m.step): m.value for n in names for m in client.get_metric_history(stored.info.run_id, n)}
    assert seen == want
    assert len(stored.data.metrics) == len(names)


def wandb_records(file):
    """The records of an offline run: a log in blocks of 32 KiB, each piece with checksum, length and kind."""
    data, place, record = file.read_bytes()[7:], 0, b""
    while place + 7 <= len(data):
        if 32768 - (place + 7) % 32768 < 7:  # no room for another head in this block
            place += 32768 - (place + 7) % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    run(config(), tmp_path / "run", callbacks=[WeightsAndBiases(folder=str(tmp_path))])
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    seen = {}
    for data in wandb_records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.history.item:
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            seen |= {(name, row["_step"]): value for name, value in row.items() if not name.startswith("_")}
    assert seen == pytest.approx(cells(tmp_path / "run"))


def test_a_tracker_that_cannot_be_reached_never_stops_a_run(tmp_path):
    pytest.importorskip("mlflow")
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(UserWarning, match="MLflow failed and is left out; the run goes on"):
        outcome = run(config(), callbacks=[MLflow(uri=(tmp_path / "file").as_uri())])
    assert outcome.commits == 12


def test_a_missing_package_is_said_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"pip install 'offbeat\[mlflow\]'"):
        callbacks_of(["mlflow"])
