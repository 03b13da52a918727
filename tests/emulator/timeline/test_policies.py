"""Policies as decisions on hand-made sequences of results."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fleetbed.emulator.timeline.making_policies import make_policy, tiers_of
from fleetbed.emulator.timeline.own_policies import restored
from fleetbed.emulator.timeline.policies import AnyPolicy, Decision, Rounds, Stream, choose
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import AlgorithmChoice, Experiment, Participation, Policy

ALL = [0, 1, 2, 3, 4, 5]


def rounds(size: int = 3, stages: int = 1, **policy: Any) -> Rounds:
    return Rounds(Policy(**policy), seed=1, size=size, stages=stages)


def finish(policy: AnyPolicy, clients: tuple[int, ...], first_task: int = 0) -> Decision:
    """Every client's result arrives; gives the last decision."""
    decision = Decision()
    for number, client in enumerate(clients):
        decision = policy.ended(first_task + number, client, ok=True, idle=ALL)
    return decision


def test_sync_waits_for_all_it_invited() -> None:
    policy = rounds()
    invited = policy.open(ALL).invite
    assert len(set(invited)) == 3
    assert policy.ended(0, invited[0], ok=True, idle=ALL).merge is None
    assert policy.ended(1, invited[1], ok=False, idle=ALL).merge is None
    assert policy.ended(2, invited[2], ok=True, idle=ALL) == Decision(merge=(0, 2))


def test_a_round_in_which_everybody_failed_closes_with_nothing() -> None:
    policy = rounds(size=1)
    (client,) = policy.open(ALL).invite
    assert policy.ended(0, client, ok=False, idle=ALL) == Decision(merge=())


def test_rounds_count_and_choose_anew() -> None:
    policy = rounds(size=2)
    seen = []
    for number in range(1, 30):
        invited = policy.open(ALL).invite
        assert policy.round == number
        finish(policy, invited)
        policy.merged(len(invited))
        seen.append(invited)
    assert {client for invited in seen for client in invited} == set(ALL)
    assert len(set(seen)) > 5


def test_the_deadline_drops_the_late_and_gives_their_clients_up() -> None:
    policy = rounds(kind="deadline", deadline_s=5.0)
    decision = policy.open(ALL)
    a, b, c = decision.invite
    assert decision.timer_s == 5.0
    policy.ended(10, b, ok=True, idle=ALL)
    assert policy.timer(policy.opened) == Decision(merge=(10,), abandon=(a, c))


def test_a_late_result_counts_in_the_next_round_if_asked() -> None:
    policy = rounds(size=2, kind="deadline", deadline_s=5.0, late="next-round")
    a, b = policy.open(ALL).invite
    policy.ended(10, a, ok=True, idle=ALL)
    assert policy.timer(policy.opened) == Decision(merge=(10,))
    assert policy.ended(11, b, ok=True, idle=ALL) == Decision()  # the server is still merging
    policy.merged(1)
    second = policy.open([client for client in ALL if client != b]).invite
    assert finish(policy, second, 20).merge == (11, 20, 21)


def test_an_old_timer_does_not_close_a_new_round() -> None:
    policy = rounds(kind="deadline", deadline_s=5.0)
    invited = policy.open(ALL).invite
    old = policy.opened
    finish(policy, invited)
    policy.merged(len(invited))
    policy.open(ALL)
    assert policy.timer(old) == Decision()


def test_over_select_takes_the_first_and_abandons_the_rest() -> None:
    policy = rounds(kind="over-select", invite=4, take=2)
    a, b, c, d = policy.open(ALL).invite
    policy.ended(0, c, ok=True, idle=ALL)
    assert policy.ended(1, a, ok=True, idle=ALL) == Decision(merge=(0, 1), abandon=(b, d))


def test_stages_go_on_with_those_who_came_through() -> None:
    policy = rounds(stages=2)
    a, b, c = policy.open(ALL).invite
    policy.ended(0, a, ok=True, idle=ALL)
    policy.ended(1, b, ok=False, idle=ALL)
    assert policy.ended(2, c, ok=True, idle=ALL).merge == (0, 2)
    policy.merged(2)
    assert policy.open(ALL).invite == (a, c)
    assert (policy.round, policy.stage) == (1, 1)
    finish(policy, (a, c), 3)
    policy.merged(2)
    policy.open(ALL)
    assert (policy.round, policy.stage) == (2, 0)


def stream(**policy: Any) -> Stream:
    experiment = Experiment(
        title="", fleet="", algorithms=(AlgorithmChoice(name="x"),), participation=Participation(ratio=0.5)
    )
    made = make_policy(experiment, Policy(**policy), seed=1, planned_s=dict.fromkeys(ALL, 1.0), stages=1)
    assert isinstance(made, Stream)
    return made


def test_async_merges_each_result_and_keeps_as_many_busy() -> None:
    policy = stream(kind="async")
    invited = policy.open(ALL).invite
    assert len(invited) == 3
    assert policy.ended(0, invited[1], ok=True, idle=ALL) == Decision(merge=(0,))
    idle = [client for client in ALL if client not in policy.busy]
    assert len(policy.open(idle).invite) == 1
    assert len(policy.busy) == 3


def test_async_replaces_a_client_that_failed() -> None:
    policy = stream(kind="async", concurrency=1)
    (client,) = policy.open(ALL).invite
    assert len(policy.ended(0, client, ok=False, idle=ALL).invite) == 1


def test_a_round_of_a_stream_is_as_many_results_as_a_round_would_have() -> None:
    policy = stream(kind="async", concurrency=1)
    seen = []
    for task in range(7):
        (client,) = policy.open(ALL).invite
        seen.append(policy.round)
        policy.ended(task, client, ok=True, idle=ALL)
        policy.merged(1)
    assert seen == [1, 1, 1, 2, 2, 2, 3]


def test_what_waits_for_the_server_does_not_count_yet() -> None:
    policy = stream(kind="async")
    clients = policy.open(ALL).invite
    assert [policy.ended(task, client, ok=True, idle=[]).merge for task, client in enumerate(clients)] == [
        (0,),
        (1,),
        (2,),
    ]
    seen = []
    for _ in clients:  # a round of three results
        policy.merged(1)
        policy.open([])
        seen.append(policy.round)
    assert seen == [1, 1, 2]


def test_buffered_merges_every_so_many() -> None:
    policy = stream(kind="buffered", buffer=2, concurrency=2)
    a, b = policy.open(ALL).invite
    assert policy.ended(0, a, ok=True, idle=[c for c in ALL if c not in (a, b)]).merge is None
    assert policy.ended(1, b, ok=True, idle=ALL).merge == (0, 1)


@pytest.mark.parametrize(
    ("settings", "staleness", "weight"),
    [
        ({"staleness": "constant"}, 9, 0.6),
        ({"staleness": "polynomial", "exponent": 0.5}, 0, 0.6),
        ({"staleness": "polynomial", "exponent": 0.5}, 3, 0.3),
        ({"staleness": "hinge", "hinge_a": 10.0, "hinge_b": 4.0}, 4, 0.6),
        ({"staleness": "hinge", "hinge_a": 10.0, "hinge_b": 4.0}, 5, 0.6 / 11),
    ],
)
def test_stale_results_weigh_less(settings: dict[str, Any], staleness: int, weight: float) -> None:
    assert stream(kind="async", **settings).weight(staleness) == pytest.approx(weight)


def made(selection: str = "uniform", clients: int = 6, tiers: int = 3, ratio: float = 0.5, **policy: Any) -> AnyPolicy:
    experiment = Experiment(
        title="",
        fleet="",
        algorithms=(AlgorithmChoice(name="x"),),
        participation=Participation(ratio=ratio, selection=selection, tiers=tiers),  # type: ignore[arg-type]
    )
    planned_s = {client: float(10 - client) for client in range(clients)}
    return make_policy(experiment, Policy(**policy), seed=1, planned_s=planned_s, stages=1)


@pytest.mark.parametrize(
    ("clients", "ratio", "size"), [(100, 0.29, 29), (100, 0.57, 57), (10, 0.7, 7), (10, 0.69, 6), (10, 0.01, 1)]
)
def test_a_round_has_the_part_of_the_fleet_that_is_asked_for(clients: int, ratio: float, size: int) -> None:
    assert made(clients=clients, ratio=ratio).size == size


def test_uniform_selection_cannot_tell_who_is_away() -> None:
    policy = made("uniform")
    seen = set()
    for task in range(0, 60, 3):
        invited = policy.open([0, 1, 2], [3, 4, 5]).invite
        assert any(client in (0, 1, 2) for client in invited)  # a round of the away alone would be no round
        seen |= set(invited)
        finish(policy, invited, task)
        policy.merged(len(invited))
    assert seen == set(ALL)


def test_by_availability_only_those_who_are_there_are_invited() -> None:
    policy = made("available")
    assert set(policy.open([0, 1], [2, 3, 4, 5]).invite) == {0, 1}


@pytest.mark.parametrize("selection", ["uniform", "available", "tier"])
def test_a_round_waits_for_somebody_to_come(selection: str) -> None:
    policy = made(selection)
    assert policy.open([], ALL) == Decision()
    assert policy.round == 1
    decision = policy.on_client_available([2], [0, 1, 3, 4, 5])
    assert 2 in decision.invite
    assert policy.round == 1
    assert policy.on_client_available([2, 3], [0, 1, 4, 5]) == Decision()  # the round has begun


def test_late_results_are_waited_for_when_all_others_are_away() -> None:
    policy = made("uniform", clients=2, ratio=1.0, kind="deadline", deadline_s=5.0, late="next-round")
    assert policy.open([0, 1]).invite == (0, 1)
    policy.ended(0, 0, ok=True, idle=[])
    assert policy.timer(policy.opened).merge == (0,)
    policy.merged(1)
    # the one who is away would fail at once, and the next round too, and all that follow, at the same moment
    assert policy.open([], [0]).invite == ()
    assert policy.ended(1, 1, ok=True, idle=[]) == Decision(merge=(1,))


def test_a_stream_fills_up_when_somebody_comes() -> None:
    policy = made("uniform", kind="async", concurrency=2)
    assert policy.open([4], [0, 1]).invite == (4,)
    assert policy.on_client_available([3], [0, 1]).invite == (3,)
    assert policy.on_client_available([0], [1]).invite == ()


def test_tiers_are_by_planned_time_and_of_equal_size() -> None:
    assert tiers_of({0: 9.0, 1: 1.0, 2: 5.0, 3: 2.0, 4: 8.0}, 2) == [[1, 3], [2, 4, 0]]
    assert tiers_of({0: 1.0, 1: 1.0}, 5) == [[0], [1]]


def test_a_round_draws_from_one_tier_and_in_time_from_all() -> None:
    policy = made("tier")  # tiers of two: (5, 4), (3, 2), (1, 0)
    seen = set()
    for task in range(0, 60, 3):
        invited = policy.open(ALL).invite
        assert set(invited) in ({4, 5}, {2, 3}, {0, 1})
        seen |= set(invited)
        finish(policy, invited, task)
        policy.merged(len(invited))
    assert seen == set(ALL)
    assert set(policy.open([3], [0, 1, 2, 4, 5]).invite) == {3}  # a tier of which nobody is there is not drawn


@pytest.mark.parametrize(
    ("selection", "policy", "says"),
    [
        ("tier", {"kind": "async"}, "tier draws a round from one tier, but async has no rounds"),
        ("uniform", {"kind": "buffered", "buffer": 7}, "buffer is 7, but 6 clients take part: it would never be full"),
        ("uniform", {"kind": "over-select", "invite": 9, "take": 2}, "invite is 9, but 6 clients take part"),
    ],
)
def test_what_cannot_work_is_refused(selection: str, policy: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        made(selection, **policy)


def test_rounds_do_not_discount() -> None:
    assert rounds().weight(5) == 1.0


def test_choosing_is_uniform_seeded_and_independent_of_the_order() -> None:
    counts = dict.fromkeys(ALL, 0)
    for draw in range(3000):
        for client in choose(ALL, 2, seed=1, draw=draw):
            counts[client] += 1
    assert all(abs(count - 1000) < 100 for count in counts.values())
    assert choose(ALL[::-1], 3, 1, 5) == choose(ALL, 3, 1, 5)
    assert choose([], 3, 1, 5) == []


@pytest.mark.parametrize("policy", [rounds(), stream(kind="buffered", buffer=2)])
def test_a_policy_survives_json(policy: AnyPolicy) -> None:
    policy.open(ALL)
    assert restored(msgspec.json.decode(msgspec.json.encode(policy))) == policy


@pytest.mark.parametrize("kind", ["sync", "deadline"])
def test_the_last_round_may_invite_more(kind: str) -> None:
    policy = ending(6, 3, 0.5, last_ratio=1.0, kind=kind, deadline_s=5.0 if kind == "deadline" else None)
    sizes = []
    for _ in range(3):
        invited = policy.open(ALL).invite
        sizes.append(len(invited))
        finish(policy, invited)
        policy.merged(len(invited))
    assert sizes == [3, 3, 6]


@pytest.mark.parametrize(
    "policy", [{"kind": "async"}, {"kind": "buffered", "buffer": 2}, {"kind": "over-select", "invite": 3, "take": 2}]
)
def test_without_rounds_of_a_part_of_the_fleet_there_is_no_last_one(policy: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"participation\.last_ratio is 1, but .* does not read it"):
        ending(6, 3, 0.5, last_ratio=1.0, **policy)


def ending(clients: int, rounds: int, ratio: float, *, last_ratio: float, **policy: Any) -> AnyPolicy:
    experiment = Experiment(
        title="",
        fleet="demo",
        algorithms=(AlgorithmChoice(name="heteroavg"),),
        participation=Participation(ratio=ratio, last_ratio=last_ratio),
        rounds=rounds,
    )
    return make_policy(experiment, Policy(**policy), 1, dict.fromkeys(range(clients), 1.0), 1)


def test_in_a_stream_what_diverged_counts_but_is_not_merged() -> None:
    policy = Stream(Policy(kind="async"), seed=1, size=2, buffer=1, concurrency=2)
    first, second = policy.open(ALL).invite
    assert policy.ended(0, first, ok=False, idle=ALL, diverged=True) == Decision(merge=())
    policy.merged(0)
    assert len(policy.open([c for c in ALL if c != second]).invite) == 1
    assert policy.round == 1
    assert policy.ended(1, second, ok=False, idle=ALL, diverged=True) == Decision(merge=())
    policy.open(ALL)
    assert policy.round == 2
