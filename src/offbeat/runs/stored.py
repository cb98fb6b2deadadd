"""Reading a run directory: only what its manifest lists, and only if it is what was written there."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offbeat.config import registry, toml
from offbeat.errors import ConfigError, OffbeatError, StorageError
from offbeat.records import Row
from offbeat.runs.columns import Source, StoredRows, batches, whole
from offbeat.runs.disk import read_tensors, text_digest
from offbeat.runs.folder import refuse_links
from offbeat.runs.manifest import NAME, Manifest, Part, read_manifest

# They change neither schedule nor numbers. Of an engine the numbers rest on its tiles alone: a run that has them keeps
# them, whoever goes on with it, and one that gets them has it in its record.
FREE = ("until", "targets", "checkpoint_seconds", "client_memory", "engine", "workers", "address", "callbacks")

NO_CHECKPOINT = "there is no checkpoint in {} to go on from: it has none yet; begin it anew with --overwrite"


@dataclass(frozen=True)
class Checkpoint:
    """Where a run can be taken up: its state, and the rows of trace and metrics that belong to it."""

    name: str
    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]
    trace: list[Part]
    metrics: list[Part]


class Stored:
    """A run directory and its manifest."""

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path = path
        manifest = manifest or read_manifest(path)
        if manifest is None and (path / "config.toml").exists() and (path / "checkpoint.safetensors").exists():
            raise OffbeatError(
                f"{path} was written by an older Offbeat: it has no {NAME}, so nothing in it can be checked; "
                f"run {path / 'config.toml'} again into another directory"
            )
        if manifest is None or manifest.kind != "run":
            raise OffbeatError(f"there is no run in {path} (no {NAME} of one); give a directory that `run --out` left")
        refuse_links(path)
        self.manifest: Manifest = manifest

    def check(self, *names: str) -> None:
        """Refuse files that are not what was written; without names, any that is listed, but the config, of which
        `config` says what may be edited."""
        names = names or tuple(name for name in self.manifest.files if name != "config.toml")
        problems = [self.manifest.damage(self.path, name) for name in names]
        if wrong := [problem for problem in problems if problem]:
            raise StorageError(f"{self.path} is damaged: {'; '.join(wrong)}")

    def config(self, limits: bool) -> dict[str, Any]:
        """The table of config.toml; with `limits` as it was edited there, else as the run was made with."""
        table, changed = self.edited()
        if changed is not None:
            said = ", ".join(changed) or "its text, but no value"
            # From one place, so that a command that reads several files says it once.
            warnings.warn(f"{self.path / 'config.toml'} was changed: {said}", stacklevel=1)
        return table if limits else toml.parse(self.manifest.config)

    def edited(self) -> tuple[dict[str, Any], list[str] | None]:
        """The table of config.toml, and the keys that were edited there; None where its text is what was written. A key
        that decides numbers is refused by name."""
        if not self.manifest.config:
            raise OffbeatError(NO_CHECKPOINT.format(self.path))
        file = self.path / "config.toml"
        problem = self.manifest.damage(self.path, "config.toml")
        try:
            table = toml.read(file)
        except ConfigError as error:
            raise StorageError(f"{error}; what the run was made with stands in {NAME}") from None
        if problem is None:
            return table, None
        changed = changed_keys(toml.parse(self.manifest.config), table)
        if fixed := [key for key in changed if key.partition(".")[0] not in FREE]:
            raise OffbeatError(
                f"{file} was changed since the run began ({', '.join(fixed)}), and the rest of the run would not fit; "
                f"put back what stands in {NAME}, or begin a new run"
            )
        return table, changed

    def check_config(self, table: Mapping[str, Any]) -> None:
        """Refuse a config, made with objects that were passed again, that is not the run's."""
        changed = changed_keys(toml.parse(self.manifest.config), toml.parse(toml.write(table)))
        if fixed := [key for key in changed if key.partition(".")[0] not in FREE]:
            raise OffbeatError(
                f"the run in {self.path} was made with another {', '.join(fixed)}; pass what it was made with"
            )

    def check_code(self, changed: bool) -> None:
        """Refuse code of one's own that is not what the run was made with, or, if it may be `changed`, say so."""
        if not (names := registry.changed(self.manifest.sources)):
            return
        said = f"the code of {' and of '.join(names)} was changed since the run in {self.path} began"
        if not changed:
            raise OffbeatError(
                f"{said}, and the rest of the run would not fit; put it back, begin a new run, or give --changed-code "
                "(in Python: changed_code=True) to go on with it"
            )
        warnings.warn(f"{said}, so its bits may differ", stacklevel=3)

    def checkpoint(self) -> Checkpoint:
        """The newest checkpoint that is whole, with its part of the trace; whatever else is wrong is said."""
        problems: list[str] = []
        used: set[str] = {"config.toml"}
        for name in reversed(self.manifest.checkpoints):
            point, problem = self.read_checkpoint(name)
            if point is not None:
                break
            problems.append(problem)
            used.add(name)
        else:
            if not problems:
                raise OffbeatError(NO_CHECKPOINT.format(self.path))
            said = "; ".join(dict.fromkeys(problems))
            raise StorageError(f"there is no checkpoint in {self.path} to go on from: {said}")
        if problems:
            problems.append(f"going on from the one before, {point.name}, at commit {point.facts['version']}")
        used |= {name for name, _ in (*point.trace, *point.metrics)} | {point.name}
        rest = [self.manifest.damage(self.path, name) for name in self.manifest.files if name not in used]
        problems += [f"{problem}, and is made anew" for problem in rest if problem and problem not in problems]
        if problems:
            warnings.warn(f"{self.path}: {'; '.join(dict.fromkeys(problems))}", stacklevel=2)
        return point

    def read_checkpoint(self, name: str) -> tuple[Checkpoint, str] | tuple[None, str]:
        problem = self.manifest.damage(self.path, name)
        if problem:
            return None, problem
        tensors, facts = read_tensors(self.path / name)
        if (facts.get("run"), facts.get("config")) != (self.manifest.run, self.manifest.config_digest):
            return None, f"{name} belongs to another run"
        trace, metrics = first(self.manifest.trace, facts["rows"][0]), first(self.manifest.metrics, facts["metrics"])
        if trace is None or metrics is None:
            return None, f"{name} belongs to a longer trace than there is"
        for part, _ in (*trace, *metrics):
            if problem := self.manifest.damage(self.path, part):
                return None, problem
        return Checkpoint(name, tensors, facts, trace, metrics), ""

    def sources(self, kind: str) -> list[Source]:
        return [(self.path / name, count) for name, count in getattr(self.manifest, kind)]

    def rows(self) -> StoredRows:
        return StoredRows(self.sources("trace"))

    def metrics(self) -> list[dict[str, Any]]:
        return metric_rows(self.sources("metrics"))


def first(parts: list[Part], count: int) -> list[Part] | None:
    """The parts that hold the first `count` rows, the last of them cut; None where there are fewer."""
    enough: list[Part] = []
    for name, rows in parts:
        if count > 0:
            enough.append([name, min(rows, count)])
        count -= min(rows, count)
    return enough if count == 0 else None


def config_digest(table: Mapping[str, Any]) -> str:
    """A digest of all of a config but its limits."""
    return text_digest(toml.write({key: value for key, value in table.items() if key not in FREE}))


def changed_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, those of inner tables as table.key."""
    plain: list[dict[str, str]] = []
    for table in (one, other):
        inner = {(k, i): v for k, t in table.items() for i, v in (t.items() if isinstance(t, dict) else [("", t)])}
        texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in inner.items()}
        plain.append({".".join(filter(None, key)): text for key, text in texts.items()})
    return [key for key in {**plain[0], **plain[1]} if plain[0].get(key) != plain[1].get(key)]


def read_trace(path: Path) -> list[Row]:
    """The rows of a trace file, or of a run directory, finished or not."""
    return list(StoredRows(sources(Path(path), "trace")))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return metric_rows(sources(Path(path), "metrics"))


def metric_rows(parts: list[Source]) -> list[dict[str, Any]]:
    return [row for batch in batches(parts, "metrics") for row in batch.to_pylist()]


def sources(path: Path, kind: str) -> list[Source]:
    if not path.is_dir():
        return [whole(path)]
    stored = Stored(path)
    stored.config(limits=False)
    if parts := getattr(stored.manifest, kind):
        stored.check(*(name for name, _ in parts))
    return stored.sources(kind)


def read_model(path: Path) -> dict[str, torch.Tensor]:
    """The model of a run directory, or of a file; one that a manifest lists must be what was written."""
    path = Path(path)
    if path.is_dir():
        stored = Stored(path)
        if not stored.manifest.finished:
            raise OffbeatError(f"the run in {path} has not ended, so it has no model yet; resume it first")
        path = path / "model.safetensors"
        stored.check(path.name)
    elif (beside := read_manifest(path.parent)) is not None and path.name in beside.files:
        Stored(path.parent).check(path.name)
    return read_tensors(path)[0]
