"""Client steps per second of pfl or Flower on small models: 10 clients a round, batch 10, 5 steps each, 1x28x28 images.

    python benchmarks/others/small_models.py pfl --rounds 50          (in pfl's environment)
    python benchmarks/others/small_models.py flower --rounds 20       (in Flower's environment)

One JSON object is printed: for lr (784-10), mlp (784-200-10) and cnn (5x5 convolutions of 32 and 64 channels, each with
2x2 pooling, dense 1024-512-10) the median round after the warm-up, as client steps per second. No evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import workload

RATE = 0.01


def pfl_stamps(name: str, args: argparse.Namespace) -> list[float]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    stamps: list[float] = []

    class Laps(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Metrics:
            stamps.append(time.perf_counter())
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            if args.device == "cuda":
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())
            return False, Metrics()

    def metrics(x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        loss, _, n = net.totals(x, y)
        return {"loss": Weighted(loss, n)}

    net = workload.small(name).to(args.device)
    net.metrics = metrics  # pfl wants one; it is called in round 0 alone
    x, y = (torch.from_numpy(part).to(args.device) for part in workload.small_data())
    n = workload.SMALL_IMAGES
    users = [Dataset((x[k : k + n], y[k : k + n])) for k in range(0, len(x), n)]
    data = FederatedDataset(users.__getitem__, get_user_sampler("random", range(len(users))))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(args.rounds, args.rounds + 1, workload.SMALL_COHORT, 0),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_learning_rate=RATE, local_num_epochs=1, local_batch_size=workload.BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Laps()],
        send_metrics_to_platform=False,
    )
    return stamps


def flower_stamps(name: str, args: argparse.Namespace) -> list[float]:
    import flower_client
    from flwr.app import ArrayRecord, ConfigRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    stamps: list[float] = []
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=workload.SMALL_COHORT / workload.SMALL_USERS,
            fraction_evaluate=0.0,
            min_available_nodes=workload.SMALL_USERS,
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(workload.small(name).state_dict()),
            num_rounds=args.rounds,
            train_config=ConfigRecord(
                {"model": name, "data": "synthetic", "layout": "nchw", "device": args.device, "unequal": False}
            ),
            evaluate_fn=lambda number, arrays: stamps.append(time.perf_counter()),
        )

    cuda = args.device == "cuda"
    run_simulation(
        server_app=server,
        client_app=flower_client.app,
        num_supernodes=workload.SMALL_USERS,
        backend_config={
            "init_args": {"num_cpus": args.actors, "num_gpus": int(cuda), "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 1 / args.actors if cuda else 0.0},
        },
    )
    return stamps


def main() -> None:
    parser = argparse.ArgumentParser(description="client steps per second on small models")
    parser.add_argument("simulator", choices=["pfl", "flower"])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--models", nargs="+", choices=workload.SMALL, default=list(workload.SMALL))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--actors", type=int, default=os.cpu_count(), help="Ray processes (Flower)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["PFL_PYTORCH_DEVICE"] = args.device
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    for switch in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
        os.environ.setdefault(switch, "0")
    steps = workload.SMALL_COHORT * workload.SMALL_IMAGES // workload.BATCH
    warm_up = max(1, args.rounds // 5)
    rates = {}
    for name in args.models:
        torch.manual_seed(0)
        stamps = (pfl_stamps if args.simulator == "pfl" else flower_stamps)(name, args)
        if len(stamps) != args.rounds + 1:
            raise SystemExit(f"{name}: {len(stamps) - 1} of {args.rounds} rounds were run")
        rates[name] = steps / float(np.median(np.diff(stamps)[warm_up:]))
    record = {
        "simulator": args.simulator,
        "client_steps_per_second": rates,
        "rounds": args.rounds,
        "device": workload.device_name(args.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            **{name: version(name) for name in (["pfl"] if args.simulator == "pfl" else ["flwr", "ray"])},
        },
    }
    print(json.dumps(record))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
