"""Checks the table of the policies against values calculated by hand."""

from __future__ import annotations

from types import ModuleType


def test_differences_and_times_are_those_of_the_same_seed(policies: ModuleType) -> None:
    rows = [
        {"study": name, "method": method, "policy": policy, "seed": str(seed), "rounds": "1"}
        | {"accuracy": str(accuracy + change), "time": str(time * share)}
        for name, policy, change, share in (("fashion", "sync", 0.0, 1.0), ("policies", "async", -0.02, 0.25))
        for method in policies.STUDIES
        for seed, accuracy, time in ((1, 0.5, 100), (2, 0.55, 150), (3, 0.6, 200))
    ]
    text = policies.table(rows)
    head, _, first, *_, last = text.splitlines()
    assert head == "| method | sync | deadline | async | buffered |"
    assert first == "| HeteroAvg | 55.0 % in 150 s | – | −2.0 [−2.0, −2.0] in 25% | – |"
    assert last == "| FedHeNN | 55.0 % in 150 s | – | – | – |"
