"""Checks what a study needs of its surroundings before anything of it is written."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from fleetbed.profiles.errors import HostCannot
from fleetbed.running import run


def test_a_fleet_over_ray_without_ray_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = metadata.version

    def version(name: str) -> str:
        if name == "ray":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "version", version)
    settings = {"processes": "ray", "timing.source": "modelled"}
    with pytest.raises(HostCannot, match=r"^Ray is not installed: pip install 'fleetbed\[ray\]'$"):
        run("demo", set=settings, out=tmp_path / "study", progress=False)
    assert list(tmp_path.iterdir()) == []
