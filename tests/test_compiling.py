"""Kernels that are only compiled: what is launched in the meantime, by whom, and what it leaves behind."""

from __future__ import annotations

import sys
import threading
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offbeat.numerics.fast.compiling import Kernel, side_by_side

mode: ContextVar[Any] = ContextVar("mode", default=None)


class Mode:
    """As Triton's: it holds in the thread that entered it, and those that inherit from it."""

    def __init__(self, threads: Any) -> None:
        self.threads = threads

    def __enter__(self) -> None:
        self.token = mode.set(self)

    def __exit__(self, *_: object) -> None:
        mode.reset(self.token)


class Jitted:
    arg_names = ("x", "out", "size")

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.compiled: list[tuple[Any, bool]] = []  # grid, whether the mode held

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launched.append(grid)

    def warmup(self, *args: Any, grid: Any, **options: Any) -> None:
        self.compiled.append((grid, mode.get() is not None))


def test_launches_are_compiled_in_any_thread_and_leave_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(AsyncCompileMode=Mode))
    jitted = Jitted()
    kernel, x, out = Kernel(jitted, ("out",)), torch.ones(3), torch.ones(3)
    with side_by_side() as possible:
        assert possible
        backward = threading.Thread(target=lambda: kernel[(7,)](x, out, 3, BLOCK=4))  # as autograd's own thread
        backward.start()
        backward.join()
    assert jitted.compiled == [((7,), True)]
    assert jitted.launched == []
    assert (x.tolist(), out.tolist()) == ([1.0] * 3, [0.0] * 3)
    kernel[(8,)](x, out, 3, BLOCK=4)
    assert jitted.launched == [(8,)]


def test_an_old_triton_compiles_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    jitted = Jitted()
    with side_by_side() as possible:
        assert not possible
        Kernel(jitted, ())[(1,)]()
    assert (jitted.launched, jitted.compiled) == ([(1,)], [])
