"""One of each kind from outside the package, as module:function or added by an installed package: run, resumed and
replayed from the command line, or refused with a sentence."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbeat import Experiment, cli, run
from offbeat.cli.list_command import LISTS
from offbeat.config import registry
from offbeat.errors import ConfigError
from offbeat.fleets.make import build as build_fleet
from offbeat.runs.manifest import read_manifest

MINE = '''
"""One of each kind, of one's own."""
from dataclasses import dataclass, replace

import numpy as np
import torch

from offbeat import Buffer, Callback, Method, Rule, metric
from offbeat.fleets.synthetic import equal
from offbeat.papers.recipe import Cell, Recipe, Training
from offbeat.theory.constants import Advice, Condition
from offbeat.numerics import local
from offbeat.tasks.quadratic import quadratic, random_quadratic


def halves(buffer_size: int = 3, local_steps: int = 2, client_lr: float = 0.1, when=None) -> Method:
    """Half of the mean."""

    def commit(w, updates, cohort):
        return {"model": w["model"] - 0.5 * updates["delta"].mean(dim=0)}

    rule = Rule(local.sgd(client_lr, None), commit=commit, init=lambda model: {"model": model})
    return Method("halves", when or Buffer(buffer_size, local_steps), rule)


@dataclass(frozen=True)
class Pairs(Buffer):
    """Commits of two."""

    size: int = 2
    steps: int | None = 1


def bowls(seed: int, clients: int = 6, dimension: int = 3):
    """Quadratics."""
    matrices, linear = random_quadratic(clients, dimension, 1.0, seed=seed)
    return quadratic(matrices, linear, None, 0.0, 1, seed)


def narrow(input_shape, outputs: int, width: int = 3):
    """A small network."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.Linear(width, outputs))


def strided(y, clients, seed, owners=None, skip: int = 0):
    """Every so many-th sample."""
    return [np.arange(skip + client, len(y), clients) for client in range(clients)]


def twice_as_slow(clients: int = 100, seed: int = 0, factor: float = 2.0):
    """An equal fleet, slower."""
    fleet = equal(clients, seed)
    return replace(fleet, step_seconds=fleet.step_seconds * factor)


value = 3


def nothing() -> None:
    return None


def breaks() -> Method:
    raise ValueError("no luck")


class Watching(Callback):
    """Watches."""


@metric(more_is_better=False)
def wrong(outputs, targets):
    """The share of wrong ones."""
    return (outputs.argmax(-1) != targets).float().mean()


def small_rates(constants, plan):
    """A theorem on halves."""
    condition = Condition("rate", "lr <= 0.2", plan.client_lr or 0.2, 0.2)
    return Advice("On halves", 0.2, 1.0, None, "the loss", (condition,))


@dataclass(frozen=True)
class Halved:
    """Half the bytes."""

    name: str = "halved"

    def encode(self, vector, key):
        return (vector.half(),)

    def decode(self, parts):
        return parts[0]

    def bytes(self, dimension):
        return 2 * dimension


def cell(method, size):
    work = Training({"name": method, "buffer_size": size, "local_steps": 2}, {"name": "digits", "clients": 6}, "equal",
                    {"commits": 3}, client_steps=36, pace="lr")
    return Cell(f"{method} b={size}", work, {"commits": 3.0})


RECIPE = Recipe("mine-table1", "Mine: commits of two buffers", "Table 1: what two buffers come to.",
                ("method", "buffer"), (cell("fedbuff", 2), cell("fedbuff", 3)), ("commits",), seeds=1)


def recipe():
    """The same, made anew."""
    return RECIPE


def ring(nodes, seed):
    """A ring."""
    import networkx

    return networkx.cycle_graph(nodes)


def leaves() -> Method:
    raise SystemExit(3)


def divides() -> Method:
    """Fails in the middle of a run."""
    rule = halves().what
    return Method("divides", Buffer(2, 2), replace(rule, commit=lambda w, updates, cohort: 1 / 0))
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with a module `mine` in it that is on no path, as for the installed command."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def offbeat(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable]:
    """`offbeat ARGUMENTS`, with nothing of `mine` in memory from before: (exit code, stdout, stderr)."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments: object) -> tuple[int, str, str]:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "parts", "packed")]:
            del sys.modules[name]
        monkeypatch.setattr(sys, "argv", ["offbeat", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert str(here) not in sys.path
        return ended.value.code, out, err

    yield call
    signal.signal(signal.SIGTERM, handler)


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, points: str, name: str = "packed") -> None:
    """An installed package with these entry points."""
    info = folder / "site" / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(points))
    (folder / "site" / f"{name}.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(folder / "site"))


DIGITS = ("--set", "task.clients=6", "--device", "cpu", "--until", "commits=4")
ONE_OF_EACH = {
    "method": ("--task", "quadratic", "--method", "mine:halves", "--set", "method.buffer_size=2", *DIGITS),
    "policy": ("--task", "quadratic", "--set", 'method.when={policy="mine:Pairs", steps=3}', *DIGITS),
    "task": ("--task", "mine:bowls", "--set", "task.dimension=4", "--set", "method.buffer_size=2", *DIGITS),
    "model": ("--set", 'task.model={name="mine:narrow", width=2}', "--set", "method.buffer_size=2", *DIGITS),
    "split": ("--set", 'task.split={name="mine:strided", skip=1}', "--set", "method.buffer_size=2", *DIGITS),
    "fleet": ("--task", "quadratic", "--fleet", "mine:twice_as_slow", "--set", "fleet.local_steps=2",
              "--set", "method.buffer_size=2", "--set", "fleet.factor=3", *DIGITS),
    "graph": ("--method", "hl-sgd", "--fleet", "hlsgd", "--set", 'fleet.clusters={count = 2, graph = "mine:ring"}',
              *DIGITS),
    "stage": ("--task", "quadratic", "--set", 'method.stages={up = "mine:Halved"}', "--set", "method.buffer_size=2",
              *DIGITS),
    "metric": ("--metric", "mine:wrong", "--set", "method.buffer_size=2", *DIGITS),
    "callback": ("--callback", "mine:Watching", "--set", "method.buffer_size=2", *DIGITS),
}  # fmt: skip


def test_a_split_with_too_few_shards_is_named(offbeat: Callable, here: Path) -> None:
    (here / "few.py").write_text("def few(y, clients, seed, owners=None):\n    return [[0, 1], [2, 3]]\n")
    code, _, err = offbeat("run", "--set", "task.split=few:few", *DIGITS)
    assert (code, err) == (
        2,
        "offbeat: split 'few:few' gives 2 shards for 6 clients; it must give one for each\n",
    )


THEOREM = """
from offbeat.theory.constants import Advice, Condition, known

def few_steps(constants, plan):
    "No more local steps than clients."
    (smoothness,) = known(constants, plan, "smoothness")
    few = Condition("(1)", "K <= N", plan.local_steps, constants.clients)
    return Advice("mine, Theorem 1", 1 / smoothness, 1.0, None, "nothing", (few,))

def broken(constants, plan):
    return plan.nothing
"""


def test_a_theorem_of_ones_own_is_asked_about_any_method(offbeat: Callable, here: Path) -> None:
    (here / "mine.py").write_text(MINE + THEOREM)
    line = ("measure", "--task", "quadratic", "--set", "task.clients=6", "--rounds", "1", "--device", "cpu")
    named = ("--theorem", "mine:few_steps")
    code, out, err = offbeat(*line, "--method", "mine:halves", "--advise", "mine:halves", *named, "--json")
    assert (code, err) == (0, "")
    advice = json.loads(out)["advice"]
    assert list(advice) == ["mine:few_steps"]
    assert advice["mine:few_steps"]["own"]["conditions"][0]["given"] == 2
    code, _, err = offbeat(*line, "--advise", "fedprox")
    assert code == 2
    assert "a theorem of your own is --theorem module:function" in err
    code, _, err = offbeat(*line, "--method", "scaffold", "--advise", "scaffold", "--theorem", "mine:broken")
    assert code == 2
    assert "theorem 'mine:broken' stopped with AttributeError" in err
    code, _, err = offbeat(*line, *named)
    assert code == 2
    assert "--advise METHOD" in err
    code, out, _ = offbeat("list", "theorems", "mine:few_steps")
    assert code == 0
    assert "No more local steps than clients" in out


FLEETS = """
import numpy as np
from offbeat import Fleet


def plain(clients, seed, *, base, share=0.5):
    zero = np.zeros(clients)
    seconds = np.where(np.arange(clients) < share * clients, base, 10 * base)
    return Fleet("plain", clients, seconds, zero, zero, zero + 1e6, zero + 1e6)


def fewer(clients, seed):
    return plain(3, seed, base=0.1)


def lists(clients, seed):
    return Fleet("lists", clients, *[[0.1] * clients] * 5)


def nameless(n, seed):
    return plain(n, seed, base=0.1)
"""


def test_options_reach_a_fleet_whose_clients_and_seed_have_no_defaults(offbeat: Callable, here: Path) -> None:
    (here / "fleets.py").write_text(FLEETS)
    options = {"base": 0.5, "share": 0.25, "clusters": 2, "local_steps": 3}
    fleet = build_fleet("fleets:plain", 8, 0, **options)
    assert fleet.step_seconds.tolist() == [0.5] * 2 + [5.0] * 6
    assert fleet.clusters is not None
    assert fleet.local_steps is not None
    code, _, err = offbeat(
        "run", "--fleet", "fleets:plain", "--set", "fleet.shar=0.1", *DIGITS, "--set", "method.buffer_size=2"
    )
    assert code == 2
    assert err.splitlines() == [
        "offbeat: unknown option of fleet 'fleets:plain' 'shar': did you mean 'share'? Known: base, clusters, "
        "local_steps, share",
        "offbeat: fleet 'fleets:plain': base is missing; it has no default",
    ]


@pytest.mark.parametrize("more", [(), ("--set", "fleet.clusters=2", "--set", "fleet.local_steps=3")])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fewer", "fleet 'fleets:fewer': it has 3 clients where 6 were asked for; they must be the same"),
        ("lists", "fleet: step_seconds = [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]; it must be a NumPy array of numbers"),
        ("nameless", "fleet 'fleets:nameless' has no parameter clients; it is called with clients and seed"),
    ],
)
def test_a_fleet_that_cannot_be_used_is_a_sentence(
    name: str, said: str, more: tuple[str, ...], offbeat: Callable, here: Path
) -> None:
    (here / "fleets.py").write_text(FLEETS)
    code, _, err = offbeat("run", "--fleet", f"fleets:{name}", *more, *DIGITS)
    assert code == 2
    assert said in err


GRAPHS = """
import networkx


def tailed(nodes, seed, *, tail=0):
    return networkx.lollipop_graph(nodes - tail, tail)


def large(nodes, seed):
    return [networkx.path_graph(nodes + 1)]


def links(nodes, seed):
    return {0: 1}


def breaks(nodes, seed):
    raise ValueError("no luck")
"""


def test_a_graph_of_ones_own_runs_and_replays(offbeat: Callable, here: Path) -> None:
    (here / "drawn.py").write_text(GRAPHS)
    clusters = 'fleet.clusters={count = 2, graph = {name = "drawn:tailed", tail = 1}}'
    code, _, err = offbeat("run", "--method", "hl-sgd", "--fleet", "hlsgd", "--set", clusters, *DIGITS, "--out", "r")
    assert (code, err) == (0, "")
    assert list(read_manifest(here / "r").sources) == ["graph drawn:tailed"]
    assert offbeat("replay", "r")[0] == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "large",
            "gives Graph with 7 nodes and 6 edges; it must give networkx graphs of the nodes 0 to 5, one or more",
        ),
        ("links", "gives {0: 1}; it must give networkx graphs of the nodes 0 to 5, one or more"),
        ("breaks", ": stopped with ValueError: no luck (line"),
    ],
)
def test_a_graph_that_cannot_be_used_is_a_sentence(name: str, said: str, here: Path) -> None:
    (here / "drawn.py").write_text(GRAPHS)
    with pytest.raises(ConfigError) as error:
        build_fleet("equal", 6, clusters={"count": 1, "graph": f"drawn:{name}"})
    assert f"fleet 'equal': cluster 0: graph 'drawn:{name}'" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_one_of_each_runs_resumes_and_replays_from_the_command_line(kind: str, offbeat: Callable, here: Path) -> None:
    code, out, err = offbeat("run", *ONE_OF_EACH[kind], "--out", "r", "--json")
    assert (code, err) == (0, ""), err
    assert json.loads(out)["commits"] == 4
    sources = read_manifest(here / "r").sources
    assert [key.split(":")[0] for key in sources] == [f"{kind} mine"]
    code, out, err = offbeat("resume", "r", "--until", "commits=6", "--json")
    assert (code, err, json.loads(out)["commits"]) == (0, "", 6)
    code, out, err = offbeat("replay", "r", "--json")
    assert (code, err, json.loads(out)["same_bits"]) == (0, "", True)
    with (here / "mine.py").open("a") as file:
        file.write("# another line\n")
    for command in ("replay", "resume"):
        code, _, err = offbeat(command, "r")
        assert code == 2
        assert f"the code of {kind} mine:" in err
        assert "was changed" in err
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = offbeat("replay", "r", "--changed-code")
    assert code == 0
    assert "was changed" in err


def test_a_config_file_names_it_too(offbeat: Callable, here: Path) -> None:
    (here / "run.toml").write_text('[method]\nname = "mine:halves"\nbuffer_size = 2\n[until]\ncommits = 3\n')
    code, out, err = offbeat("run", "run.toml", "--set", "task.clients=6", "--device", "cpu", "--json")
    assert (code, err, json.loads(out)["method"]) == (0, "", "halves")


def test_limits_that_are_no_table_are_a_sentence(offbeat: Callable, here: Path) -> None:
    (here / "run.toml").write_text('until = "soon"\n')
    assert offbeat("run", "run.toml")[::2] == (2, "offbeat: until = 'soon'; it must be a table\n")


def test_equal_runs_have_equal_configs_and_the_options_are_written(offbeat: Callable, here: Path) -> None:
    for out in ("one", "two"):
        assert offbeat("run", *ONE_OF_EACH["method"], "--out", out)[0] == 0
    text = (here / "one" / "config.toml").read_text()
    assert text == (here / "two" / "config.toml").read_text()
    assert 'name = "mine:halves"\nbuffer_size = 2\nlocal_steps = 2\nclient_lr = 0.1\n' in text


def test_compare_takes_it_beside_shipped_ones(offbeat: Callable, here: Path) -> None:
    both = ("mine:halves", "fedasync")
    code, out, err = offbeat("compare", *both, "--task", "quadratic", *DIGITS, "--out", "c", "--json")
    assert (code, err, set(json.loads(out)["runs"])) == (0, "", set(both))


def test_choose_takes_it_too(offbeat: Callable, here: Path) -> None:
    brief = ("--set", "task.clients=12", "--budget", "commits=4", "--trials", "1", "--seeds", "1", "--device", "cpu")
    code, out, err = offbeat("choose", "--task", "digits", *brief, "--method", "mine:halves", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["recommended"]["name"] == "mine:halves"
    code, _, err = offbeat("choose", "--task", "digits", *brief, "--method", "mine:halvse")
    assert (code, "did you mean 'halves'?" in err) == (2, True)


def test_entry_points_add_names(offbeat: Callable, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = """
        [offbeat.methods]
        halves = packed:halves
        fedbuff = packed:breaks
        lost = packed:lost
        [offbeat.fleets]
        slow = packed:twice_as_slow
    """
    package(here, monkeypatch, points)
    listed = json.loads(offbeat("list", "methods", "--json")[1])
    assert listed["halves"] == "Half of the mean."
    assert listed["fedbuff"].startswith("w <- w")  # what ships keeps its name
    assert "cannot be loaded" in listed["lost"]
    assert "buffer_size = 3" in offbeat("list", "methods", "halves")[1]
    assert 'local_steps = "none"' in offbeat("list", "fleets", "slow")[1]
    code, _, err = offbeat("run", "--method", "halves", "--fleet", "slow", *DIGITS, "--out", "r")
    assert (code, err) == (0, "")
    assert list(read_manifest(here / "r").sources) == ["method halves", "fleet slow"]
    assert offbeat("replay", "r")[0] == 0
    package(here, monkeypatch, "[offbeat.methods]\nhalves = other:halves\n", "other")
    code, _, err = offbeat("run", "--method", "halves", *DIGITS)
    assert code == 2
    assert "two installed packages have a method 'halves'" in err


def test_a_metric_is_known_by_the_file_that_has_its_function(here: Path) -> None:
    with registry.recording() as sources:
        registry.find("metric", "mine:wrong")
        registry.find("method", "mine:halves")
    assert sources["metric mine:wrong"] == sources["method mine:halves"]


MEASURE = ("measure", "--task", "quadratic", "--set", "task.clients=6", "--rounds", "1", "--device", "cpu")
BY_NAME = {kind: ("run", *arguments) for kind, arguments in ONE_OF_EACH.items()}
BY_NAME |= {
    "theorem": (*MEASURE, "--method", "mine:halves", "--advise", "mine:halves", "--theorem", "mine:small_rates"),
    "recipe": ("paper", "mine:RECIPE", "--size", "smoke", "--device", "cpu"),
}


@pytest.mark.parametrize("kind", registry.KINDS)
def test_entry_points_name_one_of_each_kind(
    kind: str, offbeat: Callable, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {
        "method": "halves", "policy": "Pairs", "task": "bowls", "model": "narrow", "split": "strided", "graph": "ring",
        "fleet": "twice_as_slow", "stage": "Halved", "metric": "wrong", "callback": "Watching",
        "theorem": "small_rates", "recipe": "RECIPE",
    }  # fmt: skip
    assert named.keys() == BY_NAME.keys() == registry.KINDS.keys()
    package(here, monkeypatch, f"[offbeat.{registry.KINDS[kind].group}]\nown-one = packed:{named[kind]}\n")
    code, _, err = offbeat(*(word.replace(f"mine:{named[kind]}", "own-one") for word in BY_NAME[kind]))
    assert (code, err) == (0, "")
    listed = next(group for group, word in LISTS.items() if word == kind)
    assert json.loads(offbeat("list", listed, "--json")[1])["own-one"]
    code, _, err = offbeat(*(word.replace(f"mine:{named[kind]}", "own-noe") for word in BY_NAME[kind]))
    assert (code, "did you mean 'own-one'?" in err) == (2, True)


@pytest.mark.parametrize("name", ["mine:RECIPE", "mine:recipe"])
def test_a_recipe_of_ones_own_takes_every_flag(name: str, offbeat: Callable, here: Path) -> None:
    paper = ("paper", name, "--size", "smoke", "--device", "cpu", "--only", "b=2")
    code, out, err = offbeat(*paper, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["figures"][0]["values"]["commits"] == 4  # as many as the smoke size has
    (line,) = json.loads(offbeat(*paper, "--cells", "--json")[1])
    assert (line["recipe"], line["cell"], line["seed"]) == ("mine-table1", "fedbuff b=2", 0)
    (here / "results").mkdir()
    code, out, _ = offbeat(*paper, "--resume", "--minutes", "5")
    assert (code, "1 cells were run; their records are in results/papers" in out) == (0, True)
    (record,) = json.loads((here / "results/papers/mine-table1.json").read_text())
    assert record["command"].startswith(f"offbeat paper {name} --only 'fedbuff b=2'")
    assert json.loads(offbeat(*paper, "--cells", "--json")[1]) == []
    assert [line["cell"] for line in json.loads(offbeat("paper", name, "--status", "--json")[1])] == [
        "fedbuff b=2",
        "fedbuff b=3",
    ]
    code, out, err = offbeat("paper", name, "--page")
    assert (code, err) == (0, "")
    page = (here / "results/README.md").read_text()
    assert f"Made by `offbeat paper {name} --page`" in page
    assert "### Mine: commits of two buffers" in page
    assert "DLSGD" not in page
    assert "Table 1" in offbeat("list", "papers", "mine:RECIPE")[1]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("R = 3", "is 3; name a recipe, or a function that gives one"),
        ("def R(): return 3", "gives 3; it must give a Recipe"),
        ("def R(settings): return RECIPE", "stopped with TypeError"),
        ("R = replace(RECIPE, name='dlsgd-table2')", "its name is 'dlsgd-table2', as that of one that ships"),
        ("R = replace(RECIPE, name='../up')", "its name '../up' is no name of a file"),
        ("R = replace(RECIPE, kinds=('method',))", "cell 'fedbuff b=2' has 2 words, for the kinds method"),
        ("R = replace(RECIPE, cells=RECIPE.cells[:1] * 2)", "cell 'fedbuff b=2' is there twice"),
        ("R = replace(RECIPE, cells=())", "it has no cells"),
        ("R = replace(RECIPE, cells=(replace(RECIPE.cells[0], work=print, pace='snail'),))", "unknown pace 'snail'"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_a_sentence(lines: str, said: str, offbeat: Callable, here: Path) -> None:
    (here / "mine.py").write_text(f"{MINE}\n{lines}\n")
    code, _, err = offbeat("paper", "mine:R", "--cells")
    assert (code, "recipe 'mine:R'" in err, said in err) == (2, True, True), err


def test_all_recipes_at_once_are_not_remade(offbeat: Callable) -> None:
    code, _, err = offbeat("paper", "all")
    assert (code, "name one, or give --cells" in err) == (2, True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere:f", "there is no module nowhere among the installed packages and in"),
        ("mine:halve", "did you mean 'halves'?"),
        ("mine:value", "name a function that gives a method"),
        ("mine:nothing", "gives None; it must give a Method"),
        ("mine:breaks", "stopped with ValueError: no luck (line"),
        ("mine:leaves", "stopped with SystemExit: 3 (line"),
        ("mine:strided", "y is missing"),
        ("mine:", "is written module:function"),
        ("../mine:halves", "is written module:function"),
        ("__main__:halves", "put the function into a module"),
        ("raises:f", "raises stopped while it was imported, with ZeroDivisionError: division by zero (line 1"),
        ("leaves:f", "leaves stopped while it was imported, with SystemExit: 3"),
        ("lacks:f", "lacks needs a module that is not there: nowhere_at_all"),
        ("halvse", "unknown method 'halvse'"),
    ],
)
def test_what_cannot_be_found_or_used_is_a_sentence(name: str, said: str, here: Path) -> None:
    (here / "raises.py").write_text("1 / 0\n")
    (here / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (here / "lacks.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ConfigError) as error:
        run(Experiment(method=name, device="cpu"))
    assert said in str(error.value)
    assert str(here) not in sys.path


def test_code_of_ones_own_that_fails_in_a_run_is_a_sentence(
    offbeat: Callable, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "outside", {})
    code, _, err = offbeat("run", "--method", "mine:divides", *DIGITS)
    line = next(i for i, text in enumerate(MINE.splitlines(), 1) if "1 / 0" in text)
    assert code == 2
    assert f"it stopped with ZeroDivisionError: division by zero (line {line} of {here / 'mine.py'})" in err
    assert "code of your own (method mine:divides)" in err
    code, _, err = offbeat("check", "mine:breaks")
    assert (code, "method 'mine:breaks' stopped with ValueError: no luck" in err) == (2, True)


def test_options_are_checked_by_the_functions_parameters(here: Path) -> None:
    method = {"name": "mine:halves", "buffer": 3, "client_lr": "fast"}
    with pytest.raises(ConfigError) as error:
        run(Experiment(method=method, device="cpu"))
    first, second = error.value.problems
    assert "unknown option of mine:halves 'buffer': did you mean 'buffer_size'?" in first
    assert "client_lr = 'fast'; it must be a number" in second


@pytest.mark.parametrize("on_path", [False, True])
def test_no_code_is_taken_from_a_run_directory(
    on_path: bool, offbeat: Callable, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offbeat("run", *ONE_OF_EACH["method"], "--out", "r")[0] == 0
    (here / "r" / "planted.py").write_text("raise SystemExit(77)\n")
    monkeypatch.chdir(here / "r")
    if on_path:  # as with `python -m offbeat`
        monkeypatch.syspath_prepend(str(here / "r"))
    with pytest.raises(ConfigError) as error:
        registry.find("method", "planted:f")
    said = "lies in the run directory" if on_path else "there is no module planted"
    assert said in str(error.value)


def test_a_function_of_another_module_is_followed_to_its_file(offbeat: Callable, here: Path) -> None:
    (here / "parts.py").write_text("from mine import halves\n")
    assert offbeat("run", "--method", "parts:halves", *DIGITS, "--out", "r")[0] == 0
    with (here / "mine.py").open("a") as file:
        file.write("# another line\n")
    code, _, err = offbeat("replay", "r")
    assert code == 2
    assert "method parts:halves was changed" in err


def test_a_policy_object_of_ones_own_is_written_so_that_it_can_be_read(here: Path) -> None:
    pairs = registry.find("policy", "mine:Pairs")
    table = Experiment(method={"name": "fedbuff", "when": pairs(steps=4)}).table()["method"]["when"]
    assert table == {
        "policy": "mine:Pairs",
        "size": 2,
        "steps": 4,
        "concurrency": None,
        "restart": "newest",
        "overlap": False,
    }


def test_check_says_which_laws_hold(offbeat: Callable, here: Path) -> None:
    (here / "mine.py").write_text(MINE.replace('updates["delta"].mean(dim=0)', 'updates["delta"][0]'))
    code, out, _ = offbeat("check", "mine:halves", "--set", "local_steps=1", "--alone", "buffer_size=1")
    assert code == 1
    verdicts = [line.split("  ")[0] for line in out.splitlines()]
    assert verdicts.count("FAILS") == 2  # half of the first is neither of any order nor plain SGD
    assert "FAILS           The order of the updates in a commit does not matter. with the updates" in out
    code, out, _ = offbeat("check", "mine:Pairs", "--json")
    assert (code, {finding["holds"] for finding in json.loads(out)}) == (0, {True})
    assert "unknown option of mine:Pairs" in offbeat("check", "mine:Pairs", "--set", "sise=3")[2]
    code, _, err = offbeat("check", "mine:halves", "--alone", "sise=3")
    assert (code, "unknown option of mine:halves 'sise'" in err) == (2, True)
