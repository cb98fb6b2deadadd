"""What replaces PyTorch's functions inside a wave gives each client what the function itself would have given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat import Experiment, Task, keys, run
from offbeat.engines.engine import Engine
from offbeat.engines.tiles import LADDER, TiledAdvance, replayed, unoptimised
from offbeat.errors import ConfigError
from offbeat.experiments.assemble import build_method
from offbeat.method import Local, Method, Rule
from offbeat.numerics.draws import Keyed
from offbeat.numerics.fast import convolution
from offbeat.numerics.local import descend
from offbeat.numerics.vector import FlatModel
from offbeat.records import Begun
from offbeat.tasks.models import CropFlip


class Tied(nn.Module):
    """One layer used twice, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.twice(self.frozen(torch.tanh(self.twice(x)))))


class OneRow(nn.Module):
    """Maps samples one at a time, with a weight that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row) * self.scale for row in x])


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4))


MODULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), (6,)),
    "tied": (Tied, (6,)),
    "rows": (OneRow, (6,)),
    "sequence": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Flatten(), nn.Linear(10, 4)), (2, 3)),
    "convolution": (lambda: images(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2)), (2, 8, 7)),
    "strides": (lambda: images(nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 2)), nn.Conv2d(3, 2, 2, bias=False)), (2, 8, 7)),
    "groups": (lambda: images(nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 3, 2, dilation=2)), (2, 8, 7)),
    "same": (lambda: images(nn.Conv2d(2, 3, 3, padding="same"), nn.MaxPool2d(3, 2, 1)), (2, 8, 7)),
    "group norm": (lambda: images(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), (2, 8, 7)),
}


def cross_entropy_with_holes(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores, torch.where(target == 3, -100, target))


LOSSES = {
    "plain": functional.cross_entropy,
    "holes": cross_entropy_with_holes,
    "smooth": lambda z, y: functional.cross_entropy(z, y, label_smoothing=0.1),
    "weighted": lambda z, y: functional.cross_entropy(z, y, weight=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=z.dtype)),
}


def compare(model: FlatModel, shape: tuple[int, ...], tolerance: float, key: Tensor | None = None) -> None:
    """Gradients of three clients at once against each client's own."""
    torch.manual_seed(1)
    flat = model.initial() + 0.1 * torch.randn(3, model.dimension, dtype=model.dtype)
    x, y = (
        torch.randn(3, 5, *shape, dtype=model.dtype),
        torch.tensor([[0, 1, 2, 3, 1], [3, 3, 0, 1, 2], [2, 2, 1, 0, 3]]),
    )
    losses, gradient = model.gradient(flat, x, y, key)
    for i in range(3):
        own = flat[i].clone().requires_grad_()
        loss = model.one(own, x[i], y[i], None if key is None else key[i])
        (slope,) = torch.autograd.grad(loss, own)
        assert torch.allclose(losses[i], loss, rtol=0, atol=tolerance)
        assert torch.allclose(gradient[i], slope, rtol=0, atol=tolerance)


def built(make: Any, shape: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = make()
    module(torch.zeros(2, *shape))
    return module


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_many_clients_are_each_clients_own(name: str) -> None:
    make, shape = MODULES[name]
    compare(FlatModel(built(make, shape), functional.cross_entropy, torch.float64), shape, 1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropies_are_each_clients_own(name: str) -> None:
    compare(FlatModel(built(*MODULES["linear"]), LOSSES[name], torch.float64), (6,), 1e-12)


def test_rows_may_be_longer_than_the_model() -> None:
    model = FlatModel(built(*MODULES["linear"]), functional.cross_entropy, torch.float64)
    flat = model.initial().repeat(2, 1)
    x, y = torch.randn(2, 5, 6, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.int64)
    _, short = model.gradient(flat, x, y)
    _, long = model.gradient(functional.pad(flat, (0, 7), value=5.0), x, y)
    assert torch.equal(long, functional.pad(short, (0, 7)))


# ---- convolutions -------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["product", "each"])
@pytest.mark.parametrize(("step", "padding"), [((1, 1), (0, 0)), ((2, 1), (1, 2))])
def test_all_methods_compute_the_same_convolution(method: str, step: Any, padding: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, 7, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 5, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    want = torch.stack([functional.conv2d(x[i], w[i], bias[i], step, padding) for i in range(3)])
    found = getattr(convolution, method)(x, w, bias, step, padding)
    assert torch.allclose(found, want, atol=1e-12)
    g = torch.randn_like(want)
    for ours, theirs in zip(*(torch.autograd.grad(out, (x, w, bias), g) for out in (found, want)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_the_method_follows_from_the_shape_alone() -> None:
    def rule(*sides: int, clients: int = 2, step: int = 1, padding: int = 0) -> str:
        channels, side, filters, kernel = sides
        x, w = torch.randn(clients, 10, channels, side, side), torch.randn(clients, filters, channels, kernel, kernel)
        return convolution.rule(x, w, (step, step), (padding, padding))

    assert rule(1, 28, 32, 5) == rule(1, 28, 32, 5, clients=7) == rule(64, 8, 64, 3, padding=1) == "each"
    assert rule(64, 16, 64, 1) == rule(16, 32, 32, 1, step=2) == "product"  # a kernel of one pixel is a product
    assert rule(1, 8, 8, 3) == "product"  # too little work to call the library for each client


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("method", ["product", "each"])
def test_every_method_puts_gradients_where_they_belong(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "rule", lambda *_: method)
    module = built(lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.Flatten(),
                                         nn.LazyLinear(4)), (2, 5, 5))  # fmt: skip
    compare(FlatModel(module, functional.cross_entropy, torch.float64), (2, 5, 5), 1e-12)


# ---- crops and mirror images --------------------------------------------------------------------
def test_crops_and_mirror_images_are_keyed_and_of_the_image() -> None:
    model = FlatModel(nn.Sequential(CropFlip(), nn.Conv2d(1, 1, 1)), lambda out, y: out.square().mean(), torch.float64)
    x = torch.arange(1.0, 65.0, dtype=torch.float64).reshape(1, 1, 8, 8)
    seen = set()
    for number in range(400):
        with Keyed(torch.tensor(keys.key(0, "crop", number))):
            made = model.module[0](x)[0, 0]
        seen.add(tuple(made.flatten().tolist()))
        rows = [row for row in made if row.any()]
        steps = {float(d) for row in rows for d in row[row > 0].diff()}
        assert steps <= {1.0} or steps <= {-1.0}  # neighbours stay neighbours, perhaps mirrored
    assert 120 < len(seen) <= 162  # of 9 x 9 places, each also mirrored
    model.module.eval()
    assert torch.equal(model.module[0](x), x)
    model.module.train()
    y = torch.zeros(3, 2)
    images, key = (
        torch.randn(3, 2, 1, 8, 8, dtype=torch.float64),
        torch.tensor([keys.key(0, "crop", n) for n in range(3)]),
    )
    flat = model.initial().repeat(3, 1)
    losses, _ = model.gradient(flat, images, y, key)
    for client in range(3):
        alone = model.one(flat[client], images[client], y[client], key[client])
        assert torch.allclose(alone, losses[client], atol=1e-14)


# ---- dropout ------------------------------------------------------------------------------------
def dropping(p: float = 0.5) -> Task:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 40), nn.Dropout(p), nn.ReLU(), nn.Dropout(p), nn.Linear(40, 4))
    x, y = torch.randn(40, 6, dtype=torch.float64), torch.randint(4, (40,))
    return Task(module, functional.cross_entropy, (x, y), [range(10 * i, 10 * i + 10) for i in range(4)], batch_size=5)


def engine(task: Task, mode: Any = "wave", precision: Any = "float64", steps: int = 3) -> Engine:
    method = build_method({"name": "local-sgd", "local_steps": steps, "client_lr": 0.1})
    return Engine(method, task, 0, torch.device("cpu"), precision, mode)


def test_masks_follow_from_the_job_alone() -> None:
    jobs = [Begun(client, 2, 0, 3) for client in range(4)]
    together = engine(dropping()).solve(jobs).updates["delta"]
    alone = torch.cat([engine(dropping()).solve([job]).updates["delta"] for job in jobs[::-1]]).flip(0)
    twin = engine(dropping(), "reference").solve(jobs).updates["delta"]
    assert torch.allclose(together, alone, atol=1e-14)
    assert torch.allclose(together, twin, atol=1e-14)
    other = engine(dropping()).solve([Begun(client, 3, 0, 3) for client in range(4)]).updates["delta"]
    assert not torch.allclose(together, other, atol=1e-3)


def test_gradients_pass_where_nothing_was_dropped() -> None:
    model = FlatModel(dropping().model, functional.cross_entropy, torch.float64)
    compare(model, (6,), 1e-13, keys.key(3, "noise", torch.arange(3)))


def test_places_are_dropped_as_often_as_asked_and_differ_by_layer_and_step() -> None:
    from offbeat.numerics.draws import keep

    key = keys.fold(keys.key(0, "noise", torch.arange(2))[:, None], torch.arange(2)).flatten()
    kept = keep(torch.ones(4, 50_000), key, 0.3)
    assert (kept == 0).double().mean(1).sub(0.3).abs().max() < 0.01
    assert torch.allclose(kept[kept > 0], torch.tensor(1 / 0.7))
    assert len({tuple(row[:64].tolist()) for row in kept}) == 4


def test_nothing_is_dropped_when_the_model_is_evaluated() -> None:
    ours = engine(dropping(0.9))
    assert ours.evaluate() == ours.evaluate()
    model = ours.solver.problem.model
    x = torch.ones(3, 6, dtype=torch.float64)
    assert torch.equal(model.outputs(model.initial(), x), model.outputs(model.initial(), x))


def test_a_model_that_draws_needs_a_key() -> None:
    model = FlatModel(dropping().model, functional.cross_entropy, torch.float64)
    with pytest.raises(ConfigError, match="draws at random, but no key"):
        model.one(model.initial(), torch.ones(2, 6, dtype=torch.float64), torch.tensor([0, 1]))


# ---- dropout of channels ------------------------------------------------------------------------
def channels(p: float = 0.5) -> Task:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Dropout2d(p), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(p), nn.Linear(54, 4)
    )
    x, y = torch.randn(40, 2, 8, 8, dtype=torch.float64), torch.randint(4, (40,))
    return Task(module, functional.cross_entropy, (x, y), [range(10 * i, 10 * i + 10) for i in range(4)], batch_size=5)


def masked(key: Tensor, p: float, shape: tuple[int, ...] = (300, 50, 2, 3), **options: Any) -> Tensor:
    with Keyed(key):
        return functional.dropout2d(torch.ones(shape), p, **options)


def test_whole_channels_are_dropped_as_often_as_asked() -> None:
    key = keys.key(0, "noise", torch.tensor(1))
    kept = masked(key, 0.3)
    assert torch.equal(kept, kept[:, :, :1, :1].expand(kept.shape))
    assert (kept[:, :, 0, 0] == 0).double().mean().sub(0.3).abs() < 0.02
    assert torch.allclose(kept[kept > 0], torch.tensor(1 / 0.7))
    assert torch.equal(kept, masked(key, 0.3))
    assert not torch.equal(kept, masked(keys.fold(key, 1), 0.3))
    assert not torch.equal(kept[0], kept[1])  # samples differ


def test_two_dropouts_of_channels_in_one_model_differ() -> None:
    with Keyed(keys.key(0, "noise", torch.tensor(1))):
        one, two = (functional.dropout2d(torch.ones(20, 10, 2, 2)) for _ in range(2))
    assert not torch.equal(one, two)


def test_channels_stay_when_p_is_zero_or_the_model_is_evaluated() -> None:
    key = keys.key(0, "noise", torch.tensor(1))
    assert masked(key, 0.0).eq(1).all()
    assert masked(key, 0.9, training=False).eq(1).all()
    ours = engine(channels(0.9))
    assert ours.evaluate() == ours.evaluate()
    with pytest.raises(ConfigError, match="draws at random, but no key"), Keyed(None):
        functional.dropout2d(torch.ones(1, 2, 2, 2))


def test_dropped_channels_follow_from_the_job_alone() -> None:
    jobs = [Begun(client, 2, 0, 3) for client in range(4)]
    together = engine(channels()).solve(jobs).updates["delta"]
    alone = torch.cat([engine(channels()).solve([job]).updates["delta"] for job in jobs[::-1]]).flip(0)
    twin = engine(channels(), "reference").solve(jobs).updates["delta"]
    assert torch.allclose(together, alone, atol=1e-14)
    assert torch.allclose(together, twin, atol=1e-14)
    other = engine(channels()).solve([Begun(client, 3, 0, 3) for client in range(4)]).updates["delta"]
    assert not torch.allclose(together, other, atol=1e-3)


def test_every_step_of_a_job_drops_other_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[float]] = []
    plain = Keyed.dropout2d

    def noted(mode: Keyed, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        factors = plain(mode, torch.ones_like(x), *args, **kwargs)
        seen.append(factors[:, :, 0, 0].flatten().tolist())
        return x * factors

    ours = engine(channels(), "reference")
    ours.solve([Begun(0, 0, 0, 3)])  # the first time, the reference loop looks at what the model keeps
    monkeypatch.setattr(Keyed, "dropout2d", noted)
    for _ in range(2):
        ours.solve([Begun(0, 0, 0, 3)])
    one, two, three = seen[:3]
    assert one != two != three != one
    assert seen[3:] == [one, two, three]


@pytest.mark.parametrize("p", [0.5, 0.3])
def test_gradients_pass_in_channels_that_were_kept(p: float) -> None:
    model = FlatModel(channels(p).model, functional.cross_entropy, torch.float64)
    compare(model, (2, 8, 8), 1e-13, keys.key(3, "noise", torch.arange(3)))


@pytest.mark.cuda
def test_a_gpu_drops_the_same_channels() -> None:
    jobs = [Begun(client, 2, 0, 3) for client in range(4)]
    want = engine(channels()).solve(jobs).updates["delta"]
    method = build_method({"name": "local-sgd", "local_steps": 3, "client_lr": 0.1})
    for mode in ("wave", "reference"):
        found = Engine(method, channels(), 0, torch.device("cuda"), "float64", mode).solve(jobs).updates["delta"]
        assert torch.allclose(found.cpu(), want, atol=1e-6)


# ---- tiles and traces ---------------------------------------------------------------------------
@pytest.mark.parametrize("make", [dropping, channels])
def test_traced_steps_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Task]) -> None:
    """Plain steps, then the same size traced, in tiles on threads; with momentum, dropout and early leavers."""
    method = build_method({"name": "local-sgd", "local_steps": 3, "client_options": {"momentum": 0.5}})
    jobs = [Begun(client, 1, 0, (4, 2, 4, 1)[client]) for client in range(4)]
    outcomes: dict[int, list[Any]] = {}
    for worth in (10**9, 1):
        monkeypatch.setattr("offbeat.engines.tiles.WORTH", worth)
        monkeypatch.setattr("offbeat.engines.tiles.ALONE", 1)
        ours = Engine(method, make(), 0, torch.device("cpu"), threads=2)
        before = torch.get_num_threads()
        outcomes[worth] = [ours.solve(jobs) for _ in range(12)]  # the later ones are cut into equal tiles
        assert torch.get_num_threads() == before
        assert {clients for clients, _ in ours.solver.advance.steps} == ({1, 2} if worth == 1 else set())
    for plain, traced in zip(*outcomes.values(), strict=True):
        assert torch.equal(traced.updates["delta"], plain.updates["delta"])
        assert torch.equal(traced.losses, plain.losses)
        assert torch.equal(traced.bad, plain.bad)


@pytest.mark.parametrize(("width", "inside"), [(6, 1), (1500, 2)], ids=["light", "heavy"])
def test_light_models_and_small_evaluations_take_one_thread(width: int, inside: int) -> None:
    """Threads of an operation wait for each other, and on a busy machine for a slice of the scheduler."""
    noted: list[int] = []

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            noted.append(torch.get_num_threads())
            return super().forward(x)

    x, y = torch.randn(400, width), torch.randint(100, (400,))
    shards = [range(10 * i, 10 * i + 10) for i in range(4)]
    task = Task(Noting(width, 100), functional.cross_entropy, (x, y), shards, test=(x, y))
    method = build_method({"name": "local-sgd", "local_steps": 3})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ours = Engine(method, task, 0, torch.device("cpu"), threads=2)
        noted.clear()
        ours.solve([Begun(0, 1, 0, 3)])
        assert set(noted) == {inside}
        noted.clear()
        ours.evaluate()
        assert set(noted) == {inside}
    finally:
        torch.set_num_threads(before)


def test_tiles_of_a_large_model_take_turns_with_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            noted.append(torch.get_num_threads())
            return super().forward(x)

    x, y = torch.randn(40, 1500), torch.randint(100, (40,))
    task = Task(Noting(1500, 100), functional.cross_entropy, (x, y), [range(10 * i, 10 * i + 10) for i in range(4)])
    jobs, before, updates = [Begun(client, 1, 0, 3) for client in range(4)], torch.get_num_threads(), []
    monkeypatch.setattr("offbeat.engines.tiles.ALONE", 1)
    torch.set_num_threads(2)
    try:
        for large, inside in ((1 << 60, 1), (1, 2)):
            monkeypatch.setattr("offbeat.engines.tiles.LARGE", large)
            ours = Engine(build_method("local-sgd"), task, 0, torch.device("cpu"), threads=2)
            noted.clear()
            updates.append(ours.solve(jobs).updates["delta"])
            assert set(noted) == {inside}
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(*updates, atol=1e-6)


class Handing(torch.autograd.Function):
    """a b, whose gradients are a and b themselves, crosswise: no new tensors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return b, a


def test_gradients_that_are_parts_of_the_model() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(200, 200)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x.mean() * 0 + Handing.apply(self.a, self.b)

    x = torch.randn(8, 1)
    task = Task(Crossed(), lambda out, _: out, (x, x), [range(4), range(4, 8)])
    made = build_method({"name": "local-sgd", "client_lr": 0.1})
    modes: tuple[Any, ...] = ("wave", "reference")
    ours, twin = (Engine(made, task, 0, torch.device("cpu"), "float64", mode) for mode in modes)
    jobs = [Begun(client, 0, 0, 3) for client in range(2)]
    want = twin.solve(jobs).updates["delta"]
    assert want.norm() > 0
    assert torch.allclose(ours.solve(jobs).updates["delta"], want, rtol=1e-10)


@pytest.mark.parametrize("method", ["local-sgd", "scaffold"])
@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("side", [4, 12], ids=["more weights than images", "more images than weights"])
def test_large_kernels_move_without_a_copy_of_their_gradients(
    monkeypatch: pytest.MonkeyPatch, side: int, clients: int, method: str
) -> None:
    x, y = torch.randn(12, 64, side, side), torch.randint(3, (12,))
    layers = nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * side**2, 3)
    task = Task(nn.Sequential(*layers), functional.cross_entropy, (x, y), [range(4 * i, 4 * i + 4) for i in range(3)])
    made = build_method({"name": method, "n": 3, "client_lr": 0.05})

    def solved(worth: int, precision: Any, mode: Any) -> list[Tensor]:
        monkeypatch.setattr("offbeat.engines.tiles.WORTH", worth)
        ours = Engine(made, task, 0, torch.device("cpu"), precision, mode, threads=2)
        rounds = [[Begun(client, number, 0, 3) for client in range(clients)] for number in range(3)]
        return [ours.solve(jobs).updates["delta"] for jobs in rounds]  # what clients remember moves from job to job

    assert all(map(torch.equal, solved(10**9, "float32", "wave"), solved(1, "float32", "wave")))
    for ours, twin in zip(solved(1, "float64", "wave"), solved(1, "float64", "reference"), strict=True):
        assert torch.allclose(ours, twin, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "lr", [0.05, {"schedule": "local-cosine", "value": 0.05}], ids=["one rate", "a rate for each step"]
)
def test_several_steps_at_once_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, lr: Any) -> None:
    made = build_method({"name": "local-sgd", "client_lr": lr})
    jobs, found = [Begun(client, 1, 0, 9) for client in range(4)], {}
    for worth in (10**9, 1):
        monkeypatch.setattr("offbeat.engines.tiles.WORTH", worth)
        ours = Engine(made, dropping(), 0, torch.device("cpu"))
        found[worth] = [ours.solve(jobs) for _ in range(3)][-1]
    assert [steps.several is not None for steps in ours.solver.advance.steps.values()] == [True]
    assert all(map(torch.equal, found[1].updates.values(), found[10**9].updates.values()))
    assert torch.equal(found[1].losses, found[10**9].losses)


def test_replayed_steps_need_no_python_and_have_the_same_bits() -> None:
    calls = []

    def step(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        calls.append(1)
        return weight.addmm_(x.T, x, alpha=-0.1), x.square().sum(1)

    given = [torch.randn(3, 3), torch.randn(5, 3)]
    want, program = step(*(t.clone() for t in given)), replayed(step, given)
    before = len(calls)
    with unoptimised():
        assert all(map(torch.equal, program(*(t.clone() for t in given)), want))
    assert len(calls) == before


def test_a_step_that_cannot_be_replayed_stays_as_it_is() -> None:
    def other_each_time(x: Tensor) -> tuple[Tensor, ...]:
        return (x + torch.rand(3),)

    def gives_no_tensors(x: Tensor) -> Any:
        return (object(),)

    for step in (other_each_time, gives_no_tensors):
        assert replayed(step, [torch.zeros(3)]) is step


class Behind(NamedTuple):
    y: Tensor
    previous: Tensor


def test_a_carry_may_keep_the_old_iterate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced step moves the iterate in its place only where nobody holds on to where it was."""
    monkeypatch.setattr("offbeat.engines.tiles.WORTH", 1)
    local = Local(
        begin=lambda server, job: Behind(server["model"], server["model"]),
        step=lambda carry, g, job: Behind(descend(carry.y, job.lr, g), carry.y),
        finish=lambda server, carry, job: {"delta": carry.previous - carry.y},
        rates={"lr": lambda version: 0.1},
    )
    rule = Rule(local, init=lambda model: {"model": model}, commit=lambda state, updates, cohort: state)
    made = Method("behind", build_method("local-sgd").when, rule)
    ours, twin = (Engine(made, dropping(), 0, torch.device("cpu"), "float64", mode) for mode in ("wave", "reference"))
    jobs = [Begun(client, 0, 0, 3) for client in range(4)]
    want = twin.solve(jobs).updates["delta"]
    assert want.norm() > 0
    for _ in range(4):
        assert torch.allclose(ours.solve(jobs).updates["delta"], want, atol=1e-12)
    assert ours.solver.advance.steps


def test_tiles_come_in_few_sizes() -> None:
    advance = TiledAdvance(engine(dropping()).solver.problem, 2, 2)
    advance.most, advance.least = 10, 1
    for clients in range(1, 60):
        sizes = advance.tiles(clients, 5)
        assert sum(sizes) == clients
        assert max(sizes) <= 10
        assert set(sizes) <= set(LADDER)
        advance.seen[clients, 5] = 100
        even = advance.tiles(clients, 5)
        assert sum(even) == clients
        assert max(even) - min(even) <= 1
        assert len(even) >= min(2, clients)


def test_a_wrong_step_is_found_in_a_traced_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.engines.tiles.WORTH", 1)
    task = dropping(0.0)
    task.data[0][12] = float("nan")  # of client 1
    ours = engine(task)
    jobs = [Begun(client, 0, 0, 3) for client in range(4)]
    plain, *_, found = (ours.solve(jobs).bad.tolist() for _ in range(3))  # the first wave is not traced, the last is
    assert plain == found
    assert found[1] >= 0
    assert found[:1] + found[2:] == [-1, -1, -1]


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 1e-3), ("bf16", 1e-1)])
def test_products_of_rounded_numbers_stay_near(precision: Any, tolerance: float) -> None:
    """The tolerances that docs/performance.md states, relative to the norm of the update."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4))
    data = torch.randn(40, 1, 8, 8), torch.randint(4, (40,))
    task = Task(module, functional.cross_entropy, data, [range(10 * i, 10 * i + 10) for i in range(4)], batch_size=5)
    jobs = [Begun(client, 0, 0, 5) for client in range(4)]
    want = engine(task, precision="float64", steps=5).solve(jobs).updates["delta"]
    found = engine(task, precision=precision, steps=5).solve(jobs).updates["delta"].double()
    assert ((found - want).norm(dim=1) / want.norm(dim=1)).max() < tolerance


def test_a_run_with_dropout_repeats() -> None:
    task = dropping()
    made = {"method": {"name": "fedbuff", "buffer_size": 2, "local_steps": 2}, "task": task, "fleet": "uniform"}
    done = run(Experiment(**made, device="cpu", until={"commits": 6}))  # type: ignore[arg-type]
    again = run(Experiment(**made, device="cpu", until={"commits": 6}))  # type: ignore[arg-type]
    assert done.loss_final == again.loss_final


class Life:
    pass


class Watched(torch.autograd.Function):
    """The identity; a life is as long as that of what backward needs."""

    generate_vmap_rule = True
    lives: list[weakref.ref[Life]] = []

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.life = Life()
        Watched.lives.append(weakref.ref(ctx.life))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Through(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        watched: Tensor = Watched.apply(x)
        return watched


@pytest.mark.parametrize("size", [16, 256])  # the step of a large matrix is made of factors
def test_a_step_lets_go_of_its_activations(size: int) -> None:
    Watched.lives.clear()
    module = nn.Sequential(nn.Linear(8, size), Through(), nn.Linear(size, size), nn.Linear(size, 4))
    model = FlatModel(module, functional.cross_entropy, torch.float32)
    batch = torch.randn(3, 5, 8), torch.randint(4, (3, 5))
    model.descend(torch.randn(3, model.dimension), (), torch.full((3,), 0.1), None, *batch, torch.zeros(3).long())
    gc.collect()
    assert len(Watched.lives) == 1
    assert Watched.lives[0]() is None
