"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

STORE_BYTES = 80 << 20

needs_ray = pytest.mark.skipif(
    not any(each.metadata["Name"] == "ray" for each in metadata.distributions()),
    reason="Ray is not installed: pip install 'fleetbed[ray]'",
)


@contextlib.contextmanager
def ray_cluster() -> Iterator[Any]:
    """A cluster with a head without cores and two nodes with one each; it listens on loopback."""
    multiprocessing.util.get_temp_dir()  # later tests use it, so it must not be in the folder below
    folder = tempfile.mkdtemp(prefix="fb-", dir="/tmp")  # the path of a socket must be short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # so that it listens on 127.0.0.1, as on a laptop
        from ray.cluster_utils import Cluster  # reads the environment

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        found = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                add_node(found)
            yield found
        finally:
            found.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def add_node(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
