"""The ledger of a tuning: every trial on the disk, so that tuning can be broken off and taken up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offbeat.config import toml
from offbeat.errors import OffbeatError
from offbeat.experiments.experiment import Experiment, split_name
from offbeat.runs.disk import storing
from offbeat.runs.folder import Folder, reopened

LEDGER = "trials.jsonl"


@dataclass(frozen=True)
class Entry:
    """A trial in the ledger, or, if `fresh`, what a finalist came to on seeds that no trial had seen."""

    label: str
    number: int
    options: dict[str, Any]
    scores: list[float | None]  # one for each seed that it was run with; None: it failed
    cut: bool  # before it was run with all seeds
    company: int
    seconds: float  # of its part of the real time
    said: str | None = None
    fresh: bool = False

    @property
    def score(self) -> float | None:
        """The mean over seeds; larger is better, None is a failure."""
        known = [score for score in self.scores if score is not None]
        return sum(known) / len(known) if known and len(known) == len(self.scores) else None


class Ledger:
    """All trials so far, on the disk where there is a directory: a line for each, in whole batches."""

    def __init__(self, out: Path | None, key: str, resume: bool) -> None:
        self.entries: list[Entry] = []
        self.folder: Folder | None = None
        self.key = key
        if out is None:
            return
        lines: list[str] = []
        if resume and (out / LEDGER).is_file():
            first, *lines = (out / LEDGER).read_text().splitlines() or [""]
            if json.loads(first or "{}").get("key") != key:
                raise OffbeatError(
                    f"{out} holds a tuning of something else (other methods, budget or search); choose another --out"
                )
            self.entries = [Entry(**json.loads(line)) for line in lines]
        elif resume and not out.exists():
            raise OffbeatError(f"there is no tuning in {out} to go on with")
        self.folder = reopened(out, "tuning") if resume else Folder(out, "tuning")
        self.write()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            self.folder.lock.release()

    def add(self, entries: Sequence[Entry]) -> None:
        self.entries += entries
        self.write()

    def write(self) -> None:
        if self.folder is None:
            return
        lines = [json.dumps({"key": self.key}), *(json.dumps(asdict(entry)) for entry in self.entries)]
        file = self.folder.path / LEDGER
        with storing(self.folder.path):
            new = file.with_suffix(".new")
            new.write_text("\n".join(lines) + "\n")
            new.replace(file)
            self.folder.add([file])

    def trials(self, label: str, fresh: bool = False) -> list[Entry]:
        return [entry for entry in self.entries if entry.label == label and entry.fresh == fresh]

    def close(self, experiments: Mapping[str, Experiment], best: Mapping[str, dict[str, Any]], head: str) -> None:
        """`tuned.toml`: a comparison of the methods with their best options, at the same budget."""
        if self.folder is None:
            return
        common = next(iter(experiments.values())).table()
        table = {key: value for key, value in common.items() if key != "method"}
        table["methods"] = {}
        for label, experiment in experiments.items():
            name, fixed = split_name("method", experiment.method)
            table["methods"][label] = {"name": name, **fixed, **best[label]}
        file = self.folder.path / "tuned.toml"
        with storing(self.folder.path):
            file.write_text(f"# {head}\n{toml.write(table)}")
            self.folder.add([file])
