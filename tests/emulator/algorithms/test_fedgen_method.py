"""FedGen against its equations: a generator of features that learns from the clients' classifiers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import exp

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

from fleetbed.emulator.algorithms.fedgen import Generator, diversity, label_shares
from fleetbed.emulator.method.algorithm import ALL_POLICIES, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.work import Pass
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Optimizer, Training

SMALL = {"noise": 4, "hidden": 7, "gen_batch": 6, "server_steps": 3, "server_batch": 5}
#: of that generator: noise and 3 classes to 7, batch norm's two parameters, 7 to 5 features
P_G = (4 + 3) * 7 + 3 * 7 + 7 * 5 + 5
depths = partial(toy_depths, "one", "three")


def test_the_generator_has_as_many_values_as_the_papers() -> None:
    assert sum(p.numel() for p in Generator(64, 10, 512, 512).parameters()) == 302_080


def test_bytes_are_a_model_each_way_the_generator_down_and_the_counts_up() -> None:
    bed = depths()
    method = bed.method("fedgen", **SMALL)
    so_far = run(bed, method, 2)
    for number, variant in enumerate(("one", "three")):
        parameters, buffers, counters = wire_sizes(bed, variant)
        model = 4 * (parameters + buffers) + 8 * counters
        assert so_far.sent[0][number].nbytes() == model
        assert so_far.sent[1][number].nbytes() == model + 4 * (P_G + 2 * 7)
        assert so_far.replies[0][number].message.nbytes() == model + 4 * 3
        task = Assignment(client=bed.context.clients[number])
        first, later = method.work(method.setup(), task), method.work(so_far.state, task)
        assert (first.bytes_down, first.bytes_up) == (model, model + 12)
        assert (later.bytes_down, later.bytes_up) == (model + 4 * (P_G + 14), model + 12)
        assert later.each_step == (Pass("forward", "classifier", 8), Pass("train", "classifier", 6))
        assert (first.each_step, first.held_values, later.held_values) == ((), 0, P_G + 14)
        assert later.flops == 2 * (P_G + 14) * (8 + 6)
        assert method.heaviest(method.setup(), bed.context.clients[number]) == later


@pytest.mark.parametrize("params", [{"alpha": 0, "beta": 0}, {"alpha": 0, "latent": False}])
def test_without_alpha_and_beta_it_is_heteroavg(params: dict[str, object]) -> None:
    bed = depths(nets=ToyDropout)
    plain, without = run(bed, bed.method("heteroavg"), 3), run(bed, bed.method("fedgen", **params), 3)
    assert same(without.state, plain.state)
    assert [b.nbytes() for b in without.sent[2]] == [b.nbytes() for b in plain.sent[2]]
    used = run(bed, bed.method("fedgen", **SMALL), 3)
    assert not equal(weights(used.state), weights(plain.state))
    once = run(bed, bed.method("fedgen", **SMALL))  # there is no generator yet
    assert equal(weights(once.state), weights(run(bed, bed.method("heteroavg")).state))


def test_the_clients_loss_by_hand() -> None:
    bed = depths(optimizer=Optimizer(lr=0.05, momentum=0.0))
    method = bed.method("fedgen", **SMALL, alpha=2.0, beta=3.0)
    so_far = run(bed, method)
    client = bed.context.clients[1]
    message = method.send(so_far.state, Assignment(client=client))
    reply = method.client(bed.job(client, message, round_=4))
    generator = method.generator(so_far.state).eval()
    net = bed.family.build("three", SPEC).train()
    net.load_state_dict(weights(message))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    job, fade = bed.job(client, message, round_=4), 0.98**3
    rng = job.generator("noise")
    for x, y in job.batches():
        optimizer.zero_grad()
        z = net(x)
        teacher = torch.softmax(net.fc(generator(torch.rand(8, 4, generator=rng), y)), 1).detach()
        kl = (teacher * (teacher.log() - torch.log_softmax(z, 1))).sum(1).mean()
        drawn = torch.randint(3, (6,), generator=rng)
        made = generator(torch.rand(6, 4, generator=rng), drawn).detach()
        loss = F.cross_entropy(z, y) + 3 * fade * kl + 6 / 8 * 2 * fade * F.cross_entropy(net.fc(made), drawn)
        loss.backward()
        optimizer.step()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(reply.message.tensors[name], tensor, rtol=1e-4, atol=1e-5)


def test_generated_features_touch_neither_extractor_nor_running_statistics() -> None:
    """All that a generated batch reaches is the classifier: with cross entropy on it alone nothing else moves."""
    bed = depths()
    method = bed.method("fedgen", **SMALL)
    so_far = run(bed, method)
    message = method.send(so_far.state, Assignment(client=bed.context.clients[0]))
    job = bed.job(bed.context.clients[0], message, round_=2)
    model = job.model(weights(message))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    generator = method.generator(message).eval()
    y = torch.tensor([0, 1, 2])
    F.cross_entropy(model.classify(generator(generator.draw(y, job.generator("noise")), y)), y).backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert reached == {"fc.weight", "fc.bias"}
    assert equal(before, dict(model.state_dict()))


def test_counts_are_one_more_than_the_labels_seen() -> None:
    bed = without_class(depths(epochs=2), 0, 1)
    client, method = bed.context.clients[0], bed.method("fedgen", **SMALL)
    message = method.send(method.setup(), Assignment(client=client))
    reply = method.client(bed.job(client, message))
    labels = torch.cat([y for _, y in bed.job(client, message).batches()])
    assert reply.message.tensors["labels/counts"].tolist() == [1 + int((labels == c).sum()) for c in range(3)]
    assert reply.message.tensors["labels/counts"][1] == 1
    cut = method.client(bed.job(client, message, most_steps=1))
    assert int(cut.message.tensors["labels/counts"].sum()) == 3 + 8


def test_shares_by_hand() -> None:
    shares, seen = label_shares([torch.tensor([3, 1, 1]), torch.tensor([1, 1, 7])])
    assert shares.tolist() == [[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]]
    assert torch.equal(shares.sum(1), torch.ones(3))
    assert seen.tolist() == [0, 2]  # nobody saw class 1


def test_diversity_by_hand() -> None:
    eps, made = torch.tensor([[0.0, 0.0], [1.0, 3.0]]), torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    # of the four pairs two are of different samples: 5 times 3 each
    assert float(diversity(eps, made)) == pytest.approx(exp(-(5 * 3) * 2 / 4))
    assert float(diversity(eps, made * 0)) == 1.0


def test_the_generator_trains_by_its_equations() -> None:
    """Two merges against torch's own Adam, whose state lives on."""
    bed = depths()
    method = bed.method("fedgen", **SMALL, server_lr=0.01, eta=0.5)
    so_far = run(bed, method, 2)
    generator = method.generator(method.setup()).train()
    optimizer = torch.optim.Adam(generator.parameters(), lr=0.01, weight_decay=1e-2)
    for merge in (0, 1):
        optimizer.param_groups[0]["lr"] = 0.01 * 0.98**merge
        messages = [reply.message.tensors for reply in so_far.replies[merge]]
        counts = torch.stack([m["labels/counts"].float() for m in messages])
        rng = rng_of(bed, merge)
        for _ in range(3):
            y = torch.randint(3, (5,), generator=rng)
            eps = torch.rand(5, 4, generator=rng)
            optimizer.zero_grad()
            z = generator(eps, y)
            loss = torch.zeros(())
            for k, m in enumerate(messages):
                scores = z @ m["fc.weight"].T + m["fc.bias"]
                share = torch.stack([counts[k, c] / counts[:, c].sum() for c in y])
                loss = loss + (share * F.cross_entropy(scores, y, reduction="none")).mean()
            apart = sum(
                (eps[i] - eps[j]).square().mean() * (z[i] - z[j]).abs().mean() for i in range(5) for j in range(5)
            )
            (loss + 0.5 * torch.exp(-apart / 25)).backward()
            optimizer.step()
    for name, tensor in so_far.state.under("generator/").items():
        torch.testing.assert_close(tensor, generator.state_dict()[name], rtol=1e-3, atol=1e-5)


def rng_of(bed: Bed, merge: int) -> torch.Generator:
    from fleetbed.emulator.randomness import torch_rng

    return torch_rng(bed.seed, merge, "generator")


def test_the_generator_learns_and_the_classifiers_do_not() -> None:
    bed = depths()
    method = bed.method("fedgen", **SMALL)
    so_far = run(bed, method)
    before = [frozen(reply.message) for reply in so_far.replies[0]]
    came = arrivals_of(bed, so_far)
    merged = method.merge(method.setup(), came)
    assert all(same(a.message, was) for a, was in zip(came, before, strict=True))
    assert not equal(merged.state.under("generator/"), method.setup().under("generator/"))
    plain = weights(run(bed, bed.method("heteroavg")).state)
    assert weights(merged.state).keys() == plain.keys()
    for name, tensor in weights(merged.state).items():
        torch.testing.assert_close(tensor, plain[name])


def test_a_merge_is_seeded_by_its_number() -> None:
    bed = depths()
    method = bed.method("fedgen", **SMALL)
    came, state = arrivals_of(bed, run(bed, method)), method.setup()
    torch.manual_seed(1)
    first = method.merge(state, came)
    torch.manual_seed(2)
    assert same(method.merge(state, came).state, first.state)
    later = replace(frozen(state), values={**state.values, "merges": 1})
    assert not equal(method.merge(later, came).state.under("generator/"), first.state.under("generator/"))


def test_the_server_pays_for_the_generator() -> None:
    bed = depths()
    method, plain = bed.method("fedgen", **SMALL), bed.method("heteroavg")
    came = arrivals_of(bed, run(bed, method))
    extra = server_flops(bed, method.server_work(method.setup(), came)) - plain.server_work(method.setup(), came).flops
    assert extra == 3 * 5 * (6 * (P_G + 14) + 4 * 2 * 5 * 3)


def test_a_client_that_steps_down_takes_part() -> None:
    bed = depths()
    method = bed.method("fedgen", **SMALL)
    so_far = run(bed, method, 2)
    smaller = Client(1, "two", 24)
    method.reassign([bed.context.clients[0], smaller])
    advance(bed, method, so_far, [bed.context.clients[0], smaller], round_=3)
    apart = bed.method("fedgen", **SMALL, aggregation="same-architecture")
    so_far = run(bed, apart, 2)
    apart.reassign([bed.context.clients[0], smaller])
    advance(bed, apart, so_far, [bed.context.clients[0], smaller], round_=3)
    assert "two/fc.weight" in so_far.state.tensors


def test_what_it_needs_and_refuses() -> None:
    needs = depths().method("fedgen").needs
    assert needs.policies == ALL_POLICIES - {"async"}
    assert needs.long_merges
    with pytest.raises(BadInput, match=r"toy-width, but fedgen needs features of one width"):
        Bed(ToyWidth(None), ["half", "full"]).method("fedgen").check()
    bed = depths()
    task = Assignment(client=bed.context.clients[0])
    assert bed.method("fedgen").objection(task, Bundle({"labels/counts": torch.tensor([1, 0, 4])})) is not None


def test_it_learns_and_repeats() -> None:
    bed = Bed(ToyDepth(None), ["one", "three"], samples=60, training=Training(batch=8, optimizer=ADAM, epochs=2))
    method = bed.method("fedgen", **SMALL, alpha=1, beta=0.1)
    first, second = run(bed, method, 6), run(bed, method, 6)
    assert same(first.state, second.state)
    assert accuracy(bed, method, first) > accuracy(bed, method, run(bed, method, 1)) + 0.1
