"""What the bits of a run rest on besides its config: processor, instruction set, threads, libraries, device."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

VARIABLES = (
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip


def environment(device: torch.device, threads: int) -> dict[str, Any]:
    """A flat table, equal on two machines only if nothing that is known to decide rounding differs."""
    facts: dict[str, Any] = {
        "processor": processor(),
        "machine": platform.machine(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "offbeat": installed(),
        "device": "cpu",
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["CUDA"] = str(torch.version.cuda)
        facts["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return facts | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def installed() -> str:
    try:
        return metadata.version("offbeat")
    except metadata.PackageNotFoundError:
        return "unknown"


def differences(recorded: Sequence[Mapping[str, Any]], here: Mapping[str, Any]) -> list[str]:
    """How each recorded environment differs from this one, key by key.

    >>> differences([{"threads": 2, "torch": "2.5"}], {"threads": 1, "torch": "2.5"})
    ['threads: 2, here 1']
    """
    lines = [
        f"{key}: {then.get(key, 'none')}, here {here.get(key, 'none')}"
        for then in recorded
        for key in {**then, **here}
        if then.get(key) != here.get(key)
    ]
    return list(dict.fromkeys(lines))
