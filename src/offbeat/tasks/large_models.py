"""Networks for small images: AlexNet, VGGs, a ResNet, a MobileNet; and what a network asks of images and of dropout.

They are built by name, as the others are, with `offbeat.tasks.models.build`.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from offbeat.errors import ConfigError


def alexnet(input_shape: tuple[int, ...], outputs: int, dropout: float = 0.5, augment: bool = False) -> nn.Sequential:
    """AlexNet for small images, as in the FedaGrac experiments (Table 4): five convolutions, then 2048 twice.

    7,212,874 parameters on 3x32x32 with 10 outputs. With `augment` it trains on random crops and mirror images.
    """
    channels, height, width = images("alexnet", input_shape, 29)
    left = [((side - 1) // 4 + 1) // 8 for side in (height, width)]
    return nn.Sequential(
        *_augmentation(augment),
        nn.Conv2d(channels, 64, 11, stride=4, padding=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *_dense(256 * math.prod(left), 2048, outputs, dropout),
    )


def vgg16(input_shape: tuple[int, ...], outputs: int, dropout: float = 0.5, augment: bool = False) -> nn.Sequential:
    """VGG-16 for small images: 13 convolutions, then 512 twice; in all else as `vgg19`.

    15,245,130 parameters on 3x32x32 with 10 outputs. The FedAvg paper on heterogeneity trains a VGG-16 on CINIC-10 and
    says no more of it.
    """
    return _vgg("vgg16", (2, 2, 3, 3, 3), input_shape, outputs, dropout, augment)


def vgg19(input_shape: tuple[int, ...], outputs: int, dropout: float = 0.5, augment: bool = False) -> nn.Sequential:
    """VGG-19 for small images, as in the FedaGrac experiments (Table 5): 16 convolutions, then 512 twice.

    20,554,826 parameters on 3x32x32 with 10 outputs. There is no normalisation, and with PyTorch's default weights the
    signal would fade in so many layers: the convolutions begin He-normal, with biases of 0. With `augment` it trains on
    random crops and mirror images.
    """
    return _vgg("vgg19", (2, 2, 4, 4, 4), input_shape, outputs, dropout, augment)


def _vgg(
    name: str, plan: tuple[int, ...], input_shape: tuple[int, ...], outputs: int, dropout: float, augment: bool
) -> nn.Sequential:
    """`plan[k]` 3x3 convolutions in the k-th of five blocks, each block with a 2x2 pooling at its end."""
    channels, height, width = images(name, input_shape, 32)
    layers: list[nn.Module] = _augmentation(augment)
    for filters, times in zip((64, 128, 256, 512, 512), plan, strict=True):
        for _ in range(times):
            convolution = nn.Conv2d(channels, filters, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            layers += [convolution, nn.ReLU()]
            channels = filters
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), *_dense(512 * (height // 32) * (width // 32), 512, outputs, dropout))


class Residual(nn.Module):
    """Two 3x3 convolutions beside the input, each with a group normalisation."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
        self.norm = groups_of(filters)
        self.second = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.norm_second = groups_of(filters)
        self.beside: nn.Module = nn.Identity()
        if stride != 1 or channels != filters:
            self.beside = nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), groups_of(filters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.norm_second(self.second(nn.functional.relu(self.norm(self.first(x)))))
        return nn.functional.relu(inside + self.beside(x))


def resnet18_gn(input_shape: tuple[int, ...], outputs: int, width: int = 64) -> nn.Sequential:
    """ResNet-18 for small images, with group normalisation: 3x3 at its head and no pooling there.

    `width` channels first, eight times as many last. On 3x32x32 with 10 outputs 11,173,962 parameters with width 64,
    and 701,466 with 16.
    """
    channels, _, _ = images("resnet18-gn", input_shape, 8)
    if width < 1:
        raise ConfigError([f"width is {width}; give a whole number of at least 1."])
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), groups_of(width), nn.ReLU()]
    inside = width
    for filters, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Residual(inside, filters, stride), Residual(filters, filters, 1)]
        inside = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, outputs))


def mobilenet(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    """A MobileNet for small images: depthwise 3x3 and 1x1 convolutions in turn, with group normalisation.

    136,778 parameters on 3x32x32 with 10 outputs.
    """
    channels, _, _ = images("mobilenet", input_shape, 8)
    layers: list[nn.Module] = [nn.Conv2d(channels, 32, 3, padding=1, bias=False), groups_of(32), nn.ReLU()]
    inside = 32
    for filters, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1)):
        layers += [nn.Conv2d(inside, inside, 3, stride, padding=1, groups=inside, bias=False), groups_of(inside)]
        layers += [nn.ReLU(), nn.Conv2d(inside, filters, 1, bias=False), groups_of(filters), nn.ReLU()]
        inside = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, outputs))


def groups_of(channels: int) -> nn.GroupNorm:
    """Group normalisation of eight groups, or as many as divide the channels."""
    return nn.GroupNorm(math.gcd(8, channels), channels)


def _dense(inputs: int, hidden: int, outputs: int, dropout: float) -> list[nn.Module]:
    """The end of the large networks: two hidden layers, each behind a dropout."""
    share("dropout", dropout)
    first = [nn.Dropout(dropout), nn.Linear(inputs, hidden), nn.ReLU()]
    second = [nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU()]
    return [*first, *second, nn.Linear(hidden, outputs)]


def _augmentation(wanted: bool) -> list[nn.Module]:
    return [CropFlip()] if wanted else []


class CropFlip(nn.Module):
    """A random crop after padding by 4 pixels, and a mirror image for every other one; while training only.

    Its draws are keyed like those of dropout, because they are made of them.
    """

    PAD, BITS = 4, 6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        b, c, h, w = x.shape
        bits = (nn.functional.dropout(x.new_ones(b, 2 * self.BITS + 1), 0.5) > 0).long()
        digits = bits[:, 1:].reshape(b, 2, self.BITS) << torch.arange(self.BITS, device=x.device)
        down, right = ((digits.sum(2) * (2 * self.PAD + 1)) >> self.BITS).unbind(1)  # 0 .. 2 PAD, nearly alike
        across = torch.arange(w, device=x.device)[None]
        across = torch.where(bits[:, :1] == 1, w - 1 - across, across) + right[:, None]
        along = torch.arange(h, device=x.device)[None] + down[:, None]
        wide = nn.functional.pad(x, (self.PAD,) * 4)
        lines = wide.gather(2, along[:, None, :, None].expand(b, c, h, w + 2 * self.PAD))
        return lines.gather(3, across[:, None, None].expand(b, c, h, w))


def share(what: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError([f"{what} is {value}; give a number from 0 (nothing is dropped) to below 1."])


def images(model: str, input_shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Channels, height and width of samples that are images large enough for the model."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ConfigError(
            [
                f"model '{model}' needs images of channels x height x width of at least {least}x{least} pixels, the "
                f"data has samples of shape {'x'.join(map(str, input_shape)) or '()'}; take 'mlp' or 'logistic'."
            ]
        )
    channels, height, width = input_shape
    return channels, height, width
