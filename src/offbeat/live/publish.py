"""From a finished journal to a run directory as a simulation leaves it, with what only a live run has beside it.

live.json          per client: samples, digest of its shard, seconds of a heartbeat, what was refused; bytes on the wire
jobs.safetensors   start and update of a sample of jobs, as they travelled
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from offbeat.live.journal import FILE, Journal
from offbeat.records import Begun, Commit, Row
from offbeat.runs.disk import write_file
from offbeat.runs.environment import environment
from offbeat.runs.lock import Lock
from offbeat.runs.manifest import Manifest
from offbeat.runs.outcome import Outcome, client_rows
from offbeat.runs.store import Store

if TYPE_CHECKING:
    from offbeat.live.live_server import LiveServer

LIVE, JOBS = "live.json", "jobs.safetensors"


def publish(server: LiveServer, path: Path, lock: Lock, manifest: Manifest) -> Outcome:
    """Write the run directory, list it in the manifest, then let the journal go."""
    run, built = server.run, server.built
    log, engine = run.log, run.engine
    if not log.looked:
        log.look_at_last()
    manifest.trace, manifest.metrics, manifest.checkpoints = [], [], []
    journal = Journal(path)
    store = Store(path, lock, manifest, built.experiment.toml(), environment(engine.device, engine.settings.threads))
    begun = note_rows(journal, store)
    for row in log.metrics:
        store.note_metrics(row)
    facts = {"format": "live", "closing": log.closing, "version": run.server.version, "account": log.account.state(),
             "wall_seconds": run.now()}  # fmt: skip
    for name, write in ((LIVE, partial(write_facts, live_facts(server, journal))), (JOBS, jobs_writer(journal, begun))):
        manifest.files[name] = write_file(path / name, write)
        if name not in manifest.live:
            manifest.live.append(name)
    store.checkpoint({name: t.detach().cpu().contiguous().clone() for name, t in run.server.save().items()}, facts)
    result = log.result(run.ended or "") | {
        "refused": dict(run.guard.refused),
        "live": {
            "epochs": run.epoch,
            "bytes": server.health()["bytes"],
            "memory_lost": server.counts["memory_lost"],
            "waiting": [list(job) for job in run.arrivals],
        },
    }
    model = engine.model()
    store.close(result, model, client_rows(log.account, engine.client_figures()))
    journal.close()
    clear(path)
    return Outcome(result, log.metrics, model)


def note_rows(journal: Journal, store: Store) -> dict[tuple[int, int], Begun]:
    """Hand the rows up to the last commit to the store; the sampled jobs among them."""
    sampled = journal.sampled("update")
    begun: dict[tuple[int, int], Begun] = {}
    rows: list[Row] = []
    for row in journal.rows():
        rows.append(row)
        if isinstance(row[1], Begun) and row[1][:2] in sampled:
            begun[row[1][:2]] = row[1]
        if isinstance(row[1], Commit):
            store.note(rows)
            rows = []
    return begun


def live_facts(server: LiveServer, journal: Journal) -> dict[str, Any]:
    waits: dict[str, list[float]] = {}
    for (client, job), seconds in journal.waits().items():
        waits.setdefault(str(client), []).extend((job, seconds))
    health = server.health()
    return {
        "sizes": {"down": server.run.down.size, "up": server.run.up.size}, "bytes": health["bytes"],
        "refused": health["refused"], "turned_away": health["turned_away"], "epochs": server.run.epoch,
        "fleet": server.clients,
        "clients": {str(client): facts for client, facts in sorted(server.known.items())}, "waits": waits,
    }  # fmt: skip


def write_facts(facts: dict[str, Any], at: Path) -> None:
    at.write_text(json.dumps(facts, indent=1) + "\n")


def jobs_writer(journal: Journal, begun: dict[tuple[int, int], Begun]) -> Any:
    """Writes starts and updates of the sampled jobs that arrived."""
    tensors = {}
    for job in begun:
        for kind in ("start", "update"):
            raw = np.fromfile(journal.sample(*job, kind), dtype=np.uint8)
            tensors[f"{kind}/{job[0]}/{job[1]}"] = torch.from_numpy(raw)
    metadata = {"facts": json.dumps({"jobs": [list(each) for each in begun.values()]})}
    return lambda at: save_file(tensors, at, metadata=metadata)


def clear(path: Path) -> None:
    """The journal has done its work."""
    for file in (
        *path.glob(f"{FILE}*"),
        *path.glob("state-*.safetensors"),
        *path.glob("payloads/*"),
        *path.glob("samples/*"),
    ):
        file.unlink(missing_ok=True)
    for name in ("payloads", "samples"):
        if (path / name).is_dir():
            (path / name).rmdir()
