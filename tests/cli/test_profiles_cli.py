"""`fleetbed profiles`, `fleetbed schema`, and the errors that main handles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetbed.cli import main as main_module
from fleetbed.cli.main import main
from fleetbed.profiles.errors import BadInput, FleetbedError, HostCannot
from fleetbed.profiles.resolve import shipped

COMMAND = [sys.executable, "-m", "fleetbed.cli.main"]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(args)
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--version")
    assert (code, out.split()[0]) == (0, "fleetbed")
    code, out, _ = run(capsys, "--help")
    assert code == 0
    first_words = [line.strip("│ ").split(" ")[0] for line in out.splitlines()]
    wanted = ["run", "init", "profiles", "models", "doctor", "watch", "report", "compare", "privacy"]
    assert [word for word in first_words if word in wanted] == wanted  # in the order in which people need them
    assert "Exit codes" in out


def test_start_imports_nothing_heavy() -> None:
    code = "import sys, fleetbed.cli.main; print([m for m in ('torch', 'matplotlib', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "profiles", "list", "--json")
    found = json.loads(out)
    assert code == 0
    assert [(kind, len(rows)) for kind, rows in found.items()][:3] == [("devices", 35), ("links", 15), ("fleets", 12)]
    pi5 = next(row for row in found["devices"] if row["name"] == "raspberry-pi-5-8gb")
    assert (pi5["rate_gflops"], pi5["cap_mib"], pi5["memory"]["available_mib"]) == (70.3, 7526 - 215, 7526)
    demo = next(row for row in found["fleets"] if row["name"] == "demo")
    assert demo["clients"] == 8


def test_list_of_one_kind_with_a_folder_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "string.yaml").write_text("title: Tin can\ndown_mbit_s: 1\nup_mbit_s: 1\nrtt_ms: 9\n")
    code, out, _ = run(capsys, "profiles", "list", "link", "--profiles", str(tmp_path))
    assert code == 0
    assert out.startswith("16 links\n")
    assert "Tin can" in out
    assert "devices" not in out


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "profiles", "show", "raspberry-pi-zero-2w")
    line = next(line for line in out.splitlines() if line.startswith("memory.runtime_mib"))
    assert line.split()[1:3] == ["147", "measured"]  # of its runtime
    line = next(line for line in out.splitlines() if line.startswith("rates.matmul_gflops"))
    assert line.split()[2] == "derived"
    _, out, _ = run(capsys, "profiles", "show", "phones")
    assert out.splitlines()[2].split()[:3] == ["000-052", "53", "phone-low"]
    assert out.splitlines()[4].split()[:3] == ["099", "1", "phone-high"]
    _, out, _ = run(capsys, "profiles", "show", "demo", "--kind", "experiment")
    assert "weight_decay: 0.0" in out  # a default, filled in


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "profiles", "show", "demo", "--kind", "fleet", "--json")
    found = json.loads(out)
    assert (found["kind"], len(found["clients"])) == ("fleet", 8)
    assert found["clients"][7]["device"]["cpu"]["fp32_gflops"] == 70.3
    _, out, _ = run(capsys, "profiles", "show", "demo", "--kind", "experiment", "--json")
    found = json.loads(out)
    assert found["clients"] == 8
    assert found["runs"][0] == "heteroavg-sync-1"
    assert found["profile"]["training"]["optimizer"]["momentum"] == 0.9


def test_a_name_of_two_kinds_needs_the_kind(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "profiles", "show", "demo")
    assert (code, out) == (2, "")
    assert err == "fleetbed: demo is the name of one fleet and one experiment: choose one with --kind.\n"


@pytest.mark.slow
def test_check_everything_that_is_shipped(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "profiles", "check")
    assert (code, err) == (0, "")
    assert all(": ok" in line for line in out.splitlines())
    assert len(out.splitlines()) >= 19 + 15 + 6 + 2


DEVICE = (shipped() / "devices" / "raspberry-pi-5-8gb.yaml").read_text()
FLEET = "title: x\ntotal: 4\nmembers:\n  - {device: jetson-nano, weight: 0.5}\n  - {device: jetson-tx2, weight: 0.5}\n"
STUDY = "title: x\nfleet: demo\nalgorithms:\n  - name: heteroavg\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DEVICE.replace("cores:", "coers:"), "cpu.coers: there is no key 'coers'; did you mean cores?"),
        (DEVICE.replace("cores: 4", "cores: four"), 'cpu.cores is "four", but a whole number'),
        (DEVICE.replace("fp32_gflops: 70.3", "fp32_gflops: -1"), "cpu.fp32_gflops is -1, but a number from 1e-6"),
        (DEVICE.replace("fp32_gflops: 70.3", "fp32_gflops: 0"), "cpu.fp32_gflops is 0, but a number from 1e-6"),
        (
            DEVICE.replace("7526", "512 MB"),
            'memory.available_mib is "512 MB", but a number from 1 to 1000000000 is needed: write',
        ),
        (DEVICE.replace("7526", ".inf"), ", line 16: memory.available_mib is .inf, but a finite number is needed."),
        (DEVICE.replace("cores: 4", "cores: 4\n  cores: 4"), ", line 7: the key cpu.cores is given twice"),
        (DEVICE.replace("link: wifi5", "link: wifi55"), "link: there is no link 'wifi55'; did you mean wifi5"),
        ("", "is empty: a mapping of keys to values is needed."),
        ("just text", 'has "just text" at the top, but a mapping (key: value) is needed.'),
        ("title: [", "is not valid YAML: "),
        (FLEET.replace("0.5", "0.4", 1), "the weights of members sum to 0.9, but 1 or 100 is needed"),
        (FLEET.replace("total: 4", "total: 0"), "total is 0, but a whole number from 1"),
        ("title: x\ntotal: 1\nmembers: []\n", "members is a list of 0, but a list of at least 1 is needed."),
        (FLEET.replace("jetson-tx2", "jetson-tx3"), "members.1.device: there is no device 'jetson-tx3'; did you mean"),
        (FLEET.replace("0.5}", "0.5, link: wifi6}"), "members.0.link: there is no link 'wifi6'; did you mean wifi5"),
        (STUDY.replace("fleet: demo", "fleet: demmo"), "fleet: there is no fleet 'demmo'; did you mean demo?"),
        (STUDY + "server: {device: sever}\n", "server.device: there is no device 'sever'; did you mean server?"),
        (STUDY + "rounds: 0\n", "rounds is 0, but a whole number from 1"),
        (STUDY + "  - name: heteroavg\n", 'algorithms: "heteroavg" occurs twice'),
    ],
)
def test_bad_files(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    code, out, err = run(capsys, "profiles", "check", str(file))
    assert (code, out) == (2, "")
    assert all(line.startswith(f"fleetbed: {file}") for line in err.splitlines())
    assert expected in err.splitlines()[0]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["check", "gone.yaml"], "fleetbed: gone.yaml does not exist: give the path of a YAML file.\n"),
        (
            ["check", "gone.yaml", "--kind", "link"],
            "fleetbed: gone.yaml does not exist: give the path of a YAML file.\n",
        ),
        (["show", "raspberry-pi-6"], "fleetbed: there is no profile 'raspberry-pi-6'; did you mean raspberry-pi-"),
        (["show", "wifi6", "--kind", "link"], "fleetbed: there is no link 'wifi6'; did you mean wifi5 or wifi4?"),
        (["list", "--profiles", "/no/such"], "fleetbed: --profiles /no/such: there is no such folder.\n"),
    ],
)
def test_bad_names(capsys: pytest.CaptureFixture[str], args: list[str], expected: str) -> None:
    code, out, err = run(capsys, "profiles", *args)
    assert (code, out) == (2, "")
    assert err.startswith(expected)


def test_check_goes_on_after_a_wrong_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("down_mbit_s: 1\nup_mbit_s: 1\nrtt_ms: 1\n")
    code, out, err = run(capsys, "profiles", "check", str(bad), "wifi4", str(tmp_path / "gone.yaml"))
    assert code == 2
    assert out.endswith("wifi4.yaml: ok\n")
    assert [line.split(": ")[1] for line in err.splitlines()] == [str(bad), f"{tmp_path}/gone.yaml does not exist"]
    code, out, _ = run(capsys, "profiles", "check", str(bad), "wifi4", "--json")
    first, second = json.loads(out)
    assert code == 2
    assert "the key title is missing" in first["errors"][0]
    assert (second["errors"], second["kind"]) == ([], "link")


def test_check_tells_which_figures_have_no_provenance(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("title: x\ndown_mbit_s: 1\nup_mbit_s: 1\nrtt_ms: 1\n")
    code, out, _ = run(capsys, "profiles", "check", str(file))
    assert code == 0
    assert out == f"link {file}: ok (no provenance: down_mbit_s, up_mbit_s, rtt_ms)\n"


def test_a_file_whose_kind_is_not_plain_needs_the_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "what.yaml"
    file.write_text("title: x\n")
    code, _, err = run(capsys, "profiles", "check", str(file))
    assert code == 2
    assert "choose one with --kind" in err


@pytest.mark.parametrize("kind", ["device", "link", "fleet", "experiment"])
def test_schema_prints_the_keys_of_the_shipped_schema(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    code, out, _ = run(capsys, "schema", kind)
    assert code == 0
    printed, stored = json.loads(out), json.loads((shipped() / "schemas" / f"{kind}.json").read_text())
    assert printed["title"] == f"fleetbed {kind}"
    for name, part in stored["$defs"].items():
        assert set(printed["$defs"][name]["properties"]) == set(part["properties"])


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "frobnicate")[0] == 2
    assert run(capsys, "schema", "toaster")[0] == 2
    assert run(capsys, "profiles", "list", "--no-such-option")[0] == 2


@pytest.mark.parametrize(("error", "code"), [(FleetbedError, 1), (BadInput, 2), (HostCannot, 3)])
def test_every_error_of_ours_is_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: type[FleetbedError], code: int
) -> None:
    def fail(**_: object) -> None:
        raise error("two\nlines")

    monkeypatch.setattr(main_module, "app", fail)
    assert run(capsys) == (code, "", "fleetbed: two lines\n")


def test_interrupted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "app", interrupt)
    assert run(capsys) == (130, "", "")


def test_as_a_process() -> None:
    found = subprocess.run([*COMMAND, "profiles", "show", "nothing"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("fleetbed: there is no profile 'nothing'")
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("args", [["profiles", "list", "--json"], ["--version"]])
def test_a_reader_that_went_away_is_no_error_to_show(args: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    found = subprocess.run([*COMMAND, *args], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (found.returncode, found.stderr) == (1, "")
