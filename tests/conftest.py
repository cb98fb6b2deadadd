"""One thread keeps tests steady beside other work, and Hypothesis draws the same examples every time; CUDA tests are
skipped, visibly, where there is no device."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import pytest
import sklearn.datasets
import torch
from hypothesis import settings

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the programs that tests start
settings.register_profile("steady", derandomize=True, database=None)
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def digits_read_once() -> Iterator[None]:
    """Most runs are on the digits, and a fifth of a small run is scikit-learn reading their text file again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sklearn.datasets, "load_digits", functools.cache(sklearn.datasets.load_digits))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
