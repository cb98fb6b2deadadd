"""Whatever comes in: a sentence or a sensible run, soon, and in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

import mutants

SECONDS, BYTES = 20.0, 2 * 2**30
MANY, PIECE = 5000, 250


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(10))
def test_a_sample_of_changed_configs(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))
    said = [mutants.outcome(10**6 + 15 * block + number, tmp_path) for number in range(15)]
    assert all(said)


def test_the_sample_has_runs_and_refusals(tmp_path: Path) -> None:
    texts = [mutants.case(10**6 + number) for number in range(150)]
    assert len({text for text, _ in texts}) > 100
    assert any(sets for _, sets in texts)


def attempt(first: int, last: int) -> list[dict[str, Any]]:
    """The records of a range of cases, from a process of its own; one that dies or takes too long is a record too."""
    records: list[dict[str, Any]] = []
    while first < last:
        command = [sys.executable, mutants.__file__, str(first), str(last)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        lines: Queue[str | None] = Queue()

        def listen(worker: Any = worker, lines: Any = lines) -> None:
            for line in worker.stdout:
                lines.put(line)
            lines.put(None)

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        while first < last:
            try:
                line = lines.get(timeout=6 * SECONDS)  # starting takes time, and other work runs beside
            except Empty:
                line = None
            if line is None:
                failure = "the process died, or took more than two minutes"
                records.append({"number": first, "said": "", "failure": failure, "seconds": 0.0, "bytes": 0})
                first += 1
                break
            record = json.loads(line)
            if "number" in record:
                records.append(record)
                first += 1
        worker.kill()
        worker.wait()
        listener.join()
        assert worker.stdout is not None
        worker.stdout.close()
    return records


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
def test_thousands_of_changed_configs() -> None:
    """`MUTANTS=FIRST:LAST` tries another range; `MUTANTS_OUT` names a file for all records."""
    first, last = map(int, os.environ.get("MUTANTS", f"0:{MANY}").split(":"))
    ranges: Queue[tuple[int, int]] = Queue()
    for begin in range(first, last, PIECE):
        ranges.put((begin, min(last, begin + PIECE)))
    records: list[dict[str, Any]] = []

    def work() -> None:
        while True:
            try:
                begin, end = ranges.get_nowait()
            except Empty:
                return
            records.extend(attempt(begin, end))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if where := os.environ.get("MUTANTS_OUT"):
        Path(where).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(records) == last - first
    assert [r for r in records if r["failure"]] == []
    assert [r for r in records if r["seconds"] > SECONDS or r["bytes"] > BYTES] == []
    runs = sum(record["said"] == "run" for record in records)
    assert runs > 0.1 * len(records)
    assert runs < 0.9 * len(records)
