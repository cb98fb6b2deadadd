"""`python benchmarks/against_lenet.py OUT.json --flower PYTHON --blazefl PYTHON`: BlazeFL's protocol, turn by turn.

Seconds per round of Offbeat, of the plain loop and of the simulators whose Python is given, each in a process of its
own, one after the other in every turn; the shortest round of all turns counts. See benchmarks/others/README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "others" / "lenet_protocol.py"


def said(python: str, *options: str) -> dict[str, Any]:
    done = subprocess.run([python, str(SCRIPT), *options], check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="seconds per round of 100 clients with a LeNet, turn by turn")
    parser.add_argument("out", type=Path)
    parser.add_argument("--flower", help="the Python of Flower's environment")
    parser.add_argument("--blazefl", help="that of BlazeFL's")
    parser.add_argument("--mode", default="threads", help="BlazeFL's threads, processes or serial")
    parser.add_argument("--parallel", type=int, help="clients side by side in Flower and BlazeFL; default: the cores")
    parser.add_argument("--precision", default="float32", help="Offbeat's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    common = ["--device", args.device, "--clients", str(args.clients), "--rounds", str(args.rounds)]
    several = ["--parallel", str(args.parallel)] if args.parallel else []
    commands = {
        "offbeat": [sys.executable, "offbeat", "--precision", args.precision],
        "plain": [sys.executable, "plain"],
    }
    if args.flower:
        commands["flower"] = [args.flower, "flower", *several]
    if args.blazefl:
        commands["blazefl"] = [args.blazefl, "blazefl", "--mode", args.mode, *several]
    turns: list[dict[str, Any]] = []
    for _ in range(args.turns):
        turns.append({who: said(*command, *common) for who, command in commands.items()})
        best = {who: min(turn[who]["seconds_per_round_min"] for turn in turns) for who in commands}
        over = {who: seconds / best["offbeat"] for who, seconds in best.items()}
        summary = {"seconds per round": best, "over offbeat": over, "clients": args.clients}
        args.out.write_text(json.dumps({**summary, "turns": turns}, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
