"""Odd things in place of a file or folder: one sentence and exit code 2, never a traceback, never a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from generated import dump, odd_paths

from fleetbed.cli.main import main
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.files import check_new, list_folder, open_regular, read_regular, user_path

KEYS = {
    "fleet": "fleet",
    "server": "server.device",
    "data": "data.name",
    "partition": "data.partition.file",
    "trace": "availability.trace",
    "bandwidth": "availability.bandwidth",
    "replay": "timing.replay",
}
EXTRA = {
    "data.partition.file": ["data.partition.kind=file"],
    "availability.trace": ["availability.kind=trace"],
    "timing.replay": ["timing.source=replay"],
}
ODD = (
    "fifo",
    "dir",
    "sock",
    "loop",
    "none",
    "none/x",
    "fifo/x",
    "/dev/zero",
    "/dev/full",
    "/proc/kmsg",
    "long",
    "deep",
)


@pytest.fixture(autouse=True)
def _patience() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def odd(name: str, folder: Path) -> str:
    odd_paths(folder)
    if name.startswith("/"):
        return name
    return str(folder / {"long": "x" * 300, "deep": "y/" * 3000 + "z"}.get(name, name))


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(args)
    out, err = capsys.readouterr()
    assert caught.value.code == 2, err
    assert out == ""
    assert err.startswith("fleetbed: ")
    assert len(err) < 3000
    return err


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("key", KEYS.values())
def test_a_key_of_an_experiment(capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str, name: str) -> None:
    if key == "availability.bandwidth" and name == "dir":
        pytest.skip("it may be a folder")
    path = odd(name, tmp_path)
    suffix = "/" if key in ("fleet", "server.device", "data.name") and not name.startswith("/") else ""
    sets = [f"{key}={dump(path + suffix if name in ('dir',) else path)}", *EXTRA.get(key, [])]
    sets += [] if key == "timing.replay" else ["timing.source=modelled"]
    asked = [word for each in [*sets, "processes=inline"] for word in ("--set", each)]
    err = refused(capsys, "run", "demo", "--dry-run", *asked)
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ODD)
def test_the_file_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    path = odd(name, tmp_path)
    for args in (("profiles", "check", path), ("profiles", "show", path, "--kind", "link"), ("run", path, "--dry-run")):
        assert refused(capsys, *args).count("\n") == 1


@pytest.mark.parametrize("name", [name for name in ODD if name != "dir"])
def test_folders_of_profiles_and_results(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    path = odd(name, tmp_path)
    refused(capsys, "profiles", "list", "--profiles", path)
    if name not in ("none", "none/x"):
        refused(capsys, "run", "demo", "--set", "timing.source=modelled", "--out", f"{path}/a/b")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\0b", "has a NUL byte"),
        ("\udcff.yaml", "is not UTF-8 text"),
        ("~nouser/x.yaml", "that user has no home folder on this host"),
    ],
)
def test_paths_that_no_file_can_have(capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says) as caught:
        user_path(text, "data.root")
    assert str(caught.value).isprintable()
    if "\0" not in text:  # no process can be given such an argument
        assert says in refused(capsys, "profiles", "check", text)


def test_a_key_with_half_a_character_or_a_nul_byte(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text('title: x\nfleet: "a/\\uDCFF"\nalgorithms: [{name: fedavg}]\n')
    assert "fleet" in refused(capsys, "profiles", "check", str(file))
    file.write_text('title: x\nfleet: "a/\\0"\nalgorithms: [{name: fedavg}]\n')
    assert "NUL byte" in refused(capsys, "profiles", "check", str(file))


def test_a_current_folder_that_is_missing_or_not_utf8(tmp_path: Path) -> None:
    # in a process of its own: this one must keep its folder
    program = "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]) if len(sys.argv) > 2 else None; "
    program += "from fleetbed.cli.main import main; main(['profiles', 'list', 'link'])"
    strange = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(strange)
    for extra, says in (([], b"is not UTF-8 text"), (["gone"], b"the current folder no longer exists")):
        command = [sys.executable, "-I", "-c", program, strange, *extra]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        assert done.returncode == 2, done.stderr
        assert says in done.stderr
        assert b"Traceback" not in done.stderr


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    for path in odd_paths(tmp_path):
        if path.startswith(("/proc", "~")):  # regular as far as one can see, and no path yet
            continue
        with pytest.raises(BadInput) as caught:
            open_regular(Path(path), "a file", "key")
        assert str(caught.value).startswith("key: ")
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", "a file", 5) == b"12345"
    with pytest.raises(BadInput, match="larger than 0 KiB"):
        read_regular(tmp_path / "file", "a file", 4)
    check_new(tmp_path / "new" / "folder", "--out")
    os.mkdir(os.fsencode(tmp_path) + b"/dir/\xff")
    with pytest.raises(BadInput, match="is not UTF-8 text"):
        list_folder(tmp_path / "dir", "--profiles")
