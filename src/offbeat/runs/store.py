"""The run directory: resolved config, trace, metrics, result, model, checkpoint.

    config.toml          what reproduces the run           metrics.parquet      one row per evaluation
    trace.parquet        every command and event           clients.parquet      one row per client
    result.json          the figures, and how it ended     model.safetensors    the last version, by parameter name
    checkpoint.safetensors   all that a resumed run needs to go on with the same bits

While a run goes on, trace and metrics are written in parts (`parts/`); they are joined when it ends. Files appear
whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from offbeat.errors import OffbeatError
from offbeat.records import Row
from offbeat.schedule.trace import COLUMNS, flat, unflat

TRACE = pa.schema(
    [("time", pa.float64()), ("kind", pa.string()), *((name, pa.int32()) for name in COLUMNS[2:7]),
     ("until", pa.float64()), ("jobs", pa.list_(pa.int32()))]
)  # fmt: skip
METRICS = pa.schema(
    [("commit", pa.int64()), ("virtual_seconds", pa.float64()), ("accuracy", pa.float64()), ("loss", pa.float64()),
     ("client_steps", pa.int64()), ("samples", pa.int64()), ("bytes_up", pa.int64()), ("bytes_down", pa.int64()),
     ("staleness_mean", pa.float64())]
)  # fmt: skip


class Store:
    """Writes one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            (path / "parts").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OffbeatError(f"cannot write the run directory {path}: {error}; choose another --out") from None
        self.rows: list[Row] = []
        self.metrics: list[dict[str, Any]] = []
        for old in (path / "parts").iterdir():
            old.unlink()

    def config(self, text: str) -> None:
        replace(self.path / "config.toml", lambda at: at.write_text(text))

    def flush(self) -> None:
        """Write what has gathered as parts of their own."""
        number = len(list((self.path / "parts").glob("trace-*")))
        if self.rows:
            table = trace_table(self.rows)
            replace(self.path / "parts" / f"trace-{number:05d}.parquet", lambda at: pq.write_table(table, at))
            self.rows = []
        if self.metrics:
            made = pa.Table.from_pylist(self.metrics, schema=METRICS)
            replace(self.path / "parts" / f"metrics-{number:05d}.parquet", lambda at: pq.write_table(made, at))
            self.metrics = []

    def checkpoint(self, held: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        self.flush()
        metadata = {"facts": json.dumps(facts)}
        replace(self.path / "checkpoint.safetensors", lambda at: save_file(held, at, metadata=metadata))

    def close(self, result: dict[str, Any], model: dict[str, torch.Tensor], clients: list[dict[str, Any]]) -> None:
        """Join the parts and write what the run came to."""
        self.flush()
        for name, schema in (("trace", TRACE), ("metrics", METRICS)):
            parts = sorted((self.path / "parts").glob(f"{name}-*"))
            table = pa.concat_tables([pq.read_table(p) for p in parts]) if parts else schema.empty_table()
            replace(self.path / f"{name}.parquet", partial(pq.write_table, table.combine_chunks()))
            for part in parts:
                part.unlink()
        replace(self.path / "clients.parquet", lambda at: pq.write_table(pa.Table.from_pylist(clients), at))
        replace(self.path / "model.safetensors", lambda at: save_file(model, at))
        replace(self.path / "result.json", lambda at: at.write_text(json.dumps(result, indent=2) + "\n"))
        (self.path / "parts").rmdir()


def replace(target: Path, write: Callable[[Path], object]) -> None:
    """Write beside the target, then move there: a file is old or new, never half."""
    beside = target.with_name(target.name + ".new")
    write(beside)
    os.replace(beside, target)


def trace_table(rows: list[Row]) -> pa.Table:
    columns = list(zip(*(flat(row) for row in rows), strict=True))
    return pa.table([pa.array(c, t) for c, t in zip(columns, TRACE.types, strict=True)], schema=TRACE)


def write_trace(rows: list[Row], path: Path) -> None:
    replace(path, lambda at: pq.write_table(trace_table(rows), at))


def read_trace(path: Path) -> list[Row]:
    """The rows of a trace file, or of the run directory that holds one (finished or not)."""
    table = read_parts(path, "trace")
    return [unflat(values) for values in zip(*(table[name].to_pylist() for name in COLUMNS), strict=True)]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_parts(path, "metrics").to_pylist()
    return rows


def read_parts(path: Path, name: str) -> pa.Table:
    whole = path / f"{name}.parquet" if path.is_dir() else path
    files = [whole] if whole.exists() else sorted((path / "parts").glob(f"{name}-*.parquet"))
    if not files:
        raise OffbeatError(f"there is no {name} in {path}; give a run directory or a {name}.parquet")
    return pa.concat_tables([pq.read_table(file) for file in files])


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    file = path / "checkpoint.safetensors"
    if not file.exists():
        raise OffbeatError(f"there is no checkpoint in {path}; the run ended before its first one: start it again")
    with safe_open(file, framework="pt") as held:
        facts = json.loads(held.metadata()["facts"])
        return {name: held.get_tensor(name) for name in held.keys()}, facts  # noqa: SIM118
