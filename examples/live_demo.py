"""A server and six client processes on a loopback: FedBuff on digits with mutual TLS, and what a simulation forecasts.

    python examples/live_demo.py live-demo

Certificates are made on the fly, every client has its samples in a file of its own and a pace of its own. When the run
has ended, the fleet behind it is fitted, the same experiment is simulated on that fleet, and both are drawn.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from offbeat import Experiment, build, run
from offbeat.config import toml
from offbeat.live import fit
from offbeat.live.verify import verify
from offbeat.runs import fleet_plots, plots
from offbeat.runs.stored import read_metrics, read_trace
from offbeat.tasks.inputs import read

HERE = Path(__file__).parent
CLIENTS = 6
SLOWEST = 0.06  # seconds of a local step


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    keys, folder = out / "keys", out / "run"
    offbeat = [sys.executable, "-m", "offbeat"]
    subprocess.run([*offbeat, "keys", "make", keys, "--clients", str(CLIENTS)], check=True, stdout=subprocess.DEVNULL)
    experiment = Experiment.of(toml.read(HERE / "live.toml"))
    task = build(experiment).task
    x, y = read(task.data)
    for number, rows in enumerate(task.shards):
        np.savez(out / f"shard-{number}.npz", x=x[rows].numpy(), y=y[rows].numpy())
    address = "127.0.0.1:7373"
    serve = [
        *offbeat,
        "serve",
        HERE / "live.toml",
        "--keys",
        keys,
        "--address",
        address,
        "--out",
        folder,
        "--overwrite",
    ]
    processes = [subprocess.Popen([*serve, "--log", out / "serve.log"])]
    for number in range(CLIENTS):
        pace = SLOWEST / (1 + number % 3)
        join = [*offbeat, "join", address, "--data", out / f"shard-{number}.npz", "--keys", keys]
        join += ["--name", f"client-{number}", "--step-seconds", str(pace), "--log", out / f"client-{number}.log"]
        processes.append(subprocess.Popen(join, stdout=subprocess.DEVNULL))
    for process in processes:
        if process.wait() != 0:
            sys.exit(f"{process.args} ended with {process.returncode}")
    print(verify(folder))
    report(out, folder, experiment)


def report(out: Path, folder: Path, experiment: Experiment) -> None:
    """Fit the fleet, simulate on it, draw both."""
    found = fit.write(folder, out / "fleet.json")
    table = experiment.table() | {"fleet": {"name": "recorded", "file": str(out / "fleet.json")}}
    forecast = run(Experiment.of(table), out / "forecast", overwrite=True)
    rows = {"what happened": read_trace(folder), "forecast on the fitted fleet": read_trace(out / "forecast")}
    picture = fleet_plots.timeline(rows, out / "timeline.png", rows["what happened"][-1][0] / 3, CLIENTS)
    curves = {"live": [read_metrics(folder)], "forecast": [read_metrics(out / "forecast")]}
    curve = plots.comparison(curves, out / "accuracy.png", "FedBuff on digits, six clients")
    print(f"fit: half of the jobs within {found['error']['compute']:.1%} of their client's median")
    ends = {name: rows_[-1][0] for name, rows_ in rows.items()}
    print("; ".join(f"{name}: {end:.1f} s" for name, end in ends.items()))
    print(f"accuracy live {curves['live'][0][-1]['accuracy']:.3f}, forecast {forecast.accuracy_final:.3f}")
    print(f"pictures: {picture}, {curve}")


if __name__ == "__main__":
    began = time.monotonic()
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "live-demo"))
    print(f"{time.monotonic() - began:.0f} s in all")
