"""Writing a run directory: resolved config, trace, metrics, result, model, checkpoints.

    manifest.json        what every other file must be     metrics.parquet      one row per evaluation
    config.toml          what reproduces the run           clients.parquet      one row per client
    trace.parquet        every command and event           model.safetensors    the last version, by parameter name
    result.json          the figures, and how it ended     checkpoint-N.safetensors   all that a resumed run needs
    best.safetensors     the best version, where a callback keeps it

While a run goes on, trace and metrics are written in parts (`parts/`), which are joined when it ends. New files get
new names, the manifest that lists them comes last, and only then do old ones go: whenever a run is killed, what is
listed is there and fits. The last two checkpoints are kept.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from offbeat.records import Row
from offbeat.runs.columns import join, metrics_table, trace_table
from offbeat.runs.disk import storing, sync, write_file
from offbeat.runs.folder import PARTS, clear_run, refuse_links
from offbeat.runs.lock import Lock
from offbeat.runs.manifest import Manifest
from offbeat.runs.rerun import Digest

PART_ROWS = 1 << 17  # rows of the trace that gather before they are written


class Store:
    """Writes one run directory, which it has locked. Nothing is changed there before the first checkpoint."""

    def __init__(self, path: Path, lock: Lock, manifest: Manifest, config: str, environment: dict[str, Any]) -> None:
        self.path = path
        self.lock = lock
        self.manifest = manifest
        self.config = config
        self.rows: list[Row] = []
        self.metrics: list[dict[str, Any]] = []
        self.digest = Digest()
        self.number = 1 + max((int(n) for name in manifest.files for n in re.findall(r"-(\d+)\.", name)), default=-1)
        if environment not in manifest.environments:
            manifest.environments.append(environment)

    def note_metrics(self, row: dict[str, Any]) -> None:
        self.metrics.append(row)

    def note(self, rows: list[Row]) -> None:
        self.rows += rows
        self.digest.add(rows)
        if len(self.rows) >= PART_ROWS:
            with storing(self.path):
                self.begin()
                self.flush()

    def begin(self) -> None:
        """Turn a finished run into one that goes on: its trace and metrics become parts, the other results go."""
        refuse_links(self.path)
        (self.path / PARTS).mkdir(exist_ok=True)
        if not self.manifest.finished:
            return
        for kind in ("trace", "metrics"):
            for part in getattr(self.manifest, kind):
                name = self.next_name(f"{PARTS}/{kind}-{{}}.parquet")
                (self.path / name).unlink(missing_ok=True)
                try:
                    os.link(self.path / part[0], self.path / name)
                except OSError:  # a file system without links
                    shutil.copyfile(self.path / part[0], self.path / name)
                    sync(self.path / name)
                self.manifest.files[name] = self.manifest.files[part[0]]
                part[0] = name
        self.manifest.finished = False
        self.write_manifest()

    def next_name(self, pattern: str) -> str:
        self.number += 1
        return pattern.format(f"{self.number - 1:06d}")

    def flush(self) -> None:
        """Write what has gathered as parts of their own."""
        for kind, table in (("trace", trace_table(self.rows)), ("metrics", metrics_table(self.metrics))):
            if len(table):
                name = self.next_name(f"{PARTS}/{kind}-{{}}.parquet")
                self.manifest.files[name] = write_file(self.path / name, partial(pq.write_table, table))
                getattr(self.manifest, kind).append([name, len(table)])
        self.rows, self.metrics = [], []

    def checkpoint(self, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        with storing(self.path):
            self.begin()
            self.flush()
            manifest = self.manifest
            if "config.toml" not in manifest.files or manifest.config != self.config:
                write = partial(Path.write_text, data=self.config, encoding="utf-8")
                manifest.files["config.toml"] = write_file(self.path / "config.toml", write)
                manifest.config = self.config
            metrics = sum(count for _, count in manifest.metrics) - (facts["closing"] is not None)
            facts = facts | {"run": manifest.run, "config": manifest.config_digest, "metrics": metrics}
            metadata = {"facts": json.dumps(facts | {"rows": self.digest.value()})}
            name = self.next_name("checkpoint-{}.safetensors")
            save = partial(save_file, tensors, metadata=metadata)
            manifest.files[name] = write_file(self.path / name, lambda at: save(filename=at))
            manifest.checkpoints = [*manifest.checkpoints[-1:], name]
            self.write_manifest()

    def close(
        self, result: dict[str, Any], model: dict[str, torch.Tensor], clients: list[dict[str, Any]],
        best: dict[str, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Join the parts and write what the run came to. Comes after a checkpoint."""
        text = json.dumps(strict(result), indent=2, allow_nan=False)
        with storing(self.path):
            files = self.manifest.files
            for kind in ("trace", "metrics"):
                parts = getattr(self.manifest, kind)
                sources = [(self.path / name, count) for name, count in parts]
                name = f"{kind}.parquet"
                files[name] = write_file(self.path / name, partial(join, sources, kind))
                parts[:] = [[name, sum(count for _, count in parts)]]
            for name, write in (
                ("clients.parquet", partial(pq.write_table, pa.Table.from_pylist(clients))),
                ("model.safetensors", lambda at: save_file(model, at)),
                ("result.json", lambda at: at.write_text(text + "\n")),
                ("best.safetensors", lambda at: save_file(best or {}, at)),
            ):
                if name != "best.safetensors" or best is not None:
                    files[name] = write_file(self.path / name, write)
            self.manifest.finished = True
            self.write_manifest()

    def write_manifest(self) -> None:
        """From here on the directory is what the manifest says; what it does not list goes."""
        manifest = self.manifest
        named = {"config.toml", *manifest.checkpoints, *(name for name, _ in (*manifest.trace, *manifest.metrics))}
        named.update(manifest.live)
        if manifest.finished:
            named |= {"clients.parquet", "model.safetensors", "result.json", "best.safetensors"}
        manifest.files = {name: mark for name, mark in manifest.files.items() if name in named}
        self.lock.check()
        if (self.path / PARTS).exists():
            sync(self.path / PARTS)
        manifest.write(self.path)
        clear_run(self.path, named)


def strict(value: Any) -> Any:
    """The same without infinities and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
