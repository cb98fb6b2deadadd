"""The server's journal: what happened is on the disk before anybody is told of it.

SQLite with a write-ahead log and `synchronous = FULL`; buffers lie in files beside it. One thread writes: whatever has
gathered while it waited for the disk goes into the next transaction, so many clients share one sync. A row and the
commands that answer it stand in one transaction, so a journal never ends between them.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from offbeat.errors import StorageError
from offbeat.records import Row
from offbeat.runs.disk import reason, sync
from offbeat.schedule.trace import COLUMNS, flat, unflat

FILE = "journal.sqlite3"
PAYLOADS, SAMPLES = "payloads", "samples"
FORMAT = 1
TABLES = f"""
    CREATE TABLE IF NOT EXISTS rows (number INTEGER PRIMARY KEY, {", ".join(COLUMNS)}, epoch INTEGER);
    CREATE TABLE IF NOT EXISTS payloads (client INTEGER, job INTEGER, size INTEGER, PRIMARY KEY (client, job));
    CREATE TABLE IF NOT EXISTS clients (client INTEGER PRIMARY KEY, facts TEXT);
    CREATE TABLE IF NOT EXISTS metrics (number INTEGER PRIMARY KEY, facts TEXT);
    CREATE TABLE IF NOT EXISTS waits (client INTEGER, job INTEGER, seconds REAL, PRIMARY KEY (client, job));
    CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);
"""
ROW = f"INSERT INTO rows VALUES ({', '.join('?' * (len(COLUMNS) + 2))})"
PAYLOAD = "INSERT OR REPLACE INTO payloads VALUES (?, ?, ?)"
FORGET = "DELETE FROM payloads WHERE client = ? AND job = ?"
FACT = "INSERT OR REPLACE INTO facts VALUES (?, ?)"
Work = tuple[str, Sequence[Any]]


class Journal:
    """One run's journal. Whoever opens it holds the lock of its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (PAYLOADS, SAMPLES):
            (folder / name).mkdir(exist_ok=True)
        try:
            self.base = sqlite3.connect(folder / FILE, check_same_thread=False, isolation_level=None)
            self.base.execute("PRAGMA journal_mode = WAL")
            self.base.execute("PRAGMA synchronous = FULL")
            self.base.executescript(TABLES)
            sync(folder)
        except sqlite3.Error as error:
            raise StorageError(f"{folder / FILE} cannot be used: {error}") from None
        self.count: int = self.base.execute("SELECT COUNT(*) FROM rows").fetchone()[0]
        self.work: queue.SimpleQueue[list[Work] | Future[None] | None] = queue.SimpleQueue()
        self.parts = itertools.count()
        self.group: list[Work] = []  # what belongs together, and is not handed over yet
        self.failure: StorageError | None = None
        self.writer: threading.Thread | None = None

    # ---- what is there --------------------------------------------------------------------------
    def fact(self, name: str, default: Any = None) -> Any:
        row = self.base.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return default if row is None else json.loads(row[0])

    def rows(self) -> StoredJournal:
        return StoredJournal(self.base)

    def epochs(self) -> dict[tuple[int, int], int]:
        """Under which epoch each job began."""
        begun = self.base.execute("SELECT client, job, epoch FROM rows WHERE kind = 'begun'")
        return {(client, job): epoch for client, job, epoch in begun}

    def clients(self) -> dict[int, dict[str, Any]]:
        return {client: json.loads(facts) for client, facts in self.base.execute("SELECT * FROM clients")}

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(facts) for (facts,) in self.base.execute("SELECT facts FROM metrics ORDER BY number")]

    def waits(self) -> dict[tuple[int, int], float]:
        return {(client, job): s for client, job, s in self.base.execute("SELECT client, job, seconds FROM waits")}

    def payloads(self) -> dict[tuple[int, int], int]:
        return {(client, job): size for client, job, size in self.base.execute("SELECT * FROM payloads")}

    def payload(self, client: int, job: int) -> Path:
        return self.folder / PAYLOADS / f"{client}-{job}.bin"

    def part(self) -> Path:
        """Where a payload lies until the run has taken it; no two have the same place."""
        return self.folder / PAYLOADS / f"{next(self.parts)}.part"

    def sample(self, client: int, job: int, kind: str) -> Path:
        return self.folder / SAMPLES / f"{client}-{job}.{kind}"

    def sampled(self, kind: str) -> set[tuple[int, int]]:
        """The jobs of which a start or an update was kept."""
        names = [file.stem.split("-") for file in (self.folder / SAMPLES).glob(f"*.{kind}")]
        return {(int(client), int(job)) for client, job in names}

    # ---- what is written ------------------------------------------------------------------------
    def start(self) -> None:
        self.writer = threading.Thread(target=self.write, name="journal", daemon=True)
        self.writer.start()

    def put(self, statement: str, *values: Any) -> None:
        self.group.append((statement, values))

    def flush(self) -> None:
        """What was put goes into one transaction."""
        if self.group:
            self.work.put(self.group)
            self.group = []

    def row(self, row: Row, epoch: int) -> None:
        values = flat(row)
        jobs = None if values[-1] is None else json.dumps(values[-1])
        self.put(ROW, self.count, *values[:-1], jobs, epoch)
        self.count += 1

    def set_fact(self, name: str, value: Any) -> None:
        self.put(FACT, name, json.dumps(value))

    def set_client(self, client: int, facts: dict[str, Any]) -> None:
        self.put("INSERT OR REPLACE INTO clients VALUES (?, ?)", client, json.dumps(facts))

    def durable(self) -> Future[None]:
        """Done when all that was put before is on the disk."""
        self.flush()
        barrier: Future[None] = Future()
        self.work.put(barrier)
        return barrier

    def apply(self, group: list[Work]) -> None:
        """Put a group of one's own, from any thread, and wait until it is on the disk."""
        barrier: Future[None] = Future()
        self.work.put(group)
        self.work.put(barrier)
        barrier.result()

    def write(self) -> None:
        """The writer's loop. After a failure nothing more is written: what is there stays whole."""
        while (first := self.work.get()) is not None:
            batch: list[list[Work] | Future[None]] = [first]
            with suppress(queue.Empty):
                while (item := self.work.get_nowait()) is not None:
                    batch.append(item)
                self.work.put(None)
            self.transact(batch)

    def transact(self, batch: list[list[Work] | Future[None]]) -> None:
        barriers = [item for item in batch if isinstance(item, Future)]
        statements = [work for item in batch if not isinstance(item, Future) for work in item]
        try:
            if self.failure is None and statements:
                if any(statement is PAYLOAD for statement, _ in statements):
                    sync(self.folder / PAYLOADS)  # the names of files that the rows speak of
                self.base.execute("BEGIN")
                for statement, values in statements:
                    self.base.execute(statement, values)
                self.base.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            self.failure = StorageError(f"cannot write {self.folder / FILE}: {error}; what was acknowledged is kept")
            with suppress(sqlite3.Error):
                self.base.execute("ROLLBACK")
        for barrier in barriers:
            if not barrier.set_running_or_notify_cancel():
                continue
            barrier.set_result(None) if self.failure is None else barrier.set_exception(self.failure)

    def close(self) -> None:
        """Write what was put; closing again does nothing."""
        if self.writer is not None:
            self.flush()
            self.work.put(None)
            self.writer.join()
            self.writer = None
        self.base.close()

    def sweep(self) -> None:
        """Remove payloads that no row speaks of: they were on their way when the server ended."""
        known = {self.payload(*job).name for job in self.payloads()}
        for file in (self.folder / PAYLOADS).iterdir():
            if file.name not in known:
                file.unlink()


class StoredJournal:
    """The rows of a journal; each pass reads them anew."""

    def __init__(self, base: sqlite3.Connection) -> None:
        self.base = base

    def __iter__(self) -> Iterator[Row]:
        for row in self.base.execute(f"SELECT {', '.join(COLUMNS)} FROM rows ORDER BY number"):
            yield unflat((*row[:-1], None if row[-1] is None else json.loads(row[-1])))


def write_payload(file: Path, data: bytes | bytearray) -> None:
    """A file that is on the disk when this returns, but for its name in the folder."""
    try:
        with file.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        file.unlink(missing_ok=True)
        raise StorageError(f"cannot write {file}: {reason(error)}") from None
