"""Policies of a user's own: found by file and entry point, refused with a sentence, guarded, stored and restored."""

# ruff: noqa: E501  a mistake and its sentence are on one line

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetbed.emulator.method.failures import CodeFailed
from fleetbed.emulator.timeline.making_policies import check_policy, make_policy
from fleetbed.emulator.timeline.own_policies import GROUP, check_state, restored, works_like
from fleetbed.emulator.timeline.policies import AnyPolicy, Rounds, Stream
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import AlgorithmChoice, Experiment, Participation, Policy

HEAD = "from msgspec import Struct\nfrom fleetbed import Rounds, Stream\n"
#: the clients that have been invited least, half of them at most; a late result weighs less
GOOD = f"""{HEAD}
class Params(Struct, frozen=True):
    part: float = 0.5
class Policy(Rounds):
    times: dict[int, int] = {{}}
    took: list[float] = []
    def invite(self, candidates, count):
        chosen = sorted(candidates, key=lambda c: (self.times.get(c, 0), c))[: int(count * self.params.part)]
        for client in chosen:
            self.times[client] = self.times.get(client, 0) + 1
        return chosen
    def timer_s(self):
        return 10.0 * self.round
    def is_complete(self):
        return len(self.arrived) >= 2
    def on_result(self, client, seconds, loss):
        self.took.append(seconds)
"""
STREAM = f"""{HEAD}
class Policy(Stream):
    def start(self):
        self.buffer, self.concurrency = 2, 3
    def weight(self, staleness):
        return 1 / (1 + staleness)
"""


def experiment(**settings: Any) -> Experiment:
    return Experiment(title="x", fleet="demo", algorithms=(AlgorithmChoice(name="heteroavg"),), **settings)


def choice(folder: Path, text: str, **params: Any) -> Policy:
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(text))
    return Policy(kind=str(path), params=params)


def made(policy: Policy, clients: int = 8, **settings: Any) -> AnyPolicy:
    return make_policy(experiment(**settings), policy, 1, {n: 1.0 + n for n in range(clients)}, 1)


def again(policy: AnyPolicy) -> AnyPolicy:
    return restored(msgspec.json.decode(msgspec.json.encode(policy)))


def test_rounds_are_opened_and_closed_by_its_hooks(tmp_path: Path) -> None:
    policy = made(choice(tmp_path, GOOD, part=0.5))
    opened = policy.open(list(range(8)))
    assert (opened.invite, opened.timer_s) == ((0, 1, 2, 3), 10.0)
    policy.on_result(2, 3.5, None)
    assert policy.ended(0, 2, ok=True, idle=[]).merge is None
    closed = policy.ended(1, 0, ok=True, idle=[])
    assert (closed.merge, closed.abandon) == ((0, 1), (1, 3))
    policy.merged(2)
    policy = again(policy)
    assert (policy.took, policy.planned_s[7], policy.params.part) == ([3.5], 8.0, 0.5)  # type: ignore[attr-defined]
    opened = policy.open(list(range(8)))
    assert (opened.invite, opened.timer_s) == ((4, 5, 6, 7), 20.0)


def test_what_is_restored_is_the_same_and_of_the_same_type(tmp_path: Path) -> None:
    policy = made(choice(tmp_path, GOOD))
    policy.open(list(range(8)))
    assert again(policy) == policy
    assert type(again(policy)) is type(policy)
    assert isinstance(policy, Rounds)


def test_a_stream_sets_its_buffer_and_weighs_by_itself(tmp_path: Path) -> None:
    policy = made(choice(tmp_path, STREAM))
    assert isinstance(policy, Stream)
    assert (policy.min_clients, policy.concurrency) == (2, 3)
    assert len(policy.open(list(range(8))).invite) == 3
    assert policy.weight(3) == 0.25
    assert works_like(policy.policy) == "async"


def test_it_chooses_among_the_available_clients_only(tmp_path: Path) -> None:
    assert made(choice(tmp_path, GOOD)).open([5, 6], [0, 1, 2]).invite == (5, 6)


def test_its_random_numbers_depend_on_the_seed_and_the_draw(tmp_path: Path) -> None:
    text = f"{HEAD}\nclass Policy(Rounds):\n    def invite(self, candidates, count):\n        return self.rng().permutation(candidates)[:3]\n"
    policy = made(choice(tmp_path, text))
    first = policy.open(list(range(8))).invite
    policy.ended(0, first[0], ok=True, idle=[])
    copied = again(policy)
    second = [each.open(list(range(8))).invite for each in (policy, copied)]
    assert second[0] == second[1] != first
    assert all(type(client) is int for client in first)


def test_an_entry_point_brings_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_policy.py").write_text(STREAM)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\npairwise = their_policy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(made(Policy(kind="pairwise")), Stream)
    with pytest.raises(BadInput, match=r"policies\.1\.kind: there is no policy 'pairwize'.*did you mean pairwise"):
        check_policy(experiment(), Policy(kind="pairwize"), 8, "policies.1")


CLASS = f"{HEAD}\nclass Policy(Rounds):\n    "
REFUSED = {
    "raises": ("x = 1\n1 / 0", r"cannot be imported: ZeroDivisionError: division by zero \(.*mine\.py, line 2\)"),
    "nothing": ("", r"has no Policy: a policy defines one, a class that derives from fleetbed\.Rounds or"),
    "function": ("def Policy(): pass", "has no Policy"),
    "engine": (f"{CLASS}def open(self, idle, away=()): pass", r"a Policy with open, which belongs to fleetbed\.Rounds: a policy may define start, invite"),
    "field": (f"{CLASS}waiting: list[int] = []", "a Policy with waiting, which belongs to fleetbed.Rounds"),
    "params": (f"{CLASS}pass\nParams = 3", "has Params that cannot be used"),
    "start": (f"{CLASS}def start(self):\n        self.nothing()", r"mine failed in start at .*mine\.py:\d+: AttributeError"),
    "size": (f"{CLASS}def start(self):\n        self.size = 99", "start set size to 99, but a number from 1 to 8"),
    "buffer": (STREAM.replace("2, 3", "0, 3"), "start set buffer to 0, but a number from 1 to 8"),
    "state": (f"{CLASS}def start(self):\n        self.found = object()\n    found: int = 0", "has the field found, which cannot be stored: .*object.* give the field a type"),
    "type": (f"{CLASS}def start(self):\n        self.found = 'x'\n    found: int = 0", "a field whose value does not have its type: Expected `int`, got `str`"),
    "keys": (f"from typing import Any\n{CLASS}def start(self):\n        self.found = {{1: 2}}\n    found: Any = None", r"the field found, which is {1: 2} and would be {'1': 2} after it was stored"),
    "tensor": (f"import torch\n{CLASS}def start(self):\n        self.found = torch.zeros(2)\n    found: list[float] = []", "has the field found, which cannot be stored"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_one_is_refused_with_one_sentence(tmp_path: Path, name: str) -> None:
    text, says = REFUSED[name]
    policy = choice(tmp_path, text)
    with pytest.raises(BadInput, match=says) as caught:
        check_policy(experiment(), policy, 8, "policies.0")
    assert str(caught.value).startswith("policies.0.kind: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("params", "says"),
    [({"parts": 1}, r"policies\.0\.params\.parts: there is no key 'parts'; did you mean part"), ({"part": "x"}, r'policies\.0\.params\.part is "x", but a number is needed')],
)  # fmt: skip
def test_wrong_parameters_are_refused(tmp_path: Path, params: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        check_policy(experiment(), choice(tmp_path, GOOD, **params), 8, "policies.0")


FAILS = {
    "raises": ("invite", "return 1 / 0", r"the policy mine failed in invite at .*mine\.py:\d+: ZeroDivisionError"),
    "strangers": ("invite", "return [3, 99]", r"invite returned \[3, 99\], but only candidates can be invited"),
    "twice": ("invite", "return [3, 3]", "each once"),
    "nobody": ("invite", "return []", "at least one client is needed"),
    "none": ("invite", "pass", "invite returned None, but a list of clients' numbers is needed"),
    "timer": ("timer_s", "return -1", "timer_s returned -1, but a number of seconds above 0, or None is needed"),
    "nan": ("timer_s", "return float('nan')", "timer_s returned nan"),
}


@pytest.mark.parametrize("name", FAILS)
def test_a_hook_that_fails_is_named(tmp_path: Path, name: str) -> None:
    hook, body, says = FAILS[name]
    given = "self, candidates, count" if hook == "invite" else "self"
    policy = made(choice(tmp_path, f"{HEAD}\nclass Policy(Rounds):\n    def {hook}({given}):\n        {body}\n"))
    with pytest.raises(CodeFailed, match=says):
        policy.open(list(range(8)))


def test_a_stream_invites_no_more_than_it_may_and_weighs_by_numbers(tmp_path: Path) -> None:
    text = STREAM + "    def invite(self, candidates, count):\n        return candidates\n"
    with pytest.raises(CodeFailed, match="at most 3 can be invited now, because concurrency is 3"):
        made(choice(tmp_path, text)).open(list(range(8)))
    policy = made(choice(tmp_path, STREAM.replace("1 / (1 + staleness)", "'much'")))
    with pytest.raises(CodeFailed, match="weight returned 'much', but a finite number from 0 is needed"):
        policy.weight(1)


def test_a_state_that_spoils_later_is_found_when_it_is_stored(tmp_path: Path) -> None:
    text = f"{HEAD}\nclass Policy(Rounds):\n    seen: list[float] = []\n    def on_result(self, client, seconds, loss):\n        self.seen.append(loss)\n"
    policy = made(choice(tmp_path, text))
    policy.on_result(1, 2.0, 0.5)
    check_state(policy)
    policy.on_result(1, 2.0, None)
    with pytest.raises(CodeFailed, match="a field whose value does not have its type"):
        check_state(policy)


def test_tiers_and_a_last_round_of_all_work_with_rounds_and_not_with_a_stream(tmp_path: Path) -> None:
    tier, last = Participation(selection="tier", tiers=2), Participation(ratio=0.5, last_ratio=1.0)
    assert made(choice(tmp_path, GOOD), participation=tier).open(list(range(8))).invite in ((0, 1, 2, 3), (4, 5, 6, 7))
    made(choice(tmp_path, GOOD), participation=last)
    for participation, says in ((tier, "mine has no rounds"), (last, "mine does not read it")):
        with pytest.raises(BadInput, match=says):
            made(choice(tmp_path, STREAM), participation=participation)
