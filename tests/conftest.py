"""One thread keeps tests steady beside other work, and Hypothesis draws the same examples every time; CUDA tests are
skipped, visibly, where there is no device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("steady", derandomize=True, database=None)
settings.load_profile("steady")


LONGEST = ("test_docs", "test_bits", "test_laws", "test_live", "test_zoo", "test_memory")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)  # the longest files first: none is waited for at the end
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
