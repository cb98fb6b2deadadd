"""Trace and metrics as Parquet: columns in, columns out, a stretch at a time, so that no run is too long to be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from offbeat.errors import OffbeatError, StorageError
from offbeat.records import Row
from offbeat.schedule.trace import COLUMNS, StepsBefore, flat, unflat

TYPES = {"time": pa.float64(), "kind": pa.string(), "steps_before": pa.int64(), "until": pa.float64(),
         "jobs": pa.list_(pa.int32())}  # fmt: skip
TRACE = pa.schema([(name, TYPES.get(name, pa.int32())) for name in COLUMNS])
OLDER = TRACE.remove(TRACE.get_field_index("steps_before"))  # traces of directories of format 3
METRICS = pa.schema(
    [("commit", pa.int64()), ("virtual_seconds", pa.float64()), ("accuracy", pa.float64()), ("loss", pa.float64()),
     ("client_steps", pa.int64()), ("samples", pa.int64()), ("bytes_up", pa.int64()), ("bytes_down", pa.int64()),
     ("bytes_d2d", pa.int64()), ("staleness_mean", pa.float64())]
)  # fmt: skip
SCHEMAS = {"trace": TRACE, "metrics": METRICS}
GROUP = 1 << 18  # rows of a row group: the bytes of a joined file depend on its rows alone
Source = tuple[Path, int]  # a Parquet file, and how many of its rows count


def trace_table(rows: Sequence[Row]) -> pa.Table:
    columns = list(zip(*map(flat, rows), strict=True)) or [()] * len(TRACE)
    return pa.table([pa.array(c, t) for c, t in zip(columns, TRACE.types, strict=True)], schema=TRACE)


def metrics_table(rows: list[dict[str, Any]]) -> pa.Table:
    """One row per evaluation. What there is besides METRICS are further metrics, numbers all."""
    further = [name for name in rows[0] if name not in METRICS.names] if rows else []
    return pa.Table.from_pylist(rows, schema=with_further(further))


def with_further(names: Iterable[str]) -> pa.Schema:
    return pa.schema([*METRICS, *((name, pa.float64()) for name in names)])


def fits_schema(schema: pa.Schema, name: str) -> bool:
    """Whether a file's columns are those of a trace, or of metrics with perhaps some more."""
    further = schema.names[len(METRICS) :]
    known = [with_further(further)] if name == "metrics" else [TRACE, OLDER]
    return any(schema.equals(each) for each in known)


def batches(sources: Iterable[Source], name: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of these files in order, in batches. What is no such table is refused."""
    for path, count in sources:
        try:
            with pq.ParquetFile(path) as file:
                if not fits_schema(file.schema_arrow, name):
                    raise StorageError(f"{path} is no {name} of a run: its columns are others")
                if file.metadata.num_rows < count:
                    raise StorageError(f"{path} has {file.metadata.num_rows} rows instead of {count}")
                left = count
                for batch in file.iter_batches(1 << 14, columns=columns):
                    if left:
                        yield batch.slice(0, left)
                    left -= min(left, len(batch))
        except (pa.ArrowException, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise (StorageError if path.exists() else OffbeatError)(f"{path} cannot be read: {reason}") from None


def whole(path: Path) -> Source:
    """A file of which all rows count."""
    try:
        return path, pq.read_metadata(path).num_rows
    except FileNotFoundError:
        raise OffbeatError(f"there is no {path}; give a run directory or a Parquet file of one") from None
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"{path} cannot be read: {str(error).strip().splitlines()[0]}") from None


def join(sources: Sequence[Source], name: str, target: Path) -> None:
    """Write these files as one, in row groups of one size."""
    schema = pq.read_schema(sources[0][0]) if sources and name == "metrics" else SCHEMAS[name]
    with pq.ParquetWriter(target, schema) as writer:
        waiting: list[pa.RecordBatch] = []
        for batch in batches(sources, name):
            waiting.append(batch)
            if sum(map(len, waiting)) >= GROUP:
                table = pa.Table.from_batches(waiting)
                writer.write_table(table.slice(0, GROUP).combine_chunks(), GROUP)
                waiting = table.slice(GROUP).to_batches()
        writer.write_table(pa.Table.from_batches(waiting, schema).combine_chunks(), GROUP)


class StoredRows:
    """The rows of a stored trace; each pass reads the files anew."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources

    def __len__(self) -> int:
        return sum(count for _, count in self.sources)

    def __iter__(self) -> Iterator[Row]:
        completed = StepsBefore()
        for batch in batches(self.sources, "trace"):
            older = batch.schema.equals(OLDER)
            missing = [0] * len(batch)
            columns = [batch.column(name).to_pylist() if name in batch.schema.names else missing for name in COLUMNS]
            rows = map(unflat, zip(*columns, strict=True))
            yield from map(completed, rows) if older else rows

    def last_begins(self) -> list[int]:
        """For each version the last row in which a job begins from it, or -1."""
        last, row, commits = np.full(1024, -1), 0, 0
        for batch in batches(self.sources, "trace", ("kind", "version")):
            kind = np.asarray(batch.column(0).to_numpy(zero_copy_only=False), dtype=object)
            begun = np.flatnonzero(kind == "begun")
            versions = batch.column(1).take(pa.array(begun)).to_numpy(zero_copy_only=False).astype(np.int64)
            commits += int((kind == "commit").sum())
            while max(commits, versions.max(initial=0)) >= len(last):
                last = np.concatenate([last, np.full(len(last), -1)])
            last[versions] = row + begun  # of equal versions the last one stays
            row += len(batch)
        return last[: commits + 1].tolist()  # type: ignore[no-any-return]
