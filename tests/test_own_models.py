"""Models as people write them: all of them trains, and as in a plain loop; or a sentence says why it cannot."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat import Experiment, Task, run

X, Y = torch.randn(40, 5, generator=torch.manual_seed(0)), torch.arange(40) // 4 % 4
SHARDS = [range(i, 40, 4) for i in range(4)]


class Own(nn.Module):
    """Two layers, and what a function makes of them."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.a, self.b = forward, nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


def plain(m: Own, x: Tensor) -> Tensor:
    return m.b(m.a(x))


def task(model: nn.Module, loss: Any = functional.cross_entropy) -> Task:
    return Task(model, loss, (X, Y), SHARDS)


def trained(model: nn.Module, mode: Any = "wave", method: Any = "local-sgd", **more: Any) -> dict[str, Tensor]:
    spec = {"name": method, "local_steps": 3} | ({"n": 4} if method == "local-sgd" else {})
    spec |= {"buffer_size": 2} if method == "fedbuff" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that jobs run one after another is said
        return run(
            Experiment(method=spec, task=task(model), until={"commits": 4}, device="cpu", mode=mode, **more)
        ).model


def listed() -> nn.Module:
    model = Own(lambda m, x: functional.linear(m.a(x), m.matrices[0], m.b.bias))
    model.matrices = [model.b.weight]
    return model


def behind_a_lambda() -> nn.Module:
    model = Own(lambda m, x: m.b(m.block(x)))
    model.block = lambda x: model.a(x)
    return model


class Centres(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.eye(4))

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        return functional.cross_entropy(z @ self.centres, t)


def test_parameters_that_training_would_not_see_are_refused() -> None:
    model = Own(plain)
    for given, name in (
        (
            task(model, lambda z, t: functional.cross_entropy(z, t) + model.b.weight.square().sum()),
            "model's 'b.weight'",
        ),
        (task(listed()), "model's 'b.weight'"),
        (task(behind_a_lambda()), "model's 'a.weight'"),
        (task(Own(plain), Centres()), "loss's 'centres'"),
    ):
        assert f"depends on the {name} by a way that training does not see" in "; ".join(given.problems())
    teacher = Own(plain)  # another model stays as it is, and may
    assert task(Own(plain), lambda z, t: functional.mse_loss(z, teacher(torch.ones(len(z), 5)))).problems() == []


def test_a_loss_that_asks_the_model_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.aux = m.a(x).square().mean()
        return plain(m, x)

    model = Own(forward)
    model.aux = 0.0
    (problem,) = task(model, lambda z, t: functional.cross_entropy(z, t) + model.aux).problems()
    assert "the loss reads 'aux' of the model, which forward sets" in problem
    assert task(model).problems() == []
    model.classes = 4
    assert task(model, lambda z, t: functional.cross_entropy(z[:, : model.classes], t)).problems() == []


def late(m: Any, x: Tensor) -> Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return plain(m, x) * (1.0 if m.calls < 20 else 0.1)


def smoothed(m: Any, x: Tensor) -> Tensor:
    m.mean = 0.9 * getattr(m, "mean", 0.0) + 0.1 * x.mean()
    return plain(m, x) * (1 + m.mean)


@pytest.mark.parametrize(("forward", "name"), [(late, "calls"), (smoothed, "mean")])
def test_models_that_live_on_earlier_calls_are_refused(forward: Any, name: str) -> None:
    (problem,) = task(Own(forward)).problems()
    assert f"the model keeps '{name}' from call to call, and its loss depends on that" in problem


def cached(m: Any, x: Tensor) -> Tensor:
    if getattr(m, "mask", None) is None or m.mask.shape != x.shape:
        m.mask = torch.ones_like(x)
    m.seen = [*getattr(m, "seen", []), 1]
    return plain(m, x * m.mask)


@pytest.mark.parametrize("method", ["local-sgd", "fedbuff"])
def test_what_a_call_leaves_in_the_model_is_gone_at_the_next(method: str) -> None:
    model = Own(cached)
    wave, twin = trained(model, method=method, precision="float64"), trained(model, "twin", method, precision="float64")
    for name, value in trained(Own(plain), "twin", method, precision="float64").items():
        assert torch.allclose(wave[name], value, rtol=1e-10, atol=1e-12)
        assert torch.equal(twin[name], value)
    assert not hasattr(model, "mask")


def clipped(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if h.requires_grad:
        h.register_hook(lambda g: g.clamp(-0.005, 0.005))
    return m.b(h)


def doubled() -> nn.Module:
    model = Own(plain)
    model.b.register_full_backward_hook(lambda module, inner, outer: (2 * inner[0],))
    return model


@pytest.mark.parametrize(("make", "where"), [(lambda: Own(clipped), "its forward"), (doubled, "Linear ('b')")])
def test_hooks_on_gradients_are_called(make: Callable[[], nn.Module], where: str) -> None:
    spec = Experiment(method={"name": "local-sgd", "n": 4}, task=task(make()), until={"commits": 2}, device="cpu")
    with pytest.warns(UserWarning, match="one after another") as said:
        found = run(spec)
    assert f"{where} has a hook on a gradient" in str(said[0].message)
    for name, value in trained(make(), "twin").items():
        assert torch.equal(trained(make())[name], value)
    assert found.commits == 2


def test_complex_buffers_stay_complex() -> None:
    def rotated(m: Any, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(m.a(x).unflatten(-1, (3, 2))) * m.turns.to(torch.complex64)
        return m.b(torch.view_as_real(turned).flatten(1))

    turns = torch.polar(torch.ones(3), torch.tensor([0.3, 1.0, 2.0]))
    as_buffer, as_attribute = Own(rotated), Own(rotated)
    as_buffer.register_buffer("turns", turns)
    as_attribute.turns = turns
    one, other = trained(as_buffer), trained(as_attribute)
    assert all(torch.equal(one[name], other[name]) for name in other if name != "turns")


class FirstBatch(nn.Module):
    """Sets its shift from the first batch it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.done = nn.Parameter(torch.zeros(5)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.shift.data.copy_(-x.mean(0))
            self.done = True
        return x + self.shift


def test_the_callers_model_is_not_called() -> None:
    model = nn.Sequential(FirstBatch(), nn.Linear(5, 4))
    (problem,) = task(model).problems()
    assert "the model changes '0.shift' while it trains" in problem
    assert bool((model[0].shift == 0).all())


@pytest.mark.parametrize("mode", ["wave", "twin"])
def test_openings_of_models_that_cannot_be_batched(mode: str) -> None:
    model = Own(lambda m, x: plain(m, x) * (1 if x.sum() > 0 else -1))
    found = trained(model, mode, "fedagrac", precision="float64")
    assert not torch.equal(found["a.weight"], model.a.weight.double())


def test_threads_that_try_models_do_not_disturb_each_other() -> None:
    """Clients of a live run may be threads of one process: while one tries its model, another computes jobs."""
    stop, mine, others = threading.Event(), Own(plain), task(Own(plain))

    def keep_trying() -> None:
        while not stop.is_set():
            assert others.problems() == []

    other = threading.Thread(target=keep_trying)
    other.start()
    try:
        for _ in range(5):
            trained(mine)
    finally:
        stop.set()
        other.join()
