"""The shipped profiles load and are complete, and each figure has a source."""

from collections import Counter

import msgspec
import pytest

from fleetbed.profiles import (
    available,
    clients_of,
    load_device,
    load_experiment,
    load_fleet,
    load_link,
)
from fleetbed.profiles.checks.provenance import without_provenance
from fleetbed.profiles.loading import TYPES, Kind
from fleetbed.profiles.resolve import FOLDERS, shipped
from fleetbed.schema import json_schema, schema_text

DEVICES = sorted(available("device"))
LINKS = sorted(available("link"))
FLEETS = sorted(available("fleet"))


def test_counts() -> None:
    assert len(DEVICES) == 34 + 1  # 34 boards and phones, and the generic server
    assert "server" in DEVICES
    assert len(LINKS) == 15
    iot = {f"iot-{total}" for total in (10, 20, 50, 100, 200)}
    others = {"demo", "gpu-edge", "phones", "small-boards", "smart-home-500", "tiny-iot", "tiny-iot-outdoors"}
    assert set(FLEETS) == iot | others


@pytest.mark.parametrize("name", DEVICES)
def test_device(name: str) -> None:
    device = load_device(name)
    assert without_provenance(device) == []
    assert load_link(device.link)
    assert device.cap_mib >= 35  # room for a small model
    assert device.trains_on == ("gpu" if name.startswith("jetson") else "cpu")
    origin = {entry.figure: entry for entry in device.provenance}
    if name != "server":
        assert origin["runtime"].note


@pytest.mark.parametrize("name", LINKS)
def test_link(name: str) -> None:
    assert without_provenance(load_link(name)) == []


@pytest.mark.parametrize("name", DEVICES + LINKS)
def test_a_figure_that_was_read_somewhere_says_where(name: str) -> None:
    profile = load_device(name) if name in DEVICES else load_link(name)
    for entry in profile.provenance:
        assert entry.source or entry.note, entry.figure
        if entry.kind in ("measured", "vendor"):
            assert entry.source, entry.figure


def test_figures_read_in_the_sources() -> None:
    """A sample, compared by hand with the sources named in the files."""
    pi5 = load_device("raspberry-pi-5-8gb")
    assert (pi5.cpu.fp64_gflops, pi5.rate_gflops, pi5.memory.available_mib) == (35.2, 70.3, 7526)
    orin = load_device("jetson-orin-nano-8gb")
    assert orin.rate_gflops == 673  # sustained, not the peak of 1280
    assert load_device("jetson-nano").rate_gflops == 236  # only the peak is known
    zero = load_device("raspberry-pi-zero-2w")
    assert (zero.rate_gflops, zero.memory.available_mib, zero.runtime_mib) == (5.6, 329, 147)
    tx2 = load_device("jetson-tx2")
    assert (tx2.power.idle_w, tx2.power.load_w) == (None, 15)  # no idle figure was found
    lora = load_link("lora_sf12")
    assert (lora.up_mbit_s, lora.loss) == (0.00025, 0.1)
    lte = load_link("lte_cat4")
    assert (lte.down_mbit_s, lte.up_mbit_s, lte.rtt_ms, lte.jitter_ms, lte.loss) == (30, 15, 50, 15, 0.005)


def test_fleets() -> None:
    kinds = {name: Counter(client.kind for client in clients_of(load_fleet(name))) for name in FLEETS}
    assert {name: sum(counter.values()) for name, counter in kinds.items()} == {
        "demo": 8,
        "gpu-edge": 20,
        "iot-10": 10,
        "iot-20": 20,
        "iot-50": 50,
        "iot-100": 100,
        "iot-200": 200,
        "phones": 100,
        "small-boards": 8,
        "smart-home-500": 500,
        "tiny-iot": 20,
        "tiny-iot-outdoors": 20,
    }
    assert sorted(kinds["demo"].values()) == [2, 2, 2, 2]
    for total in (10, 20, 50, 100, 200):
        assert list(kinds[f"iot-{total}"].values()) == [total // 5] * 5
    assert kinds["phones"] == {"phone-low": 53, "phone-mid": 46, "phone-high": 1}
    assert all(kind.startswith("jetson") for kind in kinds["gpu-edge"])
    assert {client.device.trains_on for client in clients_of(load_fleet("demo"))} == {"cpu"}
    assert kinds["tiny-iot-outdoors"] == kinds["tiny-iot"]  # on other links


@pytest.mark.parametrize("name", sorted(available("experiment")))
def test_experiment(name: str) -> None:
    experiment = load_experiment(name)
    assert load_device(experiment.server.device)
    assert load_link(experiment.server.link)
    assert clients_of(load_fleet(experiment.fleet))
    assert msgspec.convert(msgspec.to_builtins(experiment), TYPES["experiment"]) == experiment


@pytest.mark.parametrize("kind", sorted(FOLDERS))
def test_schema_and_modelines(kind: Kind) -> None:
    assert (shipped() / "schemas" / f"{kind}.json").read_text() == schema_text(kind, with_names=False), (
        "run: python -m fleetbed.schema"
    )
    for path in available(kind).values():
        first = path.read_text().splitlines()[0]
        modeline = f"# yaml-language-server: $schema=../schemas/{kind}.json"
        assert first == modeline, path
        assert (path.parent / first.partition("=")[2]).resolve() == shipped() / "schemas" / f"{kind}.json"


@pytest.mark.parametrize("kind", sorted(FOLDERS))
def test_the_schema_helps_an_editor(kind: Kind) -> None:
    found = json_schema(kind)
    assert found["title"] == f"fleetbed {kind}"
    for part in found["$defs"].values():
        assert part["description"]
        assert "Struct" not in part["description"]  # a missing docstring shows as the base's own
        assert part["additionalProperties"] is False
        for key, schema in part["properties"].items():
            assert schema["description"], key
