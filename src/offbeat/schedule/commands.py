"""What a policy may command. What nobody can obey ends a run with a sentence that names the policy and the command."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from offbeat.config.options import fits
from offbeat.errors import OffbeatError, in_words
from offbeat.method import Policy
from offbeat.records import COMMANDS, Drop, Fetch, Offer, Start, WakeAt


def whole(value: Any) -> bool:
    """A whole number, of NumPy too."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def command_problem(now: float, command: Any, clients: int, newest: int) -> str | None:
    """What is wrong with a command that nobody can obey, among so many clients and with this as the newest version."""
    if not isinstance(command, COMMANDS):
        return f"{in_words(command)} is no command"
    if isinstance(command, Start | Fetch | Drop) and not (whole(command.client) and 0 <= command.client < clients):
        return f"it speaks of client {in_words(command.client)}, and there are 0 to {clients - 1}"
    if isinstance(command, Start | Offer) and not (whole(command.steps) and command.steps >= 0):
        return f"it orders {in_words(command.steps)} steps; give a whole number, or 0 for as many as the client will"
    if isinstance(command, Start) and not (whole(command.version) and 0 <= command.version <= newest):
        return f"it starts from version {in_words(command.version)}, and there are 0 to {newest}"
    if isinstance(command, Offer) and command.version != newest:
        return f"it offers version {in_words(command.version)}, and the newest is {newest}"
    if isinstance(command, WakeAt) and not (fits(command.time, float) and command.time >= now):
        return f"it wants to be woken at {in_words(command.time)} s, which is past"
    return None


def require_fit(policy: Policy, now: float, command: Any, clients: int, newest: int) -> None:
    """Ends a run whose policy commands what cannot be."""
    if problem := command_problem(now, command, clients, newest):
        raise OffbeatError(
            f"policy '{policy.kind}' ({type(policy).__name__}) answers {in_words(command)} at {now:g} s; {problem}. "
            "`offbeat check` tries all that a policy must keep"
        )
