"""Speed of pfl-research on the workload of workload.py: seconds per round, central evaluation included.

    python benchmarks/others/pfl_protocol.py --device cuda --rounds 60 --data synthetic --out pfl.json

One JSON object is printed. The defaults are the fastest settings of pfl that leave the arithmetic as it is:
  * all images are tensors on the device before the first round, and each user's `Dataset` object is kept, so that pfl
    caches its batch slices (`--feed host` keeps NumPy arrays, which pfl converts and moves batch by batch);
  * `PFL_PYTORCH_DEVICE` is set, which saves pfl a look at the CUDA driver for every tensor;
  * no metrics of the training users, no local or central privacy, no printing; on CUDA one batch holds all test images.
pfl's guide to fast simulation advises 1 to 5 processes for each GPU: `--workers N` starts N of them on this machine
with pfl's own PFL_WORKER_ADDRESSES; each then trains its part of the cohort. NCCL refuses two ranks on one GPU, so with
more workers than GPUs the ranks are joined by gloo. `--compile`, `--optimizer`, `--tf32`, `--layout` are there to be
tried as well: keep whichever is fastest.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="pfl-research on CIFAR-10: 1,000 users, 50 a round, 5 local steps")
    parser.add_argument("--rounds", type=int, default=1_500)
    parser.add_argument(
        "--warm-up", type=int, help="rounds left out of the figures; default 10, or a fifth of --rounds"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--data", default="synthetic", help="directory with CIFAR-10, or `synthetic`")
    parser.add_argument("--unequal", action="store_true", help="log-normal user sizes in place of 50 images each")
    parser.add_argument("--workers", type=int, default=1, help="pfl processes on this machine")
    parser.add_argument("--feed", choices=["device", "host"], default="device", help="where the users' images lie")
    parser.add_argument("--layout", choices=["nhwc", "nchw"], default="nhwc", help="nhwc is what pfl's benchmark has")
    parser.add_argument("--optimizer", choices=["default", "foreach", "fused"], default="default", help="local SGD")
    parser.add_argument("--compile", choices=["no", "default", "reduce-overhead"], default="no")
    parser.add_argument(
        "--tf32", action="store_true", help="TF32 in matrix products too (convolutions have it already)"
    )
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--eval-batch", type=int, help="default 10,000 on CUDA; on the CPU 100, which is faster there")
    parser.add_argument("--user-eval", action="store_true", help="evaluate the cohort too, as pfl's configuration does")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def launch(count: int) -> int:
    """Start this script once for each rank, as pfl's guide says, and wait; rank 0 prints."""
    ports = []
    for _ in range(count):
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            ports.append(probe.getsockname()[1])
    addresses = ",".join(f"localhost:{port}" for port in ports)
    ranks = []
    for rank in range(count):
        env = {**os.environ, "PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)}
        sink = None if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env, stdout=sink))
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.terminate()
        time.sleep(0.05)
    return max(abs(rank.returncode) for rank in ranks)


def main() -> None:
    args = parse()
    if args.workers > 1 and "PFL_WORKER_RANK" not in os.environ:
        raise SystemExit(launch(args.workers))
    rank = int(os.environ.get("PFL_WORKER_RANK", "0"))
    os.environ["PFL_PYTORCH_DEVICE"] = args.device
    began = time.perf_counter()

    import numpy as np
    import torch
    import workload

    cuda = args.device == "cuda"
    if args.workers > 1 and (not cuda or args.workers > torch.cuda.device_count()):
        torch.distributed.init_process_group = functools.partial(_join, torch.distributed.init_process_group)
    if cuda:
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = args.tf32

    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002  (pfl draws users from the global state)

    class Net(workload.Net):
        def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
            loss, right, n = self.totals(x, y)
            return {"loss": Weighted(loss, n), "accuracy": Weighted(right, n)}

    class Laps(TrainingProcessCallback):
        """A stamp at the end of each round, after the evaluation and after the device is done."""

        def __init__(self) -> None:
            self.stamps: list[float] = []

        def stamp(self) -> None:
            if cuda:
                torch.cuda.synchronize()
            self.stamps.append(time.perf_counter())

        def on_train_begin(self, *, model: Any) -> Metrics:
            self.stamp()
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            self.stamp()
            return False, Metrics()

    x, y, test_x, test_y = workload.load(args.data, args.layout)
    order = workload.shuffled(args.seed)
    x, y = x[order], y[order]
    test = Dataset((torch.from_numpy(test_x).to(args.device), torch.from_numpy(test_y).to(args.device)))
    if args.feed == "device":
        x, y = torch.from_numpy(x).to(args.device), torch.from_numpy(y).to(args.device)
    spans = workload.bounds(args.unequal)
    users = [Dataset((x[a:b], y[a:b]), user_id=str(k)) for k, (a, b) in enumerate(spans)]
    weights = {k: -(-(b - a) // workload.BATCH) for k, (a, b) in enumerate(spans)} if args.unequal else None
    data = FederatedDataset(users.__getitem__, get_user_sampler("random", range(len(users))), weights)

    net = Net(args.layout).to(args.device)
    if args.compile != "no":
        net.compile(mode=args.compile)
    options = {} if args.optimizer == "default" else {args.optimizer: True}
    model = PyTorchModel(
        net,
        local_optimizer_create=functools.partial(torch.optim.SGD, **options),
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    eval_batch = args.eval_batch or (workload.TEST if cuda else 100)
    eval_params = NNEvalHyperParams(local_batch_size=eval_batch)
    laps = Laps()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=args.rounds,
            evaluation_frequency=args.eval_every if args.user_eval else args.rounds + 1,
            train_cohort_size=workload.COHORT,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=workload.RATE, local_num_epochs=1, local_batch_size=workload.BATCH
        ),
        model_eval_params=eval_params,
        callbacks=[CentralEvaluationCallback(test, eval_params, frequency=args.eval_every), laps],
        send_metrics_to_platform=False,
    )
    final = {str(name): value.overall_value for name, value in model.evaluate(test, eval_params=eval_params)}
    warm_up = min(10, max(1, args.rounds // 5)) if args.warm_up is None else args.warm_up
    record = {
        "simulator": "pfl",
        "workload": "U" if args.unequal else "W",
        "rounds": args.rounds,
        **workload.summary(np.diff(laps.stamps).tolist(), warm_up),
        "accuracy": final["accuracy"],
        "test_loss": final["loss"],
        "setup_seconds": laps.stamps[0] - began,
        "device": workload.device_name(args.device),
        "threads": torch.get_num_threads(),
        "data": "synthetic" if args.data == "synthetic" else "cifar10",
        "settings": {key: value for key, value in vars(args).items() if key not in ("out", "data")},
        "eval_batch": eval_batch,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "pfl": version("pfl")},
    }
    if rank == 0:
        print(json.dumps(record))
        if args.out:
            args.out.write_text(json.dumps(record, indent=1) + "\n")


def _join(inner: Any, *, backend: str, **rest: Any) -> None:
    """pfl asks for NCCL wherever there is a GPU; ranks that share one need gloo."""
    inner(backend="gloo", **rest)


if __name__ == "__main__":
    main()
