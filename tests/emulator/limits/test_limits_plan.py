from __future__ import annotations

import mmap

import pytest

from fleetbed.emulator.limits.plan import Quota, quota_for, with_headroom


@pytest.mark.parametrize(
    ("cores", "quota"),
    [
        (0.5, Quota(50_000, 100_000)),
        (1.25, Quota(125_000, 100_000)),
        (0.01, Quota(1_000, 100_000)),  # the smallest quota, just reached
        (0.004, Quota(1_000, 250_000)),  # 0.4 ms in 100 ms would be no cap
        (0.001, Quota(1_000, 1_000_000)),
        (0.0001, Quota(1_000, 1_000_000)),  # there is nothing below
    ],
)
def test_a_tiny_share_gets_a_longer_period(cores: float, quota: Quota) -> None:
    assert quota_for(cores) == quota


@pytest.mark.parametrize("mib", [16, 199, 7419])
def test_the_limit_is_in_whole_pages_and_at_most_five_percent_above_the_cap(mib: int) -> None:
    cap = mib * 2**20 + 1
    limit = with_headroom(cap)
    assert limit % mmap.PAGESIZE == 0
    assert cap < limit <= 1.05 * cap
