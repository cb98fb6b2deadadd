"""What is used of PyTorch without its promise to keep it: all of it, where, and a test of each that names the version.

A new use fails the first test until it stands here; a new PyTorch that changed one fails the test of that one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional, parameter

import offbeat
from offbeat.numerics import transforms

SOURCE = Path(offbeat.__file__).parent
VERSION = f"PyTorch {torch.__version__} has changed it; it was as expected in 2.11 and 2.13"
USES = re.compile(
    r"\.(_[a-z]\w+)\b|\bimport (_[a-z]\w+)|\b(_[a-z]\w+)=|getattr\([^\n]*\"(_[a-z]\w+)\""  # attributes, names, options
    r"|nn\.modules\.\w+\.(_\w+)|torch\.(_VF)|torch\.ops\.(aten)\b|torch\.fx\.(experimental)|parameter\.(is_lazy)"
    r'|"(_orig_mod)"'
)
OTHERS = {  # of Python, NumPy and Ray, and Offbeat's own
    "_replace", "_asdict", "_fields", "_is_protocol", "_core", "_private", "_node_ip_address", "_apart",
}  # fmt: skip
OURS = re.compile(r"\bdef (_\w+)|\bself\.(_\w+)(?:: [^=\n]+)? =")  # methods and attributes
LISTED = {
    "_NormBase": {"numerics/buffers.py"},  # layers that keep running statistics
    "_backward_hooks": {"numerics/first_step.py", "numerics/replica.py"},  # on gradients, which waves would not call
    "_backward_pre_hooks": {"numerics/first_step.py"},
    "_post_accumulate_grad_hooks": {"numerics/first_step.py", "numerics/replica.py"},
    "_global_backward_hooks": {"numerics/first_step.py"},  # those of all modules
    "_global_backward_pre_hooks": {"numerics/first_step.py"},
    "_buffers": {"numerics/buffers.py", "numerics/replica.py", "numerics/snapshot.py"},  # one put back, or looked at
    "_version": {"numerics/buffers.py", "numerics/snapshot.py", "numerics/trial.py"},  # whether a tensor was written
    "_error_on_data_dependent_ops": {"engines/tiles.py"},  # traced steps may read a value
    "_op": {"engines/tiles.py"},  # an operation without what Python adds to it
    "_python_dispatch": {"numerics/first_step.py", "numerics/trial.py"},  # notices operations that draw, or factorise
    "_engine_run_backward": {"numerics/vector.py"},  # `torch.autograd.grad` without its imports
    "_functorch": {"engines/solver.py", "numerics/transforms.py"},  # which transforms are at work, and their warnings
    "_set_vmap_fallback_warning_enabled": {"engines/solver.py"},
    "_inductor": {"engines/settings.py"},  # whether the compiler is there already
    "_pytree": {  # trees of tensors
        "engines/captured.py", "engines/solver.py", "engines/tiles.py", "numerics/reference_loop.py",
        "numerics/evaluation.py", "numerics/forms.py", "numerics/mixing.py", "numerics/outputs.py",
        "numerics/trial.py", "numerics/wave.py", "experiments/sizes.py", "laws/of_methods.py",
        "tasks/inputs.py", "tasks/losses.py",
    },
    "_orig_mod": {"tasks/task_problems.py"},  # the module that torch.compile was given
    "_softmax_backward_data": {"numerics/fast/attention.py"},  # one kernel on a GPU
    "aten": {"engines/tiles.py", "numerics/fast/tokens.py"},  # operations by name, for traced steps
    "experimental": {"engines/tiles.py"},  # make_fx: steps as their bare operations
    "is_lazy": {"numerics/vector.py"},
    "_base": {"numerics/transforms.py"},  # what a tensor is a part of
}  # fmt: skip


def test_the_list_is_whole() -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    ours = {name for path in SOURCE.rglob("*.py") for pair in OURS.findall(path.read_text()) for name in pair}
    for path in sorted(SOURCE.rglob("*.py")):
        for match in USES.finditer(path.read_text()):
            name = next(group for group in match.groups() if group)
            if name not in OTHERS | ours:
                found[name].add(path.relative_to(SOURCE).as_posix())
    assert {name: files for name, files in found.items() if name not in LISTED} == {}
    unlisted = {name: found[name] - files for name, files in LISTED.items() if found[name] - files}
    assert unlisted == {}
    assert {name for name in LISTED if not found[name]} == set()


@pytest.mark.parametrize("name", LISTED)
def test_it_is_as_expected(name: str) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    if name == "_NormBase":
        assert isinstance(nn.BatchNorm1d(2), getattr(nn.modules.batchnorm, name)), VERSION
    elif name == "_backward_hooks":
        p = nn.Parameter(torch.zeros(2))
        assert not p._backward_hooks, VERSION
        p.register_hook(lambda g: g)
        assert p._backward_hooks, VERSION
        part = nn.Linear(2, 2)
        part.register_full_backward_hook(lambda *_: None)
        assert part._backward_hooks, VERSION
    elif name == "_backward_pre_hooks":
        part = nn.Linear(2, 2)
        assert not part._backward_pre_hooks, VERSION
        part.register_full_backward_pre_hook(lambda *_: None)
        assert part._backward_pre_hooks, VERSION
    elif name == "_post_accumulate_grad_hooks":
        p = nn.Parameter(torch.zeros(2))
        assert not p._post_accumulate_grad_hooks, VERSION
        p.register_post_accumulate_grad_hook(lambda p: None)
        assert p._post_accumulate_grad_hooks, VERSION
    elif name == "_global_backward_hooks":
        assert not nn.modules.module._global_backward_hooks, VERSION
        handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
        assert nn.modules.module._global_backward_hooks, VERSION
        handle.remove()
    elif name == "_global_backward_pre_hooks":
        handle = nn.modules.module.register_module_full_backward_pre_hook(lambda *_: None)
        assert nn.modules.module._global_backward_pre_hooks, VERSION
        handle.remove()
    elif name == "_buffers":
        norm, other = nn.BatchNorm1d(2), torch.ones(2)
        norm._buffers["running_mean"] = other
        assert norm.running_mean is other, VERSION
    elif name == "_version":
        t = torch.zeros(2)
        before = t._version
        t.add_(1)
        assert t._version > before, VERSION
    elif name == "_error_on_data_dependent_ops":
        from torch.fx.experimental.proxy_tensor import make_fx

        def read(t):  # type: ignore[no-untyped-def]
            return t * t.sum().item()

        traced = make_fx(read, _error_on_data_dependent_ops=False)(torch.ones(2))
        assert traced(torch.ones(2)).tolist() == [2, 2], VERSION
        with pytest.raises(RuntimeError):
            make_fx(read)(torch.ones(2))
    elif name == "_engine_run_backward":
        z = torch.randn(3, requires_grad=True)
        losses = (x * x).sum(dim=1)
        run = torch.autograd.graph._engine_run_backward
        found = run((losses,), (torch.ones_like(losses),), False, False, (x, z), True, accumulate_grad=False)
        assert torch.equal(found[0], 2 * x), VERSION
        assert found[1] is None, VERSION
    elif name == "_inductor":
        assert find_spec("torch._inductor.config") is not None, VERSION
    elif name == "_orig_mod":
        layer = nn.Linear(2, 2)
        assert dict(torch.compile(layer, backend="eager").named_children()) == {"_orig_mod": layer}, VERSION
    elif name == "_python_dispatch":
        from torch.utils._python_dispatch import TorchDispatchMode

        seen = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                seen.append(torch.Tag.nondeterministic_seeded in func.tags)
                return func(*args, **(kwargs or {}))

        with Watch():
            torch.rand(2)
        assert seen == [True], VERSION
    elif name == "_pytree":
        from torch.utils import _pytree as pytree

        leaves, form = pytree.tree_flatten({"a": (1, [2])})
        assert (leaves, pytree.tree_unflatten(leaves, form)) == ([1, 2], {"a": (1, [2])}), VERSION
    elif name in ("_functorch", "_set_vmap_fallback_warning_enabled"):
        levels = []
        torch.func.vmap(lambda t: levels.append(torch._C._functorch.peek_interpreter_stack().level()) or t)(x)
        assert levels == [1], VERSION
        assert torch._C._functorch.peek_interpreter_stack() is None, VERSION
        axes = []
        torch.func.vmap(lambda t: axes.append((*transforms.axes_inside(0), transforms.is_batchedtensor(t))) or t,
                        randomness="same")(x)  # fmt: skip
        assert axes == [(transforms.Axis(1, 2, "same"), True)], VERSION
        rows = torch.func.vmap(lambda t: t + transforms.axes_inside(0)[0].rows(torch.arange(2.0)))(x)
        assert torch.equal(rows, x + torch.arange(2.0)[:, None]), VERSION
        assert callable(torch._C._functorch._set_vmap_fallback_warning_enabled), VERSION
    elif name == "_softmax_backward_data":
        weights, g = functional.softmax(x, -1), torch.randn(2, 3)
        (slope,) = torch.autograd.grad(weights, x, g)
        assert torch.allclose(torch._softmax_backward_data(g, weights.detach(), -1, weights.dtype), slope), VERSION
    elif name == "aten":
        rows = torch.ops.aten.embedding_dense_backward(torch.ones(2, 3), torch.tensor([1, 1]), 4, -1, False)
        assert rows.sum(1).tolist() == [0, 6, 0, 0], VERSION
    elif name == "_op":
        assert callable(torch.ops.aten.addcmul_.default._op), VERSION
    elif name == "experimental":
        from torch.fx.experimental.proxy_tensor import make_fx

        traced = make_fx(lambda a: torch.sin(a) * 2)(x.detach())
        assert torch.equal(traced(x.detach()), torch.sin(x.detach()) * 2), VERSION
        assert [n.op for n in traced.graph.nodes] == ["placeholder", "call_function", "call_function", "output"], (
            VERSION
        )
    elif name == "_base":
        assert x._base is None, VERSION
        assert torch.zeros(3)[1:]._base is not None, VERSION
    elif name == "is_lazy":
        assert parameter.is_lazy(nn.LazyLinear(2).weight), VERSION
        assert not parameter.is_lazy(nn.Linear(2, 2).weight), VERSION
    else:
        pytest.fail(f"{name} has no test")
