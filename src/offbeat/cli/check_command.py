"""`offbeat check`: the laws, tried on a method, policy or stage of one's own."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from offbeat.cli.flags import Json, assignment


def check(
    name: Annotated[
        str, typer.Argument(help="A method, policy or stage: module:function of your own, or a known name.")
    ],
    sets: Annotated[list[str] | None, typer.Option("--set", help="An option of it: name=value; repeatable.")] = None,
    alone: Annotated[
        list[str] | None,
        typer.Option(help="An option with which a method is plain SGD for one client: name=value; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Try every law on a method, policy or stage of your own, and say in words which fail. Exit code 1 if one does.

    Example: offbeat check my_module:my_method --set n=3 --alone n=1
    """
    options, single = (
        dict(assignment(flag, text) for text in texts or []) for flag, texts in (("--set", sets), ("--alone", alone))
    )
    from offbeat.laws import check

    findings = check(name, options, single or None)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        for law, holds, said in findings:
            verdict = {True: "holds", False: "FAILS", None: "does not apply"}[holds]
            print(f"{verdict:<14}  {law}" + (f" {said}" if said else ""))
    if any(finding.holds is False for finding in findings):
        raise typer.Exit(1)
