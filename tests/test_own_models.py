"""Models as people write them: all of them trains, and as in a plain loop; or a sentence says why it cannot."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from offbeat import Experiment, Task, run
from offbeat.errors import BadNumbers, OffbeatError
from offbeat.experiments.assemble import build
from offbeat.numerics.draws import Keyed
from offbeat.numerics.vector import FlatModel

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
    wave, twin = (
        trained(model, method=method, precision="float64"),
        trained(model, "reference", method, precision="float64"),
    )
    for name, value in trained(Own(plain), "reference", method, precision="float64").items():
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
    for name, value in trained(make(), "reference").items():
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


@pytest.mark.parametrize("mode", ["wave", "reference"])
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


# ---- parts and parameters in several places -------------------------------------------------------
def layer_twice() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 4))


def weight_twice() -> nn.Module:
    model = layer_twice()
    model[2] = nn.Linear(5, 5)
    model[2].weight = model[0].weight
    model[3].register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    return model


def again_on_the_way_back() -> nn.Module:
    return Own(lambda m, x: checkpoint(lambda t: m.b(torch.tanh(m.a(t))), x, use_reentrant=False))


class Sparing(torch.autograd.Function):
    """A product that keeps no weight for its way back: it asks the layer."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, layer: nn.Module) -> Tensor:
        return x @ weight.T

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layer = inputs[2]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g @ ctx.layer.weight, g.T @ ctx.saved_tensors[0], None


def asked_on_the_way_back() -> nn.Module:
    return Own(lambda m, x: Sparing.apply(m.a(x), m.b.weight, m.b) + m.b.bias)


@pytest.mark.parametrize("make", [layer_twice, weight_twice, again_on_the_way_back, asked_on_the_way_back])
def test_models_train_as_in_a_plain_loop(make: Callable[[], nn.Module]) -> None:
    model = make()
    whole = Task(model, functional.cross_entropy, (X, Y), SHARDS, batch_size=None)
    method = {"name": "local-sgd", "n": 4, "local_steps": 3, "client_lr": 0.5}
    spec = Experiment(method=method, task=whole, until={"commits": 2}, device="cpu", precision="float64")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = [run(replace(spec, mode=mode)).model for mode in ("wave", "reference")]
    want = copy.deepcopy(model).double()
    for _ in range(2):
        clients = [copy.deepcopy(want) for _ in SHARDS]
        for client, shard in zip(clients, SHARDS, strict=True):
            optimiser = torch.optim.SGD(client.parameters(), lr=0.5)
            for _ in range(3):
                optimiser.zero_grad()
                functional.cross_entropy(client(X[shard].double()), Y[shard]).backward()
                optimiser.step()
        for p, *each in zip(want.parameters(), *(client.parameters() for client in clients), strict=True):
            p.data = torch.stack([one.detach() for one in each]).mean(0)
    for one in found:
        assert one.keys() == model.state_dict().keys()
        model.load_state_dict(one)
        for name, value in want.state_dict().items():
            torch.testing.assert_close(one[name], value, rtol=1e-10, atol=1e-12)


# ---- records with scores and more ----------------------------------------------------------------
@dataclass
class Record:
    """As those of Hugging Face."""

    logits: Tensor
    spread: Tensor  # of a batch
    hidden: Tensor  # of each sample


def recorded(m: Any, x: Tensor) -> Record:
    hidden = m.a(x)
    return Record(m.b(hidden), hidden.softmax(-1).mean(0).square().sum(), hidden)


def in_a_table(m: Any, x: Tensor) -> dict[str, Tensor]:
    return vars(recorded(m, x))


def with_spread(record: Any, t: Tensor) -> Tensor:
    return functional.cross_entropy(record.logits, t) + record.spread


def with_spread_of_table(record: Any, t: Tensor) -> Tensor:
    return functional.cross_entropy(record["logits"], t) + record["spread"]


def with_hidden(record: Any, t: Tensor) -> Tensor:
    return functional.cross_entropy(record["logits"], t) + record["hidden"].square().mean()


@pytest.mark.parametrize(("forward", "loss"), [(recorded, with_spread), (in_a_table, with_spread_of_table)])
def test_a_loss_may_take_the_whole_record(forward: Any, loss: Any) -> None:
    def sums(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        record = recorded(m, x)
        return record.logits, record.spread

    spec = {"name": "local-sgd", "n": 4, "local_steps": 3}
    given = Experiment(method=spec, task="digits", until={"commits": 3}, device="cpu", precision="float64")
    asked = replace(task(Own(forward), loss), metrics={"top-5": "top-5", "sizes": lambda z, t: z.shape[1]})
    wave, twin = (run(replace(given, task=asked, mode=mode)) for mode in ("wave", "reference"))
    plainly = run(replace(given, task=task(Own(sums), lambda z, t: functional.cross_entropy(z[0], t) + z[1])))
    for name, value in plainly.model.items():
        assert torch.equal(wave.model[name], value)
        assert torch.allclose(twin.model[name], value, rtol=1e-10, atol=1e-12)
    assert wave.loss_final == plainly.loss_final
    assert wave.metrics[-1]["accuracy"] is not None  # metrics get the scores
    assert wave.metrics[-1]["sizes"] == 4


def test_losses_of_single_clients_from_a_record() -> None:
    def by_samples(m: Any, x: Tensor) -> Any:
        return SimpleNamespace(**in_a_table(m, x))

    def of_samples(m: Any, x: Tensor) -> dict[str, Tensor]:
        record = recorded(m, x)
        return {"logits": record.logits, "hidden": record.hidden}

    for forward, loss in ((recorded, with_spread), (by_samples, with_spread), (of_samples, with_hidden)):
        own = replace(task(Own(forward), loss), test=(X, Y), client_tests=SHARDS)
        found = build(Experiment({"name": "local-sgd", "n": 4}, own, device="cpu")).engine().evaluate()
        want = [loss(forward(own.model, X[rows]), Y[rows]).item() for rows in map(list, SHARDS)]
        assert found["own_loss_mean"] == pytest.approx(sum(want) / 4, rel=1e-6)
        assert found["own_loss_worst"] == pytest.approx(max(want), rel=1e-6)


def test_a_loss_that_takes_neither_scores_nor_the_record_is_told_of_both() -> None:
    (problem,) = task(Own(in_a_table), with_spread).problems()
    assert "The model gives a record (logits, spread, hidden); the loss was called with its logits, then" in problem
    assert task(Own(recorded)).record is None  # the scores are enough


# ---- models that something was done to ------------------------------------------------------------
compiled = partial(torch.compile, backend="eager")


def test_the_model_inside_is_taken() -> None:
    model = Own(plain)
    for wrapped in (compiled(model), nn.DataParallel(model), compiled(nn.DataParallel(model))):
        assert task(wrapped).model is model
    for part in (compiled(nn.Linear(5, 4)), nn.DataParallel(nn.Linear(5, 4))):
        (problem,) = task(nn.Sequential(part)).problems()
        assert f"part '0' of the model is a Linear inside a {type(part).__name__}" in problem


def test_pruned_parts_say_how_they_can_be_copied() -> None:
    model = Own(plain)
    prune.l1_unstructured(model.a, "weight", 0.5)
    (problem,) = task(model).problems()
    assert "part 'a' of the model is pruned, and keeps a 'weight'" in problem
    prune.remove(model.a, "weight")
    assert task(model).problems() == []


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_tables_with_a_largest_norm_say_what_to_do(make: Any) -> None:
    def bounded(e: Tensor) -> Tensor:
        return e * (0.1 / e.norm(dim=-1, keepdim=True)).clamp(max=1)

    tokens = Y[:, None]
    model = nn.Sequential(make(4, 6, max_norm=0.1), nn.Flatten(), nn.Linear(6, 4))
    (problem,) = Task(model, functional.cross_entropy, (tokens, Y), SHARDS).problems()
    assert "the table '0.weight' has max_norm, by which forward changes its rows in place" in problem
    model[0].max_norm = None
    advised = Own(lambda m, x: m.b(bounded(m.table(x).flatten(1))))
    advised.table = model[0]
    assert Task(advised, functional.cross_entropy, (tokens, Y), SHARDS).problems() == []


def averaging(m: Any, x: Tensor) -> Tensor:
    m.centre = 0.9 * m.centre + 0.1 * x.detach().mean(0)
    return plain(m, x - m.centre)


def test_a_buffer_that_is_put_in_anew_is_named() -> None:
    model = Own(averaging)
    model.register_buffer("centre", torch.zeros(5))
    (problem,) = task(model).problems()
    assert "the model changes 'centre' while it trains" in problem


@pytest.mark.parametrize(
    ("draw", "reentrant", "said"),
    [
        (functional.dropout, False, "what it draws there cannot be keyed: turn checkpointing off"),
        (lambda t: t * torch.randn_like(t), False, "what it draws there cannot be keyed: turn checkpointing off"),
        (torch.tanh, True, "give use_reentrant=False, or turn checkpointing off"),
    ],
    ids=["dropout", "randn_like", "reentrant"],
)
def test_checkpointing_that_cannot_be_says_how_to_turn_it_off(draw: Any, reentrant: bool, said: str) -> None:
    model = Own(lambda m, x: m.b(checkpoint(lambda t: draw(torch.tanh(t)), m.a(x), use_reentrant=reentrant)))
    (problem,) = task(model).problems()
    assert said in problem
    assert "randn_like, torch.bernoulli" not in problem


# ---- samples that a model does not take --------------------------------------------------------------
def outside(m: Any, x: Tensor) -> Tensor:
    return plain(m, m.table[x[:, 0].long()])


def with_table() -> nn.Module:
    model = Own(outside)
    model.table = nn.Parameter(torch.ones(3, 5))
    return model


@pytest.mark.parametrize("mode", ["wave", "reference"])
@pytest.mark.parametrize("seen", [True, False])
def test_a_sample_on_which_the_model_fails_is_named(mode: Any, seen: bool) -> None:
    x = torch.ones(40, 5)
    x[26] = 3.0  # of client 2
    test = None if seen else (x[:8], Y[:8])
    given = Task(with_table(), functional.cross_entropy, (x, Y), SHARDS, test=test, batch_size=None)
    where = "looking at the training data" if seen else "client 2, version 0, local step 0"
    sentence = f"{where}: the model or the loss fails with IndexError: index 3 is out of bounds .*It is sample 26 of"
    method = {"name": "local-sgd", "n": 4, "local_steps": 2}
    with pytest.raises(OffbeatError, match=sentence):
        run(Experiment(method=method, task=given, until={"commits": 2}, device="cpu", mode=mode))


def test_a_sample_of_the_first_batch_is_named() -> None:
    x = torch.ones(40, 5)
    x[4] = 3.0
    (problem,) = Task(with_table(), functional.cross_entropy, (x, Y), SHARDS, batch_size=None).problems()
    assert "fails: IndexError: index 3 is out of bounds" in problem
    assert problem.endswith("It is training sample 4")


def test_a_first_model_without_a_finite_loss_is_not_for_its_rates() -> None:
    def loss(z: Tensor, t: Tensor) -> Tensor:
        return functional.cross_entropy(z, t, ignore_index=3)

    none = torch.where(torch.arange(40) % 4 == 1, 3, 0)  # client 1 has no target that counts
    method = {"name": "local-sgd", "n": 4, "local_steps": 2}
    given = Task(Own(plain), loss, (X, none), SHARDS)
    with pytest.raises(BadNumbers, match=r"client 1, version 0: the loss at local step 0 .*No step had been taken"):
        run(Experiment(method=method, task=given, until={"commits": 2}, device="cpu"))
    short = X.clone()
    short[9] = 0.0
    given = Task(Own(lambda m, x: plain(m, x / x.norm(dim=1, keepdim=True))), loss, (short, Y % 3), SHARDS)
    with pytest.raises(BadNumbers, match="first model on the training data is nan: that of sample 9 by itself"):
        run(Experiment(method=method, task=given, until={"commits": 2}, device="cpu"))


def test_whole_numbers_among_frozen_parameters() -> None:
    model = Own(plain)
    model.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    assert next(model.parameters()) is model.codes
    trained(model)


def test_what_pytorch_cannot_batch_is_said_once() -> None:
    model = Own(lambda m, x: m.b(m.a(x) - m.a(x).quantile(0.3, dim=1, keepdim=True)))
    spec = Experiment(method={"name": "local-sgd", "n": 4}, task=task(model), until={"commits": 4}, device="cpu")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(spec)
    assert ["PyTorch cannot batch aten::quantile" in str(each.message) for each in said] == [True]


def rows_apart(randomness: str) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: functional.dropout(plain(m, row), 0.5), randomness=randomness)(x)

    return Own(forward)


def masks_of(randomness: str) -> int:
    """How many different rows a dropout of equal rows has, inside a `vmap` of the model's own."""
    model = FlatModel(rows_apart(randomness), functional.cross_entropy)
    x = torch.ones(6, 5)
    with Keyed(torch.tensor(7)):
        out = model.call(model.views(model.initial()), x)
    return len({tuple(row.tolist()) for row in out != 0})


def test_draws_inside_a_vmap_of_the_model_are_each_rows_own_or_the_same() -> None:
    assert masks_of("different") > 3
    assert masks_of("same") == 1
    with pytest.raises(OffbeatError, match="randomness='different'"):
        masks_of("error")
    wave, twin = (trained(rows_apart("different"), mode, precision="float64") for mode in ("wave", "reference"))
    assert all(torch.allclose(wave[name], twin[name], rtol=0, atol=1e-12) for name in twin)


def into_zeros(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 2, 4, dtype=x.dtype)
    out[:, 0] = plain(m, x)
    out[:, 1].copy_(out[:, 0].detach().tanh())  # a part of it
    return out.sum(1)


def by_law(m: Any, x: Tensor) -> Tensor:
    return torch.distributions.Normal(plain(m, x), 0.1).rsample()


@pytest.mark.parametrize("forward", [into_zeros, by_law])
def test_models_that_write_into_tensors_of_their_own_are_batched(forward: Any) -> None:
    outcomes = [
        run(Experiment(method={"name": "fedbuff", "buffer_size": 2, "local_steps": 3}, task=task(Own(forward)),
                       precision="float64", mode=mode, device="cpu", until={"commits": 4}))
        for mode in ("wave", "reference")
    ]  # fmt: skip
    assert outcomes[0].rung != "reference"
    wave, twin = (outcome.model for outcome in outcomes)
    assert all(torch.allclose(wave[name], twin[name], rtol=0, atol=1e-12) for name in twin)


TWO_ROUNDS = Experiment(method={"name": "local-sgd", "n": 4}, device="cpu", until={"commits": 2})


def test_classes_may_be_bytes() -> None:
    whole = task(Own(plain))
    small = replace(whole, data=(whole.data[0], whole.data[1].to(torch.uint8)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models = [run(replace(TWO_ROUNDS, task=each)).model for each in (whole, small)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize("rule", ["batch", "averaged", "local"])
def test_what_follows_a_batch_norm_may_change_its_outputs_in_their_place(rule: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        out = m.norm(plain(m, x))
        out += 1.0
        return torch.relu_(out)

    model = Own(forward)
    model.norm = nn.BatchNorm1d(4)
    under = replace(task(model), batch_norm=rule)
    results = [
        run(replace(TWO_ROUNDS, task=under, precision="float64", mode=mode)).model for mode in ("wave", "reference")
    ]
    assert all(torch.allclose(results[0][name], results[1][name], rtol=0, atol=1e-12) for name in results[1])


def decides(m: Any, x: Tensor) -> Tensor:
    return plain(m, x) if x.sum() > 0 else plain(m, -x)


def listed_numbers(m: Any, x: Tensor) -> Tensor:
    return plain(m, x) * float(len(x.sum(1).tolist()))


@pytest.mark.parametrize(("forward", "words"), [(decides, "torch.where"), (listed_numbers, r"\.tolist\(\)")])
def test_why_a_model_is_not_batched_is_said_with_the_line(forward: Any, words: str) -> None:
    line = forward.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=rf"{words}.*\(tests/test_own_models.py:{line}\)"):
        run(replace(TWO_ROUNDS, task=task(Own(forward))))
