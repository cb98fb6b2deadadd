"""Who computes tiles: workers by number, wherever they are. Here the protocol, and a crew of one in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from offbeat.engines.tile_worker import Spec, TileWorker


class Reply(NamedTuple):
    """What a crew hears: an answer to a ticket, or, without one, that a worker is lost or has joined."""

    worker: int
    ticket: int | None = None
    value: Any = None
    lost: str = ""  # why


class Crew(Protocol):
    """Workers by number, wherever they are. What is asked of one it does in the order of asking."""

    name: str

    @property
    def sizes(self) -> Mapping[str, int]:
        """`TileWorker.sizes`, the same for all of one kind."""

    def workers(self) -> list[int]: ...
    def share(self, state: Mapping[str, Tensor]) -> Any:
        """Place vectors where every worker finds them; what stands for them."""

    def ask(self, worker: int, what: str, *given: Any) -> int:
        """Have a method of `TileWorker` called; the ticket of the answer."""

    def hear(self) -> Reply | None:
        """The next thing that happens; None: nothing will."""

    def close(self) -> None: ...


CrewMaker: TypeAlias = Callable[[Spec], Crew]


class InProcess:
    """A crew of one, in this process."""

    name = "tiles"

    def __init__(self, spec: Spec) -> None:
        self.worker = TileWorker(spec)
        self.sizes = self.worker.sizes()
        self.replies: deque[Reply] = deque()
        self.asked = 0

    def workers(self) -> list[int]:
        return [0]

    def share(self, state: Mapping[str, Tensor]) -> Any:
        return state

    def ask(self, worker: int, what: str, *given: Any) -> int:
        self.asked += 1
        self.replies.append(Reply(worker, self.asked, getattr(self.worker, what)(*given)))
        return self.asked

    def hear(self) -> Reply | None:
        return self.replies.popleft() if self.replies else None

    def close(self) -> None:
        """There is nobody to send home."""


def in_process(spec: Spec) -> Crew:
    return InProcess(spec)
