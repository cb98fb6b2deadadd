from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.tasks.splits import SPLITS, classes, describe, dirichlet, iid, natural, shards, single_label

labels = st.lists(st.integers(0, 5), min_size=1, max_size=80).map(np.array)
seeds = st.integers(0, 2**40)
few = settings(max_examples=60, deadline=None)
BALANCED = np.arange(600) % 10


def sizes(parts):
    return np.array([len(part) for part in parts])


def assert_disjoint(parts, n):
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < n


@few
@given(
    y=labels,
    clients=st.integers(1, 12),
    seed=seeds,
    option=st.integers(1, 6),
    name=st.sampled_from(sorted(set(SPLITS) - {"shared"})),
)
def test_every_split_is_disjoint_nonempty_and_repeatable(y, clients, seed, option, name):
    options = {
        "classes": {"per_client": option},
        "shards": {"per_client": option},
        "dirichlet": {"alpha": 10.0 ** (option - 4), "minimum": 1 + option % 2},
        "single-label": {"percent": 100 / option},
    }.get(name, {})
    owners = np.arange(len(y)) * 7 % 5
    try:
        parts = SPLITS[name](y, clients, seed, owners, **options)
    except ConfigError:
        assume(False)
    assert len(parts) == clients
    assert_disjoint(parts, len(y))
    assert sizes(parts).min() >= 1
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    again = SPLITS[name](y.copy(), clients, seed, owners, **options)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("name", sorted(set(SPLITS) - {"natural", "shared"}))
def test_another_seed_gives_another_split(name):
    one, two = (np.concatenate(SPLITS[name](BALANCED, 6, seed, None)) for seed in (0, 1))
    assert not np.array_equal(one, two)


@few
@given(y=labels, clients=st.integers(1, 12), seed=seeds)
def test_iid_uses_everything_in_equal_parts(y, clients, seed):
    assume(clients <= len(y))
    parts = iid(y, clients, seed)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    assert np.ptp(sizes(parts)) <= 1


# ---- classes ------------------------------------------------------------------------------------
@few
@given(
    counts=st.lists(st.integers(12, 30), min_size=1, max_size=6),
    clients=st.integers(1, 12),
    per_client=st.integers(1, 6),
    seed=seeds,
)
def test_classes_per_client_and_holders_per_class(counts, clients, per_client, seed):
    assume(per_client <= len(counts))
    y = np.repeat(np.arange(len(counts)) * 3, counts)  # labels need not be 0, 1, 2
    held = [np.unique(y[part]) for part in classes(y, clients, seed, None, per_client)]
    assert all(len(mine) == per_client for mine in held)
    holders = np.array([sum(label in mine for mine in held) for label in np.unique(y)])
    assert np.ptp(holders) <= 1
    if clients * per_client >= len(counts):
        assert holders.min() >= 1
        assert sizes(classes(y, clients, seed, None, per_client)).sum() == len(y)


def test_classes_divide_evenly():
    assert set(sizes(classes(BALANCED, 20, 3))) == {30}  # 10 classes of 60, 4 holders each
    odd = np.arange(610) % 10  # 61 to 4 holders: the odd sample goes to a client that has got none yet
    assert np.ptp(sizes(classes(odd, 20, 3))) <= 1


def test_five_of_ten_classes_and_the_same_volume():
    """The second split of the FedaGrac paper (DP2): 20 clients, 5 classes each, equal sizes."""
    for seed in range(5):
        parts = classes(BALANCED, 20, seed, None, per_client=5)
        assert [len(np.unique(BALANCED[part])) for part in parts] == [5] * 20
        assert set(sizes(parts)) == {30}
    odd = np.arange(617) % 10  # 62 or 61 samples of a class for 10 holders: 6 or 7 for each
    assert np.ptp(sizes(classes(odd, 20, 3, None, per_client=5))) <= 5


def test_classes_left_to_nobody():
    parts = classes(BALANCED, 2, 0, None, 3)
    assert sizes(parts).sum() == 6 * 60


def test_classes_are_drawn_at_random():
    pairs = {tuple(np.unique(BALANCED[part])) for seed in range(20) for part in classes(BALANCED, 5, seed)}
    assert len(pairs) > 25  # of 45


# ---- dirichlet ----------------------------------------------------------------------------------
@few
@given(y=labels, clients=st.integers(1, 12), seed=seeds, alpha=st.floats(1e-6, 1e6), minimum=st.integers(1, 4))
def test_dirichlet_uses_everything_and_keeps_the_minimum(y, clients, seed, alpha, minimum):
    assume(clients * minimum <= len(y))
    parts = dirichlet(y, clients, seed, None, alpha, minimum)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    assert sizes(parts).min() >= minimum


def test_alpha_moves_from_one_class_to_all():
    y = np.arange(6000) % 10
    assert describe(dirichlet(y, 10, 0, None, 1e-3), y)["classes"] < 3
    large = dirichlet(y, 10, 0, None, 1e6)
    assert np.ptp(sizes(large)) < 30
    assert describe(large, y)["classes"] == 10


def test_dirichlet_of_two_unequal_classes():
    """The first split of the FedaGrac paper (DP1) on a9a: a quarter of the labels is 1, 20 clients."""
    y = (np.arange(4000) % 4 == 0).astype(np.int64)
    for seed in range(5):
        parts = dirichlet(y, 20, seed, None, 0.3)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(4000))
        assert sizes(parts).min() >= 1
        shares = np.array([y[part].mean() for part in parts])
        assert shares.std() > 0.2  # clients differ in their labels


def test_dirichlet_proportions_have_the_right_spread():
    """Var p = (1/n)(1 - 1/n) / (n alpha + 1) for each share of a symmetric Dirichlet over n clients."""
    y, n, alpha = np.zeros(2000, int), 4, 0.5
    shares = np.concatenate([sizes(dirichlet(y, n, seed, None, alpha)) / len(y) for seed in range(500)])
    assert shares.var() == pytest.approx((1 / n) * (1 - 1 / n) / (n * alpha + 1), rel=0.1)


# ---- single label -------------------------------------------------------------------------------
@pytest.mark.parametrize("percent", [0, 10, 50, 83, 100])
@pytest.mark.parametrize("clients", [4, 10, 25])
def test_share_of_the_single_label(clients, percent):
    parts = single_label(BALANCED, clients, 5, None, percent)
    assert_disjoint(parts, 600)
    assert len(set(sizes(parts))) == 1
    size = len(parts[0])
    own = round(size * percent / 100)
    shares = np.array([np.mean(BALANCED[part] == i % 10) for i, part in enumerate(parts)])
    assert np.all(shares * size >= own - 1e-9)
    rest = (shares.mean() * size - own) / max(1, size - own)  # the rest has no favourite label
    assert rest < 0.25


def test_single_label_uses_all_that_the_labels_allow():
    assert set(sizes(single_label(BALANCED, 10, 0, None, 50))) == {60}
    assert set(sizes(single_label(BALANCED, 7, 0, None, 50))) == {85}  # 5 of 600 left over
    assert set(sizes(single_label(BALANCED, 25, 0, None, 100))) == {20}  # 5 labels have 3 holders
    scarce = np.repeat([0, 1], [90, 10])
    assert set(sizes(single_label(scarce, 2, 0, None, 100))) == {10}


# ---- shards -------------------------------------------------------------------------------------
@few
@given(y=labels, clients=st.integers(1, 12), seed=seeds, per_client=st.integers(1, 4))
def test_shards_use_everything_and_bound_the_labels(y, clients, seed, per_client):
    per_client = min(per_client, len(y))
    clients = min(clients, len(y) // per_client)
    parts = shards(y, clients, seed, None, per_client)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    assert np.ptp(sizes(parts)) <= per_client


def test_shards_hold_few_labels():
    parts = shards(BALANCED, 10, 0)  # 20 shards of 30 in 10 classes of 60: one label each
    assert max(len(np.unique(BALANCED[part])) for part in parts) <= 2


# ---- natural ------------------------------------------------------------------------------------
def test_natural_gives_each_person_their_own():
    owners = np.array([7, 3, 3, 9, 7, 9, 9])
    assert [part.tolist() for part in natural(np.zeros(7, int), 3, 0, owners)] == [[1, 2], [0, 4], [3, 5, 6]]
    assert [part.tolist() for part in natural(np.zeros(7, int), 2, 0, owners)] == [[1, 2], [0, 4]]


def test_describe():
    parts = [np.array([0, 10, 20]), np.array([1, 2, 3, 4, 5])]
    assert describe(parts, BALANCED) == {"min": 3, "mean": 4.0, "max": 5, "classes": 3.0}


# ---- sentences ----------------------------------------------------------------------------------
FLOATS = np.linspace(0, 1, 20)


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_all_splits_check_the_common_arguments(name):
    y, owners = BALANCED[:20], np.arange(20)
    for clients in (0, -3, 2.5, True):
        with pytest.raises(ConfigError, match=rf"clients is {clients}; give a whole number of at least 1"):
            SPLITS[name](y, clients, 0, owners)
    with pytest.raises(ConfigError, match="21 clients cannot share 20 samples: some shards would be empty; ask for 20"):
        SPLITS[name](y, 21, 0, owners)
    with pytest.raises(ConfigError, match="seed is -1; give a whole number of at least 0"):
        SPLITS[name](y, 2, -1, owners)
    if name not in ("iid", "natural", "shared"):
        with pytest.raises(ConfigError, match=rf"split '{name}' needs one integer label per sample, y is float64"):
            SPLITS[name](FLOATS, 2, 0, owners)


@pytest.mark.parametrize(
    ("name", "clients", "options", "sentence"),
    [
        ("classes", 5, {"per_client": 11}, "per_client is 11, but the data has 10 classes; ask for 10 at most"),
        ("classes", 5, {"per_client": 0}, "per_client is 0; give a whole number of at least 1"),
        ("classes", 400, {"per_client": 10}, "400 clients should share the 60 samples of class 0; take fewer clients"),
        ("dirichlet", 5, {"alpha": 0}, "alpha is 0; give a positive number"),
        ("dirichlet", 5, {"alpha": float("nan")}, "alpha is nan; give a positive number"),
        ("dirichlet", 5, {"alpha": float("inf")}, "alpha is inf; give a positive number"),
        ("dirichlet", 5, {"alpha": "big"}, "alpha is big; give a positive number"),
        ("dirichlet", 5, {"minimum": 0}, "minimum is 0; give a whole number of at least 1"),
        ("dirichlet", 5, {"minimum": 121}, "minimum is 121, but 600 samples give 5 clients 120 each at most"),
        ("single-label", 5, {"percent": -1}, "percent is -1; give a number from 0"),
        ("single-label", 5, {"percent": 100.5}, "percent is 100.5; give a number from 0"),
        ("single-label", 5, {"percent": float("nan")}, "percent is nan; give a number from 0"),
        ("shards", 5, {"per_client": 1.5}, "per_client is 1.5; give a whole number of at least 1"),
        ("shards", 301, {"per_client": 2}, "301 clients with per_client = 2 make 602 shards of 600 samples"),
    ],
)
def test_impossible_options(name, clients, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        SPLITS[name](BALANCED, clients, 0, None, **options)


def test_single_label_without_supply():
    with pytest.raises(ConfigError, match=r"100 % of one label for each of 4 clients is more than the data has"):
        single_label(np.array([0, 0, 0, 0, 1]), 4, 0, None, 100)


def test_natural_sentences():
    y = np.zeros(6, int)
    with pytest.raises(ConfigError, match="'natural' needs data with an owner for each sample, such as 'har'"):
        natural(y, 2, 0)
    with pytest.raises(ConfigError, match="clients is 4, but the data has 3 owners; ask for 3 at most"):
        natural(y, 4, 0, np.arange(6) % 3)
    with pytest.raises(ConfigError, match="5 owners for 6 samples"):
        natural(y, 2, 0, np.arange(5))


def test_a_shared_set_is_everyones():
    parts = SPLITS["shared"](BALANCED, 3, 0, None)
    assert [part.tolist() for part in parts] == [list(range(600))] * 3


@pytest.mark.parametrize("name", ["classes", "shards", "dirichlet"])
def test_shards_may_keep_their_classes_sorted(name):
    rows, kept = (SPLITS[name](BALANCED, 6, 0, None, order=order) for order in ("rows", "classes"))
    for plain, sorted_ in zip(rows, kept, strict=True):
        assert sorted(sorted_) == plain.tolist()
        assert np.all(np.diff(BALANCED[sorted_]) >= 0)
        assert not np.array_equal(plain, sorted_)
    with pytest.raises(ConfigError, match="unknown order 'class'"):
        SPLITS[name](BALANCED, 6, 0, None, order="class")


def test_a_random_deal_does_not_balance_the_holders():
    def holders(deal):
        parts = classes(BALANCED, 50, 3, per_client=2, deal=deal)
        assert all(len(np.unique(BALANCED[part])) == 2 for part in parts)
        return np.bincount(np.concatenate([np.unique(BALANCED[part]) for part in parts]), minlength=10)

    assert np.ptp(holders("even")) == 0
    assert np.ptp(holders("random")) > 3
