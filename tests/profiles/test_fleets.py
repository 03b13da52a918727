"""The clients of a fleet: apportionment, overrides, links, names."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbed.profiles import BadInput, Fleet, Member, clients_of, load_device, load_fleet, load_link
from fleetbed.profiles.fleet import apportion
from fleetbed.profiles.resolve import available, check_search, find_profile


@pytest.mark.parametrize(
    ("weights", "total", "counts"),
    [
        ([53.2, 46.4, 0.45], 100, [53, 46, 1]),  # shares 53.17, 46.38, 0.4498
        ([53.2, 46.4, 0.45], 200, [106, 93, 1]),  # 106.35, 92.75, 0.8996: two left, for 0.8996 and 0.75
        ([0.4, 0.2, 0.2, 0.15, 0.05], 20, [8, 4, 4, 3, 1]),
        ([1 / 3, 1 / 3, 1 / 3], 10, [4, 3, 3]),  # a tie: the first one wins
        ([0.1, 0.7, 0.2], 5, [1, 3, 1]),  # 0.5, 3.5, 1.0: a true tie only in exact arithmetic
        ([0.5, 0.5], 1, [1, 0]),
    ],
)
def test_apportionment_by_hand(weights: list[float], total: int, counts: list[int]) -> None:
    assert apportion(weights, total) == counts


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12), st.integers(1, 5000))
def test_apportionment_gives_all_and_is_never_off_by_one_or_more(weights: list[float], total: int) -> None:
    counts = apportion(weights, total)
    assert sum(counts) == total
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - weight / sum(weights) * total) < 1 + 1e-6


def test_clients_are_numbered_in_file_order() -> None:
    fleet = Fleet(title="x", members=(Member(device="jetson-nano", count=2), Member(device="phone-low", count=1)))
    clients = clients_of(fleet)
    assert [(client.number, client.name, client.kind) for client in clients] == [
        (0, "000", "jetson-nano"),
        (1, "001", "jetson-nano"),
        (2, "002", "phone-low"),
    ]
    assert clients[2].link_name == "lte_cat4"


def test_a_devices_own_rate_counts_on_its_own_link_only() -> None:
    def rates(link: str | None) -> tuple[float, float, float]:
        (client,) = clients_of(Fleet(title="x", members=(Member(device="raspberry-pi-4b-4gb", count=1, link=link),)))
        return client.link.down_mbit_s, client.link.up_mbit_s, client.link.rtt_ms

    assert load_link("wifi5").down_mbit_s == 186
    assert rates(None) == (108, 108, 3)  # the Pi 4 was measured at 108 on Wi-Fi 5; the rest is the link's
    assert rates("wifi5") == (108, 108, 3)
    assert rates("lte_cat4") == (30, 15, 50)


def test_overrides_replace_figures_and_say_so() -> None:
    member = Member(device="raspberry-pi-zero-2w", count=1, override={"memory.available_mib": 256, "cpu.cores": 2})
    (client,) = clients_of(Fleet(title="x", members=(member,)))
    plain = load_device("raspberry-pi-zero-2w")
    assert (client.device.memory.available_mib, client.device.cpu.cores) == (256, 2)
    assert client.device.cap_mib == 256 - plain.runtime_mib
    assert client.device.memory.visible_mib == plain.memory.visible_mib
    origin = {entry.figure: entry for entry in client.device.provenance}
    assert origin["memory.available_mib"].kind == "assumed"
    assert origin["memory.visible_mib"].kind == "measured"


def test_an_override_may_add_a_figure_that_the_device_lacks() -> None:
    override: dict[str, int | float | str] = {
        "throttle.after_s": 60,
        "throttle.rate": 0.5,
        "link": "3g",
        "title": "Old",
    }
    (client,) = clients_of(Fleet(title="x", members=(Member(device="server", count=1, override=override),)))
    assert client.device.throttle is not None
    assert (client.device.throttle.rate, client.link_name, client.device.title) == (0.5, "3g", "Old")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ({"memory.avialable_mib": 3}, "the fleet: members.0.override.memory.avialable_mib: there is no key"),
        (
            {"memory.available_mib": "3 GB"},
            'the fleet: members.0.override.memory.available_mib is "3 GB", but a number',
        ),
        (
            {"memory.available_mib": 1},
            "the fleet: members.0.override.runtime pytorch-cuda takes 1024, but less than",
        ),
        ({"memory": 3}, "the fleet: members.0.override: 'memory' is a group"),
        ({"title.x": 3}, "the fleet: members.0.override: 'title.x' goes below title"),
        ({"provenance": "x"}, "the fleet: members.0.override: provenance cannot be overridden"),
        ({"": 1}, "the fleet: members.0.override"),
        ({"cpu..cores": 1}, "the fleet: members.0.override"),
        ({"throttle.rate": 0.5}, "the fleet: the key members.0.override.throttle.after_s is missing"),
        ({"link": "warp"}, "the fleet: members.0.link: there is no link 'warp'"),
    ],
)
def test_bad_overrides(override: dict[str, int | float | str], expected: str) -> None:
    with pytest.raises(BadInput) as caught:
        clients_of(Fleet(title="x", members=(Member(device="jetson-nano", count=1, override=override),)))
    assert str(caught.value).startswith(expected), str(caught.value)


def test_names_resolve_by_path_then_own_folder_then_shipped(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    (own / "links").mkdir(parents=True)
    text = "title: {}\ndown_mbit_s: 1\nup_mbit_s: 1\nrtt_ms: 1\n"
    (own / "links" / "wifi4.yaml").write_text(text.format("Own"))
    (own / "links" / "other.yml").write_text(text.format("Other"))
    loose = tmp_path / "wifi4.yaml"
    loose.write_text(text.format("Loose"))

    assert load_link("wifi4").title.startswith("Wi-Fi 4")
    assert load_link("wifi4", [own]).title == "Own"
    assert load_link("other", [own]).title == "Other"
    assert load_link(str(loose), [own]).title == "Loose"
    assert load_link("wifi5", [own]) == load_link("wifi5")
    assert set(available("link", [own])) == set(available("link")) | {"other"}


def test_a_wrong_name_gets_the_nearest_ones() -> None:
    with pytest.raises(BadInput, match=r"^there is no device 'raspberri-pi-5-8gb'; did you mean raspberry-pi-5-8gb"):
        load_device("raspberri-pi-5-8gb")
    with pytest.raises(BadInput, match=r"^a.yaml: fleet: there is no fleet 'demmo'; did you mean demo\?"):
        load_fleet("demmo", (), "a.yaml: fleet")
    with pytest.raises(BadInput, match=r"^no.yaml does not exist"):
        find_profile("link", "./no.yaml")
    with pytest.raises(BadInput, match="there is no device"):
        load_device("..")


def test_paths_in_a_file_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "slow.yaml").write_text("title: Slow\ndown_mbit_s: 1\nup_mbit_s: 1\nrtt_ms: 1\n")
    fleet = tmp_path / "my.yaml"
    fleet.write_text("title: x\nmembers:\n  - {device: phone-mid, count: 1, link: parts/slow.yaml}\n")
    monkeypatch.chdir("/")
    (client,) = clients_of(load_fleet(str(fleet)))
    assert client.link.title == "Slow"


def test_a_folder_of_profiles_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no such folder"):
        check_search([tmp_path / "no"])
    with pytest.raises(BadInput, match="that folder contains none of devices, links, fleets, experiments"):
        check_search([tmp_path])
    (tmp_path / "fleets").mkdir()
    check_search([tmp_path])
