"""Device seconds of code that declares no work, against durations worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from fleetbed.emulator.engine.task import Task
from fleetbed.emulator.machine.calibration import HostRate
from fleetbed.emulator.wire.codec import WireError, control, parse_control
from fleetbed.emulator.wire.messages import Trained, from_worker
from fleetbed.flower.metered import Metered
from fleetbed.models.cost.opaque import Counted
from fleetbed.models.cost.operations import Operations
from fleetbed.models.work import Work
from fleetbed.profiles.resolve import load_device
from fleetbed.profiles.types import Rates, Throttle

RATES = Rates(
    conv_1x1_gflops=2.0, conv_gflops=4.0, depthwise_gflops=0.5, matmul_gflops=8.0, memory_gb_s=1.0, call_us=100.0
)
BOARD = msgspec.structs.replace(load_device("raspberry-pi-4b-4gb"), train_scale=1.0, rates=RATES, throttle=None)
HOT = msgspec.structs.replace(BOARD, throttle=Throttle(after_s=10.0, rate=0.5))
HOST = HostRate(60.0, 5.0 * BOARD.cpu.fp32_gflops, 2, 0.0, 0.0, 0.0)


def timing() -> Metered:
    return Metered(HOST, {0: BOARD, 1: HOT}, hang_s=7.0)


def task(client: int = 0) -> Task:
    return Task(
        number=0,
        client=client,
        variant="app",
        round=1,
        stage="train",
        base_version=0,
        kept=None,
        cap_bytes=1,
        dispatched_s=0.0,
        host_queued_s=0.0,
    )


def answer(cpu_s: float, counted: Counted | None = None) -> Trained:
    return Trained(
        task=0,
        keep=None,
        metrics={},
        steps=0,
        samples=0,
        seconds=100.0,
        cpu_s=cpu_s,
        throttled_s=None,
        peak_bytes=None,
        anon_bytes=None,
        counted=counted,
    )


def test_without_torch_it_is_cpu_time_multiplied_by_how_much_slower_the_device_is() -> None:
    found = timing()
    assert found.plan(BOARD, "app", Work(), 0).total_s == 0.0
    assert found.on_host(found.plan(BOARD, "app", Work(), 0), "app", Work()).hang_s == 7.0
    # wall time does not count; 4 CPU seconds are 20 on the device, or 10 and then 10 at half the speed
    assert found.measured_s(task(), answer(4.0)) == pytest.approx(20.0)
    assert found.measured_s(task(client=1), answer(4.0)) == pytest.approx(30.0)
    assert found.on_oom == "go-on"


def test_operators_are_charged_by_class_and_only_the_rest_by_cpu_time() -> None:
    work = Operations(conv_flop=4e9, matmul_flop=8e9, memory_bytes=1e9, calls=10_000)
    found = timing()
    # a second each for the convolutions, the products, the bytes and the calls; 0.5 of 3 CPU seconds were outside
    assert found.measured_s(task(), answer(3.0, Counted(operations=work, cpu_s=2.5))) == pytest.approx(4.0 + 2.5)
    # meters of different clocks may disagree by a little
    assert found.measured_s(task(), answer(2.4, Counted(operations=work, cpu_s=2.5))) == pytest.approx(4.0)


def test_what_is_not_done_by_torch_runs_on_the_cpu_of_a_board_with_a_gpu() -> None:
    board = load_device("jetson-orin-nano-8gb")
    assert board.trains_on == "gpu"
    found = Metered(HOST, {0: board}, hang_s=7.0)
    slowdown = HOST.busy_gflops / board.cpu.fp32_gflops * board.train_scale
    assert found.measured_s(task(), answer(4.0)) == pytest.approx(4.0 * slowdown)


def test_the_run_says_how_its_durations_were_found() -> None:
    found = timing()
    found.learn(task(), answer(1.0))
    assert found.summary() == "none of 1 calls used torch: their time is by CPU seconds"
    found.learn(task(), answer(2.0, Counted(operations=Operations(matmul_flop=120e9), cpu_s=1.0)))
    # 15 s by operators, 10 s by CPU seconds
    assert found.summary().startswith("1 of 2 calls used torch: 60% of the compute time")


def test_counted_operators_make_the_flops_of_a_task() -> None:
    done = task()
    done.take(answer(3.0, Counted(operations=Operations(matmul_flop=8.0, conv_flop=4.0, memory_bytes=3.0), cpu_s=2.0)))
    assert done.flops == 12.0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e19])
@pytest.mark.parametrize("name", ["memory_bytes", "cpu_s"])
def test_a_client_cannot_tell_absurd_amounts(name: str, value: float) -> None:
    good = Counted(operations=Operations(memory_bytes=1.0), cpu_s=1.0)
    frame = control(answer(1.0, good))
    assert parse_control(from_worker, frame) == answer(1.0, good)
    told = msgspec.msgpack.decode(bytes(frame))
    (told["counted"] if name == "cpu_s" else told["counted"]["operations"])[name] = value
    with pytest.raises(WireError):
        parse_control(from_worker, msgspec.msgpack.encode(told))
