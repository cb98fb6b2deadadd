"""The command line. Exit codes: 0 done, 1 a replay ended elsewhere than its run, 2 bad input, 3 the run stopped on bad
numbers, 4 files that cannot be written or are not what was written, 130 interrupted."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from offbeat import __version__, registry, toml
from offbeat.advise import THEOREMS, asked_about
from offbeat.advise import advise as run_advise
from offbeat.assemble import make_fleet, make_task, seed_problems
from offbeat.bench import ITEMS
from offbeat.bench import Settings as Bench
from offbeat.bench import bench as run_bench
from offbeat.compare import compare as run_comparison
from offbeat.config import Experiment, split_name
from offbeat.engines.local import BadNumbers
from offbeat.errors import ConfigError, OffbeatError, StorageError, unknown
from offbeat.experiment import repeat as repeat_run
from offbeat.experiment import resume as resume_run
from offbeat.experiment import run as run_experiment
from offbeat.fleets.make import maker as fleet_maker
from offbeat.laws import check as check_laws
from offbeat.measure import Effort
from offbeat.measure import measure as run_measure
from offbeat.meters import hlsgd
from offbeat.options import defaults, option_problems
from offbeat.papers.recipe import Settings
from offbeat.runs import plots, report
from offbeat.runs.disk import storing
from offbeat.runs.folder import Folder, file_name
from offbeat.runs.loop import Interrupted, Outcome
from offbeat.runs.progress import Progress
from offbeat.runs.repeat import ReplayDiffers
from offbeat.runs.store import strict
from offbeat.runs.target import LIMITS
from offbeat.tasks.data import DATA
from offbeat.tasks.make import DEFAULTS

app = typer.Typer(
    help="Train one model over many clients that keep no common time.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
console = Console(width=None if sys.stdout.isatty() else 180)
EXITS: dict[type, int] = {ReplayDiffers: 1, BadNumbers: 3, StorageError: 4, Interrupted: 130}
LISTS = {
    "methods": "method", "tasks": "task", "fleets": "fleet", "models": "model", "splits": "split", "graphs": "graph",
    "policies": "policy", "papers": "recipe",
}  # fmt: skip

ConfigFile = Annotated[Path | None, typer.Argument(help="A TOML file; flags and --set change what it says.")]
TaskName = Annotated[str | None, typer.Option(help="A task: `offbeat list tasks`, or module:function.")]
FleetName = Annotated[str | None, typer.Option(help="A fleet: `offbeat list fleets`, or module:function.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of the config, e.g. method.client_lr=0.1; repeatable.")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Until = Annotated[
    list[str] | None,
    typer.Option(
        help=f"When to stop, e.g. accuracy=0.9; repeatable. Limits: {', '.join(LIMITS)}. They replace the config's."
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace what an earlier run of this command left in --out.")
]
ChangedCode = Annotated[
    bool, typer.Option("--changed-code", help="Go on although code of your own that the run uses was changed.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


def merge(table: dict[str, Any], flags: dict[str, Any], sets: list[str], until: list[str]) -> dict[str, Any]:
    """A config's table with the flags and then each --set laid over it."""
    for name, given in flags.items():
        if given is None:
            continue
        named = name in ("method", "task", "fleet") and isinstance(table.get(name), dict)
        table[name] = table[name] | {"name": given} if named else given
    if until:
        table["until"] = dict(assignment("--until", text) for text in until)
    for text in sets:
        path, value = assignment("--set", text)
        place = table
        *parents, last = path.split(".")
        for depth, parent in enumerate(parents):
            inner = place.get(parent, {})
            if depth == 0 and parent in ("method", "task", "fleet") and parent not in place:
                inner = getattr(Experiment(), parent)
            place[parent] = dict(inner) if isinstance(inner, dict) else {"name": inner}
            place = place[parent]
        place[last] = value
    return table


def assignment(flag: str, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ConfigError([f"{flag} {text}: write it as key=value, e.g. {flag} commits=100"])
    return name.strip(), toml.parse_value(value.strip())


def split_pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ConfigError([f"{flag} {text}: write it as NAME=COMMAND, e.g. {flag} 'pfl=python pfl_protocol.py'"])
    return name.strip(), value.strip()


def print_outcome(outcome: Outcome, as_json: bool, out: Path | None) -> None:
    if as_json:
        print(json.dumps(strict(outcome.result)))
        return
    result = outcome.result
    target = next(iter(result["reached"]), None)
    report.show(
        f"{result['task']} on {result['fleet']}",
        report.COLUMNS,
        report.comparison_rows({result["method"]: [result]}, float(target) if target else None),
        console,
    )
    for kind, title in (("reached", "first reached"), ("reached_smoothed", "mean of 5 evaluations reached")):
        for target, at in result[kind].items():
            said = f"after {at['virtual_seconds']:,.2f} virtual s, commit {at['commit']}" if at else "not reached"
            console.print(f"{title} {target}: {said}", highlight=False)
    console.print(f"ended: {result['ended']}; {result['wall_seconds']:.1f} s on {result['device']}", highlight=False)
    if out is not None:
        console.print(f"run directory: {out}", highlight=False, soft_wrap=True)


@app.command()
def run(
    config: ConfigFile = None,
    method: Annotated[
        str | None, typer.Option(help="A method: `offbeat list methods`, or module:function of your own.")
    ] = None,
    task: TaskName = None,
    fleet: FleetName = None,
    seed: Annotated[int | None, typer.Option(help="Decides every random draw.")] = None,
    device: Device = None,
    until: Until = None,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for config, trace, metrics, result and model; new or empty.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Run one experiment.

    Example: offbeat run --method fedbuff --set method.buffer_size=5 --until accuracy=0.9 --until commits=500
    """
    flags = {"method": method, "task": task, "fleet": fleet, "seed": seed, "device": device}
    experiment = Experiment.of(merge(toml.read(config) if config else {}, flags, sets or [], until or []))
    label = f"{experiment.method} seed {experiment.seed}"
    print_outcome(run_experiment(experiment, out, Progress(label, experiment.until), overwrite), as_json, out)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="A run directory that `offbeat run --out` left.")],
    until: Until = None,
    changed_code: ChangedCode = False,
    as_json: Json = False,
) -> None:
    """Go on with a run that stopped; the result is the one the run would have had."""
    limits = dict(assignment("--until", text) for text in until or [])
    progress = Progress(str(directory), limits)
    print_outcome(resume_run(directory, limits or None, progress, changed_code), as_json, directory)


@app.command()
def replay(
    directory: Annotated[Path, typer.Argument(help="A finished run directory.")],
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="How far apart the models may be: the norm of the difference against that of the stored model. "
            "Left out: 0 where the run was made, elsewhere by its precision.",
            min=0.0,
        ),
    ] = None,
    changed_code: ChangedCode = False,
    as_json: Json = False,
) -> None:
    """Feed a stored trace to the policy again; fails unless it says the same and ends at the same model."""
    outcome, apart = repeat_run(directory, tolerance, changed_code)
    if as_json:
        print(json.dumps(strict({"same_commands": True, **apart.json(), **outcome.result})))
    else:
        model = "has the same bits" if apart.same_bits else f"{'is near' if apart.within else 'DIFFERS'}: {apart}"
        console.print(f"same commands over {outcome.commits} commits; model {model}", highlight=False, soft_wrap=True)
    if not apart.within:
        raise ReplayDiffers(f"the model of the replay differs from the stored one: {apart}", outcome, apart)


@app.command()
def compare(
    methods: Annotated[
        list[str] | None, typer.Argument(help="Methods to compare, or tables [methods.X] of --config.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; [methods.LABEL] tables give each method's options.")
    ] = None,
    task: TaskName = None,
    fleet: FleetName = None,
    seeds: Annotated[int, typer.Option(help="How many seeds, from the config's seed on.", min=1)] = 1,
    device: Device = None,
    until: Until = None,
    sets: Sets = None,
    out: Annotated[Path, typer.Option(help="Directory for the runs, the table and the picture.")] = Path(
        "runs/compare"
    ),
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Run several methods on the same task and fleet: one table, one picture, at equal time, commits and samples."""
    flags = {"task": task, "fleet": fleet, "device": device}
    table = merge(toml.read(config) if config else {}, flags, sets or [], until or [])
    labelled = table.pop("methods", {})
    if not isinstance(labelled, dict) or not all(isinstance(options, dict) for options in labelled.values()):
        raise ConfigError(["[methods] must hold one table per label, e.g. [methods.fedbuff]"])
    if "method" in table:
        raise ConfigError(["compare runs several methods; set options as methods.LABEL.option, not method.option"])
    chosen = methods or list(labelled)
    if not chosen:
        raise ConfigError(["nothing to compare; name methods, e.g. `offbeat compare fedbuff local-sgd`"])
    common = Experiment.of(table)
    experiments = {label: replace(common, method={"name": label, **labelled.get(label, {})}) for label in chosen}
    numbers = range(common.seed, common.seed + seeds)
    result = run_comparison(
        experiments, numbers, out, lambda label, e: Progress(f"{label} seed {e.seed}", e.until), overwrite
    )
    picture, written = result.write(
        out, f"{common.table()['task']['name']}, {common.table()['fleet']['name']} fleet, {seeds} seed(s)"
    )
    if as_json:
        runs = {label: [strict(o.result) for o in outcomes] for label, outcomes in result.outcomes.items()}
        print(json.dumps({"picture": str(picture), "table": str(written), "runs": runs}))
    else:
        report.show("comparison", report.COLUMNS, result.rows(), console)
        console.print(f"picture: {picture}\ntable:   {written}", highlight=False, soft_wrap=True)
    if result.broken():
        raise BadNumbers("\n".join(result.broken()))


@contextmanager
def writing(out: Path | None, suffix: str) -> Iterator[None]:
    """Refuses a name that is no file of this kind before the work, and says what went wrong with the file after it."""
    if out is not None and (out.is_dir() or out.suffix.lower() != suffix):
        raise ConfigError([f"--out {out}; give the name of a file, ending in {suffix}"])
    try:
        yield
    except OSError as error:
        if out is None or error.filename is None or not str(error.filename).startswith(str(out.parent)):
            raise
        raise OffbeatError(f"--out {out} cannot be written: {error.strerror}") from None


@app.command()
def measure(
    config: ConfigFile = None,
    method: Annotated[str | None, typer.Option(help="The method whose schedule is looked at.")] = None,
    task: TaskName = None,
    fleet: FleetName = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Measure at this model: a run directory or a file.")] = None,
    train: Annotated[int, typer.Option(help="Or train so many commits first.", min=0)] = 0,
    samples: Annotated[int, typer.Option(help="Samples of each client to look at; 0: all.", min=0)] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds of FedAvg for the path estimators.", min=1)] = 10,
    local_steps: Annotated[int, typer.Option(help="Local steps in each of them.", min=1)] = 10,
    client_lr: Annotated[float, typer.Option(help="Their rate.")] = 0.05,
    iterations: Annotated[int, typer.Option(help="Steps of power iteration beside the path; 0: none.", min=0)] = 0,
    advise: Annotated[str | None, typer.Option(help=f"What theory admits for: {', '.join(THEOREMS)}.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides every random draw.")] = None,
    device: Device = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="A JSON file for all of it.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a problem: curvature (L~, L_g, L_h), divergence (zeta, gamma, B), noise, clusters, staleness.

    Example: offbeat measure --task digits --train 50 --advise local-sgd
    """
    flags = {"method": method, "task": task, "fleet": fleet, "seed": seed, "device": device}
    experiment = Experiment.of(merge(toml.read(config) if config else {}, flags, sets or [], []))
    if advise is not None:
        asked_about(experiment, advise)  # what cannot be asked is said before anything is measured
    effort = Effort(samples or None, 8 if samples else None, rounds, local_steps, client_lr, iterations)
    with writing(out, ".json"):
        progress = Progress("measuring", {})
        try:
            found = run_measure(experiment, checkpoint, train, effort, progress)
        finally:
            progress.close()
        plan, counsels = run_advise(found, experiment, advise) if advise else (None, {})
        told = found.json()
        if plan is not None:
            told |= {"plan": asdict(plan), "advice": {name: counsel.json() for name, counsel in counsels.items()}}
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(strict(told), indent=1) + "\n")
    if as_json:
        print(json.dumps(strict(told)))
        return
    name = split_name("task", experiment.task)[0]
    report.show(f"{name}: loss {found.loss:.4g}", report.READINGS, report.reading_rows(found), console)
    for line in (found.verdict, *report.schedule_lines(found.schedule), *found.notes):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"{found.passes:.1f} passes over the data in {found.seconds:.1f} s", highlight=False)
    for name, counsel in counsels.items():
        for line in report.counsel_lines(name, counsel):
            console.print(line, highlight=False, soft_wrap=True, markup=False)


@app.command()
def clusters(
    config: ConfigFile = None,
    fleet: FleetName = None,
    clients: Annotated[int | None, typer.Option(help="Devices, where no task says; else 32.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Decides random graphs and links.")] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="A picture of the clusters: a PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Show a fleet's clusters: sizes, links, spectral gaps, and what the theory of HL-SGD asks of them.

    Example: offbeat clusters --fleet hlsgd --set 'fleet.clusters={count=4,graph="torus"}' --out clusters.png
    """
    flags = {"fleet": fleet, "seed": seed}
    experiment = Experiment.of(merge(toml.read(config) if config else {"fleet": "hlsgd"}, flags, sets or [], []))
    if found := seed_problems(experiment.seed):
        raise ConfigError(found)
    with writing(out, ".png"):
        told = experiment.task.get("clients") if isinstance(experiment.task, dict) else None
        if told is None and config is not None and clients is None:
            told = make_task(experiment).clients
        made = make_fleet(experiment, told if told is not None else clients or 32)
        if made.clusters is None:
            raise ConfigError([f"fleet '{made.name}' has no clusters; give it some: --set fleet.clusters=4"])
        rows = [
            {"cluster": number, "devices": one.size, "links": sum(graph.number_of_edges() for graph in one.graphs),
             "most_links": max(degree for graph in one.graphs for _, degree in graph.degree), "rho": one.rho,
             "gap": 1 - one.rho, "least_tau": hlsgd.least_tau(one.rho),
             "step_seconds": [float(made.step_seconds[list(one.members)].min()),
                              float(made.step_seconds[list(one.members)].max())]}
            for number, one in enumerate(made.clusters.each)
        ]  # fmt: skip
        if out is not None:
            plots.clusters(made, out)
    if as_json:
        print(json.dumps(strict({"rho_max": made.clusters.rho_max, "clusters": rows})))
        return
    shown = [[str(r["cluster"]), str(r["devices"]), str(r["links"]), str(r["most_links"]), f"{r['rho']:.4f}",
              f"{r['gap']:.4f}", f"{r['least_tau']:g}", "{:.3g} to {:.3g}".format(*r["step_seconds"])]
             for r in rows]  # fmt: skip
    columns = ("cluster", "devices", "links", "most of one", "rho", "1 - rho", "tau from", "s per step")
    report.show(f"{made.name}: {len(rows)} clusters, rho_max {made.clusters.rho_max:.4f}", columns, shown, console)
    console.print("tau from: the fewest local steps with which device sampling is covered, (7) of the HL-SGD paper")
    if out is not None:
        console.print(f"wrote {out}", highlight=False, soft_wrap=True)


@app.command("list")
def list_names(
    what: Annotated[str, typer.Argument(help="methods, tasks, fleets, models, splits, graphs, policies or papers.")],
    name: Annotated[str | None, typer.Argument(help="One of them, or module:function: its options.")] = None,
    as_json: Json = False,
) -> None:
    """List what a config may name; with a NAME, the options that it takes."""
    if what not in LISTS:
        raise ConfigError([unknown("list", what, LISTS)])
    if name is not None:
        show_options(what, name, as_json)
        return
    described = {known: first_line(known, thing) for known, thing in registry.names(LISTS[what]).items()}
    if as_json:
        print(json.dumps(described))
        return
    width = max(map(len, described))
    for known, text in described.items():
        console.print(f"{known:<{width}}  {text}", highlight=False, markup=False, soft_wrap=True)


def show_options(what: str, name: str, as_json: bool) -> None:
    thing = fleet_maker(name) if what == "fleets" else registry.find(LISTS[what], name)
    own = DEFAULTS.get(name, {}) if what == "tasks" else {}
    hidden = ("when", "data", "seed", "settings", "y", "owners", "input_shape", "outputs", "nodes")
    options = defaults(thing, hidden if what in ("methods", "tasks") else (*hidden, "clients")) | own
    if as_json:
        print(json.dumps({key: repr(value) for key, value in options.items()}))
        return
    console.print((thing.__doc__ or "").strip(), highlight=False, markup=False, soft_wrap=True)
    for key, value in options.items():
        console.print(f"  {key} = {toml.value(value)}", highlight=False, markup=False, soft_wrap=True)


def first_line(name: str, thing: Any) -> str:
    if name in DATA:
        thing = DATA[name]
    text = f"cannot be loaded: {thing}" if isinstance(thing, ConfigError) else (thing.__doc__ or "").strip()
    return text.splitlines()[0] if text else ""


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="A method or a policy: module:function of your own, or a known name.")],
    sets: Annotated[list[str] | None, typer.Option("--set", help="An option of it: name=value; repeatable.")] = None,
    alone: Annotated[
        list[str] | None,
        typer.Option(help="An option with which a method is plain SGD for one client: name=value; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Try every law on a method or policy of your own, and say in words which fail. Exit code 1 if one does.

    Example: offbeat check my_module:my_method --set n=3 --alone n=1
    """
    options, single = (dict(assignment(flag, text) for text in texts or [])
                       for flag, texts in (("--set", sets), ("--alone", alone)))  # fmt: skip
    findings = check_laws(name, options, single or None)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        for law, holds, said in findings:
            verdict = {True: "holds", False: "FAILS", None: "does not apply"}[holds]
            text = f"{verdict:<14}  {law}" + (f" {said}" if said else "")
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    if any(finding.holds is False for finding in findings):
        raise typer.Exit(1)


@app.command()
def paper(
    name: Annotated[str, typer.Argument(help="A recipe: `offbeat list papers`.")],
    only: Annotated[list[str] | None, typer.Option(help="Only these methods or data sets; repeatable.")] = None,
    n: Annotated[list[int] | None, typer.Option("--n", help="Only these values of n; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(help="Seeds 0 .. SEEDS-1.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, or tf32 on CUDA.")] = "float32",
    scale: Annotated[
        str, typer.Option(help="smoke (seconds, embedded data), small, or full (the paper's size).")
    ] = "small",
    out: Annotated[Path, typer.Option(help="Directory for tables and pictures.")] = Path("runs/papers"),
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Remake one table or figure of a paper; prints our figures beside the paper's."""
    registry.find("recipe", name)
    settings = Settings(tuple(only or ()), tuple(n or ()), seeds, device, precision, scale, out / file_name(name))
    with Folder(settings.out, "paper", overwrite) as folder, storing(settings.out):
        made = registry.make("recipe", name, settings)
        folder.add(made.files)
    if as_json:
        print(json.dumps(made.json()))
        return
    for table in made.tables:
        report.show(table.title, table.columns, table.rows, console)
    for note in made.notes:
        console.print(note, highlight=False, soft_wrap=True)
    for path in made.files:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


@app.command()
def bench(
    item: Annotated[list[str] | None, typer.Argument(help=f"Only these items: {', '.join(ITEMS)}.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, or tf32 or bf16 on CUDA.")] = "float32",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats: a look, not a figure.")] = False,
    others: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="NAME=COMMAND: another simulator for the protocol; its last line must be JSON with seconds_per_round.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A JSON file for the figures.")] = None,
    as_json: Json = False,
) -> None:
    """Measure speed: waves against PyTorch's plain loop, asynchronous against synchronous, the clock, the protocol.

    Example: offbeat bench waves asynchronous --device cuda --precision tf32 --out bench.json
    """
    wrong = option_problems("bench", Bench, {"precision": precision}, ("device", "quick", "others"))
    if wrong:
        raise ConfigError(wrong)
    given = tuple((name, str(command)) for name, command in (split_pair("--with", text) for text in others or []))
    settings = Bench(device, precision, quick, given)  # type: ignore[arg-type]
    if out is not None:
        if out.is_dir():
            raise ConfigError([f"--out {out} is a directory; name a JSON file"])
        out.parent.mkdir(parents=True, exist_ok=True)
    with Console(stderr=True).status("bench") as status:
        results = run_bench(tuple(item or ()), settings, lambda name: status.update(f"bench: {name}"))
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")
    if as_json:
        print(json.dumps(results))
        return
    where = f"{results['facts']['device']}, {precision}, torch {results['facts']['torch']}"
    for name in ITEMS:
        if name in results:
            report.show_records(f"{name}: {where}", results[name], console)
    if out is not None:
        console.print(f"wrote {out}", highlight=False, soft_wrap=True)


@app.callback(invoke_without_command=True)
def version(
    shown: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Train one model over many clients that keep no common time."""
    if shown:
        print(f"offbeat {__version__}")
        raise typer.Exit


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """The entry point: turns errors into sentences and exit codes."""
    signal.signal(signal.SIGTERM, interrupt)
    warnings.showwarning = lambda message, *_, **__: print(f"offbeat: {message}", file=sys.stderr)
    try:
        app()
    except ConfigError as error:
        for problem in error.problems:
            print(f"offbeat: {problem}", file=sys.stderr)
        sys.exit(2)
    except OffbeatError as error:
        print(f"offbeat: {error}", file=sys.stderr)
        sys.exit(EXITS.get(type(error), 2))


if __name__ == "__main__":
    main()
