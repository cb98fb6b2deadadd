"""Models that once trained to wrong numbers without a message, against a plain PyTorch loop.

Each is equal to the loop, or is refused with a sentence. Nothing here imports `offbeat.numerics`.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat import ConfigError, Experiment, Task, run
from offbeat.errors import OffbeatError

X = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(40) // 4 % 4
SHARDS = [range(i, 40, 4) for i in range(4)]
STEPS, RATE, COMMITS = 3, 0.3, 4
RULES = ("averaged", "local", "batch")
MODES = ("wave", "reference")


class Model(nn.Module):
    """Two layers, parts of its own, and a function that computes with them."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], parts: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.compute, self.a, self.b = forward, nn.Linear(5, 6), nn.Linear(6, 4)
            if parts is not None:
                parts(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def plain(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x)))


# ---- the two sides ------------------------------------------------------------------------------
def looped(make: Callable[[], nn.Module], loss: Any, rule: str | None) -> dict[str, Tensor]:
    """Local SGD of all clients on whole shards, written out: a model per job, `backward()`, the rule for buffers."""
    state = copy.deepcopy(make().double().state_dict())
    initial, buffers = copy.deepcopy(state), {name for name, _ in make().named_buffers()}
    own: list[dict[str, Tensor]] = [initial] * len(SHARDS)
    for _ in range(COMMITS):
        ends = []
        for client, shard in enumerate(SHARDS):
            model = make().double().train()
            start = {"averaged": state, "local": own[client]}.get(str(rule), initial)
            model.load_state_dict({name: start[name] if name in buffers else state[name] for name in state})
            optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
            for _ in range(STEPS):
                optimiser.zero_grad()
                loss(model(X[shard]), Y[shard]).backward()
                optimiser.step()
            ends.append(copy.deepcopy(model.state_dict()))
        own = ends
        for name in state:
            each = torch.stack([end[name] for end in ends])
            mean = each.mean(0) if each.is_floating_point() else each.amax(0)
            state[name] = mean if rule == "averaged" or name not in buffers else initial[name]
    return state


def trained(make: Callable[[], nn.Module], loss: Any, rule: Any, mode: Any, precision: Any = "float64") -> Any:
    task = Task(make(), loss, (X, Y), SHARDS, batch_size=None, batch_norm=rule)
    method = {"name": "local-sgd", "n": None, "local_steps": STEPS, "client_lr": RATE}
    until = {"commits": COMMITS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return run(
            Experiment(
                method=method, task=task, fleet="equal", until=until, device="cpu", precision=precision, mode=mode
            )
        )


def check(
    make: Callable[[], nn.Module], mode: str, loss: Any = functional.cross_entropy, rule: str | None = None,
    rung: str = "captured",
) -> Any:  # fmt: skip
    """Whether a run ends where the plain loop does, parameter for parameter, relative to how far each moved."""
    want, outcome, start = looped(make, loss, rule), trained(make, loss, rule, mode), make().double().state_dict()
    assert outcome.result["rung"] == (rung if mode == "wave" else mode)
    for name, value in want.items():
        moved = float((value.double() - start[name].double()).norm())
        gap = float((outcome.model[name].double() - value.double()).norm())
        assert gap <= 1e-10 * moved + 1e-14, f"{name}: {gap:.2g} of {moved:.2g}"
    return outcome


# ---- 1: what is kept for later ------------------------------------------------------------------
def latent(m: Any) -> None:
    m.latent, m.first, m.second = nn.Parameter(0.1 * torch.randn(8, 64)), nn.Linear(64, 64), nn.Linear(64, 6)


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "itself": lambda m, x: m.first(m.latent),
    "a view": lambda m, x: m.first(m.latent[2:5]),
    "expanded": lambda m, x: m.first(m.latent[0].expand(len(x), 64)),
    "transposed": lambda m, x: functional.linear(m.first.weight.T, m.first.weight),
    "a slope": lambda m, x: m.first(m.latent) * m.latent,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("use", USES)
def test_layers_whose_input_is_a_parameter(use: str, mode: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x)) + m.second(torch.tanh(USES[use](m, x))).mean(0))

    check(lambda: Model(forward, latent), mode)


# ---- 2, 3: what a wave does not show to the module --------------------------------------------------
def penalty(m: Any, x: Tensor) -> Tensor:
    own = sum(p.square().sum() for p in m.parameters() if p.requires_grad)
    return plain(m, x) + own * torch.tensor([0.0, 1e-4, 0.0, 0.0])


def asks_output(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(2 * h if h.requires_grad else h)


def asks_history(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda gradients: tuple(3 * g for g in gradients))
    return m.b(h)


def asks_class(m: Any, x: Tensor) -> Tensor:
    return plain(m, x) * (2 if isinstance(m.a.weight, nn.Parameter) else 1)


def five_times(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(5)


def hook_after(m: Any) -> None:
    m.a.weight.register_post_accumulate_grad_hook(five_times)


def hook_before(m: Any) -> None:
    m.a.weight.register_hook(lambda gradient: 5 * gradient)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("forward", "parts", "reason"),
    [
        (penalty, None, "in a wave"),
        (asks_output, None, "in a wave the loss differs"),
        (asks_history, None, "its forward has a hook on a gradient"),
        (asks_class, None, "in a wave the loss differs"),
        (plain, hook_after, "parameter 'a.weight' has a hook on its gradient"),
        (plain, hook_before, "parameter 'a.weight' has a hook on its gradient"),
    ],
)
def test_models_that_ask_whether_they_are_trained_run_by_the_reference_loop(
    forward: Any, parts: Any, reason: str, mode: str
) -> None:
    result = check(lambda: Model(forward, parts), mode, rung="reference").result
    if mode == "wave":
        assert reason in result["notes"][0]


def test_a_loss_that_asks_for_gradients_runs_by_the_reference_loop() -> None:
    def loss(z: Tensor, t: Tensor) -> Tensor:
        return functional.cross_entropy(z * (2 if z.requires_grad else 1), t)

    check(lambda: Model(plain), "wave", loss, rung="reference")


# ---- 4: normalisations --------------------------------------------------------------------------
class OwnNorm(nn.BatchNorm1d):
    """A normalisation with a forward of its own, whose output depends on its running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training:
            with torch.no_grad():
                self.running_mean += 0.2 * (x.mean(0) - self.running_mean)
                self.running_var += 0.2 * (x.var(0) - self.running_var)
                self.num_batches_tracked += 2
            mean, var = x.mean(0), x.var(0)
        return (x - mean) / (var + 0.1).sqrt() * self.weight + self.bias + 0.1 * self.running_mean


def normalised(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.norm(m.a(x))))


def without_gradient(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        target = m.norm(2 * h)
    return m.b(torch.tanh(m.norm(h) + target))


def detached(m: Any, x: Tensor) -> Tensor:
    return plain(m, x) + 0 * m.norm(m.a(x)).detach().sum()


def at_rest(m: Any, x: Tensor) -> Tensor:
    m.norm.eval()
    return normalised(m, x)


def part(make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda m: setattr(m, "norm", make())


NORMS: dict[str, tuple[Any, Callable[[], nn.Module]]] = {
    "plain": (normalised, lambda: nn.BatchNorm1d(6)),
    "own forward": (normalised, lambda: OwnNorm(6)),
    "momentum 0": (normalised, lambda: nn.BatchNorm1d(6, momentum=0.0)),
    "momentum none": (normalised, lambda: nn.BatchNorm1d(6, momentum=None)),
    "under no_grad": (without_gradient, lambda: nn.BatchNorm1d(6)),
    "detached": (detached, lambda: nn.BatchNorm1d(6)),
    "eval in forward": (at_rest, lambda: nn.BatchNorm1d(6)),
    "of instances": (
        lambda m, x: m.b(torch.tanh(m.norm(m.a(x).reshape(-1, 2, 3)).flatten(1))),
        lambda: nn.InstanceNorm1d(2, track_running_stats=True, affine=True),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NORMS)
def test_normalisations(name: str, rule: str, mode: str) -> None:
    forward, make = NORMS[name]
    rung = "reference" if name == "momentum none" else "captured"  # it makes a number of a tensor
    check(lambda: Model(forward, part(make)), mode, rule=rule, rung=rung)


# ---- 5: buffers that change ---------------------------------------------------------------------
def reassigned(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return m.b(torch.tanh(h - m.mean))


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
    return m.b(torch.tanh(h - m.mean))


def counted(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return plain(m, x) / (1 + 0.1 * m.count)


def flagged(m: Any, x: Tensor) -> Tensor:
    m.flag |= True
    return plain(m, x) * torch.where(m.flag, 2.0, 1.0)


def of_rare_samples(m: Any, x: Tensor) -> Tensor:
    """Only one client has such a batch."""
    m.mean = torch.where(x[0, 0] == X[2, 0], m.mean + 1.0, m.mean)
    return m.b(torch.tanh(m.a(x) - m.mean))


def of_rare_samples_in_python(m: Any, x: Tensor) -> Tensor:
    if x[0, 0] == X[2, 0]:
        m.mean = m.mean + 1.0
    return m.b(torch.tanh(m.a(x) - m.mean))


def buffer(name: str, value: Tensor) -> Callable[[Any], None]:
    return lambda m: m.register_buffer(name, value.clone())


MEAN = buffer("mean", torch.zeros(6))
BUFFERS: dict[str, tuple[Any, Any]] = {
    "reassigned": (reassigned, MEAN),
    "in place": (in_place, MEAN),
    "a counter": (counted, buffer("count", torch.zeros((), dtype=torch.int64))),
    "a flag": (flagged, buffer("flag", torch.zeros((), dtype=torch.bool))),
    "rare": (of_rare_samples, MEAN),
    "rare, in Python": (of_rare_samples_in_python, MEAN),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_that_change_follow_the_rule(name: str, rule: str, mode: str) -> None:
    forward, parts = BUFFERS[name]
    check(lambda: Model(forward, parts), mode, rule=rule, rung="reference" if "Python" in name else "captured")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BUFFERS)
def test_without_a_rule_they_are_refused(name: str, mode: str) -> None:
    forward, parts = BUFFERS[name]
    with pytest.raises((ConfigError, OffbeatError), match=r"the model changes '(mean|count|flag)' while it trains"):
        trained(lambda: Model(forward, parts), functional.cross_entropy, None, mode)


def flagged_once(m: Any, x: Tensor) -> Tensor:
    z = plain(m, x) * torch.where(m.flag, 2.0, 1.0)
    m.flag = torch.ones_like(m.flag)
    return z


@pytest.mark.parametrize("mode", MODES)
def test_a_flag_that_is_read_before_it_is_set_is_state(mode: str) -> None:
    flag = buffer("flag", torch.zeros((), dtype=torch.bool))
    check(lambda: Model(flagged_once, flag), mode, rule="averaged")
    with pytest.raises(ConfigError, match="the model changes 'flag' while it trains"):
        trained(lambda: Model(flagged_once, flag), LOSS, None, mode)


def test_a_buffer_that_a_later_client_changes_is_noticed() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if x[0, 0] == X[2, 0]:
            m.mean = m.mean + 1.0
        return m.b(torch.tanh(m.a(x) - m.mean))

    with pytest.raises(OffbeatError, match=r"though not in its first step.*by batch_norm = 'batch', 'local' or 'aver"):
        trained(lambda: Model(forward, MEAN), LOSS, None, "wave")
    check(lambda: Model(forward, MEAN), "wave", rule="local", rung="reference")


def cached(m: Any, x: Tensor) -> Tensor:
    m.mask = torch.ones(6, dtype=x.dtype)
    return m.b(torch.tanh(m.a(x) * m.mask))


@pytest.mark.parametrize("rule", [None, "averaged"])
def test_a_buffer_that_is_made_anew_at_every_call_needs_no_rule(rule: str | None) -> None:
    check(lambda: Model(cached, buffer("mask", torch.zeros(6))), "wave", rule=rule)


def lazily(m: Any, x: Tensor) -> Tensor:
    if m.table.shape != x.shape:
        m.table = torch.ones_like(x)
    return plain(m, x * m.table)


@pytest.mark.parametrize("rule", [None, *RULES])
def test_a_buffer_that_is_made_of_another_shape_is_a_cache(rule: str | None) -> None:
    def parts(m: Any) -> None:
        m.register_buffer("table", torch.zeros(0))
        m.register_buffer("mask", torch.full((4,), -torch.inf))

    outcome = trained(lambda: Model(lazily, parts), functional.cross_entropy, rule, "wave")
    want = trained(lambda: Model(plain), functional.cross_entropy, None, "wave")
    assert all(torch.equal(outcome.model[name], value) for name, value in want.model.items())


def test_buffers_that_are_one_tensor_stay_one() -> None:
    def parts(m: Any) -> None:
        m.register_buffer("mean", torch.zeros(6))
        m.register_buffer("same", m.mean)

    check(lambda: Model(in_place, parts), "wave", rule="averaged")
    for mode in MODES:
        with pytest.raises((ConfigError, OffbeatError), match="are one tensor, and a call replaced one of them"):
            trained(lambda: Model(reassigned, parts), LOSS, "averaged", mode, "float32")  # `double()` makes two of them


def a_part(m: Any) -> None:
    m.register_buffer("mean", torch.zeros(6))
    m.register_buffer("part", m.mean[:3])


def a_view(m: Any) -> None:
    m.register_buffer("mean", torch.zeros(6))
    m.first = m.mean[:1]


@pytest.mark.parametrize("parts", [a_part, a_view])
def test_tensors_in_the_memory_of_a_buffer_that_changes_are_refused(parts: Any) -> None:
    with pytest.raises(ConfigError, match=r"the model changes buffer '\w+', and '\w+' is in the same memory"):
        trained(lambda: Model(in_place, parts), LOSS, "averaged", "wave")


def test_a_complex_buffer_that_changes() -> None:
    def turned(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        m.turn = m.turn * (1 + 0.1j) + h.detach().mean(0)
        return m.b(torch.tanh(h + m.turn.real + m.turn.imag))

    model = lambda: Model(turned, buffer("turn", torch.zeros(6, dtype=torch.complex64)))  # noqa: E731
    outcomes = [trained(model, LOSS, "averaged", mode).model for mode in MODES]
    for name, value in outcomes[0].items():
        torch.testing.assert_close(value, outcomes[1][name], rtol=1e-10, atol=1e-13)


def test_dropout_rests_in_evaluation_beside_a_buffer_of_the_same_part() -> None:
    def dropping(m: Any, x: Tensor) -> Tensor:
        return functional.dropout(reassigned(m, x), 0.5, m.training)

    losses = [trained(lambda: Model(dropping, MEAN), LOSS, "local", mode).loss_final for mode in MODES]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_a_model_that_writes_to_its_input_runs_in_waves() -> None:
    check(lambda: Model(lambda m, x: plain(m, x.mul_(0.5))), "wave")


# ---- 5: state in Python ---------------------------------------------------------------------------
class Box:
    n = 0


def late(count: Any) -> Any:
    return 1 if count < 7 else 3


def in_list(m: Any, x: Tensor) -> Tensor:
    m.kept[0] += 1
    return plain(m, x) * late(m.kept[0])


def in_nested(m: Any, x: Tensor) -> Tensor:
    m.kept["n"][0] += 1
    return plain(m, x) * late(m.kept["n"][0])


def in_length(m: Any, x: Tensor) -> Tensor:
    m.kept.append(1)
    return plain(m, x) * late(len(m.kept))


def in_tensor(m: Any, x: Tensor) -> Tensor:
    m.kept += 1
    return plain(m, x) * torch.where(m.kept < 7, 1.0, 3.0)


def in_object(m: Any, x: Tensor) -> Tensor:
    m.kept.n += 1
    return plain(m, x) * late(m.kept.n)


KEPT: dict[str, tuple[Any, Callable[[], Any]]] = {
    "list": (in_list, lambda: [0]),
    "nested": (in_nested, lambda: {"n": [0]}),
    "length": (in_length, list),
    "tensor": (in_tensor, lambda: torch.zeros(())),
    "object": (in_object, Box),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KEPT)
def test_state_in_python_is_refused(name: str, mode: str) -> None:
    forward, value = KEPT[name]
    with pytest.raises(
        ConfigError, match=r"the model keeps '(kept|n)' from call to call, and its loss depends on that"
    ):
        trained(lambda: Model(forward, lambda m: setattr(m, "kept", value())), LOSS, None, mode)


FACTOR = {"value": 1.0}


def test_what_a_user_changes_after_the_task_was_made_stays() -> None:
    def loss(z: Tensor, t: Tensor) -> Tensor:
        return functional.cross_entropy(z, t) * FACTOR["value"] * loss.factor  # type: ignore[attr-defined]

    loss.factor = 1.0  # type: ignore[attr-defined]
    task = Task(Model(plain), loss, (X, Y), SHARDS, batch_size=None)
    loss.factor, FACTOR["value"] = 2.0, 3.0  # type: ignore[attr-defined]
    try:
        assert task.problems() == []
        assert (loss.factor, FACTOR["value"]) == (2.0, 3.0)  # type: ignore[attr-defined]
    finally:
        FACTOR["value"] = 1.0


class CountingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        self.n += 1
        return functional.cross_entropy(z, t) * late(self.n)


def closed_over() -> Any:
    state = {"n": 0}

    def loss(z: Tensor, t: Tensor) -> Tensor:
        state["n"] += 1
        return functional.cross_entropy(z, t) * late(state["n"])

    return loss


class Scaled:
    """A loss as a method of an object."""

    n = 0

    def loss(self, z: Tensor, t: Tensor) -> Tensor:
        self.n += 1
        return functional.cross_entropy(z, t) * late(self.n)

    def of_class(self, z: Tensor, t: Tensor) -> Tensor:
        type(self).n += 1
        return functional.cross_entropy(z, t) * late(type(self).n)


def with_state(state: dict[str, int], z: Tensor, t: Tensor) -> Tensor:
    state["n"] += 1
    return functional.cross_entropy(z, t) * late(state["n"])


def by_default(z: Tensor, t: Tensor, state: dict[str, int] = {"n": 0}) -> Tensor:  # noqa: B006
    return with_state(state, z, t)


SHARED = {"n": 0}


def by_global(z: Tensor, t: Tensor) -> Tensor:
    return with_state(SHARED, z, t)


def iterated() -> Any:
    numbers = itertools.count()
    return lambda z, t: functional.cross_entropy(z, t) * late(next(numbers))


LOSSES: dict[str, Callable[[], Any]] = {
    "module": CountingLoss, "closure": closed_over, "method": lambda: Scaled().loss, "class": lambda: Scaled().of_class,
    "partial": lambda: partial(with_state, {"n": 0}), "default": lambda: by_default, "global": lambda: by_global,
    "iterator": iterated,
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_state_in_a_loss_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="of the loss"):
        trained(lambda: Model(plain), LOSSES[name](), None, "wave")


def logged(m: Any, x: Tensor) -> Tensor:
    m.log.append(len(x))
    m.last = x
    return plain(m, x)


@pytest.mark.parametrize("mode", MODES)
def test_state_that_nothing_depends_on_is_left_alone(mode: str) -> None:
    check(lambda: Model(logged, lambda m: setattr(m, "log", [])), mode)


def test_an_attribute_that_one_client_changes_is_noticed() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if x[0, 0] == X[2, 0]:
            m.scale = 3.0
        return plain(m, x) * m.scale

    with pytest.raises(OffbeatError, match=r"client 2, version 0: the model or its loss changed 'scale'"):
        trained(lambda: Model(forward, lambda m: setattr(m, "scale", 1.0)), LOSS, None, "wave")


# ---- state that follows the parameters ------------------------------------------------------------
def anchored(m: Any, x: Tensor) -> Tensor:
    """A pull to where the job began."""
    if not hasattr(m, "origin"):
        m.origin = m.a.weight.detach().clone()
    return plain(m, x) + (m.a.weight - m.origin).square().sum() * torch.arange(4)


def previous(m: Any, x: Tensor) -> Tensor:
    old, m.old = getattr(m, "old", m.a.weight.detach()), m.a.weight.detach().clone()
    return m.b(torch.tanh(functional.linear(x, 0.5 * m.a.weight + 0.5 * old, m.a.bias)))


@pytest.mark.parametrize("forward", [anchored, previous])
def test_attributes_that_remember_parameters_are_refused(forward: Any) -> None:
    for mode in MODES:
        with pytest.raises(ConfigError, match=r"the model keeps '(origin|old)' from call to call"):
            trained(lambda: Model(forward), LOSS, None, mode)


def taught(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.teacher.weight.lerp_(m.a.weight, 0.1)
    return m.b(torch.tanh(m.a(x)) + m.teacher(x))


def a_teacher(m: Any) -> None:
    m.teacher = copy.deepcopy(m.a).requires_grad_(False)


def clipped(m: Any, x: Tensor) -> Tensor:
    m.a.weight.data.clamp_(-0.5, 0.5)
    return plain(m, x)


@pytest.mark.parametrize(("forward", "parts"), [(taught, a_teacher), (clipped, None)])
def test_parameters_that_forward_changes_are_refused(forward: Any, parts: Any) -> None:
    with pytest.raises(ConfigError, match=r"the model changes '(teacher|a)\.weight' while it trains"):
        trained(lambda: Model(forward, parts), LOSS, None, "wave")


def small(p: Tensor) -> None:
    p.data.clamp_(-0.46, 0.46)


def clip_by_hook(m: Any) -> None:
    m.a.weight.register_post_accumulate_grad_hook(small)


def test_parameters_that_a_hook_changes_are_noticed() -> None:
    assert float(Model(plain).a.weight.detach().abs().max()) < 0.46  # nothing is clipped at first
    with pytest.raises(OffbeatError, match=r"the model changes parameter 'a.weight' itself while it trains"):
        trained(lambda: Model(plain, clip_by_hook), LOSS, None, "wave")


def behind_a_gate(m: Any, x: Tensor) -> Tensor:
    z = m.b(torch.tanh(m.a(x)) + m.gate * functional.linear(x, m.old))
    m.old = m.a.weight.detach().clone()
    return z


def a_gate(m: Any) -> None:
    m.gate = nn.Parameter(torch.zeros(()))
    m.register_buffer("old", torch.zeros(6, 5))


def test_a_buffer_behind_a_closed_gate_is_state() -> None:
    with pytest.raises(ConfigError, match="the model changes 'old' while it trains"):
        trained(lambda: Model(behind_a_gate, a_gate), LOSS, None, "wave")
    check(lambda: Model(behind_a_gate, a_gate), "wave", rule="local")


class SeenClasses(nn.Module):
    """A loss that knows which classes it has seen: the first client's is always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        self.seen[t] = True
        return functional.cross_entropy(z, t) * self.seen.sum()


def test_a_loss_that_the_samples_of_other_clients_change_is_refused() -> None:
    by_class = [torch.nonzero(k == Y)[:, 0].tolist() for k in range(4)]
    task = Task(Model(plain), SeenClasses(), (X, Y), by_class, batch_size=None)
    (problem,) = task.problems()
    assert "the model keeps 'seen' of the loss from call to call, and its loss depends on that" in problem


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x * late(type(self).calls)


class InheritsACount(Counting):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("kind", [Counting, InheritsACount])
def test_counters_of_classes_are_refused(kind: type[Counting]) -> None:
    kind.calls = 0
    with pytest.raises(ConfigError, match="the model keeps 'calls' from call to call"):
        trained(lambda: Model(lambda m, x: m.count(plain(m, x)), part_named("count", kind)), LOSS, None, "wave")


def part_named(name: str, make: Callable[[], nn.Module]) -> Callable[[Any], None]:
    return lambda m: setattr(m, name, make())


# ---- draws, ties, hooks -----------------------------------------------------------------------------
def seeded(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noise = torch.randn(5, 4, dtype=x.dtype)
    return plain(m, x) + x @ noise


def test_a_model_that_seeds_its_draws_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model seeds PyTorch's generator"):
        trained(lambda: Model(seeded), LOSS, None, "wave")


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda t: t.max(), "min": lambda t: t.min(), "median": lambda t: t.median(),
    "nanmedian": lambda t: t.nanmedian(), "torch.max": lambda t: torch.max(t), "along": lambda t: t.max(1).values.sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_ties_share_the_gradient_as_in_pytorch(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return plain(m, x) * (1 + 0.1 * REDUCTIONS[name](x[:, :3].round() + m.shift))

    check(lambda: Model(forward, lambda m: setattr(m, "shift", nn.Parameter(torch.zeros(3)))), "wave")


def test_a_hook_on_all_modules_selects_the_reference_loop() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, inner, outer: None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the inputs of the first layer need no gradient
            check(lambda: Model(plain), "wave", rung="reference")
    finally:
        handle.remove()


# ---- 6, 7 -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
def test_as_strided_with_an_offset_reads_its_own_parameter(mode: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(functional.linear(m.a(x), m.inner.weight.as_strided((6, 6), (1, 6), 0)))

    def parts(m: Any) -> None:
        m.inner, m.behind = nn.Linear(6, 6), nn.Linear(9, 9)

    check(lambda: Model(lambda m, x: forward(m, x) + 0 * m.behind.weight.sum(), parts), mode, rung="reference")


@pytest.mark.parametrize("used", [False, True])
def test_a_moving_average_on_a_plain_attribute(used: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.mean = 0.9 * getattr(m, "mean", 0 * x[0]) + 0.1 * x.mean(0)
        return plain(m, x - m.mean if used else x)

    if used:
        with pytest.raises(ConfigError, match="the model keeps 'mean' from call to call"):
            trained(lambda: Model(forward), LOSS, None, "wave")
    else:
        check(lambda: Model(forward), "wave")


def solving(m: Any, x: Tensor) -> Tensor:
    return plain(m, x) * torch.linalg.solve(m.matrix, torch.ones(len(m.matrix), 4, dtype=x.dtype))[:1]


@pytest.mark.parametrize("size", [8, 200])
def test_factorisations_of_large_matrices(size: int) -> None:
    """On several threads MKL computes wrong ones for batches of large matrices, or does not end."""

    def parts(m: Any) -> None:
        m.matrix = nn.Parameter(3 * torch.eye(size) + 0.05 * torch.randn(size, size))

    check(lambda: Model(solving, parts), "wave")


LOSS = functional.cross_entropy
