"""Measures the device profile of this machine, with the same workloads that rate a host.

`python -m fleetbed.emulator.checks.board` runs as a separate process and prints how much memory torch adds to it.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
from pathlib import Path

import msgspec

from fleetbed.emulator.checks.class_rates import ClassTimes, measure_classes
from fleetbed.emulator.machine import host, interpreter
from fleetbed.emulator.machine.calibration import run_kernel, spread
from fleetbed.profiles.errors import FleetbedError
from fleetbed.profiles.types import Cpu, Device, Memory, Provenance

MIB = 2**20
MODULE_MIB = 512  # memory is soldered on in multiples of this
_BOARD_NAME = Path("/proc/device-tree/model")


def board_title() -> str:
    """Return the board's own name, which only boards with a device tree have; otherwise the host name."""
    if _BOARD_NAME.exists():
        return _BOARD_NAME.read_text().rstrip("\0").strip()
    return platform.node()


def measure_board(title: str, link: str, seconds: float = 3.0) -> tuple[Device, ClassTimes]:
    """Return the device, and how well its rates predict two real training steps.

    Takes about 40 seconds on a PC, some minutes on a small board. Power is not measured: it needs a meter.
    """
    cores = host.cores()
    visible_mib = host.memory_bytes() // MIB
    available_mib = host.available_bytes() // MIB
    runtime_mib = _runtime_bytes() / MIB
    matmul = run_kernel("matmul", threads=cores, seconds=seconds)
    copy = run_kernel("copy", threads=1, seconds=seconds)
    classes = measure_classes(cores)
    device = Device(
        title=title,
        trains_on="cpu",
        cpu=Cpu(
            description=f"{cores}x {host.cpu_model()}",
            cores=cores,
            fp32_gflops=_rounded(statistics.median(matmul)),
        ),
        memory=Memory(
            installed_mib=-(-visible_mib // MODULE_MIB) * MODULE_MIB,
            visible_mib=visible_mib,
            available_mib=available_mib,
            runtime_mib=_rounded(runtime_mib),
            bandwidth_gb_s_measured=_rounded(statistics.median(copy)),
        ),
        rates=classes.rates,
        link=link,
        provenance=(
            _measured("cpu.cores", "The cores that this process may use."),
            _measured("cpu.fp32_gflops", f"Matrix product, all cores, {_of(matmul)}."),
            _measured("memory.visible_mib", "MemTotal of the kernel."),
            _measured("memory.available_mib", "MemAvailable of the kernel while measuring."),
            _measured("memory.runtime_mib", "Resident memory added by importing torch and a first step."),
            _measured("memory.bandwidth_gb_s_measured", f"Copying, each byte once, one core, {_of(copy)}."),
            _measured("rates", _predicts(classes)),
            Provenance(
                figure="memory.installed_mib",
                kind="derived",
                note=f"The next multiple of {MODULE_MIB} MiB above what is visible.",
            ),
            Provenance(figure="link", kind="assumed", note="Not measured; enter the link that connects the board."),
        ),
    )
    return device, classes


def as_yaml(device: Device) -> str:
    import yaml

    tree = _without_defaults(msgspec.to_builtins(device))
    tree["provenance"] = [_without_defaults(entry) for entry in msgspec.to_builtins(device.provenance)]
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=110))


def _without_defaults(tree: dict[str, object]) -> dict[str, object]:
    """Drop the keys that were not measured: they are null, empty or a default."""
    kept = {key: _without_defaults(value) if isinstance(value, dict) else value for key, value in tree.items()}
    return {key: value for key, value in kept.items() if value not in (None, {}, "") and key != "train_scale"}


def _measured(figure: str, note: str) -> Provenance:
    source = f"fleetbed profiles measure, kernel {platform.release()}, {platform.machine()}"
    return Provenance(figure=figure, kind="measured", source=source, note=note)


def _of(samples: list[float]) -> str:
    return f"median of {len(samples)} samples, 10th to 90th percentile {100 * spread(samples):.1f} % apart"


def _predicts(classes: ClassTimes) -> str:
    steps = ", ".join(f"{step.model} {step.error:+.0%}" for step in classes.steps)
    return f"Operators of a probe network by class, all cores, {classes.turns} rounds; error of prediction: {steps}."


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _runtime_bytes() -> int:
    command = interpreter.module_command("fleetbed.emulator.checks.board")
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if answer.returncode != 0:
        raise FleetbedError("the process that measures torch's own memory ended early; see its output above")
    return int(answer.stdout)


def main() -> None:
    before = host.resident_bytes()
    from fleetbed.emulator.checks.stress import training_step

    training_step()()
    print(host.resident_bytes() - before)


if __name__ == "__main__":
    main()
