"""FD: FedHe's turn, and a server that remembers one round."""

from __future__ import annotations

from itertools import permutations

import torch
from algorithm_harness import ADAM, Bed, ToyDropout, ToyStrangers, accuracy, advance, begin_anew, run, same

from fleetbed.emulator.method.algorithm import ROUND_POLICIES, Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.profiles.experiment import Training

TRAINING = Training(batch=4, optimizer=ADAM)


def strangers(clients: int = 2, samples: int = 40) -> Bed:
    return Bed(ToyStrangers(None), ["thin", "thick"] * (clients // 2), samples=samples, training=TRAINING)


def upload(bed: Bed, number: int, rows: dict[int, list[float]], weight: float = 1.0) -> Arrival:
    tensors = {"class": torch.tensor([*rows], dtype=torch.int32), "logits": torch.tensor([*rows.values()])}
    task = Assignment(client=bed.context.clients[number])
    return Arrival(assignment=task, sent=Bundle(), message=Bundle(tensors), weight=weight)


def sent(bed: Bed, state: Bundle) -> dict[int, list[float]]:
    message = bed.method("fd").send(state, Assignment(client=bed.context.clients[0])).tensors
    return dict(zip(message["class"].tolist(), message["logits"].tolist(), strict=True))


def test_a_round_replaces_the_logits_of_the_one_before() -> None:
    bed = strangers(4)
    method = bed.method("fd")
    first = [
        upload(bed, 0, {0: [1, 2, 3], 2: [4, 5, 6]}),
        upload(bed, 1, {0: [3, 2, 1]}),
        upload(bed, 2, {2: [0, 0, 0], 0: [5, 5, 5]}),
    ]
    for order in permutations(first):
        state = method.merge(method.setup(), order).state
        assert sent(bed, state) == {0: [3, 3, 3], 2: [2, 2.5, 3]}  # nobody saw class 1
    state = method.merge(state, [upload(bed, 3, {1: [7, 7, 7], 2: [9, 9, 9]})]).state
    assert sent(bed, state) == {1: [7, 7, 7], 2: [9, 9, 9]}  # class 0 has none until somebody sees it again


def test_a_message_is_c_times_c_plus_one_values() -> None:
    bed = Bed(ToyStrangers(None), ["thin", "thick"], samples=200, spec=InputSpec((1, 4, 4), 10), training=TRAINING)
    method = bed.method("fd", batch=100)
    so_far = run(bed, method, 2)
    assert {b.nbytes() for b in [*so_far.sent[1], *(r.message for r in so_far.replies[0])]} == {440}
    assert [b.nbytes() for b in so_far.sent[0]] == [0, 0]
    work = method.work(so_far.state, Assignment(client=bed.context.clients[0]))
    assert (work.bytes_down, work.bytes_up, work.held_models, work.steps) == (440, 440, 3, 3)


def test_until_a_second_merge_it_is_fedhe() -> None:
    """Then FedHe's logits are those of the first round as well."""
    bed = Bed(ToyDropout(None), ["one", "three"], samples=20, training=TRAINING)
    fd, fedhe = bed.method("fd"), bed.method("fedhe", cold_start=0, forget_every=0)
    after = [[run(bed, method, rounds) for method in (fd, fedhe)] for rounds in (2, 3)]
    assert all(same(after[0][0].kept[n], after[0][1].kept[n]) for n in (0, 1))
    assert not same(after[1][0].kept[0], after[1][1].kept[0])


def test_alpha_zero_is_private() -> None:
    bed = Bed(ToyDropout(None), ["one", "three"], samples=20, training=TRAINING)
    private = run(bed, bed.method("private", steps=3, batch=50, keep_optimizer=True), 3)
    without = run(bed, bed.method("fd", alpha=0), 3)
    assert all(same(without.kept[n], private.kept[n]) for n in (0, 1))
    assert not same(run(bed, bed.method("fd"), 3).kept[0], private.kept[0])


def test_a_mixing_weight_does_not_touch_logits() -> None:
    bed = strangers()
    method = bed.method("fd")
    states = [
        method.merge(method.setup(), [upload(bed, 0, {0: [1, 1, 1]}), upload(bed, 1, {0: [3, 3, 3]}, weight)]).state
        for weight in (1.0, 0.1)
    ]
    assert same(*states)


def test_a_client_that_lacks_classes_sends_and_trains_without_them() -> None:
    bed = strangers()
    bed.data.y[bed.parts[0]] = 1
    so_far = run(bed, bed.method("fd"), 2)
    assert so_far.replies[0][0].message.tensors["class"].tolist() == [1]
    assert so_far.replies[0][0].message.nbytes() == 4 * (3 + 1)
    assert set(so_far.sent[1][0].tensors["class"].tolist()) == {0, 1, 2}


def test_a_client_that_was_away_gets_the_logits_of_the_last_round() -> None:
    bed = strangers(4)
    so_far = run(bed, bed.method("fd"), 4, sampled=[[0], [1], [2], [0, 1]])
    assert same(so_far.sent[3][0], so_far.replies[2][0].message)


def test_partial_work_sends_what_it_saw() -> None:
    bed = strangers()
    client, method = bed.context.clients[0], bed.method("fd", batch=4)
    replies = [method.client(bed.job(client, Bundle(), most_steps=most)) for most in (1, None)]
    _, y = next(bed.job(client, Bundle()).batches(steps=3, batch=4))
    assert replies[0].message.tensors["class"].tolist() == sorted(set(y.tolist()))
    assert not same(replies[0].message, replies[1].message)


def test_a_client_that_steps_down_begins_anew_and_still_takes_part() -> None:
    bed = strangers()
    method = bed.method("fd")
    so_far = run(bed, method, 2)
    clients = begin_anew(bed, method, so_far, Client(1, "thin", 40))
    advance(bed, method, so_far, clients, round_=3)
    assert so_far.kept[1].tensors["model/fc.weight"].shape == (3, 4)


def test_rounds_only_with_the_reason() -> None:
    needs = strangers().method("fd").needs
    assert needs.policies == ROUND_POLICIES
    assert "replaces all logits" in needs.policies_why
    assert needs.initial_on_client


def test_it_learns_and_repeats() -> None:
    bed = strangers(samples=60)
    method = bed.method("fd", steps=8, batch=20)
    first, second = run(bed, method, 12), run(bed, method, 12)
    assert same(first.state, second.state)
    assert accuracy(bed, method, first) > accuracy(bed, method, run(bed, method, 1)) + 0.1
