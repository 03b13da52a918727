"""Benches: what is lent, what comes to lie there, and that nothing of one client is another's."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fleetbed.emulator import ahead, bench, heap, host, large_pages
from fleetbed.emulator.forks import one_thread, run_in_fork
from fleetbed.emulator.limits.rlimit import read_status
from fleetbed.emulator.memory_meter import Case, workplace
from fleetbed.emulator.messages import Train
from fleetbed.models.base import InputSpec
from fleetbed.profiles.experiment import Optimizer

MIB = 1 << 20
SIZE = 32 * MIB


def in_fork(work: Callable[[], None]) -> None:
    """With one thread: torch's others are not there in a fork, and would be waited for."""

    def alone() -> None:
        one_thread()
        work()

    run_in_fork(alone)


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 12345)  # something else lies in front
    yield fd
    os.close(fd)


@pytest.fixture
def benches(memory: int) -> Iterator[bench.Benches]:
    found = bench.Benches(memory, count=2, size=SIZE)
    found._thread.join()
    yield found
    found.close()


def shared_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) << 10


@pytest.mark.parametrize(
    ("on_it", "spare", "size"),
    [(80, None, 100), (80, 100, 100), (80, 99, 0), (1, 2, 2), (1, 1, 0)],
)
def test_who_has_memory_to_spare_is_lent_some(on_it: int, spare: int | None, size: int) -> None:
    assert bench.size_for(on_it * MIB, None if spare is None else spare * MIB) == size * MIB


def test_there_is_a_bench_for_each_core_unless_that_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cores", lambda: 4)
    monkeypatch.setattr(host, "available_bytes", lambda: 1000 * MIB)
    assert bench.count_for(10 * MIB, clients=100) == 4
    assert bench.count_for(10 * MIB, clients=3) == 3
    assert bench.count_for(100 * MIB, clients=100) == 2
    assert bench.count_for(300 * MIB, clients=100) == 0
    assert bench.count_for(0, clients=100) == 0


def test_the_memory_is_there_before_it_is_lent(memory: int, benches: bench.Benches) -> None:
    assert os.fstat(memory).st_blocks * 512 >= 2 * SIZE
    assert os.pread(memory, 5, 0) == bytes(5)


def test_a_bench_is_lent_to_one_at_a_time(benches: bench.Benches) -> None:
    one, other = benches.lend(SIZE), benches.lend(4 * MIB)
    assert one is not None
    assert other is not None
    assert {one.place[1], other.place[1]} == {SIZE, 4 * MIB}
    assert abs(one.place[0] - other.place[0]) == SIZE
    assert benches.lend(SIZE) is None
    place = one.place
    del one
    again = benches.lend(SIZE)
    assert again is not None
    assert again.place == place


def test_who_needs_none_is_lent_none(benches: bench.Benches) -> None:
    assert benches.lend(0) is None
    assert len(benches.free) == 2


def test_what_is_not_furnished_yet_is_not_lent(benches: bench.Benches) -> None:
    benches._furnished = [0, 6 * MIB]
    found = [benches.lend(SIZE) for _ in range(2)]
    assert [each.place[1] for each in found if each is not None] == [6 * MIB]


def test_where_there_are_no_large_pages_small_ones_do(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "MADV_COLLAPSE", -1)
    found = bench.Benches(memory, count=1, size=SIZE)
    found._thread.join()
    assert os.fstat(memory).st_blocks * 512 >= SIZE
    lent = found.lend(SIZE)
    assert lent is not None
    assert lent.place[1] == SIZE


def test_tensors_lie_on_the_bench_and_nowhere_else_afterwards(memory: int, benches: bench.Benches) -> None:
    lent = benches.lend(SIZE)
    assert lent is not None

    def work() -> None:
        heap.fill_holes()
        with bench.Seat(memory).at(lent.place):
            tensors = [torch.full((MIB,), 7, dtype=torch.uint8) for _ in range(20)]
            assert shared_bytes() >= 18 * MIB
            del tensors
        assert shared_bytes() < MIB  # the kernel counts in steps

    in_fork(work)
    offset, size = lent.place
    assert os.pread(memory, size, offset).count(b"\7" * 4096) >= 18 * MIB // 4096


def test_a_process_like_the_zygote_s_leaves_nothing_there() -> None:
    """Its malloc keeps nothing back, so that after a task the heap ends where it did before."""
    code = """
import os
import torch
from fleetbed.emulator import bench, heap
fd = os.memfd_create("test")
benches = bench.Benches(fd, 1, 32 << 20)
benches._thread.join()
heap.fill_holes()
seat = bench.Seat(fd)
for _ in range(3):
    with seat.at((0, 32 << 20)):
        tensors = [torch.ones(size) for size in range(1, 3000)]
        del tensors
    assert heap.top() <= seat._start, heap.top() - seat._start
"""
    environment = {**os.environ, **ahead.ONE_THREAD, "GLIBC_TUNABLES": ahead.TUNABLES}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_what_does_not_fit_lies_behind_the_bench(memory: int, benches: bench.Benches) -> None:
    lent = benches.lend(4 * MIB)
    assert lent is not None

    def work() -> None:
        with bench.Seat(memory).at(lent.place):
            tensors = [torch.full((MIB,), value, dtype=torch.uint8) for value in range(40)]
            assert [int(tensor.sum()) for tensor in tensors] == [value * MIB for value in range(40)]

    in_fork(work)


@pytest.mark.parametrize("advice", [bench.MADV_POPULATE_WRITE, -1])  # and a kernel that does not know it
def test_what_stays_alive_is_its_owner_s(
    memory: int, benches: bench.Benches, advice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MADV_POPULATE_WRITE", advice)
    lent = benches.lend(SIZE)
    assert lent is not None

    def work() -> None:
        seat = bench.Seat(memory)
        with seat.at(lent.place):
            over = torch.ones(4 * MIB, dtype=torch.uint8)
            kept = torch.arange(2 * MIB, dtype=torch.int32)
            del over
        assert advice < 0 or shared_bytes() < MIB  # the kernel counts in steps
        os.pwrite(memory, b"\xff" * lent.place[1], lent.place[0])  # the next one at this bench
        assert torch.equal(kept, torch.arange(2 * MIB, dtype=torch.int32))
        more = torch.ones(4 * MIB, dtype=torch.uint8)
        assert int(more.sum()) == 4 * MIB
        with seat.at(lent.place):  # and again
            assert int(torch.ones(8 * MIB, dtype=torch.uint8).sum()) == 8 * MIB
        assert torch.equal(kept, torch.arange(2 * MIB, dtype=torch.int32))

    in_fork(work)


@pytest.mark.parametrize("room", [2 * SIZE, SIZE // 2, MIB])
def test_a_limit_on_what_the_process_has_leaves_as_much_of_the_bench_as_it_can(
    memory: int, benches: bench.Benches, room: int
) -> None:
    """Without cgroups: the heap may grow by so much before the bench is put where it grew."""
    lent = benches.lend(SIZE)
    assert lent is not None

    def work() -> None:
        heap.fill_holes()
        limit = read_status()["VmData"] + room
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        with bench.Seat(memory).at(lent.place):
            tensors = [torch.ones(MIB // 16) for _ in range(max(2, room // MIB))]
            assert all(int(tensor.sum()) == MIB // 16 for tensor in tensors)
            del tensors

    in_fork(work)


def test_training_there_gives_the_same_bits(memory: int, benches: bench.Benches) -> None:
    case = Case("resnet-width", "resnet26-quarter", InputSpec((1, 16, 16), 4), batch=2, optimizer=Optimizer())
    here = workplace(case)
    lent = benches.lend(SIZE)
    assert lent is not None

    def trained() -> dict[str, torch.Tensor]:
        stage = here.method.needs.stages[0]
        message = here.method.send(here.method.setup(), here.context.clients[0], stage, 0)
        reply, _ = here.train(Train(task=1, client=0, variant=case.variant, stage=stage, kept=None), message, None)
        return dict(reply.message.tensors)

    def work() -> None:
        apart, seat = trained(), bench.Seat(memory)
        heap.fill_holes()
        for _ in range(3):
            with seat.at(lent.place):
                lying_there = trained()
                assert all(torch.equal(tensor, apart[name]) for name, tensor in lying_there.items())
                assert shared_bytes() > 0
                del lying_there

    in_fork(work)
