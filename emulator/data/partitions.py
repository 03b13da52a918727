"""Divides the data: each client gets a part of the training set and a matching part of the test set.

The server's public samples are chosen first, so that no client has them; the clients' training parts are disjoint. A
client's test part has the label distribution of its training part. For `shards` it consists of test shards of the same
labels, for `column` of the test samples of the same users, if these are known. For the other kinds it is drawn from the
whole test set in the proportions of the client's training labels and in proportion to its size; so the test parts of
two clients may share samples, and those of a large fleet are not empty.
Every draw is keyed by the seed and its purpose: one seed gives one split on any host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fleetbed.emulator.data.balance import balanced_counts
from fleetbed.emulator.data.dataset import Dataset
from fleetbed.emulator.data.raw import SplitName
from fleetbed.emulator.data.split import Indices, Split, read_split_file
from fleetbed.emulator.randomness import numpy_rng
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Data, Partition

_ATTEMPTS = 2_000  # at a Dirichlet draw; one that fails this often would hardly ever succeed
_MOST_CELLS = 30_000_000  # clients times classes, in all draws together
_EVEN = 1e6  # a larger alpha changes nothing: shares are equal to a thousandth, and numpy's draw may overflow


def divide(dataset: Dataset, data: Data, clients: int, seed: int) -> Split:
    """Divide a data set according to `data.partition`; raise BadInput where it has not what that goes by."""
    kind, name = data.partition.kind, data.partition.column
    if dataset.spec.targets and kind in ("dirichlet", "shards"):
        raise BadInput(
            f"data.partition.kind is {kind}, which goes by classes, but the labels of {data.name} are numbers: use "
            "iid, contiguous, column or file. If they are classes, save them as integers."
        )
    column = None
    if kind == "column":
        if name not in dataset.columns:
            known = ", ".join(sorted(dataset.columns)) or "none"
            raise BadInput(
                f"data.partition.column is {name}, but {data.name} has no such column (it has {known}); an .npz file "
                f"has it as {name}_train and, where the test samples are divided too, {name}_test."
            )
        column = dataset.columns[name]
    classes = max(1, dataset.spec.classes)
    return partition(dataset.strata("train"), dataset.strata("test"), classes, data, clients, seed, column)


def partition(
    labels_train: Indices,
    labels_test: Indices,
    classes: int,
    data: Data,
    clients: int,
    seed: int,
    column: Mapping[SplitName, Indices] | None = None,
) -> Split:
    """Divide the data according to `data.partition`, or raise BadInput with a change that would make it possible."""
    settings = data.partition
    test: Sequence[Indices] | None = None
    if settings.kind == "file":
        train, test, public = _from_file(labels_train, labels_test, data, clients)
    else:
        public = _public(labels_train, classes, data.public, numpy_rng(seed, "partition", "public"))
        pool = np.setdiff1d(np.arange(len(labels_train)), public)
        _check_enough(len(pool), clients, data)
        rng = numpy_rng(seed, "partition", "train")
        if settings.kind == "iid":
            train = np.array_split(rng.permutation(pool), clients)
        elif settings.kind == "contiguous":
            train = np.array_split(pool, clients)
        elif settings.kind == "column":
            assert column is not None  # `divide` has looked it up
            most = max(int(part.max()) for part in column.values())
            owners = _owners(column["train"], most, clients, settings, rng)
            train = [pool[owners[column["train"][pool]] == k] for k in range(clients)]
            if "test" in column:
                test = [np.flatnonzero(owners[column["test"]] == k) for k in range(clients)]
        elif settings.kind == "dirichlet":
            train = _dirichlet(_by_class(pool, labels_train, classes), settings, clients, rng)
        else:
            owned = _shard_labels(classes, settings.classes_per_client, clients, rng)
            train = _deal_shards(_by_class(pool, labels_train, classes), owned, rng)
            every = np.arange(len(labels_test))
            test_rng = numpy_rng(seed, "partition", "test")
            test = _deal_shards(_by_class(every, labels_test, classes), owned, test_rng)
    if test is None:
        members = _by_class(np.arange(len(labels_test)), labels_test, classes)
        share = len(labels_test) / sum(len(part) for part in train)
        test = [
            _matching(
                np.bincount(labels_train[part], minlength=classes),
                share,
                members,
                numpy_rng(seed, "partition", "test", k),
            )
            for k, part in enumerate(train)
        ]
    if settings.halved:
        train = _halved(train, settings.halved, numpy_rng(seed, "partition", "halved"))
    _check_parts(train, test, settings)
    return Split(tuple(np.sort(part) for part in train), tuple(np.sort(part) for part in test), np.sort(public))


def _halved(train: Sequence[Indices], share: float, rng: np.random.Generator) -> list[Indices]:
    """The parts, of which a share, drawn at random, has lost half of its samples, drawn at random too."""
    chosen = set(rng.permutation(len(train))[: round(share * len(train))].tolist())
    return [rng.permutation(part)[: (len(part) + 1) // 2] if k in chosen else part for k, part in enumerate(train)]


def _owners(values: Indices, most: int, clients: int, settings: Partition, rng: np.random.Generator) -> Indices:
    """Draw the client of each value of a column: every client gets whole values, as equally many as possible."""
    present = np.unique(values)
    if len(present) < clients:
        raise BadInput(
            f"data.partition.column: {settings.column} has {len(present)} different values in the training set, but "
            f"the fleet has {clients} clients, and each needs one at least; use fewer clients."
        )
    owners = np.full(most + 1, -1)  # of values that only test samples have, nobody is the owner
    for client, part in enumerate(np.array_split(rng.permutation(present), clients)):
        owners[part] = client
    return owners


def _by_class(indices: Indices, labels: Indices, classes: int) -> list[Indices]:
    """Return the indices of each class, in their original order."""
    own = labels[indices]
    ordered = indices[np.argsort(own, kind="stable")]
    return np.split(ordered, np.cumsum(np.bincount(own, minlength=classes))[:-1])


def _public(labels: Indices, classes: int, count: int, rng: np.random.Generator) -> Indices:
    """Choose the server's samples, as evenly from the classes as possible."""
    if count >= len(labels):
        raise BadInput(
            f"data.public is {count}; the training set has {len(labels)} samples, and clients need some of them."
        )
    members = _by_class(np.arange(len(labels)), labels, classes)
    counts = balanced_counts([len(m) for m in members], count)
    return np.concatenate([rng.permutation(m)[:n] for m, n in zip(members, counts, strict=True)])


def _check_enough(samples: int, clients: int, data: Data) -> None:
    needed = clients * data.partition.min_size
    if samples < needed:
        raise BadInput(
            f"data.partition.min_size is {data.partition.min_size}: {clients} clients need {needed} training "
            f"samples, but there are {samples}"
            + (f" besides {data.public} public ones" if data.public else "")
            + "; lower min_size, or use fewer clients or more data."
        )


def _dirichlet(members: list[Indices], settings: Partition, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Draw Dirichlet shares for each class, and repeat until the smallest client has its minimum."""
    sizes = [len(m) for m in members]
    if (cells := clients * len(sizes)) > _MOST_CELLS:
        raise BadInput(
            f"data.partition: {clients} clients times {len(sizes)} classes are {cells} shares to draw, but at most "
            f"{_MOST_CELLS} are possible; use fewer clients."
        )
    attempts = min(_ATTEMPTS, max(10, _MOST_CELLS // cells))
    best = 0
    for _ in range(attempts):
        counts = _dirichlet_counts(sizes, settings.alpha, clients, rng)
        smallest = int(counts.sum(axis=0).min())
        if smallest >= settings.min_size:
            break
        best = max(best, smallest)
    else:
        raise BadInput(
            f"data.partition: in {attempts} Dirichlet draws with alpha {settings.alpha:g} the smallest of "
            f"{clients} clients had at most {best} training samples, but min_size is {settings.min_size}; "
            "raise alpha, lower min_size, or use fewer clients or more data."
        )
    parts = [np.split(rng.permutation(m), np.cumsum(row)[:-1]) for m, row in zip(members, counts, strict=True)]
    return [np.concatenate([of_class[k] for of_class in parts]) for k in range(clients)]


def _dirichlet_counts(
    sizes: list[int], alpha: float, clients: int, rng: np.random.Generator
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Draw [class, client] counts. A client that already has an even share of all samples gets no more.

    This is usually written as a draw over all clients, in which the shares of such clients are set to zero and the rest
    are renormalised. A draw over the rest alone has the same distribution and never divides by zero.
    """
    even = sum(sizes) / clients
    counts = np.zeros((len(sizes), clients), np.int64)
    held = np.zeros(clients, np.int64)
    for row, size in zip(counts, sizes, strict=True):
        if size == 0:
            continue
        takers = np.flatnonzero(held < even)
        shares = rng.dirichlet(np.full(len(takers), min(alpha, _EVEN)))
        cuts = np.minimum(np.cumsum(shares) * size, size).astype(np.int64)
        cuts[-1] = size  # includes what rounding left over
        row[takers] = np.diff(cuts, prepend=0)
        held += row
    return counts


def _shard_labels(classes: int, each: int, clients: int, rng: np.random.Generator) -> Indices:
    """Draw [client, shard] labels from a list that has every class equally often; a client may get one twice."""
    if each > classes:
        raise BadInput(f"data.partition.classes_per_client is {each}; the data has {classes} classes.")
    per_class, rest = divmod(each * clients, classes)
    if rest or per_class == 0:
        step = classes // np.gcd(classes, each)
        raise BadInput(
            f"data.partition: {clients} clients with classes_per_client {each} are {each * clients} shards, "
            f"which do not divide evenly among {classes} classes; use a multiple of {step} clients, "
            "or another classes_per_client."
        )
    labels = np.repeat(np.arange(classes), per_class)
    return rng.permutation(labels).reshape(clients, each)


def _deal_shards(members: list[Indices], owned: Indices, rng: np.random.Generator) -> list[Indices]:
    """Cut each class into as many shards as it occurs in `owned`, and give every client those of its labels."""
    shards = [iter(np.array_split(rng.permutation(m), np.count_nonzero(owned == c))) for c, m in enumerate(members)]
    return [np.concatenate([next(shards[label]) for label in row]) for row in owned]


def _matching(label_counts: Indices, share: float, members: list[Indices], rng: np.random.Generator) -> Indices:
    """Draw test samples in the proportions of a client's training labels, `share` of them per training sample."""
    total = int(label_counts.sum())
    size = max(1, round(total * share))
    exact = label_counts * (size / max(total, 1))
    counts = exact.astype(np.int64)
    largest_rest = np.argsort(counts - exact, kind="stable")  # ties go to the lower label
    counts[largest_rest[: size - counts.sum()]] += 1
    return np.concatenate([rng.permutation(m)[:n] for m, n in zip(members, counts, strict=True)])


def _from_file(
    labels_train: Indices, labels_test: Indices, data: Data, clients: int
) -> tuple[list[Indices], list[Indices] | None, Indices]:
    if data.partition.file is None:
        raise BadInput("data.partition.file is not given; kind 'file' needs the path of a JSON file.")
    content = read_split_file(data.partition.file, len(labels_train), len(labels_test), clients)
    if data.public != len(content.public):
        raise BadInput(
            f"data.public is {data.public}, but public in {data.partition.file} lists {len(content.public)} "
            f"samples; both must be the same."
        )
    train = [np.array(part, np.int64) for part in content.train]
    test = None if content.test is None else [np.array(part, np.int64) for part in content.test]
    return train, test, np.array(content.public, np.int64)


def _check_parts(train: Sequence[Indices], test: Sequence[Indices], settings: Partition) -> None:
    for k, part in enumerate(train):
        if len(part) < settings.min_size:
            raise BadInput(
                f"data.partition: client {k} would have {len(part)} training samples, but min_size is "
                f"{settings.min_size}; lower min_size, or use fewer clients or more data."
            )
    for k, part in enumerate(test):
        if len(part) == 0:
            raise BadInput(
                f"data.partition: client {k} would have no test sample, because the test set has too few of its "
                f"labels or users; use fewer clients, or more test data."
            )
