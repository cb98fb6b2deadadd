from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from offbeat.engines.engine import Engine
from offbeat.errors import ConfigError
from offbeat.experiments.assemble import build_method
from offbeat.records import Begun
from offbeat.tasks.models import MODELS, CentreCrop, CropFlip, build
from offbeat.tasks.task import Task


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "count"),
    [
        ("dlsgd-cnn", (1, 28, 28), 10, 582_026),
        ("dlsgd-cnn", (3, 32, 32), 10, 878_538),
        ("dlsgd-cnn", (2, 16, 22), 3, 32 * 51 + 64 * 801 + 512 * (64 * 2 + 1) + 3 * 513),
        ("fedagrac-cnn", (1, 28, 28), 10, 260 + 5020 + 16050 + 510),
        ("fedagrac-cnn", (2, 16, 22), 3, 10 * 51 + 20 * 251 + 50 * (20 * 2 + 1) + 3 * 51),
        ("alexnet", (3, 32, 32), 10, 23296 + 307392 + 663936 + 884992 + 590080 + 526336 + 4196352 + 20490),
        ("alexnet", (3, 29, 61), 10, 23296 + 307392 + 663936 + 884992 + 590080 + 2048 * 513 + 4196352 + 20490),
        ("vgg19", (3, 32, 32), 10, 38720 + 221440 + 2065408 + 8259584 + 9439232 + 262656 + 262656 + 5130),
        ("vgg16", (3, 32, 32), 10, 38720 + 221440 + 1475328 + 5899776 + 7079424 + 262656 + 262656 + 5130),
        ("heterogeneity-cnn", (3, 32, 32), 10, 2432 + 25632 + 1049088 + 65664 + 1290),
        ("heterogeneity-cnn", (1, 4, 11), 3, 832 + 25632 + 512 * 65 + 65664 + 3 * 129),
        ("fedavg-cifar-cnn", (3, 32, 32), 10, 4864 + 102464 + 885120 + 73920 + 1930),
        ("fedavg-cifar-cnn", (1, 25, 40), 3, 64 * 26 + 102464 + 885120 + 73920 + 3 * 193),
        ("leaf-femnist-cnn", (1, 28, 28), 62, 832 + 51264 + 6424576 + 127038),
        ("leaf-femnist-cnn", (2, 4, 11), 3, 32 * 51 + 51264 + 2048 * 129 + 3 * 2049),
        ("logistic", (1, 8, 8), 10, 650),
        ("linear", (13,), 1, 14),
        ("mlp", (1, 8, 8), 10, 65 * 200 + 201 * 10),
    ],
)
def test_parameters_and_output_shape(name, shape, outputs, count):
    model = build(name, shape, outputs, seed=0)
    assert isinstance(model, nn.Sequential)
    assert parameters(model) == count
    assert model(torch.zeros(2, *shape)).shape == (2, outputs)


def test_linear_has_one_output_unless_told():
    assert MODELS["linear"]((5,))(torch.zeros(3, 5)).shape == (3, 1)


def test_logistic_and_linear_are_affine():
    x = torch.randn(4, 1, 3, 3)
    for name in ("logistic", "linear"):
        model = build(name, (1, 3, 3), 2, seed=1)
        (w, b) = model.parameters()
        torch.testing.assert_close(model(x), x.reshape(4, 9) @ w.T + b)


def test_mlp_computes_its_formula():
    model = build("mlp", (6,), 3, seed=1, hidden=5)
    w, b, v, c = model.parameters()
    x = torch.randn(4, 6)
    torch.testing.assert_close(model(x), (x @ w.T + b).clamp(min=0) @ v.T + c)


LINES = ("char-lstm", "gpt", "gru", "har-conv1d", "recommender", "transformer-10m")  # their samples are lines


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(LINES)))
def test_the_seed_alone_decides_and_nothing_is_disturbed(name):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    one = build(name, (1, 32, 32), 4, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(456)
    two, other = build(name, (1, 32, 32), 4, seed=7), build(name, (1, 32, 32), 4, seed=8)
    flat = [nn.utils.parameters_to_vector(model.parameters()) for model in (one, two, other)]
    assert torch.equal(flat[0], flat[1])
    assert not torch.equal(flat[0], flat[2])


def test_built_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        model = build("logistic", (4,), 2, seed=0)
    assert model[1].weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "options", "sentence"),
    [
        (
            "dlsgd-cn",
            (1, 28, 28),
            10,
            {},
            r"unknown model 'dlsgd-cn': did you mean 'dlsgd-cnn'\? Known: alexnet, char-lstm, dlsgd-cnn, fedagrac",
        ),
        ("mlp", (4,), 2, {"hiden": 3}, r"unknown option of model 'mlp' 'hiden': did you mean 'hidden'\? Known: hidden"),
        ("logistic", (4,), 2, {"hidden": 3}, "model 'logistic' has no options, but 'hidden' was given; leave it out"),
        ("mlp", (4,), 2, {"hidden": 0}, "hidden is 0; give a whole number of at least 1"),
        ("mlp", (4,), 2, {"hidden": 2.5}, "model 'mlp': hidden = 2.5; it must be a whole number"),
        ("mlp", (4,), 0, {}, "outputs is 0; give a whole number of at least 1"),
        ("mlp", (4, 0), 2, {}, r"a side of input_shape \(4, 0\) is 0; give a whole number of at least 1"),
        ("dlsgd-cnn", (1, 8, 8), 10, {}, "at least 16x16 pixels, the data has samples of shape 1x8x8; take 'mlp'"),
        ("dlsgd-cnn", (1, 28, 15), 10, {}, "samples of shape 1x28x15"),
        ("dlsgd-cnn", (28, 28), 10, {}, "needs images of channels x height x width .* samples of shape 28x28"),
        ("fedagrac-cnn", (1, 15, 28), 10, {}, "'fedagrac-cnn' needs images .* 16x16 pixels, .* of shape 1x15x28; take"),
        ("alexnet", (1, 28, 28), 10, {}, "'alexnet' needs images .* 29x29 pixels, .* of shape 1x28x28; take 'mlp'"),
        ("vgg19", (3, 32, 31), 10, {}, "'vgg19' needs images .* 32x32 pixels, .* of shape 3x32x31; take 'mlp'"),
        ("vgg19", (4,), 10, {}, "'vgg19' needs images .* of shape 4; take 'mlp'"),
        ("vgg16", (1, 28, 28), 10, {}, "'vgg16' needs images .* 32x32 pixels, .* of shape 1x28x28; take 'mlp'"),
        ("heterogeneity-cnn", (1, 3, 28), 10, {}, "'heterogeneity-cnn' needs images .* 4x4 pixels, .* 1x3x28; take"),
        ("heterogeneity-cnn", (3, 32, 32), 10, {"filters": 0}, "filters is 0; give a whole number of at least 1"),
        ("fedagrac-cnn", (1, 28, 28), 10, {"dropout": 1.0}, r"dropout is 1.0; give a number from 0 .* to below 1"),
        ("alexnet", (3, 32, 32), 10, {"dropout": -0.1}, "dropout is -0.1; give a number from 0"),
        ("fedavg-cifar-cnn", (1, 20, 28), 10, {}, "crop is 24, but images are 20x28; give 20 at most, or none"),
        ("fedavg-cifar-cnn", (3, 32, 32), 10, {"crop": 0}, "crop is 0; give a whole number of at least 1"),
        ("fedavg-cifar-cnn", (3, 32, 32), 10, {"crop": 2.5}, "crop = 2.5; it must be a whole number or none"),
        ("fedavg-cifar-cnn", (32, 32), 10, {}, "'fedavg-cifar-cnn' needs images .* of shape 32x32; take 'mlp'"),
        (
            "leaf-femnist-cnn",
            (1, 28, 3),
            62,
            {},
            "'leaf-femnist-cnn' needs images .* 4x4 pixels, .* 1x28x3; take 'mlp'",
        ),
        ("vgg19", (3, 32, 32), 10, {"dropout": "a"}, "model 'vgg19': dropout = 'a'; it must be a number"),
    ],
)
def test_sentences(name, shape, outputs, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(name, shape, outputs, 0, **options)


def test_every_wrong_option_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        build("mlp", (4,), 2, 0, width=3, depth=4)
    assert len(caught.value.problems) == 2


def test_seed_beyond_64_bits():
    with pytest.raises(ConfigError, match=r"seed is \d+; give a whole number of 64 bits"):
        build("mlp", (4,), 2, 2**64)


def test_the_network_of_pfl_research_has_its_parameters() -> None:
    model = build("pfl-cnn", (3, 32, 32), 10, seed=0)
    assert parameters(model) == 1_626_442
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_network_of_pfl_research_takes_images_of_any_shape_that_is_large_enough() -> None:
    model = build("pfl-cnn", (1, 6, 9), 3, seed=0)
    assert parameters(model) == 32 * 10 + 64 * 289 + 128 * (64 * 2 + 1) + 3 * 129
    assert model(torch.zeros(2, 1, 6, 9)).shape == (2, 3)


def test_the_network_of_pfl_research_begins_glorot_uniform() -> None:
    model = build("pfl-cnn", (3, 32, 32), 10, seed=0)
    assert isinstance(model, nn.Sequential)
    bounds = [(6 / ((3 + 32) * 9)) ** 0.5, (6 / ((32 + 64) * 9)) ** 0.5, (6 / (12544 + 128)) ** 0.5, (6 / 138) ** 0.5]
    layers = [layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer, bound in zip(layers, bounds, strict=True):
        assert 0.95 * bound < float(layer.weight.detach().abs().max()) <= bound * (1 + 1e-6)


@pytest.mark.parametrize(("shape", "said"), [((4,), "4"), ((3, 5, 32), "3x5x32"), ((32, 32), "32x32")])
def test_the_network_of_pfl_research_refuses_what_is_no_image(shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=f"'pfl-cnn' needs images .* 6x6 pixels, .* of shape {said}; take 'mlp'"):
        build("pfl-cnn", shape, 10, 0)


# ---- the networks of FedaGrac -------------------------------------------------------------------
def test_the_cnn_of_fedagrac_has_the_layers_of_its_table() -> None:
    shapes, x = [], torch.zeros(2, 1, 28, 28)
    for layer in build("fedagrac-cnn", (1, 28, 28), 10, seed=0).children():
        x = layer(x)
        shapes.append((type(layer).__name__, *x.shape[1:]))
    assert [row for row in shapes if row[0] != "ReLU"] == [
        ("Conv2d", 10, 24, 24),
        ("MaxPool2d", 10, 12, 12),
        ("Conv2d", 20, 8, 8),
        ("Dropout2d", 20, 8, 8),
        ("MaxPool2d", 20, 4, 4),
        ("Flatten", 320),
        ("Linear", 50),
        ("Dropout", 50),
        ("Linear", 10),
    ]


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("alexnet", [(64, 8, 8), (192, 4, 4), (384, 2, 2), (256, 2, 2), (256, 2, 2), (2048,), (2048,), (10,)]),
        (
            "vgg19",
            [(64, 32, 32)] * 2 + [(128, 16, 16)] * 2 + [(256, 8, 8)] * 4 + [(512, 4, 4)] * 4 + [(512, 2, 2)] * 4
            + [(512,), (512,), (10,)],
        ),
        (
            "vgg16",
            [(64, 32, 32)] * 2 + [(128, 16, 16)] * 2 + [(256, 8, 8)] * 3 + [(512, 4, 4)] * 3 + [(512, 2, 2)] * 3
            + [(512,), (512,), (10,)],
        ),
    ],
)  # fmt: skip
def test_the_large_networks_have_the_shapes_of_their_tables(name: str, rows: list[tuple[int, ...]]) -> None:
    shapes, x = [], torch.zeros(1, 3, 32, 32)
    for layer in build(name, (3, 32, 32), 10, seed=0).children():
        x = layer(x)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            shapes.append(tuple(x.shape[1:]))
    assert shapes == rows


@pytest.mark.parametrize("name", ["alexnet", "fedagrac-cnn", "vgg16", "vgg19"])
def test_dropouts_are_an_option(name: str) -> None:
    for options, p in (({}, 0.5), ({"dropout": 0.2}, 0.2)):
        layers = build(name, (3, 32, 32), 10, 0, **options).modules()
        assert [layer.p for layer in layers if isinstance(layer, nn.Dropout | nn.Dropout2d)] == [p, p]


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "vgg19"])
def test_large_networks_can_train_on_crops_and_mirror_images(name: str) -> None:
    for augment in (False, True):
        first = next(build(name, (3, 32, 32), 10, 0, augment=augment).children())
        assert isinstance(first, CropFlip) == augment


@pytest.mark.parametrize("name", ["vgg16", "vgg19"])
def test_the_signal_does_not_fade_in_a_vgg(name: str) -> None:
    """With PyTorch's default weights the first layer's gradient is about 1e-6 of the last one's."""
    torch.manual_seed(0)
    model = build(name, (3, 32, 32), 10, seed=0, dropout=0.0)
    nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    slopes = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None and p.dim() > 1]
    assert min(slopes) > 0.01 * max(slopes)


# ---- the networks of FedAvg, of FedAvg on heterogeneity and of LEAF -----------------------------
def test_the_cifar_network_on_heterogeneity_with_its_filters_or_its_dense_layer_as_printed() -> None:
    assert parameters(build("heterogeneity-cnn", (3, 32, 32), 10, seed=0)) == 1_144_106
    printed = build("heterogeneity-cnn", (3, 32, 32), 10, seed=0, filters=64)
    assert parameters(printed) == 2_218_314
    dense = [(m.in_features, m.out_features) for m in printed.modules() if isinstance(m, nn.Linear)]
    assert dense == [(4096, 512), (512, 128), (128, 10)]
    assert printed(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_cifar_network_of_fedavg_has_about_a_million_parameters() -> None:
    assert parameters(build("fedavg-cifar-cnn", (3, 32, 32), 10, seed=0)) == 1_068_298
    assert parameters(build("fedavg-cifar-cnn", (3, 24, 24), 10, seed=0, crop=None)) == 1_068_298
    assert parameters(build("fedavg-cifar-cnn", (3, 32, 32), 10, seed=0, crop=None)) == 1_756_426


def test_the_femnist_network_of_leaf_has_its_parameters() -> None:
    assert parameters(build("leaf-femnist-cnn", (1, 28, 28), 62, seed=0)) == 6_603_710


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "rows"),
    [
        (
            "fedavg-cifar-cnn", (3, 32, 32), 10,
            [("CentreCrop", 3, 24, 24), ("Conv2d", 64, 24, 24), ("MaxPool2d", 64, 12, 12), ("Conv2d", 64, 12, 12),
             ("MaxPool2d", 64, 6, 6), ("Flatten", 2304), ("Linear", 384), ("Linear", 192), ("Linear", 10)],
        ),
        (
            "heterogeneity-cnn", (3, 32, 32), 10,
            [("Conv2d", 32, 32, 32), ("MaxPool2d", 32, 16, 16), ("Conv2d", 32, 16, 16), ("MaxPool2d", 32, 8, 8),
             ("Flatten", 2048), ("Linear", 512), ("Linear", 128), ("Linear", 10)],
        ),
        (
            "leaf-femnist-cnn", (1, 28, 28), 62,
            [("Conv2d", 32, 28, 28), ("MaxPool2d", 32, 14, 14), ("Conv2d", 64, 14, 14), ("MaxPool2d", 64, 7, 7),
             ("Flatten", 3136), ("Linear", 2048), ("Linear", 62)],
        ),
    ],
)  # fmt: skip
def test_layers_of_these_networks(name: str, shape: Any, outputs: int, rows: Any) -> None:
    shapes, x = [], torch.zeros(1, *shape)
    for layer in build(name, shape, outputs, seed=0).children():
        x = layer(x)
        shapes.append((type(layer).__name__, *x.shape[1:]))
    assert [row for row in shapes if row[0] != "ReLU"] == rows


@pytest.mark.parametrize("crop", [1, 5, 22, None])
def test_crops_of_any_side(crop: int | None) -> None:
    model = build("fedavg-cifar-cnn", (2, 23, 22), 3, seed=0, crop=crop)
    assert model(torch.zeros(2, 2, 23, 22)).shape == (2, 3)


def test_a_centre_crop_is_of_the_middle() -> None:
    x = torch.arange(2.0 * 6 * 7).reshape(1, 2, 6, 7)
    assert torch.equal(CentreCrop(4)(x), x[:, :, 1:5, 1:5])
    model = build("fedavg-cifar-cnn", (3, 32, 32), 10, seed=0)
    x = torch.randn(2, 3, 32, 32)
    edge = x.clone()
    edge[:, :, :4] = edge[:, :, -4:] = edge[:, :, :, :4] = edge[:, :, :, -4:] = 9.0
    assert torch.equal(model(x), model(edge))
    edge[:, :, 4, 4] = 9.0
    assert not torch.equal(model(x), model(edge))


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("fedavg-cifar-cnn", (3, 14, 15), {"crop": 12}),
        ("fedavg-cifar-cnn", (3, 9, 10), {"crop": None}),
        ("heterogeneity-cnn", (3, 8, 9), {}),
        ("leaf-femnist-cnn", (1, 8, 8), {}),
    ],
)
def test_a_wave_of_these_networks_equals_the_twin(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(18, *shape, dtype=torch.float64), torch.randint(5, (18,))
    shards = [range(6), range(6, 8), range(8, 18)]
    task = Task(build(name, shape, 5, 0, **options), functional.cross_entropy, (x, y), shards, batch_size=4)
    method = build_method({"name": "local-sgd", "local_steps": 3, "client_lr": 0.1})
    jobs = [Begun(client, client, 0, 3) for client in range(3)]
    wave, twin = (
        Engine(method, task, 0, torch.device("cpu"), "float64", mode).solve(jobs).updates["delta"]
        for mode in ("wave", "reference")
    )
    assert wave.shape == (3, parameters(task.model))
    assert (wave.norm(dim=1) > 0.01).all()
    assert torch.allclose(wave, twin, rtol=0, atol=1e-13)
