"""What travels: stages that a vector goes through on its way between server and clients.

`staged(method, "int8")` sends broadcasts and updates through them; every method of the table takes them as `stages`.
"""

from offbeat.stages.chain import Chain
from offbeat.stages.floats import bfloat16, float16
from offbeat.stages.int8 import int8
from offbeat.stages.staged import STAGES, Stages, received, staged, takes_stages

__all__ = ["STAGES", "Chain", "Stages", "bfloat16", "float16", "int8", "received", "staged", "takes_stages"]
