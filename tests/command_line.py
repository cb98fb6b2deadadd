"""`offbeat ARGUMENTS` through its entry point, in this process."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from offbeat import cli


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Any:
    monkeypatch.setattr(sys, "argv", ["offbeat", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code
