"""`offbeat ARGUMENTS` through its entry point, in this process."""

from __future__ import annotations

import signal
import sys
import warnings
from typing import Any

import pytest

from offbeat import cli


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Any:
    monkeypatch.setattr(sys, "argv", ["offbeat", *map(str, arguments)])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which the command line replaces
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    return ended.value.code
