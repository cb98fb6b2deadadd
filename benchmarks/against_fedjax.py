"""`python benchmarks/against_fedjax.py JAX_PYTHON OUT.json`: rounds of 10 of 100 clients here, in FedJAX, in a loop.

600 random 28x28 images for each client, 50 steps of batch 10; client-steps per second, the median round after the first
four, turn by turn, the best of three turns of each. JAX_PYTHON is the Python of an environment with fedjax 0.0.17.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from offbeat import Experiment, Task, run
from offbeat.bench import work
from offbeat.runs.callbacks import Callback, View
from offbeat.tasks.models import build

CLIENTS, IMAGES, COHORT, STEPS, ROUNDS, WARM = 100, 600, 10, 50, 12, 4
MODELS = {"lr": "logistic", "mlp": "mlp", "cnn": "dlsgd-cnn"}
TURNS = 3


class Laps(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def committed(self, run: View) -> None:
        self.times.append(time.perf_counter())


def task(name: str) -> Task:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((CLIENTS * IMAGES, 1, 28, 28), dtype=np.float32))
    y = torch.from_numpy(rng.integers(0, 10, CLIENTS * IMAGES))
    shards = [np.arange(IMAGES * i, IMAGES * (i + 1)) for i in range(CLIENTS)]
    hidden = {"hidden": 200} if name == "mlp" else {}
    model = build(MODELS[name], (1, 28, 28), 10, 0, **hidden)
    return Task(model, functional.cross_entropy, (x, y), shards, batch_size=work.BATCH, name=name)


def ours(given: Task) -> float:
    laps = Laps()
    run(
        Experiment(
            method={"name": "local-sgd", "n": COHORT, "local_steps": STEPS, "client_lr": 0.01}, task=given,
            fleet="equal", until={"commits": ROUNDS + WARM}, evaluate={"every_commits": 10_000}, device="cpu",
        ),
        callbacks=[laps],
    )  # fmt: skip
    return float(COHORT * STEPS / np.median(np.diff(laps.times)[WARM - 1 :]))


def plain(given: Task) -> float:
    cpu = torch.device("cpu")
    work.plain_loop(given, [0], lambda _: STEPS, cpu)
    return 3 * STEPS / work.seconds(lambda: work.plain_loop(given, [0, 1, 2], lambda _: STEPS, cpu), cpu)


def main(python: str, out: Path) -> None:
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for name in MODELS:
        given, best = task(name), {"offbeat": 0.0, "fedjax": 0.0, "plain": 0.0}
        for _ in range(TURNS):
            script = Path(__file__).parent / "others" / "fedjax_rounds.py"
            answer = subprocess.run([python, str(script), name], check=True, capture_output=True, text=True).stdout
            theirs = json.loads(answer.splitlines()[-1])
            versions = theirs["versions"]
            now = {"offbeat": ours(given), "fedjax": theirs["rates"][name], "plain": plain(given)}
            best = {who: max(best[who], rate) for who, rate in now.items()}
        rows.append({"model": name, **best, "to fedjax": best["offbeat"] / best["fedjax"]})
        print(json.dumps(rows[-1]), flush=True)
    facts = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
             "torch": torch.__version__, **versions}  # fmt: skip
    out.write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
