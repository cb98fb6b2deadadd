"""`python benchmarks/before_and_after.py OUT.json [--busy] NAME=SRC [NAME=SRC ...]`: waves and clocks of checkouts.

SRC is the folder `src` of a checkout. Every checkout has a process of its own, and they take turns: one timing of each,
then the next, so that a noisy machine is noisy for all. The median of the turns counts; ratios are to the first. With
--busy another program takes all of one core that it can get, and clocks are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

TURNS, CLOCK_TURNS, STEPS = 5, 3, 20
MODELS = ("logistic", "mlp", "dlsgd-cnn")
SIZES = (1, 10, 50)
POLICIES = ("FedBuff", "rounds", "DLSGD-hetero")
FLEETS = (10_000,)


def worker() -> None:
    """In the process of a checkout: "MODEL CLIENTS" makes ready, "go" times a wave."""
    import torch

    from offbeat.bench import work
    from offbeat.experiments.assemble import build_method
    from offbeat.records import Begun

    try:
        from offbeat.engines.engine import Engine
    except ImportError:  # the first checkouts
        from offbeat.engines.local import LocalEngine as Engine  # type: ignore[import-not-found,no-redef]

    device, wave, jobs = torch.device("cpu"), None, []
    for line in sys.stdin:
        if line.strip() == "go":
            print(STEPS * len(jobs) / work.seconds(wave, device), flush=True)
            continue
        model, clients = line.split()
        jobs = [Begun(client, 0, 0, STEPS) for client in range(int(clients))]
        method = build_method({"name": "local-sgd", "local_steps": STEPS})
        engine = Engine(method, work.small_task(model, len(jobs)), 0, device, "float32")
        wave, until = partial(engine.solve, jobs), time.perf_counter() + 3
        while time.perf_counter() < until:
            wave()
        print("ready", flush=True)


def clock(source: str, policy: str, clients: int) -> float:
    name = "arrivals" if (Path(source) / "offbeat/bench/arrivals.py").exists() else "clock"
    command = [sys.executable, "-m", f"offbeat.bench.{name}", policy, str(clients)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(json.loads(done.stdout)["arrivals/s"])


def row(what: dict[str, Any], rates: dict[str, list[float]]) -> dict[str, Any]:
    middle = {name: median(each) for name, each in rates.items()}
    first = next(iter(middle.values()))
    found = what | middle | {f"{name} against the first": rate / first for name, rate in list(middle.items())[1:]}
    print(found, flush=True)
    return found


def main(out: str, *given: str) -> None:
    sources = dict(each.split("=", 1) for each in given if each != "--busy")
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if "--busy" in given else None
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, "worker"], env=os.environ | {"PYTHONPATH": source}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for name, source in sources.items()
    }  # fmt: skip

    def ask(name: str, line: str) -> str:
        process = processes[name]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    waves, clocks = [], []
    for model in MODELS:
        for size in SIZES:
            for name in sources:
                ask(name, f"{model} {size}")
            rates: dict[str, list[float]] = {name: [] for name in sources}
            for _ in range(TURNS):
                for name in sources:
                    rates[name].append(max(float(ask(name, "go")) for _ in range(3)))
            waves.append(row({"model": model, "clients": size}, rates))
    for process in processes.values():
        process.terminate()
    if other is not None:
        other.kill()
    for policy in () if other else POLICIES:
        for fleet in FLEETS:
            rates = {name: [] for name in sources}
            for _ in range(CLOCK_TURNS):
                for name, source in sources.items():
                    rates[name].append(clock(source, policy, fleet))
            clocks.append(row({"policy": policy, "clients": fleet}, rates))
    Path(out).write_text(json.dumps({"client-steps per second": waves, "arrivals per second": clocks}, indent=1) + "\n")


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["worker"] else main(*sys.argv[1:])
