"""Runs afterwards: finding run directories, choosing among them, gathering those that differ by their seed alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from offbeat.config import toml
from offbeat.errors import ConfigError, OffbeatError, in_words, unknown
from offbeat.runs.folder import clear, refuse_links
from offbeat.runs.lock import LOCK, Lock
from offbeat.runs.manifest import NAME, Manifest, read_manifest
from offbeat.runs.outcome import reaching
from offbeat.runs.stored import Stored, read_metrics
from offbeat.runs.target import LIMITS, plain_name, target_key, target_of

DEEPEST = 4  # folders inside one another that are looked through
CONDITION = re.compile(r"\s*([\w.\- ]+?)\s*(>=|<=|!=|=|>|<)\s*(.+?)\s*")


@dataclass(frozen=True)
class Shelved:
    """A run directory: its config, and its result where it has ended."""

    path: Path
    manifest: Manifest

    @cached_property
    def config(self) -> dict[str, Any]:
        return toml.parse(self.manifest.config) if self.manifest.config else {}

    @cached_property
    def damage(self) -> OffbeatError | None:
        """What is wrong with its small files, config and result; None where they are what was written."""
        try:
            stored = Stored(self.path, self.manifest)
            stored.edited()
            if self.manifest.finished:
                stored.check("result.json")
        except OffbeatError as error:
            return error
        return None

    @cached_property
    def result(self) -> dict[str, Any]:
        """Its figures; none where it has not ended, or where they are not what was written."""
        if not self.manifest.finished or self.damage:
            return {}
        result: dict[str, Any] = json.loads((self.path / "result.json").read_bytes())
        return result

    @property
    def method(self) -> str:
        return str(self.config.get("method", {}).get("name", "?"))

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", 0))

    @property
    def state(self) -> str:
        """How the run stands, in a word."""
        if self.damage:
            return "damaged"
        if not self.manifest.finished:
            return "not ended"
        ended = str(self.result.get("ended", ""))
        return next((word for word in ("interrupted", "stopped") if ended.startswith(word)), "done")

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    def reaching(self, target: str | None) -> dict[str, Any]:
        """The result with this target, whether its config named it or not."""
        rows = [] if target is None or target in self.result["reached"] else self.metrics()
        return reaching(self.result, rows, target)

    @property
    def names(self) -> set[str]:
        """What `value` may be asked for; keys of inner tables as table.key."""
        names = {"state", *self.result.get("metrics", {}), *dotted(self.result), *dotted(self.config)}
        return names | {name.removesuffix("_final") for name in names}

    def value(self, name: str) -> Any:
        """A figure of the result, a metric's last value, a key of the config, or the state, by name; None: no such."""
        if name == "state":
            return self.state
        if name in self.result.get("metrics", {}):
            return self.result["metrics"][name]["final"]
        for table in (self.result, self.config):
            value: Any = table
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value.get("name", value) if isinstance(value, Mapping) else value
        return self.result.get(f"{name}_final")


def dotted(table: Mapping[str, Any], head: str = "") -> Iterator[str]:
    """The keys of a table and of those inside it.

    >>> list(dotted({"seed": 1, "method": {"name": "fedbuff"}}))
    ['seed', 'method', 'method.name']
    """
    for name, value in table.items():
        yield f"{head}{name}"
        if isinstance(value, Mapping):
            yield from dotted(value, f"{head}{name}.")


def find_runs(folder: Path) -> list[Shelved]:
    """All runs in a folder, itself included; links are not followed. What is damaged is passed over."""
    runs = []
    for place in walk(folder, DEEPEST):
        try:
            manifest = read_manifest(place)
        except OffbeatError:
            continue
        if manifest is not None and manifest.kind == "run" and manifest.config:
            runs.append(Shelved(place, manifest))
    return sorted(runs, key=lambda run: str(run.path))


def walk(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    try:
        inner = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for path in inner if depth else ():
        yield from walk(Path(path), depth - 1)


def opened(paths: Sequence[Path], ended: bool = True) -> list[Shelved]:
    """The runs of these directories; one that holds several (a comparison) stands for all of them."""
    shelved: list[Shelved] = []
    for path in paths:
        if not path.is_dir():
            raise OffbeatError(f"there is no directory {path}; give one that `run --out` or `compare --out` left")
        runs = find_runs(path)
        if not runs:
            read_manifest(path)  # a damaged one says so
            raise OffbeatError(f"there is no run in {path} (no {NAME} of one); give a directory that `run --out` left")
        for run in runs:
            if run.damage is not None:
                raise run.damage
        waiting = [run for run in runs if not run.manifest.finished]
        if ended and waiting:
            where = waiting[0].path
            raise OffbeatError(f"the run in {where} has not ended; `offbeat resume {where}` goes on with it")
        shelved += [run for run in runs if run.path not in {other.path for other in shelved}]
    return shelved


def chosen(runs: Sequence[Shelved], conditions: Sequence[str]) -> list[Shelved]:
    """Runs that meet every condition, such as method=fedbuff or accuracy>=0.8."""
    tests = [condition(text) for text in conditions]
    known = known_names(runs)
    if problems := [f"--where: {unlike(name, known)}" for name, _ in tests if runs and name not in known]:
        raise ConfigError(problems)
    return [run for run in runs if all(test(run.value(name)) for name, test in tests)]


def known_names(runs: Sequence[Shelved]) -> set[str]:
    """What runs can be chosen and sorted by, though none of them may have ended."""
    return {plain_name(name) for name in LIMITS}.union(*(run.names for run in runs))


def unlike(name: str, known: set[str]) -> str:
    return unknown("figure", name, {each for each in known if "." not in each or "." in name})


def condition(text: str) -> tuple[str, Any]:
    match = CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError([f"--where {text}: write it as name=value or name>=number, e.g. accuracy>=0.8"])
    name, sign, given = match.groups()
    wanted = toml.parse_value(given)
    ordered = sign in (">", "<", ">=", "<=")
    if ordered and (isinstance(wanted, bool) or not isinstance(wanted, int | float)):
        raise ConfigError([f"--where {text}: {in_words(wanted)} is no number, which {sign} needs"])

    def test(value: Any) -> bool:
        if sign in ("=", "!="):
            return (value == wanted or str(value) == given) == (sign == "=")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return bool({">": value > wanted, "<": value < wanted, ">=": value >= wanted, "<=": value <= wanted}[sign])

    return name, test


def ordered(runs: Sequence[Shelved], by: str, down: bool) -> list[Shelved]:
    """Sorted by a figure or a key; those that have none come last."""
    values = [(run, run.value(by)) for run in runs]
    if runs and all(value is None for _, value in values):
        raise ConfigError([f"--sort: {unlike(by, known_names(runs))}"])
    there = [(run, value) for run, value in values if value is not None]
    there.sort(key=lambda pair: (isinstance(pair[1], str), pair[1]), reverse=down)
    return [run for run, _ in there] + [run for run, value in values if value is None]


def remove(run: Shelved) -> None:
    """Delete what Offbeat wrote into this run directory, and the directory where nothing else is in it."""
    with Lock(run.path):
        manifest = read_manifest(run.path)
        if manifest is None or manifest.kind != "run" or manifest.run != run.manifest.run:
            raise OffbeatError(f"{run.path} is not the run any more that was listed; nothing was removed")
        refuse_links(run.path)
        clear(run.path, manifest)
        (run.path / NAME).unlink()
        (run.path / LOCK).unlink()
    if not any(run.path.iterdir()):
        run.path.rmdir()


def target_named(given: str, runs: Sequence[Shelved]) -> str:
    """A target as results call it, such as 0.9 or `mae 0.1`; its metric must be one of these runs'."""
    try:
        name, value = target_of(given)
    except ValueError:
        raise ConfigError(
            [f"--target {given}: write an accuracy, such as 0.9, or a metric's, such as 'mae 0.1'"]
        ) from None
    known = {"accuracy", "loss"}.union(*(run.result.get("metrics", {}) for run in runs))
    if plain_name(name) not in known:
        raise ConfigError([f"--target {given}: {unknown('metric', name, known)}"])
    return target_key(name, value)


def distinct(groups: Mapping[str, Sequence[Shelved]]) -> tuple[dict[str, list[Shelved]], list[str]]:
    """The same groups with every seed once, by the run that went furthest; and sentences on what a reader should know:
    runs that were left out, and those that were interrupted."""
    kept: dict[str, list[Shelved]] = {}
    notes = []
    for label, group in groups.items():
        furthest: dict[int, Shelved] = {}
        for run in sorted(group, key=lambda run: -run.result.get("commits", 0)):
            first = furthest.setdefault(run.seed, run)
            if first is not run:
                notes.append(f"{run.path} is left out: {first.path} has the same config and seed {run.seed}")
        kept[label] = [run for run in group if run in furthest.values()]
    cut = [str(run.path) for group in kept.values() for run in group if run.state == "interrupted"]
    if cut:
        many = "1 run was" if len(cut) == 1 else f"{len(cut)} runs were"
        notes.append(f"{many} interrupted (`offbeat resume` goes on): {', '.join(cut)}")
    return kept, notes


def gathered(runs: Sequence[Shelved]) -> dict[str, list[Shelved]]:
    """Runs by label: those that differ by their seed alone stand together. A label is the method, or, where two have
    the same, the name of the directory."""
    groups: dict[str, list[Shelved]] = {}
    for run in runs:
        free = ("seed", "until", "targets", "checkpoint_seconds", "client_memory", "callbacks", "device")
        key = json.dumps({k: v for k, v in run.config.items() if k not in free}, sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    methods = [group[0].method for group in groups.values()]
    labelled: dict[str, list[Shelved]] = {}
    for group in groups.values():
        name = group[0].method
        if methods.count(name) > 1:
            name = re.sub(r"-seed\d+$", "", group[0].path.resolve().name)
        while name in labelled:
            name = f"{name}'"
        labelled[name] = group
    return labelled
