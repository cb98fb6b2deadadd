"""What is imported when: the public names on their first use, PyTorch and its like only by who computes."""

import ast
import inspect
import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import offbeat
from offbeat import cli

HEAVY = ("torch", "numpy", "scipy", "networkx", "pandas", "matplotlib", "sklearn", "pyarrow", "safetensors", "rich")
COMMANDS = (*cli.COMMANDS, "fleet")


def loaded_after(actions):
    """A fresh process does one line of Python after another: which heavy packages are there after each."""
    script = (
        "import contextlib, io, json, sys\n"
        "def offbeat(*arguments):\n"
        "    from offbeat import cli\n"
        "    sys.argv = ['offbeat', *arguments]\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        with contextlib.redirect_stderr(out):\n"
        "            cli.main()\n"
        "    assert out.getvalue(), arguments\n"
        f"actions, heavy, loaded = {list(actions)!r}, {HEAVY!r}, {{}}\n"
        "for action in actions:\n"
        "    exec(action)\n"
        "    loaded[action] = [name for name in heavy if name in sys.modules]\n"
        "print(json.dumps(loaded))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_schedule_the_contract_and_what_is_checked_first_are_light():
    words = ("choices", "options", "registry", "room", "toml")
    names = ("errors", "records", "keys", "method", "theory.theorems", "bench", *(f"config.{name}" for name in words))
    policies = (
        "agenda",
        "buffer",
        "clock",
        "commands",
        "device",
        "guard",
        "horizon",
        "hybrid",
        "pool",
        "rounds",
        "sampled",
    )
    names += ("schedule", *(f"schedule.{name}" for name in (*policies, "ticks", "trace")), "runs.target")
    actions = ["import offbeat", *(f"import offbeat.{name}" for name in names)]
    actions += [f"offbeat.{name}" for name in ("Buffer", "Method", "Rounds", "ReplayDiffers", "Sampled")]
    loaded = loaded_after([*actions, "import offbeat.fleets.distributions"])
    assert loaded.pop("import offbeat.fleets.distributions") == ["numpy", "scipy"]  # that a heavy one is seen
    assert loaded == {action: [] for action in actions}


def test_help_and_plain_mistakes_do_not_wait_for_pytorch(tmp_path):
    (tmp_path / "bad.toml").write_text("seed = = 3")
    lines = [(), ("--help",), ("--version",), ("rn",), ("--verson",), ("run", "--sed", "3"), ("list", "method")]
    lines += [(name, "--help") for name in COMMANDS]
    lines += [("run", str(tmp_path / "bad.toml")), ("resume", "x", "--until", "y"), ("compare", "--config", "nowhere")]
    actions = [f"offbeat{line!r}" if len(line) != 1 else f"offbeat({line[0]!r})" for line in lines]
    assert loaded_after(actions) == {action: [] for action in actions}


def test_a_run_does_not_wait_for_what_it_does_not_need():
    """PyTorch's compiler alone takes longer to import than a small run takes."""
    idle = (
        "torch._dynamo",
        "torch._inductor",
        "sympy",
        "scipy.stats",
        "sklearn",
        "matplotlib",
        "optuna",
        "ray",
        "grpc",
    )
    script = (
        "import sys, torch\n"
        f"idle = {idle!r}\n"
        "before = {name for name in idle if name in sys.modules}\n"
        "from offbeat import Experiment, run\n"
        "task = {'name': 'quadratic', 'clients': 6}\n"
        "run(Experiment({'name': 'local-sgd', 'n': 3}, task, until={'commits': 3}, device='cpu'))\n"
        "print(sorted({name for name in idle if name in sys.modules} - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize("name", offbeat.__all__)
def test_public_names_are_the_things_themselves(name):
    value = getattr(offbeat, name)
    assert value is getattr(import_module(offbeat._HOME[name]), name)
    assert name in dir(offbeat)
    assert find_spec(f"offbeat.{name}") is None  # a module of that name would take its place once imported
    if inspect.isclass(value) or inspect.isfunction(value):
        assert pickle.loads(pickle.dumps(value)) is value
        assert inspect.getsource(value)


def test_type_checkers_and_python_find_the_same_names():
    tree = ast.parse(inspect.getsource(offbeat))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {node.module: tuple(alias.name for alias in node.names) for node in block.body}
    assert seen == {f"offbeat.{module}": names for module, names in offbeat._HOMES.items()}
    assert set(offbeat.__all__) == set(offbeat._HOME)
    assert offbeat.__all__ == sorted(offbeat._HOME, key=lambda name: (not name.isupper(), name))
    everything = {}
    exec("from offbeat import *", everything)
    assert set(offbeat.__all__) <= set(everything)


def test_other_names_are_refused_and_modules_are_found():
    with pytest.raises(AttributeError, match="module 'offbeat' has no attribute 'Experimant'"):
        offbeat.Experimant  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Experimant'"):
        exec("from offbeat import Experimant")
    from offbeat.config import toml

    assert toml is sys.modules["offbeat.config.toml"]


def test_no_two_files_have_one_name_and_two_meanings():
    """A paper's name may recur, once per room; `make` builds what its room holds, by name."""
    root = Path(offbeat.__file__).parent
    papers = {"dlsgd", "fedagrac", "fedavg", "fedbuff", "hlsgd", "heterogeneity"}
    names = Counter(path.stem for path in root.rglob("*.py"))
    rooms = {path.name for path in root.iterdir() if path.is_dir()}
    twice = {name for name, count in names.items() if count + (name in rooms) > 1}
    assert twice - papers == {"__init__", "make"}


def test_the_map_has_every_room_and_what_pages_name_is_there():
    root, docs = Path(offbeat.__file__).parent, Path(__file__).parents[1] / "docs"
    rooms = {path.stem for path in root.iterdir() if path.suffix in ("", ".py") and not path.name.startswith("_")}
    picture = (docs / "map.md").read_text().split("```")[1]
    assert rooms - set(re.findall(r"\w+", picture)) == set()
    named = {name for page in docs.glob("*.md") for name in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text())}
    named = {name for name in named if name.split("/")[0] in rooms}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (root / name).is_file()] == []
