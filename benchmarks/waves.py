"""Waves against the plain loop, and asynchronous against synchronous runs; every figure is a ratio within one run.

    python benchmarks/waves.py [--device cuda] [--precision tf32] [--out results/waves.json]

Work: local SGD, batch 10, on random 1x28x28 images (values do not matter for speed). The plain loop is PyTorch as one
would write it: an nn.Module, an SGD optimiser, one client after the other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.nn import functional

from offbeat import Experiment, Task, run
from offbeat.assemble import build_method
from offbeat.engines.local import LocalEngine, pick_device
from offbeat.records import Begun
from offbeat.runs.report import show
from offbeat.tasks.models import build as build_model

MODELS = {"logistic": 50, "mlp": 50, "dlsgd-cnn": 50}
SHAPE = (1, 28, 28)


def make_task(model: str, clients: int) -> Task:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((clients * 60, *SHAPE), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, 10, clients * 60))
    shards = [np.arange(60 * i, 60 * (i + 1)) for i in range(clients)]
    return Task(build_model(model, SHAPE, 10, 0), functional.cross_entropy, (x, y), shards, name=model)


def plain_loop(task: Task, clients: int, steps: int, device: torch.device) -> None:
    """What one would write without this package."""
    x, y = (t.to(device) for t in task.data)
    model = task.model.to(device)
    begin = {name: value.clone() for name, value in model.state_dict().items()}
    for client in range(clients):
        model.load_state_dict(begin)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
        shard = torch.as_tensor(task.shards[client], device=device)
        for _ in range(steps):
            rows = shard[torch.randint(len(shard), (10,), device=device)]
            optimiser.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
    model.load_state_dict(begin)


def seconds(work: Callable[[], Any], device: torch.device, repeats: int = 3) -> float:
    """The best of some repeats, after one that does not count."""
    best = float("inf")
    for number in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number:
            best = min(best, time.perf_counter() - began)
    return best


def wave_rates(
    device: torch.device, precision: Any, sizes: list[int], steps_of: dict[str, int]
) -> list[dict[str, Any]]:
    return [rate for model, steps in steps_of.items() for rate in model_rates(model, steps, sizes, device, precision)]


def model_rates(model: str, steps: int, sizes: list[int], device: torch.device, precision: Any) -> list[dict[str, Any]]:
    task = make_task(model, max(sizes))
    method = build_method({"name": "local-sgd", "local_steps": steps})
    engine = LocalEngine(method, task, 0, device, precision)
    found = []
    for size in sizes:
        jobs = [Begun(client, 0, 0, steps) for client in range(size)]
        few = min(size, 10)  # the plain loop's cost is per client: ten are enough to know it
        plain = seconds(partial(plain_loop, task, few, steps, device), device, 1) / few
        wave = seconds(partial(engine.solve, jobs), device) / size
        found.append(
            {"model": model, "clients": size, "plain": steps / plain, "wave": steps / wave, "ratio": plain / wave}
        )
    return found


def async_cost(device: str, precision: Any, model: str, commits: int) -> dict[str, Any]:
    """Wall time per client-step: FedBuff (100 concurrent, buffer 10) over synchronous rounds of 100."""
    task = make_task(model, 100)
    cost = {}
    for label, method, count in (
        ("synchronous", {"name": "local-sgd", "n": 100, "local_steps": 50, "client_lr": 0.01}, commits),
        ("asynchronous", {"name": "fedbuff", "buffer_size": 10, "local_steps": 50, "client_lr": 0.01}, 10 * commits),
    ):
        for _ in range(2):  # the first run warms up
            done = run(Experiment(
                method=method, task=task, fleet={"name": "uniform", "mbit": 400.0}, device=device, precision=precision,
                until={"commits": count}, evaluate={"every_commits": 10**9},
            ))  # fmt: skip
        cost[label] = done.wall_seconds / (50 * done.jobs_computed)
        cost[label + " mean wave"] = done.jobs_computed / done.waves
    return {"model": model, **cost, "ratio": cost["asynchronous"] / cost["synchronous"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32", choices=("float32", "tf32"))
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--steps", type=int, default=10, help="local steps per job in the wave table")
    parser.add_argument("--async-model", default="mlp")
    parser.add_argument("--commits", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = pick_device(given.device)
    waves = wave_rates(device, given.precision, given.sizes, dict.fromkeys(MODELS, given.steps))
    cost = async_cost(given.device, given.precision, given.async_model, given.commits)
    console = Console()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    rows = [
        [w["model"], str(w["clients"]), f"{w['plain']:,.0f}", f"{w['wave']:,.0f}", f"{w['ratio']:.2f}"] for w in waves
    ]
    show(
        f"client-steps/s on {name}, {given.precision}",
        ("model", "clients", "plain loop", "wave", "ratio"),
        rows,
        console,
    )
    console.print(f"asynchronous over synchronous wall time per client-step ({cost['model']}): {cost['ratio']:.2f}")
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"device": name, "precision": given.precision, "torch": torch.__version__}
        given.out.write_text(json.dumps({**facts, "waves": waves, "asynchronous": cost}, indent=1) + "\n")


if __name__ == "__main__":
    main()
