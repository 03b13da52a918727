"""Partitions against their definitions: the parts of the clients, no lost samples, and refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetbed.emulator.data import Split, partition
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Data, Partition

# a shuffled set of 10 classes with 200 training and 40 test samples of each
TRAIN = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 200))
TEST = np.random.default_rng(2).permutation(np.repeat(np.arange(10), 40))
KINDS = ("iid", "dirichlet", "shards", "contiguous")


def split(clients: int = 10, seed: int = 1, public: int = 0, **of_partition: Any) -> Split:
    data = Data(public=public, partition=Partition(**of_partition))
    return partition(TRAIN, TEST, 10, data, clients, seed)


def counts(parts: tuple[np.ndarray, ...], labels: np.ndarray) -> np.ndarray:
    return np.array([[int((labels[part] == c).sum()) for c in range(10)] for part in parts])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clients", [10, 50])
@pytest.mark.parametrize("public", [0, 55])
def test_every_training_sample_belongs_to_exactly_one(kind: str, clients: int, public: int) -> None:
    found = split(clients, public=public, kind=kind)
    together = np.concatenate([*found.train, found.public])
    assert sorted(together.tolist()) == list(range(2000))
    assert len(found.train) == len(found.test) == clients
    for part in found.test:
        assert len(part) > 0
        assert len(set(part.tolist())) == len(part)
        assert part.min() >= 0
        assert part.max() < 400


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_the_clients_may_lose_half_of_its_data(kind: str) -> None:
    whole, found = split(kind=kind), split(kind=kind, halved=0.3)
    lost = [k for k in range(10) if found.train[k].tolist() != whole.train[k].tolist()]
    assert len(lost) == 3
    for k in lost:
        assert set(found.train[k].tolist()) < set(whole.train[k].tolist())
        assert len(found.train[k]) == -(-len(whole.train[k]) // 2)
    assert [part.tolist() for part in found.test] == [part.tolist() for part in whole.test]
    assert split(kind=kind, halved=0.3).to_json() == found.to_json()
    assert split(kind=kind, halved=0).to_json() == whole.to_json()


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind: str) -> None:
    one, again, other = split(seed=3, kind=kind), split(seed=3, kind=kind), split(seed=4, kind=kind)
    assert one.to_json() == again.to_json()
    assert one.to_json() != other.to_json()


def test_a_seed_gives_the_same_split_on_every_host() -> None:
    digests = {kind: hashlib.sha256(split(seed=7, public=20, kind=kind).to_json()).hexdigest()[:16] for kind in KINDS}
    assert digests == {
        "iid": "97aa8eb088629ec7",
        "dirichlet": "8f7220229f8d3721",
        "shards": "595d944a669b3c61",
        "contiguous": "1f2079110f2ba501",
    }


def test_public_samples_are_even_over_the_classes() -> None:
    found = split(public=57)
    assert sorted(np.bincount(TRAIN[found.public]).tolist()) == [5] * 3 + [6] * 7


def test_iid_parts_are_of_one_size_and_mixed() -> None:
    found = split(8, kind="iid")
    assert [len(part) for part in found.train] == [250] * 8
    # 25 of each class are expected, with a standard deviation below 5
    assert np.abs(counts(found.train, TRAIN) - 25).max() < 20


def test_contiguous_parts_are_slices_in_stored_order() -> None:
    found = split(8, kind="contiguous")
    for k, part in enumerate(found.train):
        assert part.tolist() == list(range(250 * k, 250 * (k + 1)))


def test_dirichlet_gives_every_client_its_minimum() -> None:
    for seed in range(5):
        assert min(len(part) for part in split(20, seed, kind="dirichlet", alpha=0.3, min_size=25).train) >= 25


def test_dirichlet_is_the_more_uneven_the_smaller_alpha_is() -> None:
    def largest_share(alpha: float) -> float:
        shares = []
        for seed in range(5):
            table = counts(split(10, seed, kind="dirichlet", alpha=alpha, min_size=1).train, TRAIN)
            shares.append((table.max(axis=1) / table.sum(axis=1)).mean())
        return float(np.mean(shares))

    assert largest_share(1000) < 0.14
    assert 0.2 < largest_share(1) < 0.45
    assert largest_share(0.05) > 0.6


def test_dirichlet_stops_giving_to_a_client_that_has_its_even_share() -> None:
    # two classes for two clients: whoever has its half after the first class gets nothing of the second
    labels = np.repeat([0, 1], [900, 100])
    for seed in range(20):
        data = Data(partition=Partition(kind="dirichlet", alpha=0.5, min_size=1))
        found = partition(labels, labels, 2, data, 2, seed)
        table = np.array([[int((labels[part] == c).sum()) for c in range(2)] for part in found.train])
        for first, second in table:
            if first >= 500:
                assert second == 0
        assert table.sum(axis=0).tolist() == [900, 100]


def test_dirichlet_shares_have_the_variance_of_the_distribution() -> None:
    # one class and no cap in sight: with two clients the share is Beta(alpha, alpha), variance 1/(4(2 alpha + 1))
    labels = np.repeat([0, 1], [1000, 10])
    alpha = 2.0
    shares = []
    for seed in range(600):
        data = Data(partition=Partition(kind="dirichlet", alpha=alpha, min_size=1))
        found = partition(labels, labels, 2, data, 2, seed)
        shares.append((labels[found.train[0]] == 0).sum() / 1000)
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.15)


def test_test_parts_have_the_proportions_of_the_training_part() -> None:
    for kind in ("iid", "dirichlet", "contiguous"):
        found = split(10, kind=kind)
        train, test = counts(found.train, TRAIN), counts(found.test, TEST)
        # the test set has one sample for five of training; rounding moves less than one sample per class
        np.testing.assert_allclose(test, train / 5, atol=1.0)
        np.testing.assert_allclose(test.sum(axis=1), train.sum(axis=1) / 5, atol=0.51)


@pytest.mark.parametrize(("clients", "each"), [(10, 2), (20, 5), (100, 2)])
def test_shards_are_equal_and_of_few_classes(clients: int, each: int) -> None:
    found = split(clients, kind="shards", classes_per_client=each)
    train, test = counts(found.train, TRAIN), counts(found.test, TEST)
    shard, test_shard = 2000 // (clients * each), 400 // (clients * each)
    assert (train % shard == 0).all()
    assert (train.sum(axis=1) == each * shard).all()
    assert ((train > 0).sum(axis=1) <= each).all()
    # the test part is of the same labels, in the same numbers of shards
    np.testing.assert_array_equal(test // test_shard, train // shard)
    assert test.sum() == 400


def test_shards_of_unequal_classes_differ_by_one_sample() -> None:
    labels = np.repeat([0, 1], [101, 99])
    data = Data(partition=Partition(kind="shards", classes_per_client=1))
    sizes = sorted(len(part) for part in partition(labels, labels, 2, data, 4, 1).train)
    assert sizes == [49, 50, 50, 51]


@pytest.mark.parametrize(
    ("clients", "public", "settings", "words"),
    [
        (201, 0, {"kind": "iid"}, "min_size is 10: 201 clients need 2010 training samples, but there are 2000"),
        (200, 1, {"kind": "contiguous"}, "there are 1999 besides 1 public ones; lower min_size"),
        (10, 2000, {"kind": "iid"}, "data.public is 2000; the training set has 2000 samples"),
        (100, 0, {"alpha": 0.01, "min_size": 15}, "2000 Dirichlet draws with alpha 0.01 .* at most .* raise alpha"),
        (
            7,
            0,
            {"kind": "shards"},
            "14 shards, which do not divide evenly among 10 classes; use a multiple of 5 clients",
        ),
        (2, 0, {"kind": "shards"}, "4 shards, which do not divide evenly among 10 classes"),
        (10, 0, {"kind": "shards", "classes_per_client": 11}, "is 11; the data has 10 classes"),
        (10, 0, {"kind": "file"}, "data.partition.file is not given"),
        (10, 0, {"kind": "file", "file": "no/such.json"}, "no/such.json does not exist"),
        (10, 0, {"kind": "file", "file": "/"}, "is a folder, but the path of a partition file is needed"),
    ],
)
def test_impossible_partitions_are_refused(clients: int, public: int, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        split(clients, public=public, **settings)
    assert str(caught.value).endswith(".")


def test_shards_without_test_samples_are_refused() -> None:
    data = Data(partition=Partition(kind="shards", classes_per_client=1))
    with pytest.raises(BadInput, match=r"client \d would have no test sample"):
        partition(np.repeat([0, 1], 100), np.array([0, 0, 0, 1]), 2, data, 4, 1)


def test_a_client_whose_labels_are_not_in_the_test_set_is_refused() -> None:
    data = Data(partition=Partition(kind="contiguous"))
    with pytest.raises(BadInput, match="client 0 would have no test sample"):
        partition(np.repeat([0, 1], 100), np.array([1, 1]), 2, data, 2, 1)


def written(path: Path, content: Any) -> dict[str, Any]:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return {"kind": "file", "file": str(path), "min_size": 2}


def test_a_split_that_was_written_is_read_back(tmp_path: Path) -> None:
    first = split(10, public=30, kind="dirichlet")
    again = split(10, seed=99, public=30, **written(tmp_path / "p.json", first.to_json().decode()))
    assert again.to_json() == first.to_json()


def test_a_file_may_leave_samples_out_and_the_test_parts_to_be_drawn(tmp_path: Path) -> None:
    ones, twos = np.flatnonzero(TRAIN == 1)[:20], np.flatnonzero(TRAIN == 2)[:10]
    content = {"train": [ones.tolist(), twos.tolist()]}
    found = split(2, **written(tmp_path / "p.json", content))
    assert [part.tolist() for part in found.train] == content["train"]
    assert set(TEST[found.test[0]]) == {1}
    assert set(TEST[found.test[1]]) == {2}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not a partition file"),
        ("{", "is not a partition file"),
        ("[" * 100_000, "is not a partition file"),
        ('{"train": [[0, 1], ["a"]]}', r"train.*is not a partition file|is not a partition file.*train"),
        ({"train": [[0, 1], [2, 3]], "tset": []}, "tset"),
        ({"test": []}, "train"),
        ({"train": [[0, 1], [2, 2.5]]}, "is not a partition file"),
        ({"train": [[0, 1]]}, "train has 1 parts, but the fleet has 2 clients"),
        ({"train": [[0, 1], [2, 3]], "test": [[0]]}, "test has 1 parts, but the fleet has 2 clients"),
        ({"train": [[0, 1], [2, 2000]]}, r"train\[1\]\[1\] is 2000; allowed are 0 to 1999"),
        ({"train": [[0, -1], [2, 3]]}, r"train\[0\]\[1\] is -1; allowed are 0 to 1999"),
        ({"train": [[0, 10**30], [2, 3]]}, "p.json"),
        ({"train": [[0, 1], [1, 3]]}, r"train\[1\] has the sample 1, which train\[0\] already has"),
        ({"train": [[0, 0], [2, 3]]}, r"train\[0\] has the sample 0, which train\[0\] already has"),
        ({"train": [[0, 1], [2, 3]], "test": [[0], [400]]}, r"test\[1\]\[0\] is 400; allowed are 0 to 399"),
        ({"train": [[0, 1], [2, 3]], "test": [[0], [5, 5]]}, r"test\[1\] lists a sample twice"),
        ({"train": [[0, 1], [2, 3]], "test": [[0], []]}, "client 1 would have no test sample"),
        ({"train": [[0, 1], [2]]}, "client 1 would have 1 training samples, but min_size is 2"),
        ({"train": [[0, 1], [2, 3]], "public": [9]}, "data.public is 0, but public in .* lists 1 samples"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        split(2, **written(tmp_path / "p.json", content))
    assert str(caught.value).endswith(".")


def test_public_samples_of_a_file_belong_to_no_client(tmp_path: Path) -> None:
    content = {"train": [[0, 1], [2, 3]], "public": [3, 4]}
    with pytest.raises(BadInput, match=r"train\[1\] has the sample 3, which public already has"):
        split(2, public=2, **written(tmp_path / "p.json", content))


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=4, max_size=60),
    clients=st.integers(1, 8),
    kind=st.sampled_from(KINDS),
    alpha=st.floats(1e-3, 1e300),
    public=st.integers(0, 5),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_labels_give_a_sound_split_or_a_refusal(
    labels: list[int], clients: int, kind: Any, alpha: float, public: int, seed: int
) -> None:
    train = np.array([*range(4), *labels])
    data = Data(public=public, partition=Partition(kind=kind, alpha=alpha, min_size=1, classes_per_client=2))
    try:
        found = partition(train, np.array(labels), 4, data, clients, seed)
    except BadInput:
        return
    assert sorted(np.concatenate([*found.train, found.public]).tolist()) == list(range(len(train)))
    assert all(len(part) > 0 for part in (*found.train, *found.test))
