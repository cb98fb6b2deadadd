"""The law on bits: run twice = killed and resumed = resumed with a further limit = replayed, bit for bit, whatever the
processor's instruction sets, the threads and the load. The whole is `make soak`; a sample stands here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from experiments import METHODS, drawn, ends_at, keeps_the_law, short
from offbeat.engines.settings import Settings

HERE = Path(__file__).parent
SAMPLE = (3, 8)  # of the experiments, for the environments
ALL = (3, 5, 8, 14, 16, 17)
ENVIRONMENTS = [
    {"OMP_NUM_THREADS": "1"},
    {"OMP_NUM_THREADS": "3", "ATEN_CPU_CAPABILITY": "avx2"},
    {"OMP_NUM_THREADS": "2", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"OMP_NUM_THREADS": "2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"OMP_NUM_THREADS": "3"},
]


@pytest.mark.parametrize("number", range(0, len(METHODS), 2))
def test_every_second_method_keeps_the_law(number: int, tmp_path: Path) -> None:
    keeps_the_law(short(number), tmp_path, number)


@pytest.fixture
def busy() -> Iterator[None]:
    """Two programs that take all the processor they can get."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for each in spinning:
        each.kill()
        each.wait()


class Digests:
    """The models of some experiments, computed by a process of its own, which holds each to the law."""

    def __init__(self, environment: dict[str, str], numbers: tuple[int, ...], where: Path, draw: str = "drawn") -> None:
        code = (
            f"import json, sys; from pathlib import Path; from experiments import {draw}, keeps_the_law\n"
            "out, *numbers = sys.argv[1:]\n"
            f"print(json.dumps([keeps_the_law({draw}(int(n)), Path(out) / n, int(n)) for n in numbers]))"
        )
        path = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(where), *map(str, numbers)],
            env=os.environ | environment | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> list[str]:
        out, err = self.process.communicate()
        assert self.process.returncode == 0, err[-2000:]
        digests: list[str] = json.loads(out.splitlines()[-1])
        return digests


def test_neither_instruction_set_nor_threads_nor_load_break_the_law(tmp_path: Path) -> None:
    """Two processes with three threads each, side by side: each is the other's load. As many threads as here or more
    give the same bits; another instruction set may give others, but keeps the law."""
    other, three = (Digests(ENVIRONMENTS[i], SAMPLE, tmp_path / str(i), "short") for i in (1, 4))
    one = [ends_at(short(number), tmp_path / "one" / str(number)) for number in SAMPLE]
    other.wait()
    assert three.wait() == one


@pytest.mark.soak
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: ",".join(e.values()))
@pytest.mark.parametrize("time", range(3))
def test_the_law_holds_on_every_instruction_set(
    environment: dict[str, str], time: int, tmp_path: Path, busy: None
) -> None:
    Digests(environment, ALL, tmp_path).wait()


@pytest.mark.soak
@pytest.mark.parametrize("number", range(200))
def test_random_experiments_keep_the_law(number: int, tmp_path: Path) -> None:
    keeps_the_law(drawn(number), tmp_path, number)


@pytest.mark.cuda
@pytest.mark.parametrize("number", [2, 4, 6, 8, 19])
def test_the_law_holds_on_cuda(number: int, tmp_path: Path) -> None:
    keeps_the_law(drawn(number, "cuda"), tmp_path, number)


def test_a_run_puts_back_what_it_sets() -> None:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with Settings("tf32", torch.device("cpu"), 3) as settings:
        assert torch.get_num_threads() == 3
        assert torch.get_float32_matmul_precision() == "high"
        with settings:
            pass
        assert torch.get_num_threads() == 3
    assert before == (
        torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    )  # fmt: skip
