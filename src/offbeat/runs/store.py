"""The run directory: resolved config, trace, metrics, result, model, checkpoint.

    config.toml          what reproduces the run           metrics.parquet      one row per evaluation
    trace.parquet        every command and event           clients.parquet      one row per client
    result.json          the figures, and how it ended     model.safetensors    the last version, by parameter name
    checkpoint.safetensors   all that a resumed run needs to go on with the same bits

While a run goes on, trace and metrics are written in parts (`parts/`), which are joined when it ends; the checkpoint
says which parts belong to it. A resumed run writes parts of a new generation, and the old ones go when it has a
checkpoint of its own. Files appear whole or not at all: whenever a run is killed, checkpoint, trace and metrics fit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from offbeat.errors import OffbeatError
from offbeat.records import Row
from offbeat.schedule.trace import COLUMNS, flat, unflat

WHOLE = ("trace.parquet", "metrics.parquet")
TRACE = pa.schema(
    [("time", pa.float64()), ("kind", pa.string()), *((name, pa.int32()) for name in COLUMNS[2:7]),
     ("until", pa.float64()), ("jobs", pa.list_(pa.int32()))]
)  # fmt: skip
METRICS = pa.schema(
    [("commit", pa.int64()), ("virtual_seconds", pa.float64()), ("accuracy", pa.float64()), ("loss", pa.float64()),
     ("client_steps", pa.int64()), ("samples", pa.int64()), ("bytes_up", pa.int64()), ("bytes_down", pa.int64()),
     ("bytes_d2d", pa.int64()), ("staleness_mean", pa.float64())]
)  # fmt: skip


class Store:
    """Writes one run directory. `generation` counts the times the run was taken up."""

    def __init__(self, path: Path, config: str, generation: int = 0) -> None:
        self.path = path
        self.config = config
        self.generation = generation
        self.parts = 0
        self.rows: list[Row] = []
        self.metrics: list[dict[str, Any]] = []
        try:
            (path / "parts").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OffbeatError(f"cannot write the run directory {path}: {error}; choose another --out") from None

    def clear(self) -> Store:
        """Remove what another run left here, its checkpoint first."""
        for name in ("checkpoint.safetensors", "result.json", "model.safetensors", *WHOLE, "clients.parquet"):
            (self.path / name).unlink(missing_ok=True)
        for part in (self.path / "parts").iterdir():
            part.unlink()
        return self

    def flush(self) -> None:
        """Write what has gathered as parts of their own."""
        number = f"{self.generation:03d}-{self.parts:05d}.parquet"
        trace, metrics = trace_table(self.rows), pa.Table.from_pylist(self.metrics, schema=METRICS)
        replace(self.path / "parts" / f"trace-{number}", partial(pq.write_table, trace))
        replace(self.path / "parts" / f"metrics-{number}", partial(pq.write_table, metrics))
        self.parts += 1
        self.rows, self.metrics = [], []

    def checkpoint(self, held: dict[str, torch.Tensor], facts: dict[str, Any], whole: bool = False) -> None:
        if not whole:
            self.flush()
        replace(self.path / "config.toml", lambda at: at.write_text(self.config, encoding="utf-8"))
        facts = facts | {"generation": self.generation, "parts": None if whole else self.parts}
        metadata = {"facts": json.dumps(facts)}
        replace(self.path / "checkpoint.safetensors", lambda at: save_file(held, at, metadata=metadata))
        for part in (self.path / "parts").iterdir():
            if whole or f"-{self.generation:03d}-" not in part.name:
                part.unlink()
        if whole:
            (self.path / "parts").rmdir()
        for name in () if whole else WHOLE:
            (self.path / name).unlink(missing_ok=True)

    def close(self, result: dict[str, Any], model: dict[str, torch.Tensor], clients: list[dict[str, Any]]) -> None:
        """Join the parts and write what the run came to."""
        self.flush()
        for name in ("trace", "metrics"):
            parts = [self.path / "parts" / part_name(name, self.generation, n) for n in range(self.parts)]
            table = pa.concat_tables([pq.read_table(part) for part in parts]).combine_chunks()
            replace(self.path / f"{name}.parquet", partial(pq.write_table, table))
        replace(self.path / "clients.parquet", lambda at: pq.write_table(pa.Table.from_pylist(clients), at))
        replace(self.path / "model.safetensors", lambda at: save_file(model, at))
        text = json.dumps(strict(result), indent=2, allow_nan=False)
        replace(self.path / "result.json", lambda at: at.write_text(text + "\n"))


def strict(value: Any) -> Any:
    """The same without infinities and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def part_name(name: str, generation: int, number: int) -> str:
    return f"{name}-{generation:03d}-{number:05d}.parquet"


def replace(target: Path, write: Callable[[Path], object]) -> None:
    """Write beside the target, then move there: a file is old or new, never half."""
    beside = target.with_name(target.name + ".new")
    write(beside)
    os.replace(beside, target)


def trace_table(rows: list[Row]) -> pa.Table:
    columns = list(zip(*(flat(row) for row in rows), strict=True)) or [()] * len(TRACE)
    return pa.table([pa.array(c, t) for c, t in zip(columns, TRACE.types, strict=True)], schema=TRACE)


def write_trace(rows: list[Row], path: Path) -> None:
    replace(path, lambda at: pq.write_table(trace_table(rows), at))


def read_trace(path: Path, facts: Mapping[str, Any] | None = None) -> list[Row]:
    """The rows of a trace file, or of a run directory, finished or not; with facts, those up to that checkpoint."""
    table = read_table(path, "trace", facts)
    return [unflat(values) for values in zip(*(table[name].to_pylist() for name in COLUMNS), strict=True)]


def read_metrics(path: Path, facts: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(path, "metrics", facts).to_pylist()
    return rows


def read_table(path: Path, name: str, facts: Mapping[str, Any] | None) -> pa.Table:
    whole = path / f"{name}.parquet" if path.is_dir() else path
    files = [whole]
    if facts is not None and facts["parts"] is not None:
        files = [path / "parts" / part_name(name, facts["generation"], n) for n in range(facts["parts"])]
    elif facts is None and not whole.exists():
        files = sorted((path / "parts").glob(f"{name}-*.parquet"))
    if not files or not all(file.exists() for file in files):
        raise OffbeatError(f"there is no {name} in {path}; give a run directory or a {name}.parquet")
    return pa.concat_tables([pq.read_table(file) for file in files])


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    file = path / "checkpoint.safetensors"
    if not file.exists():
        raise OffbeatError(f"there is no checkpoint in {path}; is it a run directory?")
    return read_tensors(file)


def read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a file, and the facts in its head where it has some."""
    try:
        with safe_open(file, framework="pt") as held:
            facts = json.loads((held.metadata() or {}).get("facts", "{}"))
            return {name: held.get_tensor(name) for name in held.keys()}, facts  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise OffbeatError(f"{file} cannot be read: {error}") from None
