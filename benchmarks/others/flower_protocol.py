"""Speed of Flower's simulation (Ray) on the workload of workload.py: seconds per round, central evaluation included.

    python benchmarks/others/flower_protocol.py --rounds 60 --data synthetic --out flower.json

One JSON object is printed on standard output; Flower's log goes to standard error. Each Ray actor is a process that
holds the images and one network on the device, and takes one client after the other; `--actors` says how many run side
by side (on CUDA they share the GPU). FedAvg draws 50 of 1,000 nodes without repeats (pfl draws with repeats), which
makes no difference to the work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
for switch in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
    os.environ.setdefault(switch, "0")

import flower_client  # noqa: E402
import workload  # noqa: E402
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="Flower on CIFAR-10: 1,000 users, 50 a round, 5 local steps")
    parser.add_argument("--rounds", type=int, default=1_500)
    parser.add_argument(
        "--warm-up", type=int, help="rounds left out of the figures; default 10, or a fifth of --rounds"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--data", default="synthetic", help="directory with CIFAR-10, or `synthetic`")
    parser.add_argument("--unequal", action="store_true", help="log-normal user sizes in place of 50 images each")
    parser.add_argument("--actors", type=int, default=os.cpu_count(), help="Ray processes")
    parser.add_argument("--layout", choices=["nhwc", "nchw"], default="nhwc")
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--eval-batch", type=int, help="default 10,000 on CUDA; on the CPU 100, which is faster there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = args.data if args.data == "synthetic" else str(Path(args.data).resolve())
    cuda = args.device == "cuda"
    eval_batch = args.eval_batch or (workload.TEST if cuda else 100)
    torch.manual_seed(args.seed)
    net = workload.Net(args.layout).to(args.device)
    _, _, test_x, test_y = (torch.from_numpy(part) for part in workload.load(data, args.layout))
    test_x, test_y = test_x.to(args.device), test_y.to(args.device)
    stamps: list[float] = []
    last: dict[str, ArrayRecord] = {}

    def assess(arrays: ArrayRecord) -> tuple[float, float]:
        net.load_state_dict(arrays.to_torch_state_dict())
        parts = [net.totals(*pair) for pair in zip(test_x.split(eval_batch), test_y.split(eval_batch), strict=True)]
        loss, right, n = np.sum(parts, axis=0).tolist()
        return loss / n, right / n

    def after_round(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Flower calls this before the first round (number 0) and after each."""
        metrics = None
        if number % args.eval_every == 0:
            loss, accuracy = assess(arrays)
            metrics = MetricRecord({"loss": loss, "accuracy": accuracy})
        last["arrays"] = arrays
        stamps.append(time.perf_counter())
        return metrics

    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=workload.COHORT / workload.USERS,
            fraction_evaluate=0.0,
            min_train_nodes=workload.COHORT,
            min_available_nodes=workload.USERS,
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(net.state_dict()),
            num_rounds=args.rounds,
            train_config=ConfigRecord(
                {
                    "model": "protocol",
                    "data": data,
                    "layout": args.layout,
                    "device": args.device,
                    "unequal": args.unequal,
                }
            ),
            evaluate_fn=after_round,
        )

    began = time.perf_counter()
    run_simulation(
        server_app=server,
        client_app=flower_client.app,
        num_supernodes=workload.USERS,
        backend_config={
            "init_args": {"num_cpus": args.actors, "num_gpus": int(cuda), "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 1 / args.actors if cuda else 0.0},
        },
    )
    if len(stamps) != args.rounds + 1:
        raise SystemExit(f"Flower ended after {len(stamps) - 1} of {args.rounds} rounds; its log says why")
    loss, accuracy = assess(last["arrays"])
    warm_up = min(10, max(1, args.rounds // 5)) if args.warm_up is None else args.warm_up
    record = {
        "simulator": "flower",
        "workload": "U" if args.unequal else "W",
        "rounds": args.rounds,
        **workload.summary(np.diff(stamps).tolist(), warm_up),
        "accuracy": accuracy,
        "test_loss": loss,
        "setup_seconds": stamps[0] - began,
        "device": workload.device_name(args.device),
        "data": "synthetic" if data == "synthetic" else "cifar10",
        "settings": {key: value for key, value in vars(args).items() if key not in ("out", "data")},
        "eval_batch": eval_batch,
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in ("torch", "flwr", "ray")}},
    }
    print(json.dumps(record))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
