"""Laws of speeds and delays: means, quantiles, bounds, and the sentences on bad ones."""

import math

import numpy as np
import pytest

from offbeat.errors import ConfigError
from offbeat.fleets.distributions import Constant, Exponential, LogNormal, Trace, Uniform, law

# name -> a law, its mean, its 90 % quantile
LAWS = {
    "constant": (Constant(3.0), 3.0, 3.0),
    "uniform": (Uniform(1.0, 5.0), 3.0, 4.6),
    "lognormal": (LogNormal(2.0, 0.5), 2.0 * math.exp(0.125), 2.0 * math.exp(0.5 * 1.2815515655446004)),
    "exponential": (Exponential(4.0), 4.0, 4.0 * math.log(10.0)),
    "trace": (Trace((1.0, 2.0, 9.0)), 4.0, 9.0),
}


def said(call):
    """The problems that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value.problems


@pytest.mark.parametrize("name", LAWS)
def test_laws_have_their_mean_quantile_and_bound(name):
    given, mean, quantile = LAWS[name]
    middle = (np.arange(200_000) + 0.5) / 200_000
    assert given(middle).mean() == pytest.approx(mean, rel=1e-3)
    assert given(0.9) == pytest.approx(quantile, rel=1e-12)
    assert type(given(0.9)) is float
    assert given(np.array([0.25, 0.9]))[1] == pytest.approx(given(0.9), rel=1e-14)
    assert given.problems("x") == []
    ends = [given(2.0**-53), given(1 - 2.0**-53)]
    assert 0 <= ends[0] <= ends[1] <= given.bound < math.inf


def test_trace_gives_every_recorded_value_as_often():
    counts = np.unique(Trace((5.0, 6.0, 7.0, 8.0))((np.arange(400) + 0.5) / 400), return_counts=True)
    assert [column.tolist() for column in counts] == [[5.0, 6.0, 7.0, 8.0], [100] * 4]


def test_a_law_is_read_from_a_number_or_a_table():
    assert law(2) == Constant(2.0)
    assert law({"law": "uniform", "low": 1, "high": 5}) == Uniform(1, 5)
    assert law({"law": "trace", "values": [1.0, 2.0]}) == Trace((1.0, 2.0))
    assert law(Exponential(2.0)) == Exponential(2.0)


@pytest.mark.parametrize(
    ("spec", "sentences"),
    [
        (-1, ["x = -1.0; it must be a finite number >= 0"]),
        (math.nan, ["x = nan; it must be a finite number >= 0"]),
        (True, ['x = True; give a number, or a table such as {law = "uniform", low = 1, high = 5}']),
        ({"low": 1}, ["x: the table has no key 'law'; known laws: constant, exponential, lognormal, trace, uniform"]),
        ({"law": "unifrom"}, ["unknown law of x 'unifrom': did you mean 'uniform'?"]),
        (
            {"law": "uniform", "low": 1, "hihg": 2},
            [
                "unknown key of x (law 'uniform') 'hihg': did you mean 'high'?",
                "x: the law 'uniform' needs the key 'high'",
            ],
        ),
        ({"law": "uniform", "low": 3, "high": 2}, ["x: low = 3 is above high = 2; swap them"]),
        ({"law": "uniform", "low": "a", "high": -2}, ["x: low = 'a'; it must be", "x: high = -2; it must be"]),
        ({"law": "lognormal", "median": 0, "sigma": -1}, ["x: median = 0; it must be a finite number > 0", "x: sigma"]),
        ({"law": "lognormal", "median": 1, "sigma": 99}, ["x: sigma = 99; a spread above 50"]),
        ({"law": "exponential", "mean": 0}, ["x: mean = 0; it must be a finite number > 0"]),
        ({"law": "trace", "values": []}, ["x: the trace is empty"]),
        ({"law": "trace", "values": 7}, ["x: values = 7; they must be a list"]),
        (
            {"law": "trace", "values": [1, None, -2]},
            ["x: entry 1 of the trace is missing", "x: entry 2 of the trace = -2"],
        ),
        ({"law": "trace", "values": [-1] * 9}, ["x: entry 0", "x: entry 1", "x: entry 2", "... and 6 more"]),
    ],
)
def test_bad_laws_are_named(spec, sentences):
    problems = said(lambda: law(spec, "x"))
    assert len(problems) == len(sentences)
    for problem, sentence in zip(problems, sentences, strict=True):
        assert problem.startswith(sentence)
