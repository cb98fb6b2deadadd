"""Final models of `families.FAMILIES` against a plain PyTorch loop, tensor by tensor.

The loop of this file copies the module for each client, calls `backward()` on the loss of the client's whole shard, and
steps in place; a commit is the mean of the clients. It imports nothing from `offbeat.numerics`. An error is the
difference over the distance that the tensor moved in the loop. In float64 it is at most `BOUND`. In float32 both the
run and the loop are compared with the float64 loop, and the run's error is at most `FACTOR` times that of the loop,
plus rounding of the tensor itself.
"""

from __future__ import annotations

import copy
import itertools
import warnings
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from families import FAMILIES, Family
from offbeat import Experiment, Task, run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.func.jvp compiles its own scripts

# Families that ask whether they are trained, hook into gradients, or read other memory: no wave can be right.
BY_REFERENCE = {"PenaltyOfTrained", "PenaltyByType", "GradientHook", "AskedForGradients", "NodeHook", "StridedViews"}
SMALL, EDGE, WIDE, LARGEST = 8, 64, 72, 512  # 64 * 64 is the limit of 4,096 weights; 512 * 512 passes 131,072
STEPS = {2: 2, 14: 8}  # local steps by commits: with 14 commits more than 100 steps, so that steps are traced
LR = 0.05
BOUND = 1e-9
FACTOR, ROUNDING = 8.0, 2e-6  # ROUNDING: 16 float32 spacings
LEAST = 1e-6  # a tensor that moved less than this share of the model is compared with this share


class Case(NamedTuple):
    family: str
    width: int
    precision: str
    clients: int
    commits: int


class Data(NamedTuple):
    x: Any
    y: Any
    shards: list[range]


def data_of(case: Case) -> Data:
    """Samples in float32; with many clients the shards have two or three rows in turn."""
    sizes = [3, 3] if case.clients == 2 else [3 - i % 2 for i in range(case.clients)]
    starts = [sum(sizes[:i]) for i in range(case.clients)]
    generator, kind = torch.Generator().manual_seed(1), FAMILIES[case.family]
    x, y = kind.x(sum(sizes), case.width, generator), kind.y(sum(sizes), case.width, generator)
    return Data(x, y, [range(start, start + size) for start, size in zip(starts, sizes, strict=True)])


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(zlib.crc32(case.family.encode()))
    return FAMILIES[case.family].make(case.width)


def converted(values: Any, dtype: torch.dtype, rows: range) -> Any:
    """Rows of tensors, or of each tensor of a tuple, with real numbers of this type."""
    if isinstance(values, tuple):
        return tuple(converted(each, dtype, rows) for each in values)
    return values[rows.start : rows.stop].to(dtype if values.is_floating_point() else values.dtype)


def plain_loop(case: Case, model: nn.Module, data: Data, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Parameters and floating-point buffers after local SGD over all clients, by PyTorch alone."""
    kind: Family = FAMILIES[case.family]
    model = copy.deepcopy(model).to(dtype).to(device)
    batches = []
    for shard in data.shards:
        x, y = converted(data.x, dtype, shard), converted(data.y, dtype, shard)
        x = tuple(each.to(device) for each in (x if isinstance(x, tuple) else (x,)))
        batches.append((x, tuple(each.to(device) for each in y) if isinstance(y, tuple) else y.to(device)))
    for _ in range(case.commits):
        sums = {name: torch.zeros_like(value) for name, value in tensors_of(model)}
        for x, y in batches:
            client = copy.deepcopy(model)
            for _ in range(STEPS[case.commits]):
                client.zero_grad()
                with torch.backends.cudnn.flags(allow_tf32=False):  # recurrent layers and convolutions on a device
                    kind.loss(client(*x), y).backward()
                with torch.no_grad():
                    for p in client.parameters():
                        if p.grad is not None:
                            p -= LR * p.grad
            for name, value in tensors_of(client):
                sums[name] += value - dict(tensors_of(model))[name]
        for name, value in tensors_of(model):
            value += sums[name] / len(batches)
    return {name: value.double().cpu() for name, value in tensors_of(model)}


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and floating-point buffers, without their graphs."""
    yield from ((name, p.data) for name, p in model.named_parameters())
    yield from ((name, b) for name, b in model.named_buffers() if b.is_floating_point())


def outcome_of(case: Case, model: nn.Module, data: Data, device: str) -> dict[str, Tensor]:
    kind = FAMILIES[case.family]
    task = Task(model, kind.loss, (data.x, data.y), data.shards, batch_size=None, **kind.options)
    method = {"name": "local-sgd", "n": case.clients, "local_steps": STEPS[case.commits], "client_lr": LR}
    experiment = Experiment(
        method=method, task=task, until={"commits": case.commits}, precision=case.precision, device=device
    )  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # families that PyTorch cannot batch run one client at a time
        outcome = run(experiment)
    assert (outcome.rung == "reference") == (case.family in BY_REFERENCE), outcome.notes
    return {name: value.cpu() for name, value in outcome.model.items()}


def errors(found: dict[str, Tensor], want: dict[str, Tensor], start: dict[str, Tensor]) -> dict[str, float]:
    """Difference of each tensor over the distance that it moved; frozen tensors have to stay."""
    moved = {name: float((want[name] - start[name]).norm()) for name in want}
    total = sum(distance**2 for distance in moved.values()) ** 0.5
    assert total > 1e-3, "the family does not train"
    return {name: float((found[name].double() - want[name]).norm()) / max(moved[name], LEAST * total) for name in want}


def check(case: Case, device: str = "cpu") -> None:
    model, data = model_of(case), data_of(case)
    start = {name: value.double() for name, value in tensors_of(model)}
    want = plain_loop(case, model, data, torch.float64, device)
    if FAMILIES[case.family].options.get("batch_norm") == "batch":  # running statistics are not part of the model
        want = {name: want[name] for name, _ in model.named_parameters()}
    found = errors(outcome_of(case, model, data, device), want, start)
    assert found
    if case.precision == "float64":
        wrong = {name: error for name, error in found.items() if not error <= BOUND}
        assert not wrong, f"relative errors above {BOUND}: {wrong}"
        return
    loop = errors(plain_loop(case, model, data, torch.float32, device), want, start)
    total = sum(float((want[name] - start[name]).norm()) ** 2 for name in want) ** 0.5
    for name, error in found.items():
        moved = max(float((want[name] - start[name]).norm()), LEAST * total)
        allowed = FACTOR * loop[name] + ROUNDING * (1 + float(want[name].norm()) / moved)
        assert error <= allowed, f"{name}: {error:.1e}, and {loop[name]:.1e} of a plain loop in float32"


# ---- which cases run where -----------------------------------------------------------------------------
FIRST = [Case(name, SMALL, "float64", 2, 2) for name in FAMILIES]
PARAMETERS_AS_INPUTS = list(FAMILIES)[: list(FAMILIES).index("Orthogonality")]
PAIRS = {  # with FIRST, each pair of values of two axes occurs
    (WIDE, "float64", 2, 2): PARAMETERS_AS_INPUTS,
    (WIDE, "float64", 33, 2): ["Film", "MlpMixer", "SoftMixture"],
    (WIDE, "float32", 2, 14): ["TiedAutoencoder", "MemoryNetwork", "GatedUnits"],
    (SMALL, "float32", 33, 2): ["Perceiver", "Tcn", "LayerNorms", "Rwkv", "PaddedEmbedding", "WeightNorm"],
    (SMALL, "float64", 33, 14): ["MatrixFactorisation"],
    (EDGE, "float32", 2, 2): [
        "Gcn",
        "TanhRnn",
        "SelfAttention",
        "ConvNext",
        "BagOfWords",
        "LowRankAdapters",
        "Sinkhorn",
    ],
    (EDGE, "float64", 33, 14): ["Prototypes"],
    (SMALL, "float64", 2, 14): ["Gat", "HyperNetwork", "RandomField", "DeepSets", "SineNetwork", "ComplexLayers"],
}
IN_TEST = {*FIRST, *(Case(name, *axes) for axes, names in PAIRS.items() for name in names)}
GRID = [
    Case(name, *axes)
    for name in FAMILIES
    for axes in itertools.product((SMALL, EDGE, WIDE), ("float64", "float32"), (2, 33), (2, 14))
]
CUDA_GRID = [
    Case(name, *axes)
    for name in FAMILIES
    for axes in itertools.product((WIDE, LARGEST), ("float64", "float32"), (2, 33), (2, 14))
]


def listed(cases: list[Case], *marks: Any) -> Any:
    """The cases as parameters."""
    return pytest.mark.parametrize("case", [pytest.param(c, id="-".join(map(str, c)), marks=marks) for c in cases])


@listed(sorted(IN_TEST, key=str))
def test_final_models_are_those_of_a_plain_loop(case: Case) -> None:
    check(case)


@listed([case for case in GRID if case not in IN_TEST], pytest.mark.soak)
def test_final_models_are_those_of_a_plain_loop_at_all_sizes(case: Case) -> None:
    check(case)


@listed([case for case in CUDA_GRID if (case.clients, case.commits) == (2, 2)], pytest.mark.cuda)
def test_final_models_are_those_of_a_plain_loop_on_a_device(case: Case) -> None:
    check(case, "cuda")


@listed([case for case in CUDA_GRID if (case.clients, case.commits) != (2, 2)], pytest.mark.cuda, pytest.mark.soak)
def test_final_models_are_those_of_a_plain_loop_on_a_device_at_all_sizes(case: Case) -> None:
    check(case, "cuda")
