"""CINIC-10 in its official layout: folders train/CLASS/*.png and test/CLASS/*.png."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from offbeat.errors import OffbeatError
from offbeat.tasks import files
from offbeat.tasks.data import CINIC_CLASSES, cinic10
from offbeat.tasks.make import build_task

rng = np.random.default_rng(0)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that OFFBEAT_DATA names; the other roots are empty too."""
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "DEBIAN", tmp_path / "debian")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write(folder: Path, each: int = 2) -> dict[str, np.ndarray]:
    """Images of every class and part, by part."""
    images = {}
    for part in ("train", "valid", "test"):
        pixels = images[part] = rng.integers(0, 256, (len(CINIC_CLASSES) * each, 32, 32, 3), np.uint8)
        for number, image in enumerate(pixels):
            place = folder / part / CINIC_CLASSES[number // each]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"cifar10-{part}-{number:03d}.png")
    return images


@pytest.mark.parametrize("folder", ["cinic10", "CINIC-10"])
def test_official_folders_are_read_class_by_class(root: Path, folder: str) -> None:
    images = write(root / folder)
    data = cinic10("unit")
    assert (data.classes, data.x.shape, data.x_test.shape) == (10, (20, 3, 32, 32), (20, 3, 32, 32))
    assert data.y.tolist() == data.y_test.tolist() == [c for c in range(10) for _ in range(2)]
    assert np.allclose(data.x, images["train"].transpose(0, 3, 1, 2) / 255)
    assert np.allclose(data.x_test, images["test"].transpose(0, 3, 1, 2) / 255)


def test_a_task_of_it(root: Path) -> None:
    write(root / "cinic10")
    task = build_task(
        "cinic10", {"clients": 4, "model": "logistic", "split": {"name": "single-label", "percent": 50}}, 0
    )
    assert (task.clients, task.name) == (4, "cinic10")


def test_what_is_missing_or_damaged_is_named(root: Path) -> None:
    with pytest.raises(OffbeatError, match=r"data set 'cinic10' was not found\. Looked for folders train, test"):
        cinic10()
    write(root / "cinic10")
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(root / "cinic10/train/cat/small.png")
    with pytest.raises(OffbeatError, match=r"small\.png is damaged: it is 16x16, it should be 32x32"):
        cinic10()
    (root / "cinic10/train/cat/small.png").write_bytes(b"no image")
    with pytest.raises(OffbeatError, match=r"small\.png is damaged: it cannot be read as an image"):
        cinic10()
    for path in (root / "cinic10/test/ship").iterdir():
        path.unlink()
    (root / "cinic10/train/cat/small.png").unlink()
    with pytest.raises(OffbeatError, match="ship is damaged: it holds no image"):
        cinic10()
    (root / "cinic10/test/ship").rmdir()
    with pytest.raises(OffbeatError, match="test is damaged: it has no folder ship"):
        cinic10()
