"""The law over modules: for every module of the zoo, however it is computed, each client's gradient is autograd's own,
and a wave is the twin; or the module is refused with a sentence."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offbeat import Task, keys
from offbeat.engines import tiles
from offbeat.engines.captured import GraphAdvance
from offbeat.errors import ConfigError, OffbeatError
from offbeat.numerics import local
from offbeat.numerics.draws import Keyed
from offbeat.numerics.reference_loop import reference
from offbeat.numerics.samples import Samples
from offbeat.numerics.vector import FlatModel
from offbeat.numerics.wave import Problem, wave
from offbeat.records import Begun
from zoo import REFUSED, ZOO, Animal, Caged, Own, caged

CLIENTS, BATCH = 3, 3
SMALL, LARGE = 4, 192  # widths; the larger one passes every threshold on sizes
JOBS = [Begun(0, 0, 0, 2), Begun(1, 3, 0, 2), Begun(2, 1, 0, 2)]
ALONE = {  # modules that `vmap` cannot batch: they run one client after another
    "checkpoint", "checkpoint of two", "embedding by frequency", "gru, packed", "hook on an activation", "lstm, packed",
    "noise, truncated", "seeds itself",
}  # fmt: skip
PLAIN = (  # modules whose steps cannot be captured: they look at a value, or bring one from the host
    "decoder with a mask", "loss cross-entropy, smooth and weighted", "loss cross-entropy, weighted", "orthogonal",
)  # fmt: skip
SAMPLE = (
    "linear", "sequence", "transposed", "transposed and straight", "straight and transposed", "twice", "tied",
    "sliced and whole", "expanded", "same view", "gradient reversed", "detached and straight", "weight as bias",
    "complex", "frozen weight", "checkpoint of two", "layer in two places", "output not used", "linear by names",
    "conv2d", "conv2d turned", "conv2d twice", "attention", "encoder with dropout", "gru cell", "embedding, tied",
    "loss sequence", "loss cross-entropy, smooth and weighted", "loss gaussian", "gradient inside", "weights mapped",
    "decoder with a mask", "rows filled in", "rows added in", "normal law", "dropout of rows", "complex, odd",
    "embedding, sparse function",
)  # fmt: skip


def each(small: Any, large: Any) -> Any:
    """All modules in both widths; those not named here in the soak only."""
    chosen = {(name, SMALL) for name in small} | {(name, LARGE) for name in large}
    cases = [(name, width) for width in (SMALL, LARGE) for name in ZOO]
    marked = [pytest.param(*case, marks=() if case in chosen else pytest.mark.soak) for case in cases]
    return pytest.mark.parametrize(("name", "width"), marked)


def error(ours: Tensor, theirs: Tensor) -> float:
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return float("inf")
    ours, theirs = ours.nan_to_num(), theirs.nan_to_num()  # PyTorch's mean over no targets is none
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-300)) if not torch.equal(ours, theirs) else 0.0


def plain_gradient(kept: Caged, flat: Tensor, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
    """One client's gradient by PyTorch alone, on a copy of the module; keyed draws only where it draws at all."""
    module = copy.deepcopy(kept.module)
    trained = [p for p in module.parameters() if p.requires_grad]
    nn.utils.vector_to_parameters(flat.clone(), trained)

    def gradient() -> Tensor:
        loss = kept.loss(module(x.clone()), y.clone())
        slopes = torch.autograd.grad(loss, trained, allow_unused=True)
        dense = (torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(trained, slopes, strict=True))
        return torch.cat([g.flatten() for g in dense])

    before = torch.get_rng_state()
    slope = gradient()
    if torch.equal(before, torch.get_rng_state()):
        return slope
    torch.set_rng_state(before)
    with Keyed(key):
        return gradient()


def points(model: FlatModel, kept: Caged) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where three clients stand, their batches, and their keys."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(CLIENTS, model.dimension, generator=generator, dtype=torch.float64)
    x, y = (t[: CLIENTS * BATCH].unflatten(0, (CLIENTS, BATCH)) for t in (kept.x, kept.y))
    return model.initial() + 0.1 * spread, x, y, keys.key(5, "zoo", torch.arange(CLIENTS))


def problem(kept: Caged) -> Problem:
    shards = [np.arange(i, len(kept.x), CLIENTS) for i in range(CLIENTS)]
    model = FlatModel(kept.module, kept.loss, torch.float64)
    return Problem(model, Samples.of(kept.x, kept.y, shards, BATCH), local.sgd(0.05, {"momentum": 0.5}), 7)


def task(kept: Caged) -> Task:
    return Task(kept.module.float(), kept.loss, (kept.x.float() if kept.x.is_floating_point() else kept.x, kept.y),
                [range(i, len(kept.x), CLIENTS) for i in range(CLIENTS)], batch_size=BATCH)  # fmt: skip


# ---- the laws -----------------------------------------------------------------------------------
@each(ZOO, SAMPLE)
@pytest.mark.filterwarnings("ignore")
def test_gradients_are_autograds(name: str, width: int) -> None:
    kept = caged(ZOO[name], width)
    model = FlatModel(kept.module, kept.loss, torch.float64)
    flat, x, y, key = points(model, kept)
    seen = flat.clone(), x.clone(), y.clone()
    want = torch.stack([plain_gradient(kept, *each) for each in zip(flat, x, y, key, strict=True)])
    for i in range(CLIENTS):
        assert error(one_gradient(model, flat[i], x[i], y[i], key[i]), want[i]) < 1e-10
    try:
        _, gradient = model.gradient(flat, x.clone(), y, key)
    except (RuntimeError, ValueError):
        if name not in ALONE:
            raise
        return
    assert error(gradient, want) < 1e-10
    assert all(map(torch.equal, seen, (flat, x, y)))


UNROUNDED = (  # PyTorch has no such function for mixed numbers
    "batch norm at rest", "batch norm of images at rest", "pairwise distance", "prelu", "rows added in",
)  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore")
def test_what_is_batched_is_batched_with_rounded_products_too(name: str) -> None:
    """`precision = "bf16"`; what draws has other bits there."""
    if name in (*ALONE, *UNROUNDED):
        return
    kept = caged(ZOO[name], SMALL)
    exact, rounded = (FlatModel(kept.module, kept.loss, kind, kind == torch.float32)
                      for kind in (torch.float64, torch.float32))  # fmt: skip
    flat, x, y, key = points(exact, kept)
    narrow = x.float() if x.is_floating_point() else x
    _, gradient = rounded.gradient(flat.float(), narrow, y, key)
    assert gradient.isfinite().all()
    if any(word in name for word in ("lstm", "gru", "rnn", "attention", "linear")) and "dropout" not in name:
        want = torch.stack([plain_gradient(kept, *each) for each in zip(flat, x, y, key, strict=True)])
        assert error(gradient.double(), want) < 0.1


@each(SAMPLE, ("linear", "transposed", "straight and transposed"))
@pytest.mark.filterwarnings("ignore")
def test_waves_are_the_twin_plain_and_traced(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "WORTH", 1)  # every size of tile is traced at once
    kept = caged(ZOO[name], width)
    p = problem(kept)
    x, y = kept.x.clone(), kept.y.clone()
    start = {"model": p.model.initial().repeat(len(JOBS), 1)}
    want = reference(p, start, JOBS)
    if name not in ALONE:
        advance = tiles.TiledAdvance(p, 2, 2)
        for how in (wave(p, start, JOBS), *(wave(p, start, JOBS, advance) for _ in range(3))):
            assert error(how.updates["delta"], want.updates["delta"]) < 1e-10
            assert error(how.losses, want.losses) < 1e-10
        assert advance.steps
    p.model.outputs(p.model.initial(), p.samples.x)
    assert torch.equal(kept.x, x)
    assert torch.equal(kept.y, y)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [SMALL, LARGE])
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore")
def test_captured_waves_are_the_twin(name: str, width: int) -> None:
    if name in (*ALONE, *PLAIN):
        pytest.skip("runs plainly, or one client after another")
    p = problem(caged(ZOO[name], width))
    there = Problem(p.model.to("cuda"), p.samples.to("cuda"), p.local, p.seed)
    start = {"model": there.model.initial().repeat(len(JOBS), 1)}
    want = reference(
        there, start, JOBS
    )  # not the processor's: PyTorch's own kernels differ there by more than rounding
    advance = GraphAdvance()
    advance.worth = 1
    for how in (wave(there, start, JOBS), *(wave(there, start, JOBS, advance) for _ in range(3))):
        assert error(how.updates["delta"], want.updates["delta"]) < 1e-10
    assert any(size.graphs for size in advance.graphs.values())


@pytest.mark.cuda
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore")
def test_kernels_of_our_own_agree_in_float32(name: str) -> None:
    """Most of them are for float32 alone."""
    kept = caged(ZOO[name], 32)
    wide = FlatModel(kept.module, kept.loss, torch.float64)
    flat, x, y, key = points(wide, kept)
    want = torch.stack([plain_gradient(kept, *each) for each in zip(flat, x, y, key, strict=True)])
    narrow = FlatModel(kept.module, kept.loss, torch.float32).to("cuda")
    given = [t.to("cuda", torch.float32 if t.is_floating_point() else t.dtype) for t in (flat, x, y, key)]
    try:
        _, gradient = narrow.gradient(*(t.clone() for t in given))
    except (RuntimeError, ValueError):
        if name not in ALONE:
            raise
        return
    draws = ("dropout", "noise", "coins", "shuffled", "rrelu", "gumbel", "all dropped")
    if any(word in name for word in draws):  # numbers that are drawn have other bits in float32
        want = torch.stack([one_gradient(narrow, *each) for each in zip(*given, strict=True)]).double().cpu()
    assert error(gradient.double().cpu(), want) < 1e-3


def one_gradient(model: FlatModel, flat: Tensor, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
    """As the twin computes it."""
    return model.slope(flat.clone(), x.clone(), y, key)[1]


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore")
def test_what_trains_is_not_refused(name: str) -> None:
    ours = task(caged(ZOO[name], SMALL))
    torch.manual_seed(4)
    before = torch.get_rng_state()
    assert ours.problems() == []
    assert torch.equal(before, torch.get_rng_state())  # looking draws nothing either


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_the_same_every_time_is_refused(name: str) -> None:
    make, sentence = REFUSED[name]
    state = torch.get_rng_state()
    problems = task(caged(make, SMALL)).problems()
    assert sentence in " ".join(problems)
    torch.set_rng_state(state)


def test_two_parameters_in_one_memory_are_refused() -> None:
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    two.weight = nn.Parameter(one.weight.data.t())
    with pytest.raises(ConfigError, match=r"'0.weight' and '1.weight' lie in the same memory"):
        FlatModel(nn.Sequential(one, two), nn.functional.cross_entropy)
    rows = nn.Parameter(torch.zeros(4, 3))
    parts = nn.ParameterList(
        [nn.Parameter(rows.data[:2]), nn.Parameter(rows.data[2:])]
    )  # neighbours, as cuDNN lays them
    assert FlatModel(parts, nn.functional.cross_entropy).dimension == 12


SMOOTH = (
    "linear",
    "tied",
    "transposed",
    "conv2d",
    "group norm",
    "attention",
    "encoder",
    "gru cell",
    "lstm cell",
    "lstm",
    "gru both ways",
    "rnn",
    "lstm projected",
    "noise",
)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.filterwarnings("ignore")
def test_hessian_products_are_exact(name: str) -> None:
    kept = caged(ZOO[name], SMALL)
    model = FlatModel(kept.module, kept.loss, torch.float64)
    flat, x, y, key = points(model, kept)
    v = torch.randn(flat.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    try:
        product = model.hessian_product(flat, v, x, y, key)
    except RuntimeError:
        if name not in ALONE:
            raise
        return
    step = 1e-4
    for i in range(CLIENTS):
        ends = [plain_gradient(kept, flat[i] + sign * step * v[i], x[i], y[i], key[i]) for sign in (1, -1)]
        assert error(product[i], (ends[0] - ends[1]) / (2 * step)) < 1e-5


TAKEN = itertools.count()  # steps; nobody can put it back


def test_a_draw_inside_a_job_is_noticed_and_named() -> None:
    """The module draws in its second step only, which no trial of one step can see."""

    def draws_later(m: Any, x: Tensor) -> Tensor:
        return m.parts[0](x) * (torch.empty(1).cauchy_() if next(TAKEN) > 5 else 1)

    p = problem(caged(lambda w: Animal(Own(draws_later, nn.Linear(w, w)), (w,)), SMALL))
    start = {"model": p.model.initial().repeat(len(JOBS), 1)}
    with pytest.raises(OffbeatError, match=r"draws at random by 'cauchy_' in Own"):
        reference(p, start, JOBS)


def test_parts_at_rest_stay_at_rest() -> None:
    """A part in eval mode keeps it while training and evaluating; a model in eval mode is trained as a whole."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    module[1].eval()
    model = FlatModel(module, nn.functional.cross_entropy)
    model.outputs(model.initial(), torch.ones(2, 4))
    assert [part.training for part in model.module.modules()] == [True, True, False, True]
    assert model.one(model.initial(), torch.ones(2, 4), torch.tensor([0, 1])).isfinite()  # nothing is drawn
    assert all(part.training for part in FlatModel(module.eval(), nn.functional.cross_entropy).module.modules())


def test_lazy_layers_get_their_shape_from_the_data() -> None:
    data = torch.randn(8, 5), torch.randint(3, (8,))
    lazy = Task(nn.LazyLinear(3), nn.functional.cross_entropy, data, [range(4), range(4, 8)])
    assert lazy.problems() == []
    assert lazy.flat_model(torch.float32).dimension == 18
