"""`offbeat runs`, `show`, `table`, `plot` and `explain`: runs afterwards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offbeat.cli.flags import Json
from offbeat.cli.output import show_json, show_table
from offbeat.errors import ConfigError, OffbeatError, unknown

if TYPE_CHECKING:
    from offbeat.runs.shelf import Shelved

RunPaths = Annotated[list[Path], typer.Argument(help="Run directories, or directories that hold several.")]
COLUMNS = ("method", "task", "fleet", "seed", "state", "commits", "accuracy", "loss", "virtual s")


def runs(
    folder: Annotated[Path, typer.Argument(help="Where to look; folders inside are looked through, too.")] = Path("."),
    where: Annotated[
        list[str] | None,
        typer.Option(help="A condition, such as method=fedbuff, accuracy>=0.8 or state=done; repeatable."),
    ] = None,
    sort: Annotated[str | None, typer.Option(help="A figure or a key of the config; -NAME sorts downwards.")] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Delete the runs that are listed; asks before it does.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """List the runs in a folder; with --remove, delete them: what Offbeat wrote there, and nothing else.

    Example: offbeat runs runs --where method=fedbuff --sort -accuracy
    """
    from offbeat.runs import shelf

    if not folder.is_dir():
        raise OffbeatError(f"there is no directory {folder}")
    shelved = shelf.chosen(shelf.find_runs(folder), where or [])
    if sort is not None:
        shelved = shelf.ordered(shelved, sort.lstrip("-"), sort.startswith("-"))
    lines = [{"path": str(run.path), **facts(run)} for run in shelved]
    if as_json and not remove:
        show_json(lines)
        return
    if not shelved:
        print(f"no runs in {folder}" + (" that meet this" if where else ""))
        return
    if not as_json:
        from offbeat.runs.report import spoken

        cells = [[line["path"], *(spoken(line[name]) for name in COLUMNS)] for line in lines]
        show_table(f"{len(shelved)} runs", ["run", *COLUMNS], cells, [0, 2, 6, 8, 7, 3, 5, 1, 4, 9])
    if remove:
        if not yes and not typer.confirm(f"Delete these {len(shelved)} runs?", default=False, err=True):
            raise OffbeatError("nothing was removed")
        for run in shelved:
            shelf.remove(run)
        if as_json:
            show_json({"removed": [line["path"] for line in lines]})
        else:
            print(f"removed {len(shelved)} runs")


def facts(run: Shelved) -> dict[str, Any]:
    names = {"virtual s": "virtual_seconds"}
    return {name: run.value(names.get(name, name)) for name in COLUMNS}


def show(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    as_json: Json = False,
) -> None:
    """Show one run: how it was made, how it stands, and every figure with the data that it comes from.

    Example: offbeat show runs/hetero
    """
    from offbeat.runs import shelf
    from offbeat.runs.report import significant, spoken

    (one, *more) = shelf.opened([run], ended=False)
    if more:
        raise OffbeatError(f"{run} holds {len(more) + 1} runs; `offbeat runs {run}` lists them, `table` shows them all")
    if as_json:
        show_json({"path": str(one.path), "state": one.state, "config": one.config, "result": one.result})
        return
    result = one.result
    print(f"{one.path}: {one.method} on {one.value('task')}, {one.value('fleet')} fleet, seed {one.seed}")
    if not result:
        print(f"not ended; `offbeat resume {one.path}` goes on with it")
        return
    print(f"ended: {result['ended']}; {result['wall_seconds']:.1f} s on {result['device']}")
    for sentence in filter(None, [result.get("diverging"), *notes(result)]):
        print(sentence)
    rows = []
    for name, metric in result.get("metrics", {}).items():
        best = "" if metric["best"] is None else f"{significant(metric['best'])} at commit {metric['best_commit']}"
        rows.append([name, significant(metric["final"]), best, metric["data"]])
    if rows:
        show_table("metrics", ["metric", "last", "best", "of"], rows)
    plain = {name: value for name, value in result.items() if isinstance(value, int | float) and name != "wall_seconds"}
    plain |= {f"staleness {k}": v for k, v in result["staleness"].items() if not isinstance(v, dict)}
    plain |= {f"participation {k}": v for k, v in result["participation"].items()}
    show_table("figures", ["figure", "value"], [[name, spoken(value)] for name, value in plain.items()])
    for target, at in result["reached"].items():
        said = f"after {at['virtual_seconds']:,.2f} virtual s, commit {at['commit']}" if at else "not reached"
        print(f"first reached {target}: {said}")


def notes(result: dict[str, Any]) -> list[str]:
    said = list(result.get("notes", []))
    said += [f"metric {name} failed: {text}" for name, text in result.get("metric_faults", {}).items()]
    return said + [f"callback {name} failed: {text}" for name, text in result.get("callback_faults", {}).items()]


def table(
    runs: RunPaths,
    form: Annotated[str, typer.Option("--format", help="text, markdown, latex or csv.")] = "text",
    target: Annotated[str | None, typer.Option(help="Show the time to this target, e.g. 0.9 or 'mae 0.1'.")] = None,
    as_json: Json = False,
) -> None:
    """One table of several runs; those that differ by their seed alone are averaged, with half of a 95 % interval.

    Example: offbeat table runs/compare --format latex
    """
    from offbeat.runs import report, shelf
    from offbeat.runs.layout import FORMS

    if form not in ("text", *FORMS):
        raise ConfigError([f"--format: {unknown('format', form, ('text', *FORMS))}"])
    groups, remarks = shelf.distinct(shelf.gathered(shelf.opened(runs)))
    every = [run for group in groups.values() for run in group]
    if target is None:
        target = next((key for run in every for key in run.result["reached"]), None)
    else:
        target = shelf.target_named(target, every)
    results = {label: [run.reaching(target) for run in group] for label, group in groups.items()}
    made = report.comparison_table(results, target)
    if as_json:
        show_json({"columns": made.columns, "rows": made.rows, "notes": remarks, "runs": results})
        return
    if form == "text":
        tasks = sorted({f"{group[0].value('task')} on {group[0].value('fleet')}" for group in groups.values()})
        show_table("; ".join(tasks), *made)
    else:
        print(FORMS[form](made.columns, made.rows), end="")
    for sentence in remarks:
        print(sentence, file=sys.stdout if form == "text" else sys.stderr)


def plot(
    runs: RunPaths,
    against: Annotated[str, typer.Option(help="time, commits, samples, bytes or d2d.")] = "time",
    metric: Annotated[str | None, typer.Option(help="Any column of the metrics; left out: accuracy, or loss.")] = None,
    target: Annotated[float | None, typer.Option(help="Draw this value, and say who reached it and where.")] = None,
    out: Annotated[Path, typer.Option(help="The picture: a name ending in .png, .svg or .pdf.")] = Path("plot.png"),
    as_json: Json = False,
) -> None:
    """Draw runs: curves of a metric; of several seeds the mean and its 95 % band.

    Example: offbeat plot runs/compare --out curves.png
    """
    from offbeat.runs import curves, shelf

    if out.suffix.lower() not in curves.SUFFIXES or out.is_dir():
        raise ConfigError([f"--out {out}; give the name of a file, ending in {', '.join(curves.SUFFIXES)}"])
    groups, remarks = shelf.distinct(shelf.gathered(shelf.opened(runs, ended=False)))
    lines = {label: [run.metrics() for run in group] for label, group in groups.items()}
    first = next(iter(groups.values()))[0]
    named = metric or curves.main_metric(lines)
    said = first.result.get("metrics", {}).get(named, {})
    title = f"{first.value('task')}, {first.value('fleet')} fleet"
    figure = curves.picture(lines, metric, against, target, said.get("more_is_better"), said.get("data"), title)
    try:
        curves.save(figure, out)
    except OSError as error:
        raise OffbeatError(f"--out {out} cannot be written: {error.strerror}") from None
    if as_json:
        more = said.get("more_is_better", named not in ("loss", "training_loss"))
        at = (
            {}
            if target is None
            else {n: curves.crossed(s, named, against, target, bool(more)) for n, s in lines.items()}
        )
        show_json(
            {
                "picture": str(out), "metric": named, "against": against, "curves": list(lines), "reached": at,
                "notes": remarks,
            }
        )  # fmt: skip
    else:
        print("\n".join([f"picture: {out}", *remarks]))


def units(run: Shelved) -> int | None:
    """How many clients the trace speaks of; None where it speaks of clusters."""
    from pyarrow.parquet import read_metadata

    from offbeat.experiments.assemble import build_method

    try:
        clustered = build_method(run.config.get("method")).when.speaks_of == "clusters"
    except OffbeatError:  # a method that was given as an object
        clustered = False
    return None if clustered else int(read_metadata(run.path / "clients.parquet").num_rows)


def explain(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    as_json: Json = False,
) -> None:
    """Say where the time of a run went (computing, transfers, waiting, away), and what to change.

    Example: offbeat explain runs/hetero
    """
    from offbeat.runs import explain, shelf
    from offbeat.runs.columns import StoredRows
    from offbeat.runs.stored import sources

    (one, *more) = shelf.opened([run])
    if more:
        raise OffbeatError(f"{run} holds {len(more) + 1} runs; give one of them (`offbeat runs {run}` lists them)")
    result = one.result
    rows = StoredRows(sources(one.path, "trace"))
    spent = explain.spent(rows, units(one))
    advice = explain.counsel(spent, result, one.config, one.metrics())
    computed, waves = result.get("jobs_computed", 0), result.get("waves", 0)
    if as_json:
        show_json(
            {
                "path": str(one.path), "shares": spent.shares, "last": spent.last, "waves": waves, "jobs": computed,
                "share_dead": result.get("share_dead"), "notes": notes(result), "advice": advice,
            }
        )  # fmt: skip
        return
    print(f"{one.path}: {spent.commits} commits in {spent.seconds:,.1f} virtual s, {spent.units} clients or clusters")
    kinds = [[kind, f"{share:.1%}"] for kind, share in spent.shares.items()]
    show_table("where their time went", ["", "share"], kinds)
    print(f"waves: {waves} with {computed / max(1, waves):.1f} jobs on average; {result.get('rung', '?')}")
    print(f"dead updates: {result.get('share_dead', 0.0):.1%}; staleness {result['staleness']['mean']:.1f} on average")
    if spent.last:
        print("last before a commit: " + ", ".join(f"client {client} ({many} times)" for client, many in spent.last))
    for sentence in [*notes(result), *(advice or ["Nothing stands out."])]:
        print(f"- {sentence}")
