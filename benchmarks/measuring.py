"""What measuring costs beside training: the DLSGD CNN over 100 clients of Fashion-MNIST, both in one process.

python benchmarks/measuring.py [--device cuda] [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from offbeat import Experiment
from offbeat.experiments.assemble import build
from offbeat.theory.measure import measure

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--device", default="auto")
arguments.add_argument("--rounds", type=int, default=20)
given = arguments.parse_args()
experiment = Experiment(
    method={"name": "local-sgd", "n": None, "local_steps": 50},
    task={"name": "fashion-mnist", "model": "dlsgd-cnn", "clients": 100, "batch_size": 10,
          "split": {"name": "classes", "per_client": 2}},
    fleet="dlsgd-fashion-mnist", device=given.device, until={"commits": given.rounds + 1},
)  # fmt: skip
built = build(experiment)
engine = built.engine()
ends = []
for _ in engine.commits(built.horizon(built.clock())):
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    ends.append(time.perf_counter())
measure(experiment)  # compiles what measuring needs, as the first round did for training
found = measure(experiment)
trained = ends[-1] - ends[0]
print(json.dumps({
    "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu", "rounds": given.rounds,
    "training_seconds": trained, "measuring_seconds": found.seconds, "ratio": found.seconds / trained,
    "passes": found.passes,
}))  # fmt: skip
