"""Tuning against a grid: the time to 85 % on digits of what `offbeat tune` finds, and what finding it takes.

The grid is 12 rates x 3 seeds, run one by one to the target or the end of the budget, and judged by the test set.
Tuning sees held-out samples only. What it found is then run with the grid's seeds on the test set. Both sides take the
time to the target between evaluations in a straight line, and one thread; they run one after the other.

    python benchmarks/tuning_vs_grid.py --out results/tuning.json
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offbeat import Experiment, run
from offbeat.engines.settings import limit_cores
from offbeat.errors import BadNumbers
from offbeat.studies.trials import NEVER, Aim, Tried
from offbeat.studies.tuning import Between, tune

TARGET = 0.85
LOW, HIGH, MANY = 0.001, 3.0, 12  # where `offbeat tune` looks, too
SEEDS = (0, 1, 2)
TRIALS = 16  # the default of `offbeat tune`
BUDGET = {"commits": 250}
TASK = {"name": "digits", "split": {"name": "dirichlet", "alpha": 0.5}}
METHODS: dict[str, dict[str, Any]] = {
    "local-sgd": {"n": 20}, "fedbuff": {"buffer_size": 20}, "dlsgd-hetero": {"n": 20}, "scaffold": {"n": 20},
    "fedagrac": {"n": 20},
}  # fmt: skip
AIM = Aim(target=TARGET, smooth=1)  # the first evaluation that meets it


def experiment(method: str) -> Experiment:
    return Experiment(
        method={"name": method, "local_steps": 2, **METHODS[method]}, task=TASK, fleet="straggling", device="cpu",
        until={**BUDGET, "accuracy": TARGET}, evaluate={"every_commits": 1},
    )  # fmt: skip


def score(spec: Experiment) -> float:
    """Minus the seconds to the target on the test set; far below where it was not reached."""
    try:
        rows = run(spec).metrics
    except BadNumbers:
        return -2 * NEVER
    found = AIM.score(Tried(rows))
    return -2 * NEVER if found is None else found


def mean_score(method: str, options: dict[str, Any], seeds: tuple[int, ...]) -> float:
    plain = experiment(method)
    spec = replace(plain, method={**plain.method, **options})
    return sum(score(replace(spec, seed=seed)) for seed in seeds) / len(seeds)


def one(method: str, rates: list[float]) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    grid = {rate: mean_score(method, {"client_lr": rate}, SEEDS) for rate in rates}
    grid_wall, grid_cpu = time.perf_counter() - began, time.process_time() - cpu
    best = max(grid, key=lambda rate: grid[rate])
    cpu = time.process_time()
    found = tune({method: experiment(method)}, {"client_lr": Between(LOW, HIGH)}, target=TARGET, trials=TRIALS)
    tuned_cpu = time.process_time() - cpu
    tuned = found.best[method]
    mine = mean_score(method, tuned, SEEDS)
    fresh = tuple(seed + 100 for seed in SEEDS)  # neither side has seen these
    grid_fresh, tuned_fresh = (mean_score(method, options, fresh) for options in ({"client_lr": best}, tuned))
    return {
        "grid": {"best_rate": best, "seconds_to_target": -grid[best], "wall_seconds": grid_wall,
                 "processor_seconds": grid_cpu,
                 "runs": len(rates) * len(SEEDS), "reached": sum(AIM.reached(value) for value in grid.values()),
                 "all": {f"{rate:.4g}": -value if AIM.reached(value) else None for rate, value in grid.items()}},
        "tuned": {**tuned, "seconds_to_target": -mine, "wall_seconds": found.seconds, "processor_seconds": tuned_cpu,
                  "trials": len(found.trials(method)), "cut_off": sum(entry.cut for entry in found.trials(method))},
        "time_ratio": mine / grid[best],
        "time_ratio_on_fresh_seeds": tuned_fresh / grid_fresh,
        "wall_ratio": found.seconds / grid_wall,
        "processor_ratio": tuned_cpu / grid_cpu,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("results/tuning.json"))
    parser.add_argument("--rates", type=int, default=MANY, help="rates of the grid")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # that some rates diverge is a result
    torch.set_num_threads(1)
    limit_cores(1)
    rates = [LOW * (HIGH / LOW) ** (n / (given.rates - 1)) for n in range(given.rates)]
    results: dict[str, Any] = {"task": TASK, "budget": BUDGET, "target": TARGET, "rates": rates, "seeds": list(SEEDS)}
    results["methods"] = {}
    for method in given.methods:
        results["methods"][method] = one(method, rates)
        short = {key: round(value, 3) for key, value in results["methods"][method].items() if "ratio" in key}
        print(method, short, json.dumps(results["methods"][method]), flush=True)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
