"""Running experiments: from the start, from a checkpoint, from a trace.

result = run(Experiment(method={"name": "fedbuff"}, until={"accuracy": 0.9}))
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.config import registry
from offbeat.errors import OffbeatError, ReplayDiffers
from offbeat.experiments.assemble import build
from offbeat.experiments.experiment import Experiment
from offbeat.keys import generator
from offbeat.records import Begun
from offbeat.runs.callbacks import Callback, Divergence
from offbeat.runs.columns import StoredRows
from offbeat.runs.environment import differences, environment
from offbeat.runs.folder import Folder
from offbeat.runs.lock import Lock
from offbeat.runs.loop import History, go
from offbeat.runs.manifest import FORMAT
from offbeat.runs.outcome import Outcome
from offbeat.runs.progress import Progress
from offbeat.runs.repeat import Distance, distance
from offbeat.runs.store import Store
from offbeat.runs.stored import Stored, config_digest, read_model
from offbeat.runs.watchers import callbacks_of
from offbeat.schedule.trace import Replay


def run(
    experiment: Experiment, out: str | Path | None = None, progress: Progress | bool | None = None,
    overwrite: bool = False, callbacks: Sequence[Callback] = (),
) -> Outcome:  # fmt: skip
    """Run an experiment from its start; with `out`, into a run directory: a new or empty one, or, with `overwrite`, in
    the place of another run. `progress=True` shows a line on a terminal or in a notebook; `callbacks` watch the run."""
    with preparing(progress_line(progress, experiment)) as line:
        return started(experiment, out, line, overwrite, callbacks)


@contextmanager
def preparing(progress: Progress | None) -> Iterator[Progress | None]:
    """A line of progress from the first moment on, that does not outlast the run, whatever ends it."""
    try:
        if progress is not None:
            progress.prepare()
        yield progress
    finally:
        if progress is not None:
            progress.close()


def started(
    experiment: Experiment, out: str | Path | None, progress: Progress | None, overwrite: bool,
    callbacks: Sequence[Callback],
) -> Outcome:  # fmt: skip
    built = build(experiment)
    with registry.recording() as watchers:
        watching = [Divergence(), *callbacks_of(experiment.callbacks), *callbacks_of(callbacks)]
    if out is None:
        engine = built.engine()
        schedule = built.horizon(built.clock())
        return go(experiment, built, engine, schedule, built.account(), None, progress, callbacks=watching)
    text = experiment.toml()
    with Folder(out, "run", overwrite) as folder:
        folder.manifest.config_digest = config_digest(experiment.table())
        folder.manifest.sources = {**built.sources, **watchers}
        engine = built.engine()
        store = Store(folder.path, folder.lock, folder.manifest, text, environment(engine.device, engine.threads))
        schedule = built.horizon(built.clock())
        return go(experiment, built, engine, schedule, built.account(), store, progress, callbacks=watching)


def progress_line(progress: Progress | bool | None, experiment: Experiment) -> Progress | None:
    """The line of progress that was asked for."""
    if not isinstance(progress, bool):
        return progress
    return Progress(f"{spoken(experiment.method)} seed {experiment.seed}", experiment.until) if progress else None


def spoken(given: Any) -> str:
    return str(given["name"] if isinstance(given, Mapping) else getattr(given, "name", given))


def resume(
    out: str | Path,
    until: Mapping[str, float] | None = None,
    progress: Progress | None = None,
    changed_code: bool = False,
    callbacks: Sequence[Callback] = (),
    **objects: Any,
) -> Outcome:
    """Go on with a run that stopped, for whatever reason, as if it had not. `until` may set a further limit.

    Time never depends on values, so the schedule is run again from the seed and checked against the stored trace;
    the numerics go on from the checkpoint. Objects of your own (task=..., method=..., fleet=..., callbacks=[...]) are
    passed again, callbacks in the order they had; a function that the config names as module:function must be what
    it was, unless `changed_code` says it need not.
    """
    path = Path(out)
    Stored(path)  # a directory that is none of ours is not even locked
    with Lock(path) as lock:
        stored = Stored(path)
        refuse_live(stored)
        stored.check_code(changed_code)
        experiment = Experiment.of(stored.config(limits=True) | objects)
        stored.check_config(experiment.table())
        point = stored.checkpoint()
        if until:
            experiment = replace(experiment, until=dict(until))
        built = build(experiment)
        engine = built.engine(point.facts)
        own = {name: t for name, t in point.tensors.items() if not name.startswith(("horizon/", "callback/"))}
        engine.restore(own, point.facts)
        manifest = stored.manifest
        here = environment(engine.device, engine.threads)
        if other := differences(manifest.environments, here):
            warnings.warn(f"{path} was run elsewhere ({'; '.join(other)}), so its bits may differ", stacklevel=2)
        with registry.recording() as watchers:
            watching = [Divergence(), *callbacks_of(experiment.callbacks), *callbacks_of(callbacks)]
        manifest.trace, manifest.metrics, manifest.sources = point.trace, point.metrics, {**built.sources, **watchers}
        manifest.checkpoints = manifest.checkpoints[: manifest.checkpoints.index(point.name) + 1]
        history = History(point, stored.metrics(), stored.rows(), built.clock)
        store = Store(path, lock, manifest, experiment.toml(), here)
        account = built.account()
        schedule = built.horizon(built.clock())
        return go(experiment, built, engine, schedule, account, store, progress, history, watching)


def replay(out: str | Path, tolerance: float | None = None, changed_code: bool = False, **objects: Any) -> Outcome:
    """Run again from a stored trace instead of the clock: the policy must say the same, the model must be the same.

    Raises `ReplayDiffers` where the models are further apart than `tolerance`, the relative norm of their difference.
    By default that is 0 where the run was made, and elsewhere what rounding may do there (`runs/repeat.py`).
    """
    outcome, apart = repeat(out, tolerance, changed_code, **objects)
    if not apart.within:
        raise ReplayDiffers(f"the model of the replay differs from the stored one: {apart}", outcome, apart)
    return outcome


def repeat(
    out: str | Path, tolerance: float | None = None, changed_code: bool = False, **objects: Any
) -> tuple[Outcome, Distance]:
    """`replay`, and how far it ended from the stored run."""
    path = Path(out)
    Stored(path)
    with Lock(path, reader=True):
        stored = Stored(path)
        refuse_live(stored)
        stored.check_code(changed_code)
        experiment = Experiment.of(stored.config(limits=False) | objects)
        stored.check_config(experiment.table())
        stored.check()
        if not stored.manifest.finished:
            raise OffbeatError(f"the run in {path} has not ended; resume it first")
        built = build(experiment)
        rows: StoredRows = stored.rows()
        refuse_older_streams(stored, built.task.sampling)
        policy, rng = built.method.when, generator(experiment.seed, "policy")
        last = rows.last_begins()
        driver = Replay(rows, policy, built.units, rng, last, built.clock())
        facts = stored.checkpoint().facts
        engine = built.engine(facts, again=True)
        horizon = built.horizon(driver, last=len(last) - 1)
        outcome = go(experiment, built, engine, horizon, built.account(), None, None)
        other = differences(stored.manifest.environments, environment(engine.device, engine.threads))
        model, metrics = read_model(path), stored.metrics()
    return outcome, distance(outcome.model, model, outcome.metrics, metrics, other, tolerance, experiment.precision)


def refuse_older_streams(stored: Stored, sampling: str) -> None:
    """Refuse a run of format 3 whose jobs began at other places of their clients' streams than they would today: its
    position was the job's number times the job's own steps."""
    if stored.manifest.format >= FORMAT or sampling != "in-order-continued":
        return
    for _, record in stored.rows():
        if isinstance(record, Begun) and record.job * record.steps != record.steps_before:
            raise OffbeatError(
                f"the run in {stored.path} was made by an older Offbeat, which with sampling = 'in-order-continued' "
                f"skipped or repeated rows: job {record.job} of client {record.client} began at step "
                f"{record.job * record.steps} of its stream, and belongs at step {record.steps_before}. Its numbers "
                f"cannot be computed again; run {stored.path / 'config.toml'} into another directory"
            )


def refuse_live(stored: Stored) -> None:
    if stored.manifest.live:
        raise OffbeatError(
            f"{stored.path} holds a live run, whose clients computed it: `offbeat serve` goes on with one that has not "
            "ended, and `offbeat replay` (in Python: offbeat.live.verify.verify) holds one that has against simulation"
        )
