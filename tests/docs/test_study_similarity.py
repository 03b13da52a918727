"""Checks the table of similarities against means calculated by hand."""

from __future__ import annotations

from types import ModuleType


def rows(seed: int, **stages: float) -> list[dict[str, str]]:
    run = {"study": "x", "method": "m", "policy": "sync", "seed": str(seed)}
    return [{**run, "stage": stage, "cka": str(value)} for stage, value in stages.items()]


def test_the_table_has_the_means_over_the_seeds_in_the_order_of_the_stages(similarity: ModuleType) -> None:
    text = similarity.table([*rows(1, stem=1.0, layer1=0.8), *rows(2, stem=0.9, layer1=0.4)])
    assert text.splitlines() == [
        "| data | method | policy | stem | layer1 |",
        "|---|---|---|---:|---:|",
        "| x | m | sync | 0.95 | 0.60 |",
    ]
