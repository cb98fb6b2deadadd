"""A live run from its config to its finished directory: begun, gone on with, stopped, published."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigError, Interrupted, OffbeatError, StorageError
from offbeat.experiments.assemble import Built, build
from offbeat.experiments.experiment import Experiment
from offbeat.live import transport
from offbeat.live.admissible import require_live
from offbeat.live.conduct import Effect, Run
from offbeat.live.door import Options as Options
from offbeat.live.journal import FILE, Journal
from offbeat.live.live_server import LiveServer
from offbeat.live.publish import publish
from offbeat.runs.folder import Folder
from offbeat.runs.lock import Lock
from offbeat.runs.manifest import FORMAT, Manifest, read_manifest
from offbeat.runs.outcome import Outcome
from offbeat.runs.progress import Progress
from offbeat.runs.stored import config_digest


def serve(
    experiment: Experiment,
    out: str | Path,
    options: Options | None = None,
    progress: Progress | None = None,
    announce: Callable[[LiveServer], Any] | None = None,
    overwrite: bool = False,
) -> Outcome:
    """Serve a run until it has ended. An `out` that holds an unfinished live run of this experiment is gone on with."""
    options, path = options or Options(), Path(out)
    built = build(experiment)
    require_live(built)
    transport.require_address(options.address, options.keys)
    if problems := options.problems(built.task.clients):
        raise ConfigError(problems)
    with contextlib.ExitStack() as stack:
        if (path / FILE).exists() and not overwrite:
            lock = stack.enter_context(Lock(path))
            manifest = gone_on_with(path, experiment)
        else:
            folder = stack.enter_context(Folder(out, "run", overwrite))
            lock, manifest = folder.lock, folder.manifest
            clear_journal(path)
            manifest.config_digest, manifest.sources = config_digest(experiment.table()), dict(built.sources)
            manifest.config = experiment.toml()
        return served(built, path, lock, manifest, options, progress, announce)


def gone_on_with(path: Path, experiment: Experiment) -> Manifest:
    manifest = read_manifest(path)
    if manifest is None or manifest.kind != "run":
        raise OffbeatError(f"{path} holds a journal, but is no run directory; choose another one")
    if manifest.format < FORMAT:
        raise OffbeatError(
            f"the live run in {path} was begun by an older Offbeat, whose journal this one cannot continue; finish it "
            "with that version, or choose another --out"
        )
    if manifest.finished:
        raise OffbeatError(f"the live run in {path} has ended; choose another --out, or give --overwrite")
    if manifest.config_digest and manifest.config_digest != config_digest(experiment.table()):
        raise OffbeatError(
            f"{path} holds an unfinished live run of another experiment; serve that one, or choose another --out"
        )
    return manifest


def clear_journal(path: Path) -> None:
    for file in (*path.glob(f"{FILE}*"), *path.glob("state-*.safetensors")):
        file.unlink()
    for name in ("payloads", "samples"):
        for file in (path / name).glob("*"):
            file.unlink()


def served(
    built: Built, path: Path, lock: Lock, manifest: Manifest, options: Options, progress: Progress | None,
    announce: Callable[[LiveServer], Any] | None,
) -> Outcome:  # fmt: skip
    journal = Journal(path)
    try:
        if (digest_there := journal.fact("config")) not in (None, manifest.config_digest):
            raise StorageError(f"the journal in {path} belongs to another experiment ({digest_there})")
        manifest.write(path)
        journal.sweep()
        run = Run(built, journal, options.limits.memory_mib * 2**20, progress)
        effects: list[Effect] = []
        if (sizes := journal.fact("sizes")) is not None:
            for client, samples in enumerate(sizes):
                run.server.set_size(client, samples)
        if journal.count:
            effects = run.restore()
        else:
            run.states.read()  # primed, perhaps, and not begun
        journal.start()
        journal.set_fact("epoch", run.epoch)
        journal.set_fact("config", manifest.config_digest)
        journal.durable().result()
        server = server_of(built, run, options, manifest.run)
        asyncio.run(served_until_it_ends(server, effects, announce))
        if server.failure is not None:
            raise server.failure
        if run.ended is None:
            journal.flush()
            run.states.write(run.packets, wait=True)
            raise Interrupted(
                f"stopped; `offbeat serve` with --out {path} goes on, and clients come back by themselves"
            )
        run.states.close()
        journal.close()
        outcome = publish(server, path, lock, manifest)
        if run.failure is not None:
            run.failure.outcome = outcome
            raise run.failure
        return outcome
    finally:
        journal.close()
        if progress is not None:
            progress.close()


def server_of(built: Built, run: Run, options: Options, run_id: str) -> LiveServer:
    """Clients report each for itself, or clusters as one."""
    if built.hybrid is None:
        return LiveServer(built, run, options, run_id)
    from offbeat.live.cluster_server import ClusterServer

    return ClusterServer(built, run, options, run_id)


async def served_until_it_ends(
    server: LiveServer, effects: list[Effect], announce: Callable[[LiveServer], Any] | None
) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # not in the main thread
            loop.add_signal_handler(number, server.stop)
    if server.run.begun:
        for client in server.expected():
            server.leases[client] = time.monotonic() + server.options.lease
    for effect in effects:
        if effect.kind == "wake":
            server.act(effect)
    await server.serve(announce)
