"""What a run must still be when it is resumed: the content of every file that it reads, not its name or its time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleetbed.emulator.engine.layout import lay_out
from fleetbed.emulator.resume import identity
from fleetbed.profiles import BadInput, experiment, load_experiment, runs


def profiles(folder: Path) -> dict[str, str]:
    files = {
        "data.name": "own.npz",
        "data.partition.file": "split.json",
        "availability.trace": "stays.tsv",
        "availability.bandwidth": "rates.tsv",
    }
    sets = [f"{key}={folder / name}" for key, name in files.items()]
    sets += ["data.partition.kind=file", "availability.kind=trace", "timing.source=modelled"]
    return identity.profiles(lay_out(runs(load_experiment("demo", sets=sets))[0], ()))


def write_all(folder: Path) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 256, (160, 8, 8), np.uint8), np.arange(160) % 2
    np.savez(folder / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    parts = [list(range(20 * k, 20 * k + 20)) for k in range(8)]
    (folder / "split.json").write_text(json.dumps({"train": parts, "test": parts}))
    (folder / "stays.tsv").write_text("".join(f"{k}\t0\t10{k}\n" for k in range(8)))
    (folder / "rates.tsv").write_text("0\t10\n5\t20\n9\t0\n")


def swap_digits(path: Path) -> None:
    """Other content of the same length."""
    path.write_bytes(path.read_bytes().replace(b"10", b"12", 1))


def swap_samples(path: Path) -> None:
    path.write_text(path.read_text().replace("[0, 1, 2,", "[0, 2, 1,", 1).replace("[20, 21", "[21, 20", 1))
    parts = json.loads(path.read_text())
    parts["train"][0][0], parts["train"][1][0] = parts["train"][1][0], parts["train"][0][0]
    path.write_text(json.dumps(parts))


def swap_pixels(path: Path) -> None:
    arrays = dict(np.load(path))
    arrays["x_train"] = 255 - arrays["x_train"]
    np.savez(path, **arrays)


def test_a_key_of_a_later_version_does_not_make_it_another_run() -> None:
    class Policy(experiment.Policy, frozen=True, kw_only=True):
        later: int = 0

    config = runs(load_experiment("demo", sets=["policies=[{kind: deadline, deadline_s: 9}]"]))[0]
    values = msgspec.structs.asdict(config.policy)
    told = [msgspec.structs.replace(config, policy=Policy(**values, later=later)) for later in (0, 1)]
    same, other = (identity.run_digest(one) for one in told)
    assert same == identity.run_digest(config)
    assert other != same
    late = msgspec.structs.replace(config, policy=experiment.Policy(kind="deadline", deadline_s=8.0))
    assert identity.run_digest(late) != same


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("own.npz", swap_pixels, "data"),
        ("split.json", swap_samples, "partition"),
        ("stays.tsv", swap_digits, "traces"),
        ("rates.tsv", swap_digits, "traces"),
    ],
)
def test_another_content_of_the_same_size_and_time(
    tmp_path: Path, name: str, change: Callable[[Path], None], part: str
) -> None:
    write_all(tmp_path)
    before, path = profiles(tmp_path), tmp_path / name
    assert profiles(tmp_path) == before
    then = path.stat()
    change(path)
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert path.stat().st_size == then.st_size
    after = profiles(tmp_path)
    assert {key for key in before if before[key] != after[key]} == {part}
    with pytest.raises(BadInput, match=part):
        identity.check_same("x", "profiles", before, after)
