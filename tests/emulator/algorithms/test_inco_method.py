"""InCo against its three definitions, and as an add-on that changes nothing else."""

from __future__ import annotations

import pytest
import torch
from algorithm_harness import Bed, ToyDepth, equal, run, same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetbed.emulator.algorithms.inco import Params, cross_layer
from fleetbed.emulator.method.algorithm import Arrival, Assignment, Client
from fleetbed.emulator.method.bundle import Bundle
from fleetbed.models.base import InputSpec
from fleetbed.models.families.lookup import family
from fleetbed.profiles.errors import BadInput
from fleetbed.profiles.experiment import Training

seeds = given(st.integers(0, 10_000), st.floats(1e-4, 10), st.floats(1e-4, 10))
quick = settings(max_examples=50, deadline=None)
SPEC = InputSpec((1, 16, 16), 3)


def two(seed: int, size_k: float, size_0: float, *shape: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    g_k, g_0 = (torch.randn(*(shape or (4, 3, 3, 3)), generator=rng, dtype=torch.float64) for _ in range(2))
    return size_k * g_k, size_0 * g_0


def resnet_bed(*variants: str) -> Bed:
    small = family("resnet-stage", {"base_width": 4})
    return Bed(small, variants, samples=4, spec=SPEC, training=Training(batch=4))


# released


@quick
@seeds
def test_released_is_the_formula_for_every_kernel(seed: int, size_k: float, size_0: float) -> None:
    g_k, g_0 = two(seed, size_k, size_0)
    update = cross_layer(g_k, g_0, Params()).update
    for out in range(4):
        for inp in range(3):
            k, base = g_k[out, inp].flatten(), g_0[out, inp].flatten()
            alpha, beta = float(base @ base), float(base @ k)
            theta = min(max(abs(beta) / (alpha + 1e-7), 0.0), 5.0)
            u = (k / (k.norm() + 1e-7) + theta * base / (base.norm() + 1e-7)) * (k.norm() + base.norm()) / 2
            torch.testing.assert_close(update[out, inp].flatten(), u.clamp(-0.1, 0.1))


@quick
@seeds
def test_released_is_bounded_and_blind_to_the_sign_of_beta(seed: int, size_k: float, size_0: float) -> None:
    g_k, g_0 = two(seed, size_k, size_0)
    crossed = cross_layer(g_k, g_0, Params())
    assert crossed.update.abs().max() <= 0.1
    assert crossed.theta.min() >= 0
    assert crossed.theta.max() <= 5
    assert torch.equal(crossed.theta, cross_layer(g_k, -g_0, Params()).theta)


def test_released_leaves_a_kernel_that_nobody_updated() -> None:
    g_k, g_0 = two(1, 1e-2, 1e-2)
    g_k[2, 1] = 0
    update = cross_layer(g_k, g_0, Params()).update
    assert torch.equal(update[2, 1], torch.zeros(3, 3, dtype=torch.float64))
    assert update[2, 0].abs().max() > 0


def test_released_does_not_promise_to_keep_the_direction_of_the_base() -> None:
    """With beta < 0 and |g_k| < |g_0|; so no test may ask for it."""
    g_0 = torch.zeros(1, 1, 3, 3)
    g_0[0, 0, 0, 0] = 0.02
    update = cross_layer(-0.1 * g_0, g_0, Params()).update
    assert (update * g_0).sum() < 0


@pytest.mark.parametrize("mode", ["released", "paper", "theorem"])
@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (4, 3, 1, 1), (6,)])
def test_it_is_finite_where_a_layer_did_not_move(mode: str, shape: tuple[int, ...]) -> None:
    moved, still = torch.randn(shape, generator=torch.Generator().manual_seed(3)), torch.zeros(shape)
    for g_k, g_0 in ((moved, still), (still, moved), (still, still)):
        crossed = cross_layer(g_k, g_0, Params(mode=mode))
        assert torch.isfinite(crossed.update).all()
        assert torch.isfinite(crossed.theta).all()


def test_one_by_one_kernels_and_vectors_are_taken_as_a_whole() -> None:
    for shape in ((4, 3, 1, 1), (6,)):
        crossed = cross_layer(*two(2, 1e-2, 1e-2, *shape), Params())
        assert crossed.theta.numel() == 1
    assert cross_layer(*two(2, 1e-2, 1e-2), Params()).theta.numel() == 12
    assert cross_layer(*two(2, 1e-2, 1e-2), Params(per="layer")).theta.numel() == 1


def test_the_ablations() -> None:
    g_k, g_0 = two(4, 1e-2, 2e-2)
    beta = (g_0 * g_k).sum((2, 3), keepdim=True)
    theta = (beta.abs() / ((g_0 * g_0).sum((2, 3), keepdim=True) + 1e-7)).clamp(max=5)
    torch.testing.assert_close(cross_layer(g_k, g_0, Params(normalise=False)).update, g_k + theta * g_0)
    torch.testing.assert_close(cross_layer(g_k, g_0, Params(normalise=False, optimise=False)).update, g_k + g_0)
    norm_k, norm_0 = (g.square().sum((2, 3), keepdim=True).sqrt() for g in (g_k, g_0))
    both = (g_k / norm_k + g_0 / norm_0) * (norm_k + norm_0) / 2
    torch.testing.assert_close(cross_layer(g_k, g_0, Params(optimise=False)).update, both, rtol=1e-4, atol=1e-7)


# paper


@quick
@seeds
def test_paper_is_orthogonal_to_the_base_and_as_long_as_it_says(seed: int, size_k: float, size_0: float) -> None:
    g_k, g_0 = two(seed, size_k, size_0)
    update = cross_layer(g_k, g_0, Params(mode="paper")).update
    cosine = float((g_k * g_0).sum() / (g_k.norm() * g_0.norm()))
    sine = (1 - cosine**2) ** 0.5
    assert abs(float((update * g_0).sum())) < 1e-9 * float(update.norm() * g_0.norm())
    torch.testing.assert_close(float(update.norm()), sine * float(g_k.norm() + g_0.norm()) / 2)


# theorem


@quick
@seeds
def test_theorem_keeps_to_its_constraint_and_is_idempotent(seed: int, size_k: float, size_0: float) -> None:
    for per in ("layer", "kernel"):
        g_k, g_0 = two(seed, size_k, size_0)
        params = Params(mode="theorem", per=per)
        dims = (2, 3) if per == "kernel" else (0, 1, 2, 3)
        update = cross_layer(g_k, g_0, params).update
        beta, after = ((g * g_0).sum(dims, keepdim=True) for g in (g_k, update))
        tolerance = 1e-9 * size_k * size_0
        assert after.min() >= -tolerance
        torch.testing.assert_close(torch.where(beta >= 0, update, 0.0), torch.where(beta >= 0, g_k, 0.0))
        assert torch.where(beta < 0, after, 0.0).abs().max() <= tolerance
        torch.testing.assert_close(cross_layer(update, g_0, params).update, update)


def test_theorem_by_hand() -> None:
    g_0, g_k = torch.tensor([2.0, 0.0]), torch.tensor([-4.0, 3.0])
    crossed = cross_layer(g_k, g_0, Params(mode="theorem"))
    assert crossed.update.tolist() == [0.0, 3.0]  # theta = -8/4
    assert (float(crossed.theta), float(crossed.beta)) == (-2.0, -8.0)


# the add-on

CROSS = {
    f"layer{s}.{b}.conv{c}.weight": f"layer{s}.0.conv2.weight" for s in (1, 2, 3, 4) for b in (1, 2) for c in (1, 2)
}


def test_only_the_deeper_blocks_change_and_each_reads_the_unmodified_delta() -> None:
    bed = resnet_bed("resnet10", "resnet26", "resnet26")
    base, inco = bed.method("heteroavg"), bed.method("inco")
    state = base.setup()
    rng = torch.Generator().manual_seed(5)
    arrivals = []
    for client in bed.context.clients:
        sent = base.send(state, Assignment(client=client, task=0))
        moved = {
            n: t + 0.01 * torch.randn(t.shape, generator=rng) if t.is_floating_point() else t
            for n, t in sent.tensors.items()
        }
        arrivals.append(Arrival(assignment=Assignment(client=client), sent=sent, message=Bundle(moved)))
    plain = base.merge(state, arrivals).state.tensors
    merged = inco.merge(state, arrivals)
    assert len(CROSS) == 16
    for name, tensor in merged.state.tensors.items():
        if name not in CROSS:
            assert torch.equal(tensor, plain[name]), name
            continue
        holders = [a for a in arrivals if name in a.message.tensors]
        everyone = arrivals
        g_k = sum(a.message.tensors[name] - a.sent.tensors[name] for a in holders) / len(holders)
        g_0 = sum(a.message.tensors[CROSS[name]] - a.sent.tensors[CROSS[name]] for a in everyone) / len(everyone)
        torch.testing.assert_close(tensor, state.tensors[name] + cross_layer(g_k, g_0, Params()).update)
    assert not torch.equal(merged.state.tensors["layer1.1.conv1.weight"], plain["layer1.1.conv1.weight"])


def test_theta_and_beta_are_reported_for_every_layer() -> None:
    bed = resnet_bed("resnet26")
    so_far = run(bed, bed.method("inco"))
    layers = {name.removesuffix(".weight") for name in CROSS}
    wanted = {f"{what}/{layer}" for what in ("theta", "beta", "beta_positive") for layer in layers}
    assert so_far.merged[0].metrics.keys() == wanted
    start = bed.method("heteroavg").setup().tensors
    after = so_far.replies[0][0].message.tensors
    g_k, g_0 = (after[n] - start[n] for n in ("layer3.1.conv2.weight", "layer3.0.conv2.weight"))
    beta = (g_k * g_0).sum((2, 3))
    metrics = so_far.merged[0].metrics
    torch.testing.assert_close(metrics["beta/layer3.1.conv2"], float(beta.mean()))
    torch.testing.assert_close(metrics["beta_positive/layer3.1.conv2"], float((beta > 0).float().mean()))


@pytest.mark.parametrize("base", ["heteroavg", "heteroprox", "fedin"])
def test_it_adds_no_byte_and_leaves_the_client_alone(base: str) -> None:
    bed = resnet_bed("resnet10", "resnet26")
    plain = run(bed, bed.method(base), 2)
    inco = run(bed, bed.method("inco", base=base), 2)
    for a, b in zip(plain.sent[0] + plain.sent[1], inco.sent[0] + inco.sent[1], strict=True):
        assert a.nbytes() == b.nbytes()
    assert [r.message.nbytes() for r in plain.replies[1]] == [r.message.nbytes() for r in inco.replies[1]]
    assert equal(plain.replies[0][1].message.tensors, inco.replies[0][1].message.tensors)
    client = bed.context.clients[1]
    state = plain.state
    assert bed.method("inco", base=base).work(state, Assignment(client=client)) == bed.method(base).work(
        state, Assignment(client=client)
    )
    first = bed.method(base).setup()  # FedIN's later tasks are heavier than those of the first round
    assert bed.method("inco", base=base).heaviest(first, client) == bed.method(base).heaviest(first, client)


#: each base on a family that it goes with
BASES = {
    "scaffold": ("resnet-stage", ("resnet10", "resnet26"), {}),
    "fednova": ("resnet-stage", ("resnet10", "resnet26"), {}),
    "moon": ("resnet-stage", ("resnet10", "resnet26"), {}),
    "inclusivefl": ("resnet-stage", ("resnet10", "resnet26"), {}),
    "fedrep": ("resnet-stage", ("resnet18", "resnet26"), {"head_epochs": 1}),
    "heterofl": ("resnet-grid", ("resnet18-half", "resnet26-half"), {}),
    "fedrolex": ("resnet-width", ("resnet26-eighth", "resnet26-half"), {}),
}


@pytest.mark.parametrize("base", BASES)
def test_over_other_bases_messages_work_and_policies_are_theirs_to_the_bit(base: str) -> None:
    name, variants, params = BASES[base]
    nets = family(name, {"base_width": 8})
    bed = Bed(nets, variants, samples=4, spec=SPEC, training=Training(batch=4))
    methods = bed.method(base, **params), bed.method("inco", base=base, base_params=params)
    plain, inco = (run(bed, method) for method in methods)
    for a, b in zip(plain.sent[0], inco.sent[0], strict=True):
        assert same(a, b)
    for a, b in zip(plain.replies[0], inco.replies[0], strict=True):
        assert same(a.message, b.message)
        assert (a.keep is None and b.keep is None) or same(a.keep, b.keep)
    assert methods[0].needs == methods[1].needs
    for client in bed.context.clients:
        task = Assignment(client=client, round=2)
        for a, b in ((methods[0].setup(), methods[1].setup()), (plain.state, inco.state)):
            assert methods[0].work(a, task) == methods[1].work(b, task)
        assert methods[0].send(plain.state, task).values == methods[1].send(inco.state, task).values
        assert methods[0].heaviest(plain.state, client) == methods[1].heaviest(inco.state, client)
    moved = [name for name, t in plain.state.tensors.items() if not torch.equal(t, inco.state.tensors[name])]
    assert moved
    # of the weights only these, and of what is beside them nothing
    assert set(moved) <= nets.cross_layers(plain.state.tensors).keys()
    assert plain.state.values == inco.state.values


def test_variates_are_the_bases_even_after_the_weights_were_crossed() -> None:
    """c moves by what clients say alone: the state's own weights do not enter."""
    bed = resnet_bed("resnet26", "resnet26")
    inco = run(bed, bed.method("inco", base="scaffold"), 2)
    before = inco.merged[0].state.under("variate/")
    for name, c in inco.state.under("variate/").items():
        dc = [reply.message.tensors[f"variate/{name}"] for reply in inco.replies[1]]
        torch.testing.assert_close(c, before[name] + sum(dc) / 2)


@pytest.mark.parametrize("base", ["heteroavg", "fedavg"])
def test_where_there_is_nothing_to_cross_it_is_refused(base: str) -> None:
    with pytest.raises(BadInput, match=r"the variants in use \(resnet10\) have one block .* would change nothing"):
        resnet_bed("resnet10", "resnet10").method("inco", base=base).check()
    resnet_bed("resnet10", "resnet14").method("inco", base=base).check()


@pytest.mark.parametrize("params", [{"version": "v1"}, {"aggregation": "ends"}])
def test_over_a_base_that_keeps_the_intermediate_layers_to_the_clients_it_is_refused(params: dict[str, str]) -> None:
    bed = resnet_bed("resnet18", "resnet26")
    with pytest.raises(BadInput, match=r"inco would change nothing: .* set base_params\.aggregation to layerwise"):
        bed.method("inco", base="fedin", base_params=params).check()
    bed.method("inco", base="fedin", base_params={"version": "v1", "aggregation": "layerwise"}).check()


def test_a_client_that_steps_down_does_so_in_the_base_too() -> None:
    inco = resnet_bed("resnet26", "resnet26").method("inco")
    state = inco.setup()
    inco.reassign([Client(0, "resnet26", 4), Client(1, "resnet22", 4)])
    assert [target.variant for target in inco.targets(state)] == ["resnet22", "resnet26"]


def test_the_parameters_of_the_base_reach_it() -> None:
    bed = resnet_bed("resnet26")
    prox = bed.method("inco", base="heteroprox", base_params={"mu": 0.0})
    assert same(run(bed, prox).state, run(bed, bed.method("inco")).state)
    with pytest.raises(BadInput, match=r"params\.base\.params\.mi: there is no key 'mi'"):
        bed.method("inco", base="heteroprox", base_params={"mi": 1})


def test_over_same_architecture_averaging_each_variant_is_crossed_by_itself() -> None:
    bed = resnet_bed("resnet18", "resnet26")
    so_far = run(bed, bed.method("inco", base="fedavg"))
    names = {m.removeprefix("theta/") for m in so_far.merged[0].metrics if m.startswith("theta/")}
    assert {n.split("/")[0] for n in names} == {"resnet18", "resnet26"}
    assert len(names) == 8 + 16


def test_deltas_can_be_scaled_first() -> None:
    bed = resnet_bed("resnet26")
    start = bed.method("heteroavg").setup().tensors
    plain = run(bed, bed.method("heteroavg")).state.tensors["fc.weight"] - start["fc.weight"]
    scaled = run(bed, bed.method("inco", delta_scale=0.2)).state.tensors["fc.weight"] - start["fc.weight"]
    torch.testing.assert_close(scaled, 0.2 * plain, rtol=1e-4, atol=1e-7)


def test_what_it_cannot_do_is_said() -> None:
    bed = resnet_bed("resnet26")
    with pytest.raises(BadInput, match=r"both params\.delta_scale and params\.base_params\.delta_scale"):
        bed.method("inco", delta_scale=0.2, base_params={"delta_scale": 0.2})
    with pytest.raises(BadInput, match=r"params\.base of inco is fedhe, which does not average weights"):
        bed.method("inco", base="fedhe")
    with pytest.raises(BadInput, match="ablations"):
        bed.method("inco", mode="paper", optimise=False).check()
    with pytest.raises(BadInput, match="toy-depth, but inco knows no cross-layer gradients"):
        Bed(ToyDepth(None), ["one"]).method("inco").check()
