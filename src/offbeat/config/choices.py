"""The words that an experiment may give for how it is computed. They stand alone: to check them needs no PyTorch."""

from typing import Literal

Mode = Literal["wave", "reference"]
Engines = Literal["local", "tiles", "ray"]  # whole waves here; waves in tiles here; the same tiles on workers of Ray
Precision = Literal["float32", "tf32", "bf16", "float64"]
Choice = Literal["auto", "device", "host", "file"]  # where what clients keep lies
