"""A fleet that cannot fit is refused before anything is started."""

from __future__ import annotations

import pytest

from fleetbed.emulator import fleet, host
from fleetbed.profiles.errors import HostCannot


def test_a_fleet_that_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 20 << 30)
    fleet.check_room(500)


def test_a_fleet_that_does_not_fit_is_told_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 4 << 30)
    with pytest.raises(
        HostCannot, match=r"5000 resident clients need 62048 MiB and 4096 MiB are free: about 170 would"
    ):
        fleet.check_room(5000)
