"""FedGKT against its equations: features and logits go up, logits come down, the server trains the large network."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from algorithm_harness import (
    ADAM,
    SGD,
    SPEC,
    Bed,
    ToyDepth,
    ToyDropout,
    ToyWidth,
    advance,
    arrival,
    begin_anew,
    equal,
    frozen,
    run,
    same,
    server_flops,
    toy_depths,
    without_class,
)
from torch.nn import functional as F

from fleetbed.emulator.bases.server_training import server_net
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.families import lookup
from fleetbed.models.work import Pass
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Training

S = 6  # values of a sample at the first cut
depths = partial(toy_depths, "one", "two")


def kl(teacher: torch.Tensor, logits: torch.Tensor, t: float) -> torch.Tensor:
    """T^2 times the divergence, written out."""
    p, q = torch.softmax(teacher / t, 1) + 1e-7, torch.softmax(logits / t, 1)
    return t * t * (p * (p.log() - q.log())).sum(1).mean()


def test_bytes_are_features_logits_and_labels_up_and_logits_down() -> None:
    bed = depths(samples=[24, 17])
    method = bed.method("fedgkt", server_epochs=1)
    so_far = run(bed, method, 2)
    assert [b.nbytes() for b in so_far.sent[0]] == [0, 0]
    assert [b.nbytes() for b in so_far.sent[1]] == [4 * n * 3 for n in (24, 17)]
    assert [r.message.nbytes() for r in so_far.replies[0]] == [4 * n * (S + 3 + 1) for n in (24, 17)]
    first, later = (
        method.work(state, Assignment(client=bed.context.clients[0])) for state in (method.setup(), so_far.state)
    )
    assert (first.bytes_down, first.bytes_up) == (0, 4 * 24 * (S + 3 + 1))
    assert (later.bytes_down, later.bytes_up) == (4 * 24 * 3, first.bytes_up)
    assert (first.held_values, later.held_values) == (24 * (S + 3), 24 * (S + 3 + 3))
    assert (later.held_models, later.once) == (2, (Pass("forward", "all", 24),))  # model and momentum
    assert method.heaviest(method.setup(), bed.context.clients[0]) == later


def test_an_upload_at_the_scale_of_the_papers() -> None:
    """500 samples of CIFAR-10 on ResNets: 8.2 MB up, 20 kB down."""
    nets, spec = lookup.family("resnet-stage"), InputSpec((3, 32, 32), 10)
    bed = Bed(nets, ["resnet10"], samples=500, spec=spec, training=Training(batch=64))
    work = bed.method("fedgkt").heaviest(Bundle(), bed.context.clients[0])
    assert (work.bytes_down, work.bytes_up) == (4 * 500 * 10, 4 * 500 * (64 * 8 * 8 + 10 + 1)) == (20_000, 8_214_000)


def test_uploads_are_of_the_trained_model_in_stored_order() -> None:
    bed = depths()
    client = bed.context.clients[1]
    reply = bed.method("fedgkt").client(bed.job(client, Bundle()))
    net = bed.family.build("two", SPEC)
    net.load_state_dict(reply.keep.under("model/"))
    x, y = bed.data.x[bed.parts[1]], bed.data.y[bed.parts[1]]
    with torch.no_grad():
        s = net.eval().extract(x)
        torch.testing.assert_close(reply.message.tensors["features"], s)
        torch.testing.assert_close(reply.message.tensors["logits"], net(x))
    assert torch.equal(reply.message.tensors["labels"], y.int())
    assert {"features", "logits", "labels"} == reply.message.tensors.keys()  # x never leaves the device


def test_the_clients_loss_by_hand() -> None:
    bed = depths(epochs=2, optimizer=replace_momentum())
    client = bed.context.clients[0]
    told = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    method = bed.method("fedgkt", alpha=0.7, temperature=2.0)
    reply = method.client(bed.job(client, Bundle({"logits": told})))
    net = bed.family.build("one", SPEC).train()
    net.load_state_dict(bed.context.initial("one"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x, y = bed.data.x[bed.parts[0]], bed.data.y[bed.parts[0]]
    job = bed.job(client, Bundle())
    for shown, _ in job.batches():
        rows = [next(i for i in range(24) if torch.equal(x[i], each)) for each in shown]  # by the samples themselves
        optimizer.zero_grad()
        z = net(x[rows])
        (F.cross_entropy(z, y[rows]) + 0.7 * kl(told[rows], z, 2.0)).backward()
        optimizer.step()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(reply.keep.under("model/")[name], tensor, rtol=1e-4, atol=1e-5)


def replace_momentum() -> object:
    return type(SGD)(lr=0.05, momentum=0.0)


def test_logits_are_matched_by_sample_whatever_the_stored_order() -> None:
    """The order in which a client's samples are stored changes which batch a sample is in, not what it is taught."""
    bed = depths()
    client, method = bed.context.clients[0], bed.method("fedgkt")
    whole = Bed(ToyDepth(None), ["one"], samples=24, training=Training(batch=24, epochs=3, optimizer=SGD))
    told = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    order = np.random.default_rng(1).permutation(24)
    plain = whole.method("fedgkt").client(whole.job(whole.context.clients[0], Bundle({"logits": told})))
    whole.parts[0] = whole.parts[0][order]
    permuted = whole.method("fedgkt").client(whole.job(whole.context.clients[0], Bundle({"logits": told[order]})))
    for name, tensor in plain.keep.tensors.items():
        torch.testing.assert_close(permuted.keep.tensors[name], tensor, rtol=1e-3, atol=1e-5)
    mixed = whole.method("fedgkt").client(whole.job(whole.context.clients[0], Bundle({"logits": told})))
    wrong = mixed.keep.tensors["model/fc.weight"] - plain.keep.tensors["model/fc.weight"]
    assert float(wrong.abs().max()) > 1e-3
    assert method.work(Bundle(), Assignment(client=client)).steps == 3


@pytest.mark.parametrize("optimizer", [SGD, ADAM])
def test_alpha_zero_is_private(optimizer: object) -> None:
    bed = depths(nets=ToyDropout, optimizer=optimizer)
    private = run(bed, bed.method("private", keep_optimizer=True), 3)
    alone = run(bed, bed.method("fedgkt", alpha=0, server_epochs=1), 3)
    taught = run(bed, bed.method("fedgkt", server_epochs=1), 3)
    assert all(same(alone.kept[n], private.kept[n]) for n in (0, 1))
    assert not same(taught.kept[0], private.kept[0])
    first = run(bed, bed.method("fedgkt", server_epochs=1))  # nothing was received yet
    assert same(first.kept[0], run(bed, bed.method("private", keep_optimizer=True)).kept[0])


def test_the_server_trains_by_its_equations() -> None:
    """Two merges, with momentum that lives on, against torch's own optimiser and the loss written out."""
    bed = depths(samples=[24, 9])
    method = bed.method("fedgkt", server_epochs=2, alpha=0.5, temperature=2.0)
    so_far = run(bed, method, 2)
    net = bed.family.build("three", SPEC).train()
    net.load_state_dict(bed.context.initial("three"))
    behind = [p for n, p in net.named_parameters() if net.section(n) != "extractor"]
    optimizer = torch.optim.SGD(behind, lr=0.05, momentum=0.9)
    answers: dict[int, torch.Tensor] = {}
    for replies in so_far.replies:
        for _ in range(2):
            for number, reply in enumerate(replies):
                up, outs = reply.message.tensors, []
                slices = [range(0, 8), range(8, 16), range(16, 24)] if number == 0 else [range(0, 5), range(5, 9)]
                for rows in map(list, slices):
                    optimizer.zero_grad()
                    o = net.classify(net.intermediate(up["features"][rows]))
                    (kl(up["logits"][rows], o, 2.0) + 0.5 * F.cross_entropy(o, up["labels"][rows].long())).backward()
                    optimizer.step()
                    outs.append(o.detach())
                answers[number] = torch.cat(outs)
    for name, tensor in so_far.state.under("net/").items():
        torch.testing.assert_close(tensor, net.state_dict()[name], rtol=1e-3, atol=1e-5)
    for number, wanted in answers.items():
        torch.testing.assert_close(so_far.state.tensors[f"logits/{number}"], wanted, rtol=1e-3, atol=1e-4)
    assert not any(name.startswith("net/stem") for name in so_far.state.tensors)  # the server has no extractor


def test_final_logits_are_of_the_trained_network() -> None:
    bed = depths()
    so_far = run(bed, bed.method("fedgkt", server_epochs=2, logits="final"))
    net = server_net(bed.context, "three", so_far.state.under("net/")).eval()
    up = so_far.replies[0][0].message.tensors["features"]
    torch.testing.assert_close(so_far.state.tensors["logits/0"], net.classify(net.intermediate(up)).detach())


def test_without_server_epochs_its_network_stays() -> None:
    bed = depths()
    method = bed.method("fedgkt", server_epochs=0)
    so_far = run(bed, method, 2)
    assert equal(so_far.state.under("net/"), method.setup().under("net/"))
    assert [b.nbytes() for b in so_far.sent[1]] == [0, 0]  # it has no logits to send
    final = bed.method("fedgkt", server_epochs=0, logits="final")
    twice = [run(bed, final, rounds).state for rounds in (1, 2)]
    assert equal(twice[0].under("net/"), twice[1].under("net/"))


def test_logits_of_absent_clients_wait_for_their_next_turn() -> None:
    bed = depths()
    method = bed.method("fedgkt", server_epochs=1)
    so_far = run(bed, method, 3, sampled=[[0, 1], [1], [0]])
    assert torch.equal(so_far.sent[2][0].tensors["logits"], so_far.merged[0].state.tensors["logits/0"])
    assert not torch.equal(so_far.state.tensors["logits/0"], so_far.merged[0].state.tensors["logits/0"])


def test_a_merge_is_seeded_by_its_number_and_not_by_the_order_of_arrivals() -> None:
    bed = depths(nets=ToyDropout)
    method = bed.method("fedgkt", server_epochs=1, server_variant="one")  # its first block has dropout
    so_far = run(bed, method)
    arrivals = [
        arrival(bed, n, reply.message, sent)
        for n, (sent, reply) in enumerate(zip(so_far.sent[0], so_far.replies[0], strict=True))
    ]
    state = method.setup()
    torch.manual_seed(1)
    first = method.merge(state, arrivals)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert same(method.merge(state, arrivals[::-1]).state, first.state)
    assert torch.equal(torch.get_rng_state(), before)
    later = replace(frozen(state), values={"merges": 1})
    assert not equal(method.merge(later, arrivals).state.under("net/"), first.state.under("net/"))


@pytest.mark.parametrize("samples", [1, 2, 3, 9])
def test_a_client_with_few_samples_gets_logits_for_all_of_them(samples: int) -> None:
    bed = depths(samples=[24, samples])
    so_far = run(bed, bed.method("fedgkt", server_epochs=1), 2)
    assert so_far.state.tensors["logits/1"].shape == (samples, 3)


def test_a_client_that_lacks_a_class_takes_part() -> None:
    bed = without_class(depths(), 0, 1)
    so_far = run(bed, bed.method("fedgkt", server_epochs=1), 2)
    assert 1 not in so_far.replies[0][0].message.tensors["labels"]


def test_a_client_that_steps_down_begins_anew_with_the_logits_that_the_server_has() -> None:
    bed = depths()
    method = bed.method("fedgkt", server_epochs=1)
    so_far = run(bed, method, 2)
    clients = begin_anew(bed, method, so_far, Client(1, "one", 24))
    advance(bed, method, so_far, clients, round_=3)
    assert "model/blocks.1.0.weight" not in so_far.kept[1].tensors
    assert so_far.sent[2][1].nbytes() == 4 * 24 * 3


def test_the_server_pays_for_its_training() -> None:
    bed = depths(samples=[24, 16])
    method = bed.method("fedgkt", server_epochs=3, server_variant="one")
    so_far = run(bed, method)
    arrivals = [arrival(bed, n, so_far.replies[0][n].message) for n in (0, 1)]
    steps = 3 * (24 + 16) // 8
    first, last = 2 * 6 * 5, 2 * 5 * 3  # FLOPs of a sample: the first layer behind the cut, and the classifier
    wanted = steps * 8 * (2 * first + 2 * last)  # nothing goes back into what came from elsewhere
    assert server_flops(bed, method.server_work(method.setup(), arrivals)) == pytest.approx(wanted, rel=0.01)


def test_models_are_tested_alone_and_with_the_servers_network() -> None:
    bed = depths()
    method = bed.method("fedgkt", server_epochs=1)
    so_far = run(bed, method)
    targets = method.targets(so_far.state)
    assert [(t.name, t.client, t.shared) for t in targets] == [
        ("client-000", 0, False),
        ("client-001", 1, False),
        ("client-000-server", 0, True),
        ("client-001-server", 1, True),
    ]
    net = bed.family.build("one", SPEC)
    net.load_state_dict(so_far.kept[0].under("model/"))
    net.eval()
    server = server_net(bed.context, "three", so_far.state.under("net/")).eval()
    x = bed.data.x[:6]
    assert torch.equal(method.predict(net, x, targets[0].extras), net(x))
    wanted = server.classify(server.intermediate(net.extract(x)))
    assert torch.equal(method.predict(net, x, targets[2].extras), wanted)


def test_what_it_needs_and_refuses() -> None:
    needs = depths().method("fedgkt").needs
    assert needs.policies == ALL_POLICIES - {"async"}
    assert needs.long_merges
    with pytest.raises(BadInput, match=r"toy-width, but fedgkt needs features of one shape at the first cut: half has"):
        Bed(ToyWidth(None), ["half", "full"]).method("fedgkt").check()
    with pytest.raises(BadInput, match="huge"):
        depths().method("fedgkt", server_variant="huge").check()
    with pytest.raises(BadInput, match=r"params.base of inco is fedgkt, which does not average weights"):
        depths().method("inco", base="fedgkt")


def test_a_label_out_of_range_is_refused() -> None:
    bed = depths()
    method = bed.method("fedgkt")
    message = bed.method("fedgkt").client(bed.job(bed.context.clients[0], Bundle())).message
    task = Assignment(client=bed.context.clients[0])
    assert method.objection(task, message) is None
    wrong = Bundle({**message.tensors, "labels": message.tensors["labels"] + 1})
    assert method.objection(task, wrong) == "its labels must lie between 0 and 2"


def test_the_server_learns() -> None:
    bed = depths(samples=60)
    method = bed.method("fedgkt", server_epochs=3)

    def right(rounds: int) -> float:
        so_far = run(bed, method, rounds)
        net = bed.family.build("one", SPEC)
        net.load_state_dict(so_far.kept[0].under("model/"))
        scores = method.predict(net.eval(), bed.data.x, so_far.state.under("net/"))
        return float((scores.argmax(1) == bed.data.y).float().mean())

    assert right(5) > right(1) + 0.1
