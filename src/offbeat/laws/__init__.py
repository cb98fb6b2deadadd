"""The table of laws, for methods, policies and stages of anyone: `offbeat check module:function`, or in a test

@pytest.mark.parametrize("law", law_cases(my_method), ids=str)
def test_my_method(law):
    law()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from offbeat.config import registry
from offbeat.config.options import option_problems
from offbeat.errors import ConfigError
from offbeat.experiments.assemble import build_method, build_policy
from offbeat.laws import of_methods, of_policies, of_stages
from offbeat.laws.worlds import Alone as Alone
from offbeat.laws.worlds import Passed, Trial
from offbeat.method import Method, Stage


class Finding(NamedTuple):
    law: str  # in words
    holds: bool | None  # None: it does not apply
    said: str = ""  # what fails, or why it does not apply


@dataclass(frozen=True)
class Case:
    """One law on one method, policy or stage; called, it raises an AssertionError with a sentence if it fails."""

    law: Callable[[Any], str | None]
    trial: Any

    def __str__(self) -> str:
        return self.law.__name__

    def finding(self) -> Finding:
        words = (self.law.__doc__ or "").strip().split("\n\n")[0]
        try:
            said = self.law(self.trial)
        except Passed as reason:
            return Finding(words, None, str(reason))
        except Exception as error:  # whatever a method of somebody's own may raise
            return Finding(words, False, registry.fault(error))
        return Finding(words, said is None, said or "")

    def __call__(self) -> None:
        finding = self.finding()
        if finding.holds is False:
            raise AssertionError(f"{finding.law} It fails: {finding.said}")


def law_cases(make: Callable[[], Method], alone: Alone | None = None) -> list[Case]:
    """The laws of methods on what `make` gives. It is called anew for every run."""
    trial = Trial(make, alone)
    return [Case(law, trial) for law in of_methods.LAWS]


def check_method(make: Callable[[], Method], alone: Alone | None = None) -> list[Finding]:
    """Every law on a method, in words."""
    return [case.finding() for case in law_cases(make, alone)]


def check_policy(policy: Any) -> list[Finding]:
    """Every law on a policy, in words."""
    return [Case(law, policy).finding() for law in of_policies.LAWS]


def check_stage(stage: Stage) -> list[Finding]:
    """Every law on a stage, in words."""
    return [Case(law, stage).finding() for law in of_stages.LAWS]


def check(name: str, options: Mapping[str, Any], alone: Mapping[str, Any] | None = None) -> list[Finding]:
    """The laws on a method, policy or stage by its name. With the options `alone` it should be plain SGD for one
    client."""
    kind = kind_of(name)
    function = registry.find(kind, name)
    if problems := option_problems(name, function, {**options, **(alone or {})}):
        raise ConfigError(problems)
    thing = registry.called(f"{kind} '{name}'", function, **options)
    if kind == "policy" or registry.meant("policy", thing):
        policy = build_policy({"policy": name, **options}, problems)
        if policy is None:
            raise ConfigError(problems)
        return check_policy(policy)
    if kind == "stage" or registry.meant("stage", thing):
        return check_stage(registry.make("stage", name, **options))
    make = partial(build_method, {"name": name, **options})
    make()
    single = None if alone is None else Alone(partial(build_method, {"name": name, **options, **alone}))
    return check_method(make, single)


def kind_of(name: str) -> str:
    """Whether a name is that of a policy, of a stage or of a method; module:function may be any of them."""
    known = (kind for kind in ("policy", "stage") if name in registry.shipped(kind) or name in registry.added(kind))
    return next(known, "method")
