"""The one workload that every script of this folder runs: data, users, network. Needs NumPy and PyTorch only.

W: CIFAR-10, 1,000 users of 50 images each, drawn iid; 50 users a round; batch 10, one local epoch (5 steps), local SGD
at rate 0.1; the server adds the unweighted mean of the users' changes (rate 1); 1,500 rounds; the 10,000 test images
are evaluated every 10 rounds. U: the same 50,000 images, user sizes 10 + a log-normal share (sigma 1, seed 0), so the
smallest user has at least 10 images and the last batch of a user may be short. Users count equally in the mean.

Facts read in apple/pfl-research (benchmarks/image_classification/configs/baseline.yaml and
benchmarks/model/pytorch/cnn.py, `simple_cnn`):
  * both convolutions are 3x3, stride 1, no padding: 32 -> 30 -> 28; 32 and 64 channels; ReLU after each;
  * 2x2 max pooling (28 -> 14), dropout 0.25, flatten (12,544), dense 128, ReLU, dropout 0.5, dense 10;
  * Glorot-uniform weights; biases are left as PyTorch draws them; 1,626,442 parameters;
  * images are normalised per channel with the training mean and deviation; there is no augmentation;
  * the batches of a user are the same slices each time: pfl does not shuffle within a user;
  * the test images go through in one batch of 10,000; users are weighted equally (weight_by_samples: false);
  * the published configuration also evaluates every user of the cohort before and after its local training in each
    tenth round. That is no part of W: `pfl_protocol.py --user-eval` turns it on.
pfl's loader holds images as height x width x channel and transposes inside the network; here they are stored
channel-first, unless the layout "nhwc" asks for the former.
"""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

USERS = 1_000
COHORT = 50
BATCH = 10
RATE = 0.1
EVAL_EVERY = 10
ROUNDS = 1_500
TRAIN, TEST = 50_000, 10_000


class Classifier(nn.Module):
    """Layers, a loss to train on and totals to evaluate with."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.train()
        return functional.cross_entropy(self(x), y.long())

    @torch.no_grad()
    def totals(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float, int]:
        """Summed loss, right answers, images: the loss and the count come to the host in one transfer."""
        if self.training:
            self.eval()
        scores, y = self(x), y.long()
        loss = functional.cross_entropy(scores, y, reduction="sum")
        total, right = torch.stack([loss, (scores.argmax(1) == y).sum().float()]).tolist()
        return total, right, len(y)


class Net(Classifier):
    """pfl's `simple_cnn`."""

    def __init__(self, layout: str = "nchw") -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * 14 * 14, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )
        self.nhwc = layout == "nhwc"
        for layer in self.layers:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.permute(0, 3, 1, 2) if self.nhwc else x)


SMALL = ("lr", "mlp", "cnn")
SMALL_USERS, SMALL_IMAGES, SMALL_COHORT = 100, 50, 10


def small(name: str) -> Classifier:
    """The models of small_models.py, for one 28 x 28 channel and ten classes."""
    if name == "lr":
        return Classifier(nn.Flatten(), nn.Linear(784, 10))
    if name == "mlp":
        return Classifier(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    pooled = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return Classifier(*pooled, nn.Flatten(), nn.Linear(1_024, 512), nn.ReLU(), nn.Linear(512, 10))


def small_data() -> tuple[np.ndarray, np.ndarray]:
    """Random images: every user owns 50 in a row."""
    rng = np.random.default_rng(0)
    n = SMALL_USERS * SMALL_IMAGES
    return rng.standard_normal((n, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, n)


def _from_tiles(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Lossless WebP sheets, a 100 x 100 grid of 32 x 32 images each, and an archive of labels."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    labels = np.load(folder / "cifar10_labels.npz")
    parts: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    for split, names in (("train", [f"train_{i}" for i in range(1, 6)]), ("test", ["test"])):
        for name in names:
            sheet = np.asarray(Image.open(folder / f"cifar10_{name}.webp").convert("RGB"))
            parts[split].append(sheet.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32))
    return [(np.concatenate(parts[split]), labels[split]) for split in ("train", "test")]


def _from_records(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """The official binary files: one label byte and 3,072 pixel bytes (three planes) a record."""
    out = []
    for names in ([f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"]):
        rows = np.concatenate([np.fromfile(folder / name, np.uint8).reshape(-1, 3_073) for name in names])
        out.append((rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]))
    return out


def load(data: str, layout: str = "nchw") -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images and labels, test images and labels: float32 and int64, normalised."""
    if data == "synthetic":
        rng = np.random.default_rng(0)
        splits = [
            (rng.standard_normal((n, 3, 32, 32), dtype=np.float32), rng.integers(0, 10, n)) for n in (TRAIN, TEST)
        ]
    else:
        root = Path(data)
        records, tiles = root / "cifar-10-batches-bin", root / "cifar10"
        if records.is_dir():
            splits = _from_records(records)
        elif (tiles / "cifar10_labels.npz").is_file():
            splits = _from_tiles(tiles)
        else:
            raise SystemExit(f"{root}: neither cifar-10-batches-bin/ nor cifar10/ with its sheets is there")
        pixels = splits[0][0]
        mean = pixels.mean((0, 2, 3), dtype=np.float64).astype(np.float32)[:, None, None]
        spread = np.sqrt(np.square(pixels.astype(np.float32) - mean).mean((0, 2, 3), dtype=np.float64))
        scale = spread.astype(np.float32)[:, None, None]
        splits = [((x.astype(np.float32) - mean) / scale, y) for x, y in splits]
    if layout == "nhwc":
        splits = [(np.ascontiguousarray(x.transpose(0, 2, 3, 1)), y) for x, y in splits]
    (x, y), (test_x, test_y) = splits
    return x, y.astype(np.int64), test_x, test_y.astype(np.int64)


def sizes(unequal: bool = False) -> np.ndarray:
    """Images per user, 50,000 in all; reproducible."""
    if not unequal:
        return np.full(USERS, TRAIN // USERS)
    share = np.random.default_rng(0).lognormal(0.0, 1.0, USERS)
    exact = (TRAIN - 10 * USERS) * share / share.sum()
    whole = np.floor(exact).astype(np.int64)
    short = TRAIN - 10 * USERS - int(whole.sum())
    whole[np.argsort(whole - exact)[:short]] += 1
    return whole + 10


def shuffled(seed: int = 0) -> np.ndarray:
    """The order in which the training images are dealt: user k owns one contiguous stretch of it."""
    return np.random.default_rng(seed).permutation(TRAIN)


def bounds(unequal: bool = False) -> list[tuple[int, int]]:
    ends = np.cumsum(sizes(unequal))
    return [(int(end - n), int(end)) for end, n in zip(ends, sizes(unequal), strict=True)]


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(0)
    cpu = Path("/proc/cpuinfo")
    if cpu.is_file():
        for line in cpu.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def summary(laps: list[float], warm_up: int) -> dict[str, float | int]:
    """Seconds per round after the warm-up rounds; every lap holds its own evaluation."""
    kept = np.asarray(laps[warm_up:])
    return {
        "warm_up_rounds": warm_up,
        "measured_rounds": len(kept),
        "measured_seconds": float(kept.sum()),
        "seconds_per_round": float(kept.mean()),
        "seconds_per_round_median": float(np.median(kept)),
        "seconds_per_round_min": float(kept.min()),
        "seconds_per_round_max": float(kept.max()),
        "all_rounds_seconds": float(np.sum(laps)),
    }
