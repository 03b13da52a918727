"""The policy of docs/policies.md: it runs, survives being killed, is recorded and reported, and may not change."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from killed_runs import start_and_be_killed
from same_runs import results
from small_runs import TINIER, query

from fleetbed.cli.main import main
from fleetbed.emulator.engine.observer import Observer
from fleetbed.emulator.run.study import resume_study

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
SMALL = (*TINIER, "rounds=3", "participation.ratio=0.5", "processes=inline")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The example of the page, which must stay short."""
    (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert text.count("\n") <= 30
    path = tmp_path / "my_policy.py"
    path.write_text(text)
    return path


def sets(file: Path) -> tuple[str, ...]:
    return (*SMALL, f"policies=[{{kind: {file}, params: {{explore: 0.25}}}}]")


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


def start(file: Path, out: Path) -> int:
    return command("run", "demo", *(word for each in sets(file) for word in ("--set", each)), "--out", str(out))


@pytest.mark.slow
def test_it_ends_the_same_when_it_was_killed_and_a_changed_file_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, killed = file.read_text(), tmp_path / "killed"
    assert start(file, tmp_path / "whole") == 0
    start_and_be_killed(killed, sets(file))
    file.write_text(text.replace("0.8 *", "0.7 *"))
    capsys.readouterr()
    assert command("run", "--resume", str(killed)) == 2
    assert f"cannot resume, the files changed: {file}" in capsys.readouterr().err
    file.write_text(text)
    (folder,) = resume_study(killed, Observer())
    assert results(folder) == results(tmp_path / "whole" / "heteroavg-my_policy-1")


def test_it_chooses_by_loss_and_is_recorded_and_reported(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert start(file, out) == 0
    folder = out / "heteroavg-my_policy-1"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    ((files,),) = query(folder, "SELECT value FROM meta WHERE key = 'files'")
    assert json.loads(files) == {str(file): digest}
    # of four clients a round, explore draws one: the second round has the three with the highest loss of the first
    losses = dict(query(folder, "SELECT client, loss FROM tasks WHERE round = 1 AND outcome = 'ok'"))
    second = {client for (client,) in query(folder, "SELECT client FROM tasks WHERE round = 2")}
    assert {*sorted(losses, key=lambda client: losses[client])[-3:]} <= second
    assert command("report", str(out), "--out", str(tmp_path / "page.html")) == 0
    page = (tmp_path / "page.html").read_text()
    assert "policy: my_policy;" in page
    assert f"my_policy.py (SHA-256 {digest})" in page
    assert command("plot", "time", str(out), "--out", str(tmp_path / "figures")) == 0


def test_a_hook_that_fails_ends_the_run_with_file_and_line_and_its_records_stay_whole(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = tmp_path / "flag"
    text = file.read_text().replace("from msgspec", "from pathlib import Path\nfrom msgspec", 1)
    file.write_text(text + f"        assert self.round < 2 or Path({str(flag)!r}).exists()\n")
    assert start(file, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert re.search(r"the policy my_policy failed in on_result at .*my_policy\.py:\d+: AssertionError", said)
    assert "correct it and start a new run" in said
    flag.touch()
    assert command("run", "--resume", str(tmp_path / "out")) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("class Policy(Rounds)", "class Policy"), "my_policy.py has no Policy: a policy defines one"),
        (("from msgspec", "from msgspack"), "my_policy.py cannot be imported: ModuleNotFoundError"),
        (
            ("explore: float", "explored: float"),
            "policy.params.explore: there is no key 'explore'; did you mean",
        ),
    ],
)
def test_what_is_wrong_with_the_file_ends_the_command_with_exit_code_2(
    file: Path, tmp_path: Path, change: tuple[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(file.read_text().replace(*change))
    assert start(file, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
