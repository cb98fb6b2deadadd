"""Large networks for small images: AlexNet and the VGGs; and what a network asks of images and of its dropout.

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
