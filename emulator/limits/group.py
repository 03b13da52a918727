"""The limits of a run and the group of a client, made of the best back end that each knob has on this host."""

from __future__ import annotations

import resource
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fleetbed.emulator.limits import cgroup, v1, v2
from fleetbed.emulator.limits.gpu import Driver, GpuKnob
from fleetbed.emulator.limits.knobs import CpuKnob, MemoryKnob, quota_name
from fleetbed.emulator.limits.plan import Cap, LimitPlan, Usage
from fleetbed.emulator.limits.rlimit import BACKEND as RLIMIT
from fleetbed.emulator.limits.rlimit import RlimitMemory

NAMES = {1: v1.BACKEND, 2: v2.BACKEND}
PACING = "pacing"


class PacingOnly:
    """The CPU knob without a ceiling: code that paces itself keeps its rate, other code is not limited."""

    def __init__(self, cores: float | None, why: str) -> None:
        note = f"no ceiling for code that does not pace itself; {why}"
        self.cap = None if cores is None else Cap("cpu", "enforced", PACING, cores, None, "cores", note)

    def throttled_s(self) -> float:
        return 0.0


@dataclass(frozen=True)
class Tree:
    """A run's folder in one cgroup hierarchy, with the controllers that are available there."""

    version: int
    controllers: frozenset[str]
    mount: Path
    folder: Path

    def leaf(self, name: str) -> Path:
        leaf = self.folder / name
        cgroup.make(leaf)
        return leaf

    def close(self) -> None:
        cgroup.remove(self.folder)
        if self.version == 2:
            v2.release(self.folder.parent, self.controllers)


class Group:
    """One client's limits. Made and removed by the zygote, joined by the client right after its fork."""

    def __init__(self, memory: MemoryKnob, cpu: CpuKnob, gpu: GpuKnob, leaves: list[Path]) -> None:
        self._memory, self._cpu, self._gpu = memory, cpu, gpu
        self._leaves = leaves

    def join(self) -> None:
        """Join the group, in the client: every page that it adds from now on is charged to it."""
        for leaf in self._leaves:
            cgroup.write(
                leaf / "cgroup.procs", 0
            )  # 0 is the writer itself, whatever its pid is outside of its namespace
        self._memory.enter()
        self._gpu.enter()

    def caps(self) -> list[Cap]:
        """The caps as read back. Call it in the client: RLIMIT_DATA and a card can be read back only there."""
        return [cap for cap in (self._cpu.cap, self._memory.cap, *self._gpu.caps) if cap is not None]

    def usage(self) -> Usage:
        """The client's use of CPU, memory and card; called in the client."""
        spent = resource.getrusage(resource.RUSAGE_SELF)
        return Usage(
            cpu_s=spent.ru_utime + spent.ru_stime,
            throttled_s=self._cpu.throttled_s(),
            peak_bytes=self._memory.peak_bytes(),
            anon_bytes=self._memory.anon_bytes(),
            gpu_bytes=self._gpu.memory_bytes(),
            gpu_w=self._gpu.power_w(),
        )

    @property
    def device(self) -> str:
        """The device that the client trains on: its part of a card, or the CPU."""
        return self._gpu.device

    def reset_peak(self) -> bool:
        """Reset the peak of memory, in the client; returns False where the kernel cannot, so that it is never reset."""
        return self._memory.reset_peak()

    def oom_kills(self) -> int:
        return self._memory.oom_kills()

    def remove(self) -> None:
        """Kill the processes in it and remove it; raises if that does not succeed in about two seconds."""
        for leaf in self._leaves:
            cgroup.remove(leaf)


class Limits:
    """Makes groups. A knob without a writable controller gets the fallback, with the reason in its label."""

    def __init__(self, trees: list[Tree], why_not: dict[str, str], driver: Driver) -> None:
        self._trees = trees
        self._why_not = why_not
        self._driver = driver

    @property
    def backend(self) -> str:
        return f"memory: {self.memory_backend}, cpu: {self.cpu_backend}"

    @property
    def memory_backend(self) -> str:
        tree = self._tree("memory")
        return RLIMIT if tree is None else NAMES[tree.version]

    @property
    def cpu_backend(self) -> str:
        tree = self._tree("cpu")
        return PACING if tree is None else quota_name(NAMES[tree.version])

    @property
    def has_ceiling(self) -> bool:
        """Whether the kernel limits a client that does not pace itself."""
        return self._tree("cpu") is not None

    def create(self, plan: LimitPlan) -> Group:
        leaves = {tree: tree.leaf(plan.name) for tree in self._trees}
        gpu = GpuKnob(plan.gpu, self._driver)
        return Group(self._memory(plan, leaves), self._cpu(plan, leaves), gpu, [*leaves.values()])

    def close(self) -> None:
        """Remove all folders, even if one of them cannot be removed."""
        with ExitStack() as all_of_them:
            for tree in self._trees:
                all_of_them.callback(tree.close)

    def _tree(self, controller: str) -> Tree | None:
        return next((tree for tree in self._trees if controller in tree.controllers), None)

    def _memory(self, plan: LimitPlan, leaves: dict[Tree, Path]) -> MemoryKnob:
        tree = self._tree("memory")
        if tree is None:
            return RlimitMemory(plan.memory_bytes, self._why_not["memory"])
        leaf = leaves[tree]
        if tree.version == 1:
            return v1.MemoryV1(leaf, plan.memory_bytes)
        return v2.MemoryV2(leaf, tree.mount, plan.memory_bytes)

    def _cpu(self, plan: LimitPlan, leaves: dict[Tree, Path]) -> CpuKnob:
        tree = self._tree("cpu")
        if tree is None:
            return PacingOnly(plan.cpu_cores, self._why_not["cpu"])
        leaf = leaves[tree]
        if tree.version == 1:
            return v1.CpuV1(leaf, tree.mount, plan.cpu_cores)
        return v2.CpuV2(leaf, plan.cpu_cores)
