"""Names from earlier versions: their replacements, and the conversion of recorded configurations."""

from __future__ import annotations

from typing import Any

#: the replacement of a key, or of a value of a key
REPLACED = {
    "timing.dilation": "it is now called timing.time_scale",
    "timing.source: calibrated": "plans no longer depend on this host: use modelled, or enforced to be paced to them",
}


def advice(key: str, value: Any = None) -> str | None:
    """Return what to write instead of a key, or a value, of an earlier version; None if it is not one."""
    return REPLACED.get(f"{key}: {value}" if isinstance(value, str) else key)


def up_to_date(config: Any) -> Any:
    """Convert the configuration of a run recorded by an earlier version to the names of this one."""
    if not isinstance(config, dict) or not isinstance(config.get("experiment"), dict):
        return config
    experiment = dict(config["experiment"])
    timing = experiment.get("timing")
    if isinstance(timing, dict):
        timing = dict(timing)
        if "dilation" in timing:
            timing["time_scale"] = timing.pop("dilation")
        if timing.get("source") == "calibrated":  # at full speed, like `modelled`; the run's own plans are in its tasks
            timing["source"] = "modelled"
        experiment["timing"] = timing
    return {**config, "experiment": experiment}
