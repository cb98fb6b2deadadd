"""What a run sets for the whole process, and puts back: precision of products, determinism, threads, freed memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

INSIDE = 8  # threads inside one operation at most: more gain nothing for a client's products
KEPT = 1 << 30  # bytes of freed memory that the C library keeps, instead of handing pages back and fetching them again
GLIBC = {-1: 128 << 10, -3: 128 << 10}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: glibc's own values
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


limited: list[int] = []  # by `limit_cores`


def limit_cores(count: int) -> None:
    """Runs of this process go by so many cores from now on: beside it run others, on the other cores."""
    limited[:] = [count]


def cores() -> int:
    """The processor's cores that this process may use. OMP_NUM_THREADS does not change it: bits rest on this number."""
    if limited:
        return limited[0]
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Settings:
    """Enter to set, leave to put back; entering again inside changes nothing."""

    def __init__(self, precision: str, device: torch.device, threads: int) -> None:
        self.precision, self.device, self.threads = precision, device, threads
        self.side_by_side = torch.get_num_threads()  # tiles at once: PyTorch's own number, OMP_NUM_THREADS counts here
        self.depth = 0
        self.undo = ExitStack()

    def __enter__(self) -> Settings:
        self.depth += 1
        if self.depth == 1:
            for setting in (self.products(), self.threading(), freed_memory_kept()):
                self.undo.enter_context(setting)
            if self.device.type == "cuda":
                self.undo.enter_context(deterministic())
        return self

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.undo.close()

    @contextmanager
    def products(self) -> Iterator[None]:
        fast = self.precision in ("tf32", "bf16")
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high" if fast else "highest")
        torch.backends.cudnn.allow_tf32 = fast
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]

    @contextmanager
    def threading(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(min(self.threads, INSIDE))
        try:
            yield
        finally:
            torch.set_num_threads(before)


def repeatable_kernels(mode: int) -> None:
    """Whether PyTorch takes kernels that give the same bits every time: 0 no, 1 where there are some, 2 always.

    `torch.use_deterministic_algorithms` would import the compiler to tell it, too, which takes seconds.
    """
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
    else:
        torch.set_deterministic_debug_mode(mode)


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels of PyTorch that give the same bits every time, where there are some; it warns of those that do not."""
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    kernels = torch.get_deterministic_debug_mode()
    workspace = os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    cudnn.deterministic, cudnn.benchmark = True, False
    memory.fill_uninitialized_memory = False  # it would write what is written again at once
    repeatable_kernels(1)
    try:
        yield
    finally:
        repeatable_kernels(kernels)
        cudnn.deterministic, cudnn.benchmark = before[:2]
        memory.fill_uninitialized_memory = before[2]
        if workspace is None:
            os.environ.pop(WORKSPACE, None)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Tell the C library to keep the memory that is freed: a step takes the same large pieces again and again, and
    pages that come fresh from the system cost more than the arithmetic on them. Nothing happens where it is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        yield
        return
    for setting in GLIBC:
        mallopt(setting, KEPT)
    try:
        yield
    finally:
        for setting, value in GLIBC.items():
            mallopt(setting, value)
