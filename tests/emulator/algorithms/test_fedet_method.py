"""Fed-ET against its equations: a large model at the server learns from the votes of small ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from algorithm_harness import (
    ADAM,
    SPEC,
    Bed,
    ToyDepth,
    ToyDropout,
    ToyWidth,
    accuracy,
    advance,
    arrivals_of,
    equal,
    frozen,
    run,
    same,
    server_flops,
    toy_depths,
    weights,
    wire_sizes,
    without_class,
)
from torch.nn import functional as F

from fleetbed.emulator.algorithms.fedet import divergence, votes
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.randomness import derive, torch_rng
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Training

SMALL = {"public": 20, "server_steps": 3, "server_batch": 8}
depths = partial(toy_depths, "one", "two", public=30)


def test_votes_by_hand() -> None:
    """z1 = (3, 0, 0) and z2 = (0, 1, 0): variances 3 and 1/3, weights 0.9 and 0.1, consensus (2.7, 0.1, 0)."""
    y, diverse, disputed = votes(torch.tensor([[[3.0, 0, 0]], [[0, 1.0, 0]]]))
    assert (y.tolist(), disputed.tolist()) == ([0], [True])
    torch.testing.assert_close(diverse, torch.tensor([[0.0, 1.0, 0.0]]))


def test_weights_sum_to_one_and_agreement_leaves_nobody() -> None:
    same_for_all = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0)).expand(4, 6, 3)
    y, diverse, disputed = votes(same_for_all)
    assert torch.equal(y, same_for_all[0].argmax(1))  # weights that sum to 1 leave what all say as it is
    assert not disputed.any()
    assert torch.equal(diverse, torch.zeros(6, 3))
    assert torch.isfinite(votes(torch.zeros(2, 3, 3))[1]).all()  # nobody is sure of anything


def test_where_nobody_disagrees_there_is_no_divergence() -> None:
    teacher, o = torch.tensor([[0.0, 1, 0], [0, 0, 0]]), torch.tensor([[1.0, 0, 0], [5, 0, 0]], requires_grad=True)
    counts = torch.tensor([True, False])
    p, q = torch.softmax(teacher[0], 0), torch.softmax(o[0], 0)
    loss = divergence(teacher, o, counts)
    torch.testing.assert_close(loss, (p * (p / q).log()).sum() / 2)
    loss.backward()
    assert torch.equal(o.grad[1], torch.zeros(3))


def test_bytes_are_those_of_heteroavg() -> None:
    bed = depths()
    method = bed.method("fedet", **SMALL)
    so_far = run(bed, method, 2)
    for number, variant in enumerate(("one", "two")):
        parameters, buffers, counters = wire_sizes(bed, variant)
        wanted = 4 * (parameters + buffers) + 8 * counters
        assert so_far.sent[1][number].nbytes() == so_far.replies[1][number].message.nbytes() == wanted
        task = Assignment(client=bed.context.clients[number])
        assert method.work(so_far.state, task) == bed.method("heteroavg").work(so_far.state, task)


def test_without_server_steps_it_is_heteroavg() -> None:
    bed = depths(nets=ToyDropout)
    plain = run(bed, bed.method("heteroavg"), 3)
    without = run(bed, bed.method("fedet", public=20, server_steps=0), 3)
    assert equal(weights(without.state), weights(plain.state))
    trained = run(bed, bed.method("fedet", **SMALL), 3)
    assert not equal(weights(trained.state), weights(plain.state))


@pytest.mark.parametrize("aggregation", ["layerwise", "same-architecture"])
def test_the_server_trains_by_its_equations(aggregation: str) -> None:
    bed = depths()
    method = bed.method("fedet", **SMALL, server_lr=0.1, aggregation=aggregation, **{"lambda": 0.3})
    so_far = run(bed, method)
    x = bed.context.public.draw(20, derive(bed.seed, 0, "public"))
    messages = [reply.message.tensors for reply in so_far.replies[0]]
    scores = []
    for client, message in zip(bed.context.clients, messages, strict=True):
        net = bed.family.build(client.variant, SPEC)
        net.load_state_dict(message)
        scores.append(net.eval()(x).detach())
    v = [s.var(1, keepdim=True) for s in scores]
    y = ((v[0] * scores[0] + v[1] * scores[1]) / (v[0] + v[1])).argmax(1)
    server = bed.family.build("three", SPEC).train()
    server.load_state_dict(bed.context.initial("three"))
    for name in ("weight", "bias"):
        server.fc.get_parameter(name).data = (messages[0][f"fc.{name}"] + messages[1][f"fc.{name}"]) / 2
    optimizer = torch.optim.SGD(server.parameters(), lr=0.1, momentum=0.9)
    rng = torch_rng(bed.seed, 0, "server")
    for _ in range(3):
        rows = torch.randperm(20, generator=rng)[:8]
        optimizer.zero_grad()
        o = server(x[rows])
        loss = F.cross_entropy(o, y[rows])
        for i, row in enumerate(rows.tolist()):
            others = [k for k in (0, 1) if int(scores[k][row].argmax()) != int(y[row])]
            if others:
                total = sum(v[k][row] for k in others)
                p = torch.softmax(sum(v[k][row] / total * scores[k][row] for k in others), 0)
                loss = loss + 0.3 / 8 * (p * (p.log() - torch.log_softmax(o[i], 0))).sum()
        loss.backward()
        optimizer.step()
    for name, tensor in server.state_dict().items():
        torch.testing.assert_close(so_far.state.tensors[f"server/{name}"], tensor, rtol=1e-3, atol=1e-5)
    prefixes = [""] if aggregation == "layerwise" else ["one/", "two/"]
    for prefix in prefixes:  # the small models take the server's head, and keep their own mean otherwise
        assert torch.equal(so_far.state.tensors[f"{prefix}fc.weight"], so_far.state.tensors["server/fc.weight"])
    if aggregation == "same-architecture":
        assert torch.equal(so_far.state.tensors["one/stem.1.weight"], messages[0]["stem.1.weight"])


def test_a_lone_arrival_teaches_the_server_its_own_answers() -> None:
    bed = depths()
    method = bed.method("fedet", **SMALL, **{"lambda": 0})
    merged = method.merge(method.setup(), arrivals_of(bed, run(bed, method))[:1])
    assert merged.metrics["disagreement"] == 0


def test_a_merge_is_seeded_by_its_number() -> None:
    bed = depths(nets=ToyDropout)
    method = bed.method("fedet", **SMALL, server_variant="two")
    came, state = arrivals_of(bed, run(bed, method)), method.setup()
    torch.manual_seed(1)
    first = method.merge(state, came)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert same(method.merge(state, came).state, first.state)
    assert torch.equal(torch.get_rng_state(), before)
    later = replace(frozen(state), values={**state.values, "merges": 1})
    assert not equal(method.merge(later, came).state.under("server/"), first.state.under("server/"))


def test_the_server_pays_for_votes_and_training() -> None:
    bed = depths()
    method = bed.method("fedet", **SMALL)
    came = arrivals_of(bed, run(bed, method))
    mean = bed.method("heteroavg").server_work(method.setup(), came).flops
    extra = server_flops(bed, method.server_work(method.setup(), came)) - mean
    stem, block, head = 2 * 16 * 6, 2 * 6 * 5, 2 * 5 * 3
    first, second, third = (stem + block + deeper * 2 * 5 * 5 + head for deeper in range(3))
    assert extra == pytest.approx(20 * (first + second) + 3 * 8 * (3 * third - stem))


def test_small_models_and_the_large_one_are_evaluated() -> None:
    bed = depths()
    method = bed.method("fedet", **SMALL)
    targets = method.targets(run(bed, method).state)
    assert [(t.name, t.variant, t.client) for t in targets] == [
        ("one", "one", None),
        ("two", "two", None),
        ("server", "three", None),
    ]
    assert targets[2].tensors.keys() == bed.context.initial("three").keys()


def test_a_client_that_steps_down_or_lacks_a_class_takes_part() -> None:
    bed = without_class(depths(), 0, 1)
    for aggregation in ("layerwise", "same-architecture"):
        method = bed.method("fedet", **SMALL, aggregation=aggregation)
        so_far = run(bed, method, 2, sampled=[[1], [1]])
        smaller = Client(1, "one", 24)
        method.reassign([smaller])
        advance(bed, method, so_far, [smaller], round_=3)
        assert method.targets(so_far.state)[0].variant == "one"


def test_what_it_needs_and_refuses() -> None:
    bed = depths()
    needs = bed.method("fedet").needs
    assert (needs.policies, needs.public_samples) == (ALL_POLICIES - {"async"}, 5000)
    assert needs.long_merges
    assert not needs.public_labels
    with pytest.raises(BadInput, match=r"toy-width, but fedet needs features of one width"):
        Bed(ToyWidth(None), ["half", "full"]).method("fedet").check()
    with pytest.raises(BadInput, match=r"aggregation of fedet is ends, .* choose layerwise or same-architecture"):
        bed.method("fedet", aggregation="ends").check()
    with pytest.raises(BadInput, match="huge"):
        bed.method("fedet", server_variant="huge").check()
    assert bed.method("fedet").objection(Assignment(client=bed.context.clients[0]), Bundle()) is None


def test_it_learns_and_repeats() -> None:
    training = Training(batch=8, optimizer=ADAM, epochs=2)
    bed = Bed(ToyDepth(None), ["one", "two"], samples=60, public=40, training=training)
    method = bed.method("fedet", public=40, server_steps=5, server_batch=8)
    first, second = run(bed, method, 6), run(bed, method, 6)
    assert same(first.state, second.state)
    assert accuracy(bed, method, first) > accuracy(bed, method, run(bed, method, 1)) + 0.1
