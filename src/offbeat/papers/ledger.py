"""Records of cells on disk: a JSON file for each recipe, a line for each record; and what a missing cell will cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.papers.recipe import PACES, Cell, Record, Run
from offbeat.runs.store import strict

OLDER = "older.json"  # records of earlier commits, whose draws differ from today's
START = {"h200": 4.0, "cpu": 1.0}  # seconds of a cell beside its steps: data, kernels, looks


def kind_of(device: str) -> str:
    return "cpu" if device == "cpu" else "h200"


class Ledger:
    """The records under a folder. `older` holds what was measured at commits that drew other random numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, list[Record]] = {}
        self.older: list[Record] = read(folder / OLDER) if (folder / OLDER).is_file() else []
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            if path.name != OLDER:
                self.records[path.stem] = read(path)

    def of(self, cell: Cell, size: str = "full", cut: bool = False) -> list[Record]:
        """The records of a cell, by seed; those of runs that were cut short only where asked for."""
        mine = (r for r in self.records.get(cell.home, ()) if (r["cell"], r["size"]) == (cell.record, size))
        return sorted((r for r in mine if cut or "cut" not in r), key=lambda r: int(r["seed"]))

    def has(self, cell: Cell, run: Run) -> bool:
        return any(record["seed"] == run.seed for record in self.of(cell, run.size))

    def older_of(self, cell: Cell) -> list[Record]:
        return [r for r in self.older if (r["recipe"], r["cell"]) == (cell.home, cell.record)]

    def add(self, cell: Cell, record: Record) -> None:
        """Keep a record in the place of the one with its cell, seed and size, on disk at once."""
        self.records[cell.home] = merged(self.records.get(cell.home, []), [record])
        write(self.folder / f"{cell.home}.json", self.records[cell.home])

    def merge(self, folder: Path) -> int:
        """Take over the records of another folder; gives how many."""
        paths = [path for path in sorted(folder.glob("*.json")) if path.name != OLDER]
        if not paths:
            raise OffbeatError(f"{folder} holds no records (NAME.json); give the --results folder of another machine")
        count = 0
        for path in paths:
            new = read(path)
            self.records[path.stem] = merged(self.records.get(path.stem, []), new)
            write(self.folder / path.name, self.records[path.stem])
            count += len(new)
        return count


def merged(old: list[Record], new: list[Record]) -> list[Record]:
    """The new records, and of the old ones those that no new one stands for."""
    records = {(r["cell"], r["seed"], r["size"]): r for r in old}
    for record in new:
        name = (record["cell"], record["seed"], record["size"])
        if "cut" not in record or name not in records or "cut" in records[name]:
            records[name] = record
    return sorted(records.values(), key=lambda r: (r["cell"], r["seed"], r["size"]))


def read(path: Path) -> list[Record]:
    try:
        records: Any = json.loads(path.read_text())
        if not isinstance(records, list) or not all(isinstance(r, dict) and "cell" in r for r in records):
            raise ValueError("it is no list of records")
    except (OSError, ValueError) as error:
        raise OffbeatError(f"{path} holds no records of cells ({error}); move it away or repair it") from error
    return records


def write(path: Path, records: list[Record]) -> None:
    """A record on each line, so that a change of one cell changes one line; replaced whole, so no reader sees half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("[\n" + ",\n".join(json.dumps(strict(record)) for record in records) + "\n]\n")
    part.replace(path)


def estimate(cell: Cell, kind: str, kept: Ledger) -> tuple[float, str]:
    """Seconds that a cell will take on a kind of device, and how we know: from stored runs of it, else by its steps."""
    stored = [*kept.of(cell), *kept.older_of(cell)]
    walls = [r["wall_seconds"] for r in stored if kind_of(r.get("device", "cpu")) == kind and r.get("wall_seconds")]
    cuts = [1.5 * r["cut"] for r in kept.of(cell, cut=True) if "cut" in r and kind_of(r["device"]) == kind]
    steps, pace = cell.cost
    by_rate = START[kind] + steps / PACES[kind][pace]
    if cuts and not walls:
        return max([by_rate, *cuts]), "cut before"
    return (sum(walls) / len(walls), "stored") if walls else (by_rate, "by rate")
