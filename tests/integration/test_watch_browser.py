"""`fleetbed run --watch` in a real browser: the page of a real run while it goes on, after a kill, and at its end."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from small_runs import TINIER
from webdriver import CHROMIUM, DRIVER, MISSING, Browser, chromedriver

from fleetbed.emulator.machine.interpreter import module_command

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)]


def wait_for(browser: Browser, script: str, seconds: float = 60.0) -> object:
    """Return the first result of the script that is true."""
    end_s = time.monotonic() + seconds
    while not (found := browser.run(script)):
        assert time.monotonic() < end_s, f"never became true: {script}"
        time.sleep(0.3)
    return found


def start(*args: object) -> tuple[subprocess.Popen[str], str]:
    """Start a command that serves a page; return it and the address that it prints."""
    command = module_command("fleetbed.cli.main", *map(str, args), function="program")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"watch: (http://127\.0\.0\.1:\d+/[\w-]+/)", line):
            return process, found[1]
    raise AssertionError("no address was printed")


def phone(browser: Browser, scheme: str) -> None:
    """Show the page as a phone does; it must not be wider than that."""
    browser.devtools("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=2, mobile=True)
    browser.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    assert browser.run("return document.documentElement.scrollWidth") <= 390


def test_a_run_is_seen_from_its_start_to_its_end(tmp_path: Path) -> None:
    sets = [part for text in (*TINIER, "rounds=12", "seeds=[1, 2]") for part in ("--set", text)]
    process, url = start("run", "demo", "--out", tmp_path / "study", "--watch", *sets)
    with chromedriver() as port:
        browser = Browser(port, tmp_path / "profile")
        try:
            browser.open(url)
            wait_for(browser, "return document.querySelectorAll('.card').length === 2")  # one of them has not started
            states = "return [...document.querySelectorAll('.card')].map((one) => one.className.split(' ')[1]).join()"
            wait_for(browser, f"return (() => {{ {states} }})() === 'done,running'")
            phone(browser, "dark")
            wait_for(browser, f"return (() => {{ {states} }})() === 'done,done'")
            assert browser.texts(".card .state") == ["done, round 12 of 12"] * 2
            assert browser.texts("#connection") == ["Every run has ended."]
            assert browser.run("return live.page.payload.curves.rounds[0].x.at(-1)") == 12
            assert browser.run("return document.querySelector('#doing').hidden") is True
            phone(browser, "light")
            assert process.wait(timeout=60) == 0
            wait_for(browser, "return document.querySelector('#connection').textContent.startsWith('Nobody answers')")
            assert len(browser.texts(".card.done")) == 2
            gone = r"net::ERR_CONNECTION_(REFUSED|RESET)"  # the server ends, perhaps in the middle of a request
            assert [entry for entry in browser.log("browser") if not re.search(gone, entry["message"])] == []
        finally:
            browser.quit()
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def test_a_run_is_seen_while_it_goes_on_and_as_killed(tmp_path: Path) -> None:
    small = ("timing.source=modelled", "training.max_steps=2", "policies=[{kind: sync}]", "seeds=[1]", "rounds=500")
    sets = [part for text in (*small, "algorithms=[{name: heteroavg}]") for part in ("--set", text)]
    process, url = start("run", "demo", "--out", tmp_path / "study", "--watch", *sets)
    with chromedriver() as port:
        browser = Browser(port, tmp_path / "profile")
        try:
            browser.open(url)
            wait_for(browser, "return document.querySelector('.card.running') !== null")
            line = "return document.querySelector('[data-axis=time] path.line')?.getAttribute('d')"
            first = wait_for(browser, line)
            wait_for(browser, f"return (() => {{ {line} }})() !== {first!r}")  # it moves while the run goes on
            assert browser.texts("h1") != ["Waiting for the first run"]
            assert "heteroavg-sync-1" in browser.texts("#cards h3")
            wait_for(browser, "return document.querySelectorAll('#doing-table tbody tr').length > 0")
            for scheme in ("light", "dark"):
                phone(browser, scheme)
            process.send_signal(signal.SIGKILL)
            process.wait()
            wait_for(browser, "return document.querySelector('.card.stopped .state')?.textContent.includes('killed')")
            wait_for(browser, "return document.querySelector('#connection').textContent.startsWith('Nobody answers')")
        finally:
            browser.quit()
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
