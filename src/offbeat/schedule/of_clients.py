"""What policies of single clients say alike of themselves."""

from __future__ import annotations


class OfClients:
    """Orders `steps` of each client (None: as many as it will) and commits `size` updates at a time (None: all)."""

    steps: int | None
    size: int | None

    speaks_of = "clients"
    synchronous = False

    @property
    def orders(self) -> int | None:
        return self.steps

    @property
    def cohort(self) -> int | None:
        return self.size
