"""Kernels that are compiled for each shape: all that a step needs, side by side, before the first one runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Any

MOST = 16  # compilers at once

ahead: Context | None = None  # where kernels are only compiled; gradients are made in a thread of PyTorch's own


class Kernel:
    """A kernel of Triton. While kernels are only compiled, a launch has one compiled for its shapes, in another
    thread, and leaves zeros in its outputs."""

    def __init__(self, jitted: Any, outputs: tuple[str, ...]) -> None:
        self.jitted = jitted
        self.outputs = [jitted.arg_names.index(name) for name in outputs]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch: Callable[..., Any] = partial(self.compile, grid) if ahead is not None else self.jitted[grid]
        return launch

    def compile(self, grid: Any, *args: Any, **options: Any) -> None:
        for place in self.outputs:
            args[place].zero_()
        assert ahead is not None
        ahead.run(self.jitted.warmup, *args, grid=grid, **options)


def kernel(*outputs: str) -> Callable[[Any], Kernel]:
    """In the place of `triton.jit`; `outputs` are the arguments that it writes."""
    import triton

    return lambda function: Kernel(triton.jit(function), outputs)


@contextmanager
def side_by_side() -> Iterator[bool]:
    """What is launched in here is compiled and not run; afterwards all of it is there. Not so with an old Triton."""
    global ahead
    import triton

    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        yield False
        return
    with ThreadPoolExecutor(min(MOST, os.cpu_count() or 1)) as threads, mode(threads):
        ahead = copy_context()
        try:
            yield True
        finally:
            ahead = None
