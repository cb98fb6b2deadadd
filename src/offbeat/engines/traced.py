"""Waves on few cores: tiles of clients, and steps without Python.

Taking a step through `vmap` and autograd costs the same few milliseconds of Python for one client as for a hundred.
A size of tile that is used for long is traced once into its bare tensor operations, and those are replayed: the same
operations in the same order, so the same bits. They run without the interpreter's lock, so tiles of heavy clients
(convolutions) run side by side, a thread for each core, which beats splitting every operation over all cores.
"""

from __future__ import annotations

import ctypes
import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Interpreter
from torch.utils import _pytree as pytree

from offbeat.method import Carry, Job
from offbeat.numerics import wave as numerics
from offbeat.numerics.wave import Problem, Tally, Work, draw, one_step, tallied

MOST = 320 << 20  # bytes of work in a tile
HEAVY = 16 << 20  # bytes: clients with more work than that are dealt out to the cores, a few to each
FEW = 5
GATHERED = 1 << 20  # bytes of samples that are fetched at once
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
OFTEN = 8  # a wave of a size seen so often is cut into equal tiles instead of tiles from the ladder
WORTH = 1.0  # seconds of plain steps after which a size of tile is traced

Step: TypeAlias = Callable[..., tuple[Tensor, ...]]  # leaves of the carry, job, x, y, noise -> leaves, losses


class TracedAdvance:
    """An `Advance` for CPUs. One per run."""

    def __init__(self, problem: Problem) -> None:
        keep_memory()
        size = numerics.bytes_per_job(problem)
        self.threads = torch.get_num_threads()
        self.dealt = size > HEAVY and self.threads > 1
        self.most = FEW if self.dealt else max(1, MOST // size)  # clients in a tile
        self.seen: Counter[tuple[int, int]] = Counter()
        self.spent: Counter[tuple[int, int]] = Counter()  # seconds of plain steps, by clients and samples per step
        self.steps: dict[tuple[int, int], Step] = {}

    def __call__(
        self, problem: Problem, carry: Carry, work: Work, tally: Tally, begin: int, count: int, width: int
    ) -> tuple[Carry, Tally]:
        self.seen[len(work.client), width] += 1
        sizes = self.tiles(len(work.client), width)
        parts = list(zip(*(split(t, sizes) for t in (carry, work, tally)), strict=True))

        def take(part: Any) -> Any:
            carry, work, tally = part
            return self.tile(problem, carry, work, tally, begin, count, width)

        ready = all((size, width) in self.steps for size in sizes)
        if not self.dealt or not ready or len(sizes) < self.threads:
            done = [take(part) for part in parts]
        else:
            torch.set_num_threads(1)
            try:
                done = list(workers(self.threads).map(take, parts))
            finally:
                torch.set_num_threads(self.threads)
        found: tuple[Carry, Tally] = pytree.tree_map(lambda *tiles: torch.cat(tiles), *done) if done[1:] else done[0]
        return found

    def tiles(self, clients: int, width: int) -> list[int]:
        """Sizes of the tiles of a wave: few different ones, because each that is used for long is traced."""
        parts = max(min(self.threads, clients) if self.dealt else 1, -(-clients // self.most))
        if self.seen[clients, width] >= OFTEN:
            return [clients // parts + (i < clients % parts) for i in range(parts)]
        most, left, sizes = -(-clients // parts), clients, []
        while left:
            sizes.append(LADDER[bisect_right(LADDER, min(most, left)) - 1])
            left -= sizes[-1]
        return sizes

    def tile(
        self, problem: Problem, carry: Carry, work: Work, tally: Tally, begin: int, count: int, width: int
    ) -> tuple[Carry, Tally]:
        size = (len(work.client), width)
        step = self.steps.get(size)
        if step is None:
            began = time.perf_counter()
            carry, tally = numerics.advance(problem, carry, work, tally, begin, count, width)
            self.spent[size] += time.perf_counter() - began  # type: ignore[assignment]
            if self.spent[size] > WORTH:
                rows, noise = draw(problem, work, begin, 1, width)
                x, y = problem.samples.batch_of(rows[:, 0])
                self.steps[size] = traced(problem, carry, work.job, x, y, noise[:, 0])
            return carry, tally
        rows, noise = draw(problem, work, begin, count, width)
        rows, noise = rows.transpose(0, 1).contiguous(), noise.T.contiguous()
        each = problem.samples.x[0].nbytes * rows[0].numel()
        at_once = max(1, GATHERED // max(1, each))
        leaves, form = pytree.tree_flatten(pytree.tree_map(torch.clone, carry))  # the steps may change them
        losses = []
        for first in range(0, count, at_once):
            x, y = problem.samples.batch_of(rows[first : first + at_once])
            for k in range(len(x)):
                *leaves, loss = step(*leaves, *work.job, x[k], y[k], noise[first + k])
                losses.append(loss)
        return pytree.tree_unflatten(leaves, form), tallied(tally, torch.stack(losses, dim=1), begin)


@cache
def workers(threads: int) -> ThreadPoolExecutor:
    """Threads that each compute on one core."""
    return ThreadPoolExecutor(threads, "offbeat", initializer=torch.set_num_threads, initargs=(1,))


def split(tree: Any, sizes: list[int]) -> list[Any]:
    """A tree of tensors `[n, ...]` as trees of its tiles."""
    leaves, form = pytree.tree_flatten(tree)
    cut = [leaf.split(sizes) for leaf in leaves]
    return [pytree.tree_unflatten([tiles[i] for tiles in cut], form) for i in range(len(sizes))]


@torch.no_grad()
def traced(problem: Problem, carry: Carry, job: Job, x: Tensor, y: Tensor, noise: Tensor) -> Step:
    """`one_step` for inputs of these shapes, as its bare operations; it may overwrite the carry."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import
    from torch.fx.graph import CodeGen

    form = pytree.tree_structure(carry)

    def flat_step(*given: Tensor) -> tuple[Tensor, ...]:
        *leaves, x, y, noise = given
        leaves, job = leaves[: -len(Job._fields)], Job(*leaves[-len(Job._fields) :])
        carry, losses = one_step(problem, pytree.tree_unflatten(leaves, form), job, x, y, noise)
        return (*pytree.tree_leaves(carry), losses)

    given = (*pytree.tree_leaves(carry), *job, x, y, noise)
    module = make_fx(flat_step)(*given)
    graph, forms = module.graph, Forms(module)
    forms.run(*given)
    for node in list(graph.nodes):
        if node.target in SAME and forms.seen[node] == forms.seen[node.args[0]]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    first, *_, last, output = graph.nodes
    if last.target is torch.ops.aten.addcmul.default and last.args[0] is first and output.args[0][0] is last:
        last.target = (
            torch.ops.aten.addcmul_.default
        )  # the step itself comes last: it may move the iterate in its place
    graph.set_codegen(CodeGen())  # tensors in, tensors out
    code = graph.python_code("self")
    scope = dict(code.globals)

    def direct(call: re.Match[str]) -> str:
        """A call of an operation by a name of its own, without the layers of Python before it."""
        name = "_".join(call.groups())
        scope[name] = getattr(getattr(torch.ops.aten, call[1]), call[2])._op
        return f"{name}("

    exec(re.sub(r"torch\.ops\.aten\.(\w+)\.(\w+)\(", direct, code.src), scope)
    step: Step = partial(scope["forward"], module)
    return step


VIEWS = ("detach.default", "expand.default", "permute.default", "view.default", "_unsafe_view.default")
SAME: set[Any] = {getattr(getattr(torch.ops.aten, name), kind) for name, kind in (view.split(".") for view in VIEWS)}


class Forms(Interpreter):
    """Runs a graph and notes shapes and strides: a view of the same form does nothing that is not differentiated."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.seen: dict[Any, Any] = {}

    def run_node(self, n: Any) -> Any:
        result = super().run_node(n)
        self.seen[n] = (result.shape, result.stride()) if isinstance(result, Tensor) else None
        return result


@cache
def keep_memory() -> None:
    """Tell the C library to keep the memory that is freed: a step takes the same large pieces again and again, and
    pages that come fresh from the system cost more than the arithmetic on them. Nothing happens where it is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for setting in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(setting, 1 << 30)
