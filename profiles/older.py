"""Words of earlier versions: what to write instead, and recorded configurations in the words of this version."""

from __future__ import annotations

from typing import Any

#: what became of a key, or of a value of a key
REPLACED = {
    "timing.dilation": "it is called timing.time_scale now",
    "timing.source: calibrated": "plans no longer depend on this host: use modelled, or enforced to be held to them",
}


def advice(key: str, value: Any = None) -> str | None:
    """What to write instead of a key, or of a value there, that an earlier version knew."""
    return REPLACED.get(f"{key}: {value}" if isinstance(value, str) else key)


def up_to_date(config: Any) -> Any:
    """The configuration of a run that an earlier version recorded, for those who read it."""
    if not isinstance(config, dict) or not isinstance(config.get("experiment"), dict):
        return config
    experiment = dict(config["experiment"])
    timing = experiment.get("timing")
    if isinstance(timing, dict):
        timing = dict(timing)
        if "dilation" in timing:
            timing["time_scale"] = timing.pop("dilation")
        if timing.get("source") == "calibrated":  # as full speed as `modelled`; the run's own plans are in its tasks
            timing["source"] = "modelled"
        experiment["timing"] = timing
    return {**config, "experiment": experiment}
