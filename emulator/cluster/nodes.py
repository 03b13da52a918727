"""The nodes of the cluster that this process is connected to: what they are, and whether they fit together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from msgspec import Struct

from fleetbed.profiles.errors import HostCannot

#: what must have the same version everywhere, or runs would not be comparable
SAME = ("fleetbed", "torch", "ray")
ANSWER_S = 60.0  # in which a node must say what it is; the first worker of a busy node takes its time


class ClusterNode(Struct, frozen=True):
    """A node as it described itself."""

    id: str
    name: str  # host name and address, for people
    cpu_model: str
    cores: int  # that Ray gives away there
    memory_bytes: int
    versions: dict[str, str | None]  # None: not installed


def alive() -> dict[str, dict[str, Any]]:
    """What Ray knows of the nodes that it takes to be alive, by id: it notices half a minute late that one is lost."""
    import ray

    return {each["NodeID"]: each for each in ray.nodes() if each["Alive"]}


def alive_ids() -> set[str]:
    """The ids of these nodes."""
    return set(alive())


def ask(node: str) -> Any:
    """Ask a node what it is; `understood` makes a ClusterNode of what Ray gets as an answer."""
    return on_node(description(), node).remote(list(SAME))


def cores_of(known: Mapping[str, Any]) -> int:
    """The cores that Ray gives away on the node that it knows so much of."""
    return int(known["Resources"].get("CPU", 0))


def understood(known: Mapping[str, Any], said: Mapping[str, Any]) -> ClusterNode:
    """The node that Ray knows so much of, and that has answered so."""
    cores, address = cores_of(known), known["NodeManagerAddress"]
    rest = {key: value for key, value in said.items() if key != "host"}
    return ClusterNode(known["NodeID"], f"{said['host']} ({address})", cores=cores, **rest)


def nodes(only: Collection[str] | None = None, answer_s: float = ANSWER_S) -> tuple[ClusterNode, ...]:
    """Return the nodes, or only these, that answer, the one of this process first."""
    import ray
    from ray.exceptions import RayError

    here = ray.get_runtime_context().get_node_id()
    there = [each for each in alive().values() if only is None or each["NodeID"] in only]
    if not there:
        return ()
    there.sort(key=lambda each: each["NodeID"] != here)
    asked = [(each, ask(each["NodeID"])) for each in there]
    ray.wait([answer for _, answer in asked], num_returns=len(asked), timeout=answer_s)
    found = []
    for each, answer in asked:
        with contextlib.suppress(RayError, TimeoutError):  # it was lost, or is not ready to answer
            found.append(understood(each, ray.get(answer, timeout=0)))
    return tuple(found)


def check_nodes(found: Sequence[ClusterNode], address: str | None) -> None:
    """Raise HostCannot unless every node has the versions that this process has."""
    where = "" if address is None else f"--address {address}: "
    if not found:
        raise HostCannot(f"{where}no node of the Ray cluster answers.")
    for name in SAME:
        ours = metadata.version(name)
        for node in found:
            if (theirs := node.versions.get(name)) != ours:
                found_there = "is not installed" if theirs is None else f"has version {theirs}"
                raise HostCannot(
                    f"{where}on node {node.name} {name} {found_there}, but here it is {ours}; install the same version."
                )


def check_large_enough(found: Iterable[ClusterNode], *, cores: int, memory_bytes: int, what: str) -> None:
    """Raise HostCannot unless one of the nodes has these cores and this memory."""
    if any(node.cores >= cores and node.memory_bytes >= memory_bytes for node in found):
        return
    gb = 2**30
    offered = ", ".join(f"{each.name}: {each.cores} cores, {each.memory_bytes / gb:.1f} GB" for each in found)
    raise HostCannot(
        f"{what} needs a node with {cores} free core{'s' * (cores != 1)} and {memory_bytes / gb:.1f} GB of memory, "
        f"but the Ray cluster has {offered}."
    )


def on_node(function: Callable[..., Any], node: str) -> Any:
    """The function as a task for this node and no other, which takes none of its cores and is not repeated."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=place)


def actor_on_node(kind: type, node: str, *, cores: int, threads: int) -> Any:
    """The class as an actor for this node and no other, which takes these cores and is not started again."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(kind).options(num_cpus=cores, max_concurrency=threads, scheduling_strategy=place)


def description() -> Callable[[list[str]], dict[str, Any]]:
    """The function by which a node describes itself. It is sent as code, because fleetbed may be missing there."""

    def describe(packages: list[str]) -> dict[str, Any]:
        import platform
        from importlib import metadata

        versions: dict[str, str | None] = {}
        for package in packages:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = None
        said = {"host": platform.node(), "versions": versions, "cpu_model": "unknown", "memory_bytes": 0}
        if versions["fleetbed"] is not None:
            from fleetbed.emulator.machine import host

            said |= {"cpu_model": host.cpu_model(), "memory_bytes": host.memory_bytes()}
        return said

    return describe
