"""Seconds per round of BlazeFL's comparison with Flower (the workload of lenet.py), here and on other simulators.

    PYTHONPATH=src python benchmarks/others/lenet_protocol.py offbeat --device cuda --precision tf32
    PYTHONPATH=src python benchmarks/others/lenet_protocol.py plain --rounds 3
    flower-env/bin/python benchmarks/others/lenet_protocol.py flower --parallel 4
    blazefl-env/bin/python benchmarks/others/lenet_protocol.py blazefl --mode processes --parallel 4
    PYTHONPATH=src python benchmarks/others/lenet_protocol.py compare plain.npy offbeat.npy flower.npy

One JSON object is printed. Rounds after the warm-up count; each has its look at the test set in it. With
`--order stored` clients go through their images in the stored order, so that all simulators compute the same model up
to rounding: `--model FILE.npy` keeps it, and `compare` gives distances to the first file's model, over how far that has
moved from the start. Do this with `--double`: at this rate the training is chaotic, and what float32 rounds off grows
to some per cent within a round. Shuffled epochs are drawn differently by each; compare `training_loss` then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import lenet  # noqa: E402
import workload  # noqa: E402


def offbeat(args: argparse.Namespace) -> lenet.Done:
    """All clients of a round in waves."""
    from torch.nn import functional

    from offbeat import Callback, Experiment, Task, __version__, run

    class Laps(Callback):
        def __init__(self) -> None:
            self.stamps: dict[int, float] = {}

        def began(self, run: object) -> None:
            self.stamps[0] = time.perf_counter()

        def evaluated(self, run: object) -> None:
            self.stamps[run.commit] = time.perf_counter()  # the figures are on the host: the device is done

    x, y, test_x, test_y = lenet.data("cpu", args.double)
    precision = "float64" if args.double else args.precision
    shards = [np.arange(own.start, own.stop) for own in map(lenet.rows, range(args.clients))]
    sampling = "shuffle" if args.order == "shuffle" else "in-order"
    task = Task(
        lenet.network(args.double), functional.cross_entropy, (x, y), shards, test=(test_x, test_y),
        batch_size=lenet.BATCH, sampling=sampling, name="lenet protocol",
    )  # fmt: skip
    laps = Laps()
    outcome = run(
        Experiment(
            method={"name": "local-sgd", "n": args.clients, "local_steps": lenet.STEPS, "client_lr": lenet.RATE},
            task=task, fleet="equal", until={"commits": args.rounds}, evaluate={"every_commits": 1}, device=args.device,
            precision=precision,
        ),
        callbacks=[laps],
    )  # fmt: skip
    assert outcome.client_steps == args.rounds * args.clients * lenet.STEPS
    stamps = [laps.stamps[number] for number in range(args.rounds + 1)]
    facts = {"offbeat": __version__, "precision": precision}
    return lenet.Done(np.diff(stamps).tolist(), outcome.model, outcome.loss_final, facts)


def plain(args: argparse.Namespace) -> lenet.Done:
    """What one would write without any package: one model, one client after the other."""
    if args.precision != "default":
        fast = args.precision == "tf32"
        torch.set_float32_matmul_precision("high" if fast else "highest")
        torch.backends.cudnn.allow_tf32 = fast
    x, y, test_x, test_y = lenet.data(args.device, args.double)
    net = lenet.network(args.double).to(args.device)
    generator = torch.Generator().manual_seed(0) if args.order == "shuffle" else None
    laps, loss = [], 0.0
    for _ in range(args.rounds):
        began = time.perf_counter()
        start = {name: value.clone() for name, value in net.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for client in range(args.clients):
            net.load_state_dict(start)
            own = lenet.rows(client)
            lenet.train(net, lenet.Batches(x[own], y[own], generator))
            for name, value in net.state_dict().items():
                total[name] += value / args.clients
        net.load_state_dict(total)
        loss = lenet.mean_loss(net, test_x, test_y)  # brings a number to the host: the device is done
        laps.append(time.perf_counter() - began)
    return lenet.Done(laps, net.state_dict(), loss, {"precision": args.precision})


def flower(args: argparse.Namespace) -> lenet.Done:
    for switch in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
        os.environ.setdefault(switch, "0")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [HERE, os.environ.get("PYTHONPATH")])
    )  # for Ray's processes
    import lenet_flower

    return lenet_flower.rounds(args.rounds, args.clients, args.device, args.order, args.double, args.parallel)


def blazefl(args: argparse.Namespace) -> lenet.Done:
    import lenet_blazefl

    return lenet_blazefl.rounds(
        args.rounds, args.clients, args.device, args.order, args.double, args.parallel, args.mode
    )


def compare(files: list[Path]) -> dict[str, float]:
    """How far each model is from the first, over the way that the first has gone."""
    start = lenet.vector(lenet.network(double=True).state_dict())
    first, *others = [np.load(file) for file in files]
    way = np.linalg.norm(first - start)
    return {
        str(file): float(np.linalg.norm(model - first) / way) for file, model in zip(files[1:], others, strict=True)
    }


SIMULATORS = {"offbeat": offbeat, "plain": plain, "flower": flower, "blazefl": blazefl}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="100 clients, a LeNet, five local epochs: seconds per round")
    commands = parser.add_subparsers(dest="simulator", required=True)
    for name in SIMULATORS:
        command = commands.add_parser(name)
        command.add_argument("--rounds", type=int, default=lenet.ROUNDS, help="with those of the warm-up")
        command.add_argument("--warm-up", type=int, default=1, help="rounds left out of the figures")
        command.add_argument("--clients", type=int, default=lenet.CLIENTS, help="fewer, for a quick try")
        command.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
        command.add_argument("--order", choices=["shuffle", "stored"], default="shuffle")
        command.add_argument("--double", action="store_true", help="float64 throughout, for `compare`")
        command.add_argument("--out", type=Path, help="the JSON object as a file, too")
        command.add_argument("--model", type=Path, help="where to put the last model, for `compare`")
        if name == "offbeat":
            command.add_argument("--precision", choices=["float32", "tf32"], default="float32")
        elif name == "plain":
            text = "PyTorch's default has TF32 in convolutions on CUDA, and float32 elsewhere"
            command.add_argument("--precision", choices=["default", "float32", "tf32"], default="default", help=text)
        else:
            command.add_argument("--parallel", type=int, default=os.cpu_count(), help="clients trained side by side")
        if name == "blazefl":
            command.add_argument("--mode", choices=["threads", "processes", "serial"], default="threads")
    commands.add_parser("compare").add_argument("files", nargs="+", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.simulator == "compare":
        print(json.dumps({"distance": compare(args.files)}))
        return
    if not 1 <= args.clients <= lenet.CLIENTS:
        raise SystemExit(f"--clients {args.clients}: there are {lenet.CLIENTS}")
    if args.rounds <= args.warm_up:
        raise SystemExit(f"--rounds {args.rounds} leaves nothing after a warm-up of {args.warm_up}")
    began = time.perf_counter()
    done = SIMULATORS[args.simulator](args)
    seconds = time.perf_counter() - began
    x, y, _, _ = lenet.data(args.device, args.double)
    held = args.clients * lenet.IMAGES
    net = lenet.network(args.double).to(args.device)
    net.load_state_dict(done.model)
    model = lenet.vector(done.model)
    assert len(model) == lenet.PARAMETERS
    if args.model:
        np.save(args.model, model)
    record = {
        "simulator": args.simulator,
        "workload": "L",
        "rounds": args.rounds,
        "clients": args.clients,
        "order": args.order,
        "double": args.double,
        **workload.summary(done.laps, args.warm_up),
        "laps": done.laps,
        "whole_run_seconds": seconds,
        "test_loss": done.test_loss,
        "training_loss": lenet.mean_loss(net, x[:held], y[:held]),
        "device": workload.device_name(args.device),
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **done.facts,
    }
    print(json.dumps(record))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
