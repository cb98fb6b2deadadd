"""The items of `offbeat bench`, each a table of figures from one run on one machine."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from offbeat import __version__
from offbeat.bench import NAMES, RAY, work
from offbeat.bench.families import FAMILIES, measure
from offbeat.config.choices import Precision
from offbeat.engines.engine import Engine, pick_device
from offbeat.errors import ConfigError, unknown
from offbeat.experiments.assemble import build_method
from offbeat.experiments.experiment import Experiment
from offbeat.experiments.running import run
from offbeat.records import Begun
from offbeat.runs.environment import processor

Rows: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """What is timed and where. `others` are commands that do the protocol's work on another simulator."""

    device: str = "auto"
    precision: Precision = "float32"
    quick: bool = False
    others: tuple[tuple[str, str], ...] = ()

    @property
    def on(self) -> torch.device:
        return pick_device(self.device)


def bench(
    only: tuple[str, ...], settings: Settings, say: Callable[[str], None] = lambda _: None,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """All items, or only those named; with the facts that a reader needs to believe them. `keep` is given what there
    is after every row, so that a long item that fails loses nothing."""
    chosen = {name: None for given in only for name in (RAY if given == "ray" else (given,))}
    wrong = [unknown("item of the benchmark", name, ITEMS) for name in chosen if name not in (*ITEMS, *RAY)]
    if wrong:
        raise ConfigError(wrong)
    results: dict[str, Any] = {"facts": facts(settings)}
    for name, item in ITEMS.items():
        if not only or name in chosen:
            say(name)
            results[name] = []
            for row in item(settings):
                results[name].append(row)
                keep(results)
    for name in RAY:
        if name in chosen:
            from offbeat.bench.ray_items import TABLES

            say(name)
            results[name] = TABLES[name](settings.quick)
    return results


def facts(settings: Settings) -> dict[str, Any]:
    """Device, versions, commit."""
    device = settings.on
    names = ("torch", "numpy", "triton")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "precision": settings.precision,
        "quick": settings.quick,
        "offbeat": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in names},
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except ModuleNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout that this package runs from, with "+changes" if it was changed; None without one."""
    here = Path(__file__).parent
    git = partial(subprocess.run, cwd=here, capture_output=True, text=True, check=False)
    try:
        head = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    except OSError:
        return None
    return f"{head}+changes" if head and changed else head or None


# ---- (a) waves against the plain loop -----------------------------------------------------------
def waves(settings: Settings) -> Rows:
    """Client-steps per second of a wave and of the plain loop, for three models and several sizes."""
    device = settings.on
    gpu = device.type == "cuda"
    sizes = (1, 10, 50) if settings.quick else (1, 2, 3, 5, 10, 20, 50) if not gpu else (1, 10, 50, 100, 200)
    steps = 50 if gpu else 20
    rows = []
    for model, name in work.MODELS.items():
        for size in sizes:
            task = work.small_task(model, size)
            method = build_method({"name": "local-sgd", "local_steps": steps})
            engine = Engine(method, task, 0, device, settings.precision)
            jobs = [Begun(client, 0, 0, steps) for client in range(size)]
            work.warm_up(partial(engine.solve, jobs), device, 0.5 if gpu else 3.0)
            few = range(min(size, 10))  # the plain loop's cost is per client: ten are enough to know it
            goes = 3 if gpu else 1  # of a wave in one timing
            plain, wave = [], []
            for _ in range(3 if settings.quick else 7):
                took = work.seconds(partial(work.plain_loop, task, few, lambda _: steps, device), device)
                plain.append(len(few) * steps / took)
                wave.append(size * steps * goes / work.seconds(partial(repeat, engine.solve, jobs, goes), device))
            rows.append({
                "model": name, "clients": size, "plain": max(plain), "plain, slowest": min(plain), "wave": max(wave),
                "wave, slowest": min(wave), "ratio": max(wave) / max(plain),
            })  # fmt: skip
    return rows


# ---- unequal numbers of steps -------------------------------------------------------------------
def unequal(settings: Settings) -> Rows:
    """Seconds of a wave whose clients take different numbers of steps, over those of equal ones with the same sum."""
    device = settings.on
    clients, mean = (20, 100) if device.type == "cuda" else (20, 20)
    spread = np.linspace(0.1, 1.9, clients)
    rows = []
    for model, name in work.MODELS.items():
        engine = Engine(build_method("local-sgd"), work.small_task(model, clients), 0, device, settings.precision)
        laws = {
            "equal": [mean] * clients,
            "linear, 0.1 to 1.9 of the mean": [round(mean * part) for part in spread],
            "one takes half of all": [mean * clients // 2 // (clients - 1)] * (clients - 1) + [mean * clients // 2],
        }
        seconds = {law: float("inf") for law in laws}  # fmt: skip
        for round_ in range(2 if settings.quick else 6):
            for law, steps in laws.items():
                jobs = [Begun(client, 0, 0, count) for client, count in enumerate(steps)]
                if round_ == 0:
                    work.warm_up(partial(engine.solve, jobs), device, 0.5 if device.type == "cuda" else 2.0)
                seconds[law] = min(seconds[law], work.seconds(partial(engine.solve, jobs), device) / sum(steps))
        for law, steps in laws.items():
            rows.append({
                "model": name, "steps": law, "largest / mean": max(steps) * clients / sum(steps),
                "seconds per client-step": seconds[law], "cost over equal": seconds[law] / seconds["equal"],
            })  # fmt: skip
    return rows


def repeat(job: Callable[[Any], Any], argument: Any, times: int) -> None:
    for _ in range(times):
        job(argument)


# ---- (b), (c) asynchronous runs -----------------------------------------------------------------
def asynchronous(settings: Settings) -> Rows:
    """Wall time per client-step of FedBuff (100 concurrent, buffer 10) over rounds of 100, whole runs; and the share
    of updates that DLSGD-hetero never has to compute."""
    gpu = settings.on.type == "cuda"
    model = "dlsgd-cnn" if gpu else "mlp"
    rounds = (20 if settings.quick else 180) if gpu else (2 if settings.quick else 10)
    task = work.small_task(model, 100)
    steps = {"local_steps": 50, "client_lr": 0.01}
    plans = {
        "rounds of 100": ({"name": "local-sgd", "n": 100, **steps}, rounds),
        "FedBuff, buffer 10": ({"name": "fedbuff", "buffer_size": 10, **steps}, 10 * rounds),
        "DLSGD-hetero, n = 10": ({"name": "dlsgd-hetero", "n": 10, **steps}, 10 * rounds),
    }
    rows: Rows = []

    def go(method: dict[str, Any], commits: int) -> Any:
        return run(Experiment(
            method=method, task=task, fleet={"name": "uniform", "mbit": 400.0},  # speeds uniform in [1, 5]
            device=settings.device, precision=settings.precision, until={"commits": commits},
            evaluate={"every_commits": 10**9},
        ))  # fmt: skip

    go(plans["rounds of 100"][0], 1)  # what a process does once, such as compiling, is nobody's cost
    for name, (method, commits) in plans.items():
        done = go(method, commits)
        cost = done.wall_seconds / (50 * done.jobs_computed)
        rows.append({
            "run": name, "model": work.MODELS[model], "client-steps/s": 1 / cost,
            "cost over rounds": cost * rows[0]["client-steps/s"] if rows else 1.0,
            "mean wave": done.jobs_computed / done.waves, "never computed": done.share_dead,
        })  # fmt: skip
    return rows


# ---- (d) the clock ------------------------------------------------------------------------------
def schedule(settings: Settings) -> Rows:
    """Arrivals per second on the virtual clock alone, each in a process of its own, on one core."""
    fleets = (1_000, 100_000) if settings.quick else (1_000, 10_000, 100_000, 1_000_000)
    rows = []
    for policy in ("FedBuff", "rounds", "DLSGD-hetero"):
        for clients in fleets:
            command = [sys.executable, "-m", "offbeat.bench.arrivals", policy, str(clients)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            rows.append(json.loads(done.stdout))
    return rows


# ---- (e) what could be reached ------------------------------------------------------------------
def attainable(settings: Settings) -> Rows:
    """The CNN wave against this device's own rates of matrix products and of copies, measured here and now."""
    device = settings.on
    gpu = device.type == "cuda"
    clients, steps = (100, 50) if gpu else (10, 10)
    task = work.small_task("dlsgd-cnn", clients)
    engine = Engine(build_method({"name": "local-sgd", "local_steps": steps}), task, 0, device, settings.precision)
    jobs = [Begun(client, 0, 0, steps) for client in range(clients)]
    work.warm_up(partial(engine.solve, jobs), device, 0.5 if gpu else 3.0)
    seconds = min(work.seconds(partial(engine.solve, jobs), device) for _ in range(3)) / steps
    side = 8192 if gpu else 1024
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    source = torch.randn((256 if gpu else 16) << 20, device=device)
    target = torch.empty_like(source)
    product = best(partial(torch.mm, a, b), device)
    copy = best(partial(target.copy_, source), device)
    rate, bandwidth = 2 * side**3 / product, 2 * source.nbytes / copy
    x = task.data[0][: work.BATCH]
    operations, outputs = work.operations(task.model.cpu(), x)
    # Least traffic of a step: parameters read forwards and backwards, gradients written, then read with the
    # parameters that the update writes again; activations written and read on either way.
    bytes_moved = 4 * (6 * engine.solver.problem.model.dimension + 4 * outputs)
    floor = clients * max(operations / rate, bytes_moved / bandwidth)
    return [{
        "clients": clients, "step ms": 1e3 * seconds, "products TFLOP/s": rate / 1e12, "copies GB/s": bandwidth / 1e9,
        "reached TFLOP/s": clients * operations / seconds / 1e12, "reached GB/s": clients * bytes_moved / seconds / 1e9,
        "share of the attainable": floor / seconds,
    }]  # fmt: skip


def best(job: Callable[[], Any], device: torch.device) -> float:
    return min(work.seconds(job, device) for _ in range(8))


# ---- (f), (g) the published protocol ------------------------------------------------------------
def protocol(settings: Settings) -> Rows:
    """Seconds per round of pfl-research's protocol: ours, the plain loop, and other simulators where they are given."""
    device = settings.on
    gpu = device.type == "cuda"
    few, many = (10, 30) if settings.quick else (20, 320) if gpu else (1, 4)
    rows: Rows = []
    for unequal in (False, True):
        task = work.protocol_task(unequal)
        counts = [-(-size // work.BATCH) for size in work.shares(unequal)]
        label = "unequal shards" if unequal else "equal shards"

        def go(rounds: int, task: Any = task, counts: Any = counts) -> float:
            done = run(Experiment(
                method={"name": "local-sgd", "client_lr": work.RATE, "n": work.COHORT}, task=task,
                fleet={"name": "equal", "local_steps": counts}, device=settings.device, precision=settings.precision,
                until={"commits": rounds}, evaluate={"every_commits": work.LOOK},
            ))  # fmt: skip
            return float(done.wall_seconds)

        first = go(few)
        ours = (go(many) - go(few)) / (many - few)  # what is done once cancels out
        rows.append({"shards": label, "simulator": "offbeat", "seconds per round": ours, "over ours": 1.0})
        rows[-1]["seconds until the first rounds were done"] = first
        cohort = range(0, work.USERS, work.USERS // (10 if gpu else 4))
        loop = partial(work.plain_loop, task, cohort, counts.__getitem__, device)
        plain = min(work.seconds(loop, device) for _ in range(2))
        steps = sum(counts[c] for c in cohort)
        each = plain / steps * sum(counts) / work.USERS * work.COHORT
        rows.append({"shards": label, "simulator": "plain loop", "seconds per round": each, "over ours": each / ours})
        for name, command in settings.others:
            theirs = elsewhere(command + (" --unequal" if unequal else ""))
            rows.append({"shards": label, "simulator": name, **theirs, "over ours": theirs["seconds per round"] / ours})
    return rows


def elsewhere(command: str) -> dict[str, Any]:
    """The last line that a command prints, which is a JSON object with `seconds_per_round`."""
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError([f"--with: '{command}' cannot be run: {error}"]) from error
    try:
        said = json.loads(done.stdout.strip().splitlines()[-1])
        return {"seconds per round": float(said["seconds_per_round"]), "command": command, "said": said}
    except (IndexError, KeyError, TypeError, ValueError) as error:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(
            [f"--with: '{command}' must print a JSON object with 'seconds_per_round' as its last line; it ended with "
             f"exit code {done.returncode} and said: {last}"]
        ) from error  # fmt: skip


# ---- families of models -------------------------------------------------------------------------
def models(settings: Settings) -> Iterator[dict[str, Any]]:
    """Client-steps per second of waves and of the plain loop, for every family; and the time to the first wave."""
    device = settings.on
    sizes = (50,) if device.type == "cuda" else (5,) if settings.quick else (1, 5, 20)
    chosen = [family for family in FAMILIES if not settings.quick or device.type == "cuda" or family.parameters < 10**6]
    for family in chosen:
        for size in sizes:
            yield measure(family, size, device, settings.precision, settings.quick)


ITEMS: dict[str, Callable[[Settings], Iterable[dict[str, Any]]]] = dict(
    zip(NAMES, (waves, unequal, asynchronous, schedule, attainable, protocol, models), strict=True)
)
