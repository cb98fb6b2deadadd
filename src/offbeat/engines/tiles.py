"""Waves on few cores: tiles of clients side by side, and steps without Python.

Taking a step through `vmap` and autograd costs the same few milliseconds of Python for one client as for a hundred.
A size of tile that is used for long is traced once into its bare tensor operations, and those are replayed without
Python and its lock: the same operations in the same order, so the same bits. A wave is cut into tiles whose models stay
in the cache; tiles run side by side, each on one thread. A wave of one tile uses several threads inside each operation,
unless the model is light; so do the tiles of a large model, one after the other.

What decides rounding follows by rule from the wave and `threads`: how it is cut, and whether operations are threaded.
How many tiles run at once changes nothing but the time.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx import Interpreter
from torch.utils import _pytree as pytree

from offbeat.engines.stepping import Counts, Rung, Size, rows_of, table_of
from offbeat.method import Job
from offbeat.numerics import wave as numerics
from offbeat.numerics.samples import gathered
from offbeat.numerics.threads import threads
from offbeat.numerics.wave import Clients, Problem, Tally, Work, draw, job_at, numbered, one_step, tallied
from offbeat.numerics.windows import Windows

CACHED = 4 << 20  # bytes of models in a tile: they, their gradients and a batch stay in a core's cache
MOST = 320 << 20  # bytes of work in a tile
ALONE = 8 << 20  # bytes of work that are worth a tile, and so a core, of their own: below, a step is mostly calls
LIGHT = 1 << 20  # bytes of work of a client below which more threads in an operation only wait for each other
LARGE = 16 << 20  # bytes of a model from which on two side by side only take the memory from each other
GATHERED = 1 << 20  # bytes of samples that are fetched at once
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
OFTEN = 8  # a wave of a size seen so often is cut into equal tiles instead of tiles from the ladder
WORTH = 100  # plain steps of a light model after which a size of tile is traced; fewer of one with more work ...
LEAST = 16  # ... but so many: tracing costs as much as 14 to 40 of them, which a short run would not get back

UNROLLED = 4  # steps that are replayed at once ...
NODES = 2000  # ... where they have no more operations than this

Step: TypeAlias = Callable[..., tuple[Tensor, ...]]  # leaves of the carry, job, x, y, noise -> leaves, losses


class Steps(NamedTuple):
    """One step of a size of tile; and several, which fetch their samples themselves: they are given the steps' numbers,
    rows and noise, and all samples and targets."""

    one: Step
    several: Step | None


class TiledAdvance:
    """Steps on CPUs. One per run. Unless it `counts` waves, how one is cut does not depend on those before it."""

    rung: Rung = "captured"

    def __init__(self, problem: Problem, threads: int, side_by_side: int, counts: bool = True) -> None:
        self.counts = counts
        work, models = numerics.bytes_per_job(problem), problem.model.dimension * problem.model.dtype.itemsize
        self.threads = threads  # what the rule goes by
        self.side_by_side = min(threads, side_by_side)  # tiles at once
        self.most = max(1, min(MOST // work, CACHED // models))  # clients in a tile
        self.least = max(1, ALONE // work)
        self.light, self.large = work < LIGHT, models >= LARGE
        self.worth = min(WORTH, max(LEAST, WORTH * LIGHT // work))  # before, tiles of several run one after the other
        self.seen: Counter[Size] = Counter()  # waves
        self.taken: Counter[Size] = Counter()  # plain steps of tiles
        self.steps: dict[Size, Steps] = {}
        self.inside: int | None = None  # threads in the operations of a tile that is alone

    def fitting(self, ready: int, urgent: int) -> int:
        return ready

    def release(self) -> None:
        """What is kept of a size is small."""

    def save(self) -> Counts:
        return {"seen": rows_of(self.seen), "taken": rows_of(self.taken)}

    def restore(self, counts: Counts) -> None:
        self.seen, self.taken = table_of(counts["seen"]), table_of(counts["taken"])

    def follow(self, threads: int) -> None:
        self.threads = threads

    @contextmanager
    def around(self) -> Iterator[None]:
        """What it does beside its tiles is small, and one thread does it. Others that helped would wait
        for more and take the cores from the tiles. It changes no bit: nothing is added up there."""
        self.inside = torch.get_num_threads()
        try:
            with threads(1):
                yield
        finally:
            self.inside = None

    def __call__(
        self, problem: Problem, carry: Clients, work: Work, tally: Tally, begin: int, count: int, width: int
    ) -> tuple[Clients, Tally]:
        self.seen[len(work.client), width] += self.counts
        sizes = self.tiles(len(work.client), width)
        whole = (carry, work, tally)
        parts = [whole] if len(sizes) == 1 else list(zip(*(split(t, sizes) for t in whole), strict=True))
        for size in sorted(set(sizes)):
            self.trace(problem, parts[sizes.index(size)], begin, count * sizes.count(size), width)

        def take(part: Any) -> Any:
            return self.tile(problem, *part, begin, count, width)  # type: ignore[call-arg]

        alone = len(parts) == 1 or self.large
        light = self.light or problem.model.one_thread
        with threads(self.inside if alone and not light else 1), unoptimised():
            free = all((size, width) in self.steps for size in sizes)  # of the module, which serves one at a time
            done = list((workers(self.side_by_side).map if free and not alone else map)(take, parts))
        if len(done) == 1:
            return done[0]  # type: ignore[no-any-return]
        joined: tuple[Clients, Tally] = pytree.tree_map(lambda *tiles: torch.cat(tiles), *done)
        return joined

    def tiles(self, clients: int, width: int) -> list[int]:
        """Sizes of the tiles of a wave: few different ones, because each that is used for long is traced."""
        parts = max(1, -(-clients // self.most), min(self.threads, clients // self.least))
        if self.seen[clients, width] >= OFTEN:
            return [clients // parts + (i < clients % parts) for i in range(parts)]
        most, left, sizes = -(-clients // parts), clients, []
        while left:
            sizes.append(LADDER[bisect_right(LADDER, min(most, left)) - 1])
            left -= sizes[-1]
        return sizes

    def trace(self, problem: Problem, part: Any, begin: int, steps: int, width: int) -> None:
        """Count the steps of a size of tile; trace it when there have been enough."""
        carry, work, _ = part
        size = (len(work.client), width)
        if self.taken[size] >= self.worth and size not in self.steps:
            rows, noise = draw(problem, work, begin, 1, width)
            x, y = problem.samples.batch_of(rows[:, 0])
            job = job_at(work, numbered(begin, 1, work)[0], begin)
            self.steps[size] = traced(problem, pytree.tree_map(torch.clone, carry), job, x, y, noise[:, 0])
        self.taken[size] += steps

    def tile(
        self, problem: Problem, carry: Clients, work: Work, tally: Tally, begin: int, count: int, width: int
    ) -> tuple[Clients, Tally]:
        steps = self.steps.get((len(work.client), width))
        with torch.no_grad():  # which each thread is told anew
            if steps is None:
                return numerics.advance(problem, carry, work, tally, begin, count, width)
            rows, noise = draw(problem, work, begin, count, width)
            rows, noise = rows.transpose(0, 1).contiguous(), noise.T.contiguous()
            leaves, form = pytree.tree_flatten(pytree.tree_map(torch.clone, carry))  # the steps may change them
            losses: list[Tensor] = []
            numbers, samples, place = numbered(begin, count, work), problem.samples, 0
            *fixed, _ = pytree.tree_leaves(work.job)  # the number of the step is the last
            while steps.several is not None and not work.tables and place + UNROLLED <= count:
                here = slice(place, place + UNROLLED)
                given = (numbers[here], rows[here], noise[here], samples.x, samples.y)
                *leaves, loss = steps.several(*leaves, *fixed, *given)
                losses.extend(loss)
                place += UNROLLED
            at_once = max(1, GATHERED // max(1, samples.x[0].nbytes * rows[0].numel()))
            for first in range(place, count, at_once):
                x, y = samples.batch_of(rows[first : first + at_once])
                for k in range(len(x)):
                    place = first + k
                    if work.tables:
                        *fixed, _ = pytree.tree_leaves(job_at(work, numbers[place], begin + place))
                    *leaves, loss = steps.one(*leaves, *fixed, numbers[place], x[k], y[k], noise[place])
                    losses.append(loss)
            return pytree.tree_unflatten(leaves, form), tallied(tally, torch.stack(losses, dim=1), begin)


@cache
def workers(many: int) -> ThreadPoolExecutor:
    """Threads that each compute on one core."""
    return ThreadPoolExecutor(many, "offbeat", initializer=torch.set_num_threads, initargs=(1,))


def split(tree: Any, sizes: list[int]) -> list[Any]:
    """A tree of tensors `[n, ...]` as trees of its tiles."""
    leaves, form = pytree.tree_flatten(tree)
    cut = [leaf.split(sizes) for leaf in leaves]
    return [pytree.tree_unflatten([tiles[i] for tiles in cut], form) for i in range(len(sizes))]


@torch.no_grad()
def traced(problem: Problem, carry: Clients, job: Job, x: Tensor, y: Tensor, noise: Tensor) -> Steps:
    """`one_step` for inputs of these shapes, as its bare operations; it may overwrite the carry."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import
    from torch.fx.graph import CodeGen

    leaves, form = pytree.tree_flatten((carry, job))

    def flat_step(*given: Tensor) -> tuple[Tensor, ...]:
        *leaves, x, y, noise = given
        carry, job = pytree.tree_unflatten(leaves, form)
        carry, losses = one_step(problem, carry, job, x, y, noise)
        return (*pytree.tree_leaves(carry), losses)

    given = (*leaves, x, y, noise)
    # Python may ask for a number of what is no client's, such as a mask: it is the same in every step
    module = make_fx(flat_step, _error_on_data_dependent_ops=False)(*given)
    graph, forms = module.graph, Forms(module)
    with torch.enable_grad():  # as it was traced: some operations keep what their gradient needs only then
        forms.run(*given)
    for node in list(graph.nodes):
        if node.target in SAME and forms.seen[node] == forms.seen[node.args[0]]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    first, *_, last, output = graph.nodes
    moved, *others = output.args[0]
    step_is_last = last.target is torch.ops.aten.addcmul.default and last.args[0] is first and moved is last
    if step_is_last and not any(forms.shares(other, first) for other in others):
        last.target = torch.ops.aten.addcmul_.default  # nobody keeps the old iterate: it may move in its place
    graph.set_codegen(CodeGen())  # tensors in, tensors out
    code = graph.python_code("self")
    scope = dict(code.globals)

    def direct(call: re.Match[str]) -> str:
        """A call of an operation by a name of its own, without the layers of Python before it."""
        name = "_".join(call.groups())
        scope[name] = getattr(getattr(torch.ops.aten, call[1]), call[2])._op
        return f"{name}("

    exec(re.sub(r"torch\.ops\.aten\.(\w+)\.(\w+)\(", direct, code.src), scope)
    step = with_gradients(partial(scope["forward"], module))  # of nothing: no tensor asks for one

    carried, samples = len(pytree.tree_leaves(carry)), problem.samples

    def several(*given: Tensor) -> tuple[Tensor, ...]:
        *leaves, numbers, rows, noise, every_x, every_y = given
        carry, fixed, losses = leaves[:carried], leaves[carried:], []
        for k in range(UNROLLED):
            x, y = gathered(every_x, rows[k]), gathered(every_y, rows[k])
            *carry, loss = step(*carry, *fixed, numbers[k], x, y, noise[k])
            losses.append(loss)
        return (*carry, torch.stack(losses))

    if UNROLLED * len(graph.nodes) > NODES or isinstance(samples.x, Windows) or isinstance(samples.y, Windows):
        return Steps(replayed(step, given), None)
    numbers, noises = (torch.stack([t] * UNROLLED) for t in (leaves[-1], noise))
    rows = torch.zeros(UNROLLED, *y.shape[:2], dtype=torch.int64)
    more = (*leaves[:-1], numbers, rows, noises)
    return Steps(replayed(step, given), replayed(several, more, (samples.x, samples.y)))


def unoptimised() -> Any:
    """Programs run as they were traced: fused operations would round otherwise."""
    return torch.jit.optimized_execution(False)  # type: ignore[attr-defined]


def with_gradients(step: Step) -> Step:
    """As it was traced: some operations keep what their gradient needs only then."""

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return step(*given)

    return run


def replayed(step: Step, given: Sequence[Tensor], read: Sequence[Tensor] = ()) -> Step:
    """The same operations without Python; or the step itself, where PyTorch cannot do that or gives other bits. What is
    only `read` comes last."""
    copies = [[*(t.clone() for t in given), *read] for _ in range(3)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and what comes in its place compiles other operations
            program = torch.jit.trace(step, tuple(copies[0]), check_trace=False)  # type: ignore[no-untyped-call]
        with unoptimised():
            alike = all(map(torch.equal, with_gradients(program)(*copies[1]), step(*copies[2])))
    except Exception:  # whatever PyTorch says of what it cannot trace: the step itself is right
        return step
    return with_gradients(program) if alike else step


VIEWS = ("detach.default", "expand.default", "permute.default", "view.default", "_unsafe_view.default")
SAME: set[Any] = {getattr(getattr(torch.ops.aten, name), kind) for name, kind in (view.split(".") for view in VIEWS)}


class Forms(Interpreter):
    """Runs a graph and notes shapes and strides: a view of the same form does nothing that is not differentiated."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.seen: dict[Any, Any] = {}
        self.memory: dict[Any, int] = {}  # where the numbers of each tensor lie

    def shares(self, one: Any, other: Any) -> bool:
        """Whether two tensors are views of the same memory."""
        return self.memory.get(one) == self.memory[other]

    def run_node(self, n: Any) -> Any:
        result = super().run_node(n)
        dense = isinstance(result, Tensor) and result.layout is torch.strided
        self.seen[n] = (result.shape, result.stride()) if dense else None
        if dense:
            self.memory[n] = result.untyped_storage().data_ptr()
        return result
