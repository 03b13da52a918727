"""The report's page in a real browser: sorting, filtering, zooming, a phone's width, and a clean console."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from synthetic_runs import write_study
from webdriver import CHROMIUM, DRIVER, KEYS, MISSING, Browser, chromedriver

from fleetbed.analysis.page.report import write_report
from fleetbed.analysis.tables.runs import open_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    study = write_study(folder / "study", ("fedavg", "fedin"), (1, 2), clients=30, rounds=12)
    return write_report(open_runs([study]), folder / "report.html", None, [])[0]


@pytest.fixture(scope="module")
def driver() -> Iterator[int]:
    with chromedriver() as port:
        yield port


@pytest.fixture
def browser(driver: int, page: Path, tmp_path: Path) -> Iterator[Browser]:
    """A fresh browser on the page; whatever a test does, the console must stay empty and nothing be fetched."""
    one = Browser(driver, tmp_path / "profile")
    try:
        one.open(page)
        yield one
        assert [entry for entry in one.log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
        messages = [json.loads(entry["message"])["message"] for entry in one.log("performance")]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        assert [url for url in asked if url.startswith(("http", "ws"))] == []
    finally:
        one.quit()


def test_columns_sort_both_ways_and_say_so(browser: Browser) -> None:
    first = "#client-table tbody tr th"
    assert browser.texts(first) == [f"{n:03d}" for n in range(30)]
    browser.click('#client-table [data-key="device_s"]')
    head = '#client-table th[aria-sort="descending"]'
    assert browser.texts(head) == ["Device time"]
    place = 'JSON.parse(document.querySelector("#payload").textContent)'
    rows = browser.run(
        f"const p = {place}; const at = p.columns.indexOf('device_s');"
        "return p.runs[0].clients.map((row) => [row[0], row[at]])"
    )
    expected = [name for name, _ in sorted(rows, key=lambda row: (-row[1], row[0]))]
    assert browser.texts(first) == expected
    browser.click('#client-table [data-key="device_s"]')
    assert browser.texts('#client-table th[aria-sort="ascending"]') == ["Device time"]
    assert browser.texts(first) == [name for name, _ in sorted(rows, key=lambda row: (row[1], row[0]))]


def test_unknown_values_stay_last(browser: Browser) -> None:
    place = browser.texts("#client-table thead th").index("Energy (modelled)") + 1
    for _ in range(2):  # descending, ascending
        browser.click('#client-table [data-key="joules"]')
        assert browser.texts(f"#client-table tbody tr:last-child td:nth-child({place})") == ["–"]


def test_resources_fit_without_scrolling_sideways_and_columns_can_be_chosen(browser: Browser) -> None:
    widths = "const t = document.querySelector('#client-table'); return [t.scrollWidth, t.clientWidth]"
    needed, there = browser.run(widths)
    assert needed <= there
    shown = browser.texts("#client-table thead th")
    assert {"Device time", "CPU (host)", "Peak memory / cap", "Down", "Up", "Energy (modelled)"} <= set(shown)
    assert "FLOPs" not in shown
    browser.click(".chooser summary")
    browser.click('[data-column="flops"]')
    browser.click('[data-column="variant"]')
    now = browser.texts("#client-table thead th")
    assert "FLOPs" in now
    assert "Variant" not in now


def test_resources_over_time_follow_the_tasks(browser: Browser) -> None:
    count = "return document.querySelectorAll('#resource-chart path.line').length"
    assert browser.run(count) == 29  # one client is unfit
    choose = "const s = document.querySelector('#%s'); s.value = '%s'; s.dispatchEvent(new Event('change'))"
    browser.run(choose % ("whose", "kind pi-3b"))
    assert browser.run(count) == 6
    browser.run(choose % ("whose", "client 007"))
    browser.run(choose % ("measure", "bytes"))
    (title,) = browser.texts("#resource-chart path.line title")
    total = browser.run(
        "const p = JSON.parse(document.querySelector('#payload').textContent); const row = p.runs[0].clients[7];"
        "return quantity(row[p.columns.indexOf('bytes_down')] + row[p.columns.indexOf('bytes_up')], 'bytes')"
    )
    assert title == f"client 007 (pi-3b): {total} at the end"


def test_the_page_says_what_rounds_would_take_without_the_slowest_kind(browser: Browser) -> None:
    (sentences,) = browser.texts("#straggler-summary")
    assert re.search(r"Without the 6 × .+ a round would take [\d.]+\ss \([\d.]+\s% less\)\.", sentences)
    assert "Round without it" in browser.texts("#participation thead th")


def test_filters_narrow_together(browser: Browser) -> None:
    browser.type("#search", "pi-3b wifi")
    assert set(browser.texts("#client-table tbody td:nth-child(2)")) == {"pi-3b"}
    assert browser.texts("#client-count") == ["6 of 30 clients"]
    browser.clear("#search")
    browser.type("#search", "007")
    assert browser.texts("#client-table tbody th") == ["007"]
    browser.clear("#search")
    browser.run("const s = document.querySelector('#outcome'); s.value = 'unfit'; s.dispatchEvent(new Event('input'))")
    assert browser.texts("#client-table tbody th") == ["029"]


def test_values_can_be_set_against_the_kinds_median(browser: Browser) -> None:
    browser.click("#relative")
    cells = browser.texts("#client-table tbody tr:first-child td")
    place = browser.texts("#client-table thead th").index("Compute") - 1  # the first is a heading
    assert cells[place].endswith("×")
    assert 0.2 < float(cells[place].removesuffix("×")) < 5


def test_the_timeline_zooms_moves_and_goes_back(browser: Browser) -> None:
    def window() -> tuple[float, float]:
        shown = browser.run("const d = document.querySelector('#timeline').dataset; return [d.from, d.to]")
        return float(shown[0]), float(shown[1])

    start, end = window()
    browser.click("#zoom-in")
    near, far = window()
    assert far - near == pytest.approx((end - start) / 2)
    browser.run("document.querySelector('#timeline').focus()")
    browser.type("#timeline", "+")
    assert window()[1] - window()[0] == pytest.approx((end - start) / 4)
    before = window()[0]
    browser.type("#timeline", KEYS["ArrowRight"])
    assert window()[0] > before
    browser.click("#zoom-reset")
    assert window() == (start, end)
    browser.click("#round-after")
    assert browser.run("return document.querySelector('#round').value") == "2"
    assert window()[0] >= end - 1
    browser.click("#whole-run")
    assert window()[1] > 10 * (end - start)
    assert browser.run("return document.querySelectorAll('#timeline svg path[fill]').length") >= 3


def test_a_bar_of_the_round_chart_opens_its_round(browser: Browser) -> None:
    browser.run(
        "const svg = document.querySelector('#rounds .chart svg'); const box = svg.getBoundingClientRect();"
        "svg.dispatchEvent(new MouseEvent('click', {clientX: box.right - 12, clientY: box.top + 50, bubbles: true}))"
    )
    assert browser.run("return document.querySelector('#round').value") == "12"


def test_another_run_brings_its_own_figures(browser: Browser) -> None:
    before = browser.texts("#client-table tbody tr:first-child td")
    browser.run(
        "const s = document.querySelector('#run'); s.value = 'fedin, seed 1'; s.dispatchEvent(new Event('change'))"
    )
    assert browser.texts("#run option:checked") == ["fedin, seed 1"]
    assert browser.texts("#client-table tbody tr:first-child td") != before


def test_a_client_has_a_page_of_its_own_by_keyboard_and_by_address(browser: Browser, page: Path) -> None:
    browser.run("document.querySelector('#client-table tbody tr:nth-child(4) button').focus()")
    browser.type("#client-table tbody tr:nth-child(4) button", KEYS["Enter"])
    assert browser.texts("#client-page h2") == ["Client 003"]
    assert browser.run("return location.hash") == "#client-003"
    assert "median of pi-zero-2w" in browser.texts("#client-page thead th")
    browser.type("#client-page .close", KEYS["Enter"])
    assert browser.run("return document.querySelector('#client-page').open") is False
    browser.open(page, "?again#client-011")
    assert browser.texts("#client-page h2") == ["Client 011"]
    browser.open(page, "?third#client-999")
    assert browser.texts("#client-page p") == ["There is no client 999 in this run; its clients are 000 to 029."]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_colours(browser: Browser, scheme: str) -> None:
    browser.devtools("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
    feature = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.devtools("Emulation.setEmulatedMedia", features=feature)
    assert browser.run("return document.documentElement.scrollWidth") <= 390
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in background[4:-1].split(",")) < 200) == (scheme == "dark")
    for axis in ("time", "rounds", "bytes", "joules", "loss"):
        width = browser.run(f"return document.querySelector('[data-axis={axis}] svg').getBoundingClientRect().width")
        assert 250 < width <= 390
    browser.click("#client-table tbody tr:nth-child(4) button")
    inside = "const d = document.querySelector('dialog'); return [d, ...d.querySelectorAll('.scroll, .chart')]"
    assert all(wide <= there for wide, there in browser.run(f"{inside}.map((e) => [e.scrollWidth, e.clientWidth])"))
    assert browser.run("return document.querySelector('dialog').getBoundingClientRect().right") <= 390


def test_print_is_light_and_shows_every_client(browser: Browser) -> None:
    feature = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.devtools("Emulation.setEmulatedMedia", media="print", features=feature)
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("return getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.run("return getComputedStyle(document.querySelector('#client-table')).maxHeight") == "none"


def odd_page(folder: Path, label: str) -> Path:
    """Two methods in different series; the first has an odd label, and a gap where its models diverged."""
    first, second = open_runs([write_study(folder / "study", ("fedavg", "fedin"), (1,), clients=5, rounds=6)])
    algorithm = msgspec.structs.replace(first.config.algorithm, label=label)
    gap = tuple(msgspec.structs.replace(e, loss=None) if e.version in (3, 4) else e for e in first.evaluations)
    order = (algorithm, second.config.algorithm)
    experiment = msgspec.structs.replace(first.config.experiment, algorithms=order)
    config = msgspec.structs.replace(first.config, algorithm=algorithm, experiment=experiment)
    first = replace(first, config=config, evaluations=gap)
    own = tuple(msgspec.structs.replace(e, client=0, local=1) for e in second.evaluations)
    return write_report([first, replace(second, evaluations=own)], folder / "odd.html", None, [])[0]


def test_errors_of_numbers_and_long_names(browser: Browser, tmp_path: Path) -> None:
    """Where labels are numbers, lower is better; and devices with long names leave space for all resources."""
    runs = [
        replace(
            run,
            evaluations=tuple(
                msgspec.structs.replace(e, accuracy=None, f1=None, mae=4 * (1 - e.accuracy)) for e in run.evaluations
            ),
            clients=tuple(msgspec.structs.replace(c, device=f"banana-{c.device}-512mb") for c in run.clients),
        )
        for run in open_runs([write_study(tmp_path / "study", ("fedavg", "fedin"), (1,), clients=10, rounds=12)])
    ]
    assert runs[0].metric.name == "mae"
    browser.open(write_report(runs, tmp_path / "errors.html", None, [2.5])[0])
    assert browser.texts("#accuracy h2") == ["Mean absolute error"]
    assert browser.texts("#accuracy figcaption")[0] == "Test mean absolute error against device time; lower is better"
    assert "2.5" in browser.texts("[data-axis=time] svg text")
    curves = browser.run("return page.payload.curves.time.map((curve) => curve.mean.at(-1))")
    assert curves[1] < curves[0]  # fedin ends with the lower error
    tiles = dict(zip(browser.texts(".tiles dt"), browser.texts(".tiles dd + dd"), strict=True))
    assert tiles["Best final mean absolute error"] == "fedin"
    heads = browser.texts("#client-table thead th")
    assert heads[-1] == "Mean absolute error"
    assert 0 < float(browser.texts("#client-table tbody tr:first-child td:last-child")[0]) < 4
    for table in ("#client-table", "[data-part=result_tables] .scroll"):
        needed, there = browser.run(
            f"const t = document.querySelector('{table}'); return [t.scrollWidth, t.clientWidth]"
        )
        assert needed <= there, table


@pytest.mark.parametrize("label", ["<!--<script>", "</script><!--", "\"'><img src=x onerror=alert(1)>", "__proto__"])
def test_odd_labels_gaps_and_series(browser: Browser, tmp_path: Path, label: str) -> None:
    browser.open(odd_page(tmp_path, label))
    assert browser.texts("#legend li") == [label]
    assert browser.texts("#run option")[0].startswith(f"{label}, seed 1")
    line = "return document.querySelector('[data-axis=%s] path.line').getAttribute('d')"
    assert browser.run(line % "time").count("M") == 2  # two pieces
    assert browser.run(line % "rounds").count("M") == 2
    assert browser.texts("#series option")[1].startswith("personal-own: ")
    browser.run("const s = document.querySelector('#series'); s.value = '1'; s.dispatchEvent(new Event('change'))")
    assert browser.texts("#legend li") == ["fedin"]
    assert browser.run(line % "rounds").count("M") == 1
    browser.devtools("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
    assert browser.run("return document.documentElement.scrollWidth") <= 390
