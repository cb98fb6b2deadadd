from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import OffbeatError
from offbeat.tasks import files
from offbeat.tasks.data import cifar10

rng = np.random.default_rng(0)
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that OFFBEAT_DATA names; the other roots are empty too."""
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "DEBIAN", tmp_path / "debian")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def cifar_batches(n: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(rng.integers(0, 256, (n, 3072), np.uint8), rng.integers(0, 10, n, np.uint8)) for _ in BATCHES]


def write_bin(folder: Path, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
    folder.mkdir(parents=True)
    for name, (x, y) in zip(BATCHES, batches, strict=True):
        (folder / f"{name}.bin").write_bytes(np.concatenate([y[:, None], x], axis=1).tobytes())


def python2_pickle(x: np.ndarray, y: np.ndarray) -> bytes:
    """The bytes that Python 2 wrote for {"data": x, "labels": list(y)}: strings there are byte strings."""
    raw = x.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
        + b"(K\x01(K" + bytes([len(x)]) + b"M\x00\x0ctcnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    )  # fmt: skip
    labels = b"](" + b"".join(b"K" + bytes([int(label)]) for label in y) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + labels + b"u."


@pytest.mark.parametrize("folder", ["cifar-10-batches-{}", "cifar10/cifar-10-batches-{}"])
@pytest.mark.parametrize("kind", ["bin", "py", "python 2"])
def test_cifar_layouts(root, folder, kind):
    batches = cifar_batches()
    target = root / folder.format("bin" if kind == "bin" else "py")
    if kind == "bin":
        write_bin(target, batches)
    else:
        target.mkdir(parents=True)
        for name, (x, y) in zip(BATCHES, batches, strict=True):
            modern = pickle.dumps({b"data": x, b"labels": y.tolist(), b"batch_label": b"one"}, protocol=2)
            (target / name).write_bytes(modern if kind == "py" else python2_pickle(x, y))
    data = cifar10(scale="unit")
    assert (data.x.shape, data.x_test.shape) == ((15, 3, 32, 32), (3, 3, 32, 32))
    x, y = (np.concatenate([batch[i] for batch in batches]) for i in (0, 1))
    np.testing.assert_allclose(np.concatenate([data.x, data.x_test]).reshape(18, -1) * 255, x, atol=1e-3)
    assert np.array_equal(np.concatenate([data.y, data.y_test]), y)
    assert abs(cifar10().x.mean((0, 2, 3))).max() < 1e-5


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes are no whole number of records of 3073 bytes"),
        (bytes(3073 * 2 - 5), "6141 bytes are no whole number"),
        (bytes(3073) + b"\x0b" + bytes(3072), "sample 1 has label 11, labels are 0 to 9"),
    ],
)
def test_damaged_cifar_bin(root, content, reason):
    write_bin(root / "cifar10", cifar_batches())
    (root / "cifar10/data_batch_4.bin").write_bytes(content)
    with pytest.raises(OffbeatError, match=rf"data_batch_4\.bin is damaged: .*{reason}"):
        cifar10()


class Foreign:
    def __reduce__(self):
        return os.mkdir, ("foreign-code-ran",)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (Foreign(), r"names (posix|nt)\.mkdir, which no CIFAR-10 batch needs"),
        ({b"data": np.zeros((2, 3072), np.uint8)}, "no pickled batch .*labels"),
        ({b"data": np.zeros((2, 3071), np.uint8), b"labels": [0, 1]}, r"uint8 of shape \(2, 3071\)"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, r"labels are int64 of shape \(1,\) for 2 images"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, -1]}, "sample 1 has label -1"),
    ],
)
def test_damaged_cifar_py(root, monkeypatch, batch, reason):
    monkeypatch.chdir(root)
    (root / "cifar-10-batches-py").mkdir()
    for name in BATCHES:
        (root / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(OffbeatError, match=rf"data_batch_1 is damaged: .*{reason}"):
        cifar10()
    assert not (root / "foreign-code-ran").exists()


def test_truncated_pickle(root):
    (root / "cifar-10-batches-py").mkdir()
    for name, (x, y) in zip(BATCHES, cifar_batches(), strict=True):
        (root / "cifar-10-batches-py" / name).write_bytes(python2_pickle(x, y)[:-100])
    with pytest.raises(OffbeatError, match="data_batch_1 is damaged: it is no pickled batch"):
        cifar10()
