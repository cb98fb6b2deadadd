"""The law on bits: run twice = killed and resumed = resumed with a further limit = replayed, bit for bit, whatever the
processor's instruction sets, the threads and the load. The whole is `make soak`; a sample stands here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from experiments import METHODS, drawn, ends_at, keeps_the_law
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


HALF = [pytest.param(number, marks=pytest.mark.soak if number % 2 else ()) for number in range(len(METHODS))]


@pytest.mark.parametrize("number", HALF)
def test_every_method_keeps_the_law(number: int, tmp_path: Path) -> None:
    keeps_the_law(drawn(number), tmp_path, number)


@pytest.fixture
def busy() -> Iterator[None]:
    """Two programs that take all the processor they can get."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for each in spinning:
        each.kill()
        each.wait()


def digests(
    environment: dict[str, str], numbers: tuple[int, ...], where: Path, ask: Callable[..., str] = keeps_the_law
) -> list[str]:
    """The models of some experiments, computed by another process; by default it holds each to the law."""
    code = (
        f"import json, sys; from pathlib import Path; from experiments import drawn, {ask.__name__}\n"
        "out, *numbers = sys.argv[1:]\n"
        f"print(json.dumps([{ask.__name__}(drawn(int(n)), Path(out) / n, int(n)) for n in numbers]))"
    )
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    done = subprocess.run(
        [sys.executable, "-c", code, str(where), *map(str, numbers)],
        env=os.environ | environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_law_holds_on_another_instruction_set_and_under_load(tmp_path: Path, busy: None) -> None:
    digests(ENVIRONMENTS[1], SAMPLE, tmp_path)


def test_the_number_of_threads_does_not_matter(tmp_path: Path, busy: None) -> None:
    one, three = (digests(ENVIRONMENTS[i], SAMPLE, tmp_path / str(i), ends_at) for i in (0, 4))
    assert one == three


@pytest.mark.soak
@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: ",".join(e.values()))
@pytest.mark.parametrize("time", range(3))
def test_the_law_holds_on_every_instruction_set(
    environment: dict[str, str], time: int, tmp_path: Path, busy: None
) -> None:
    digests(environment, ALL, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(METHODS), 200))
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
