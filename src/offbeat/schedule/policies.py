"""The policies that a config may name."""

from __future__ import annotations

from typing import Any

from offbeat.schedule.buffer import Buffer
from offbeat.schedule.hybrid import Hybrid
from offbeat.schedule.rounds import Rounds
from offbeat.schedule.sampled import Sampled

POLICIES: dict[str, Any] = {"buffer": Buffer, "hybrid": Hybrid, "rounds": Rounds, "sampled": Sampled}
