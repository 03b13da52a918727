"""Every mistake that a profile can have, and its sentence."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from fleetbed.profiles.checks.provenance import without_provenance
from fleetbed.profiles.errors import BadInput, nearest
from fleetbed.profiles.experiment import Experiment
from fleetbed.profiles.loading import decode
from fleetbed.profiles.settings import apply_settings
from fleetbed.profiles.types import Device, Fleet, Link, Profile

DEVICE: dict[str, Any] = {
    "title": "A board",
    "trains_on": "cpu",
    "cpu": {"description": "4 cores", "cores": 4, "fp32_gflops": 10},
    "memory": {
        "installed_mib": 1024,
        "visible_mib": 1000,
        "available_mib": 800,
        "runtime_mib": 100,
        "bandwidth_gb_s_measured": 2,
    },
    "power": {"idle_w": 1, "load_w": 5},
    "link": "wifi4",
}
LINK: dict[str, Any] = {"title": "A link", "down_mbit_s": 10, "up_mbit_s": 5, "rtt_ms": 1}
FLEET: dict[str, Any] = {
    "title": "A fleet",
    "members": [{"device": "a", "count": 2}, {"device": "b", "count": 3}],
}
WEIGHTED: dict[str, Any] = {
    "title": "A fleet",
    "total": 10,
    "members": [{"device": "a", "weight": 0.5}, {"device": "b", "weight": 0.5}],
}
EXPERIMENT: dict[str, Any] = {"title": "A study", "fleet": "demo", "algorithms": [{"name": "heteroavg"}]}


def sentence(base: dict[str, Any], type_: type[Profile], *sets: str) -> str:
    with pytest.raises(BadInput) as caught:
        decode(apply_settings(deepcopy(base), sets), type_, "f.yaml")
    return str(caught.value)


def test_the_bases_are_sound() -> None:
    for base, type_ in (
        (DEVICE, Device),
        (LINK, Link),
        (FLEET, Fleet),
        (WEIGHTED, Fleet),
        (EXPERIMENT, Experiment),
    ):
        assert isinstance(decode(deepcopy(base), type_, "f.yaml"), type_)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            "cpu.coers=4",
            "f.yaml: cpu.coers: there is no key 'coers'; did you mean cores? "
            "allowed are clock_ghz, cores, description, fp32_gflops, fp64_gflops.",
        ),
        ("cpu.cores=four", 'f.yaml: cpu.cores is "four", but a whole number from 1 to 100000 is needed.'),
        ("cpu.cores=1.5", "f.yaml: cpu.cores is 1.5, but a whole number from 1 to 100000 is needed."),
        ("cpu.cores=0", "f.yaml: cpu.cores is 0, but a whole number from 1 to 100000 is needed."),
        ("cpu.cores=true", "f.yaml: cpu.cores is true, but a whole number from 1 to 100000 is needed."),
        ("cpu.fp32_gflops=-3", "f.yaml: cpu.fp32_gflops is -3, but a number from 1e-6 to 1000000000 is needed."),
        ("cpu.fp32_gflops=0", "f.yaml: cpu.fp32_gflops is 0, but a number from 1e-6 to 1000000000 is needed."),
        ("power.idle_w=0", "f.yaml: power.idle_w is 0, but a number from 1e-6 to 1000000 is needed."),
        (
            "memory.available_mib=512 MB",
            'f.yaml: memory.available_mib is "512 MB", but a number from 1 to 1000000000 is needed: '
            "write the bare number, its unit is MiB.",
        ),
        (
            'cpu.fp32_gflops="10"',
            'f.yaml: cpu.fp32_gflops is "10", but a number from 1e-6 to 1000000000 is needed: '
            "write the bare number, without unit or quotes.",
        ),
        (
            "memory.bandwidth_gb_s_measured=",
            "f.yaml: there are no rates, and no memory.bandwidth_gb_s_measured to derive them from: "
            "add the copy rate of one core",
        ),
        ("runtime=tensorflow", 'f.yaml: runtime is "tensorflow", but one of compiled, mnn-like, pytorch'),
        (
            "rates={matmul_gflops: 3}",
            "f.yaml: the key rates.conv_1x1_gflops is missing: add it, with a number",
        ),
        ("trains_on=tpu", 'f.yaml: trains_on is "tpu", but one of cpu, gpu is needed.'),
        ("title=3", "f.yaml: title is 3, but text is needed."),
        ("title=", "f.yaml: title is null, but text is needed."),
        (
            "cpu=4",
            "f.yaml: cpu is 4, but a mapping with keys from description, cores, clock_ghz, fp64_gflops, "
            "fp32_gflops is needed.",
        ),
        (
            "memory.available_mib=1001",
            "f.yaml: memory.available_mib is 1001, but at most memory.visible_mib = 1000",
        ),
        (
            "memory.visible_mib=2000",
            "f.yaml: memory.visible_mib is 2000, but at most memory.installed_mib = 1024",
        ),
        (
            "memory.runtime_mib=800",
            "f.yaml: memory.runtime_mib is 800, but less than memory.available_mib = 800",
        ),
        ("power.idle_w=6", "f.yaml: power.idle_w is 6, but at most power.load_w = 5"),
        (
            "trains_on=gpu",
            "f.yaml: trains_on is gpu, but gpu.fp32_gflops_sustained and gpu.fp32_gflops_peak are both",
        ),
        (
            "provenance=[{figure: cpu.corse, kind: vendor}]",
            "f.yaml: provenance.0.figure: there is no key 'cpu.corse'; did you mean cpu.cores",
        ),
        (
            "provenance=[{figure: cpu, kind: guessed}]",
            'f.yaml: provenance.0.kind is "guessed", but one of assumed, derived, fitted, measured, vendor is',
        ),
    ],
)
def test_device(change: str, expected: str) -> None:
    found = sentence(DEVICE, Device, change)
    assert found.startswith(expected), found


def test_a_missing_key_is_named() -> None:
    tree = deepcopy(DEVICE)
    del tree["cpu"]["fp32_gflops"]
    assert sentence(tree, Device) == (
        "f.yaml: the key cpu.fp32_gflops is missing: add it, with a number from 1e-6 to 1000000000 as its value."
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("down_mbit_s=0", "f.yaml: down_mbit_s is 0, but a number from 1e-6 to 10000000 is needed."),
        ("up_mbit_s=-1", "f.yaml: up_mbit_s is -1, but a number from 1e-6 to 10000000 is needed."),
        (
            "rtt_ms=5 ms",
            'f.yaml: rtt_ms is "5 ms", but a number from 0 to 10000000 is needed: write the bare number, its',
        ),
        ("loss=2", "f.yaml: loss is 2, but a number from 0 to 1 is needed."),
        ("speed=3", "f.yaml: speed: there is no key 'speed'; allowed are down_mbit_s, jitter_ms, loss,"),
    ],
)
def test_link(change: str, expected: str) -> None:
    assert sentence(LINK, Link, change).startswith(expected)


@pytest.mark.parametrize(
    ("base", "change", "expected"),
    [
        (FLEET, "members=[]", "f.yaml: members is a list of 0, but a list of at least 1 is needed."),
        (FLEET, "members.0.count=0", "f.yaml: members.0.count is 0, but a whole number from 1"),
        (FLEET, "members.1.weight=0.5", "f.yaml: members.1 has both count and weight, but exactly one"),
        (FLEET, "members.1={device: a}", "f.yaml: members.1 has neither count nor weight, but exactly one"),
        (
            FLEET,
            "members.1={device: a, weight: 1}",
            "f.yaml: members.1 has a weight, but members.0 has a count",
        ),
        (FLEET, "total=6", "f.yaml: total is 6, but the counts sum to 5"),
        (FLEET, "members.0.count=99999", "f.yaml: the fleet has 100002 clients, but at most 100000"),
        (
            FLEET,
            "members.0.count=1000000000",
            "f.yaml: members.0.count is 1000000000, but a whole number from 1 to 100000",
        ),
        (
            FLEET,
            "members.0.override={cpu.cores: [1]}",
            "f.yaml: members.0.override.cpu.cores is a list of 1, but a",
        ),
        (
            FLEET,
            "members.0.override={cpu.cores: true}",
            "f.yaml: members.0.override.cpu.cores is true, but a",
        ),
        (
            WEIGHTED,
            "members.0.weight=0.4",
            "f.yaml: the weights of members sum to 0.9, but 1 or 100 is needed",
        ),
        (
            WEIGHTED,
            "members.0.weight=0.6",
            "f.yaml: the weights of members sum to 1.1, but 1 or 100 is needed",
        ),
        (WEIGHTED, "members.0.weight=-1", "f.yaml: members.0.weight is -1, but a number from 1e-9 to 100 is needed."),
        (WEIGHTED, "total=", "f.yaml: total is missing: weights need the number of clients as total."),
        (WEIGHTED, "total=0", "f.yaml: total is 0, but a whole number from 1"),
    ],
)
def test_fleet(base: dict[str, Any], change: str, expected: str) -> None:
    found = sentence(base, Fleet, change)
    assert found.startswith(expected), found


def test_an_override_of_the_rates_of_a_link_that_is_not_used_is_refused() -> None:
    found = sentence(FLEET, Fleet, "members.0.link=3g", "members.0.override={link_override.up_mbit_s: 3}")
    assert found.startswith("f.yaml: members.0.override has link_override, which belongs to the device's own link")


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["roundz=3"], "f.yaml: roundz: there is no key 'roundz'; did you mean rounds?"),
        (
            ["training.batch=0"],
            "f.yaml: training.batch is 0, but a whole number from 1 to 1000000 is needed.",
        ),
        (
            ["training.schedule=[{round: 5, lr: 0.1}, {round: 5, lr: 0.2}]"],
            "f.yaml: training.schedule.1.round is 5, but the entry before it has 5: list the changes in the order",
        ),
        (
            ["training.schedule=[{round: 5, lr: 0.1}, {round: 9, lr: 0.2}, {round: 8, lr: 0.2}]"],
            "f.yaml: training.schedule.2.round is 8, but the entry before it has 9",
        ),
        (
            ["training.schedule=[{round: 0, lr: 1}]"],
            "f.yaml: training.schedule.0.round is 0, but a whole number from 1",
        ),
        (
            ["training.schedule=[{round: 2, lr: 0}]"],
            "f.yaml: training.schedule.0.lr is 0, but a number from 1e-12 to 1e12",
        ),
        (["training.schedule=[{round: 2}]"], "f.yaml: the key training.schedule.0.lr is missing"),
        (["training.on_divergence=ignore"], 'f.yaml: training.on_divergence is "ignore", but one of continue, stop'),
        (["participation.last_ratio=0"], "f.yaml: participation.last_ratio is 0, but a number above 0"),
        (["algorithms=[]"], "f.yaml: algorithms is a list of 0, but a list of at least 1 is needed."),
        (["seeds=[1, 2, 1]"], 'f.yaml: seeds: "1" occurs twice, but all must differ: remove one of them.'),
        (["seeds=[-1]"], "f.yaml: seeds.0 is -1, but a whole number from 0 to 4294967295 is needed."),
        (["algorithms.1.name=heteroavg"], 'f.yaml: algorithms: "heteroavg" occurs twice'),
        (
            ["algorithms.0.label=../x"],
            'f.yaml: algorithms.0.label is "../x", but text of 1 to 60 characters, no slash',
        ),
        (["policies=[{kind: sync}, {kind: sync}]"], 'f.yaml: policies: "sync" occurs twice'),
        (
            ["policies.0.kind=deadline"],
            "f.yaml: policies.0.kind is deadline, but policies.0.deadline_s is missing",
        ),
        (
            ["policies=[{kind: over-select, take: 3}]"],
            "f.yaml: policies.0.kind is over-select, but policies.0.invite is missing: add it.",
        ),
        (
            ["policies=[{kind: over-select, invite: 3}]"],
            "f.yaml: policies.0.kind is over-select, but policies.0.take is missing: add it.",
        ),
        (
            ["policies=[{kind: over-select, invite: 3, take: 4}]"],
            "f.yaml: policies.0.take is 4, but at most invite = 3",
        ),
        (
            ["policies.0.kind=buffered"],
            "f.yaml: policies.0.kind is buffered, but policies.0.buffer is missing",
        ),
        (
            ["policies.0.deadline_s=5"],
            "f.yaml: policies.0.deadline_s is given, but kind is sync and only deadline",
        ),
        (
            ["policies.0.late=next-round"],
            "f.yaml: policies.0.late is given, but kind is sync and only deadline reads it",
        ),
        (
            ["policies.0.mixing=0.9"],
            "f.yaml: policies.0.mixing is given, but kind is sync and only async and buffered read it",
        ),
        (["policies.0.kind=3"], "f.yaml: policies.0.kind is 3, but text is needed"),
        (["timing.source=replay"], "f.yaml: timing.source is replay, but timing.replay is missing"),
        (
            ["timing.source=calibrated"],
            'f.yaml: timing.source is "calibrated", which no longer exists; plans no longer depend',
        ),
        (
            ["timing.dilation=2"],
            "f.yaml: timing.dilation is a key of earlier versions; it is now called timing.time_scale",
        ),
        (["timing.replay=runs/1"], "f.yaml: timing.replay is given, but"),
        (
            ["timing.time_scale=quick"],
            'f.yaml: timing.time_scale is "quick", but a number from 1e-6 to 10000 or one of auto, fast is needed',
        ),
        (
            ["data.partition.kind=file"],
            "f.yaml: data.partition.kind is file, but data.partition.file is missing",
        ),
        (["data.partition.file=a.json"], "f.yaml: data.partition.file is given, but"),
        (
            ["data.partition.alpha=0"],
            "f.yaml: data.partition.alpha is 0, but a number from 0.0001 to 1000000000 is needed.",
        ),
        (
            ["availability.kind=trace"],
            "f.yaml: availability.kind is trace, but availability.trace is missing",
        ),
        (
            ["participation.ratio=1.5"],
            "f.yaml: participation.ratio is 1.5, but a number above 0 and at most 1",
        ),
        (
            ["data.augment=[crap]"],
            'f.yaml: data.augment.0 is "crap", but one of crop, cutout, flip is needed.',
        ),
        (["data.channels=2"], "f.yaml: data.channels is 2, but one of 1, 3 is needed."),
    ],
)
def test_experiment(sets: list[str], expected: str) -> None:
    found = sentence(EXPERIMENT, Experiment, *sets)
    assert found.startswith(expected), found


def test_a_study_has_a_limit() -> None:
    found = sentence(EXPERIMENT, Experiment, f"seeds={list(range(10_001))}")
    assert found.startswith("f.yaml: algorithms, policies, seeds and sweep make 10001 runs, but at most 10000")


def test_two_runs_with_one_name_are_refused() -> None:
    """`a` under the policy `b-c` and `a-b` under `c` would share the folder a-b-c-1."""
    found = sentence(
        EXPERIMENT,
        Experiment,
        "algorithms=[{name: a}, {name: a-b}]",
        "policies=[{label: b-c}, {label: c}]",
    )
    assert found.startswith('f.yaml: the names of the runs: "a-b-c-1" occurs twice')


def test_nearest() -> None:
    assert str(nearest("fedinn", ["fedin", "scaffold"], "algorithm", "f.yaml: name")) == (
        "f.yaml: name: there is no algorithm 'fedinn'; did you mean fedin? allowed are fedin, scaffold."
    )
    assert str(nearest("zzz", ["fedin"], "algorithm", "")) == "there is no algorithm 'zzz'; allowed are fedin."
    assert str(nearest("zzz", [], "fleet", "x")) == "x: there is no fleet 'zzz'; there are none."
    many = [f"name-{n:02d}" for n in range(30)]
    assert str(nearest("zzz", many, "set", "x")) == "x: there is no set 'zzz'; there are 30, from name-00 to name-29."
    assert "did you mean raspberry-pi-5?" in str(nearest("pi-5", ["raspberry-pi-5", "wifi5"], "device", ""))


def test_figures_without_provenance_are_found() -> None:
    tree = apply_settings(
        deepcopy(DEVICE),
        ["provenance=[{figure: cpu, kind: vendor}, {figure: memory.installed_mib, kind: vendor}]"],
    )
    assert without_provenance(decode(tree, Device, "f.yaml")) == [
        "memory.visible_mib",
        "memory.available_mib",
        "memory.runtime_mib",
        "memory.bandwidth_gb_s_measured",
        "power.idle_w",
        "power.load_w",
    ]


def test_the_file_leads_the_sentence(tmp_path: Path) -> None:
    from fleetbed.profiles.resolve import load_link

    file = tmp_path / "slow.yaml"
    file.write_text("title: x\ndown_mbit_s: fast\nup_mbit_s: 1\nrtt_ms: 1\n")
    with pytest.raises(BadInput) as caught:
        load_link(str(file))
    assert str(caught.value) == f'{file}: down_mbit_s is "fast", but a number from 1e-6 to 10000000 is needed.'
