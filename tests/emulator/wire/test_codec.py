"""The wire: what goes in comes out, and nothing else gets through."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire import codec
from fleetbed.emulator.wire.messages import Failed, Hello, Trained, from_worker


def example() -> Bundle:
    generator = torch.Generator().manual_seed(7)
    return Bundle(
        {
            "weight": torch.randn(3, 5, generator=generator),
            "count": torch.tensor(4, dtype=torch.int64),
            "mask": torch.tensor([True, False]),
            "empty": torch.zeros(0, 3),
            "large": torch.randn(200, 200, generator=generator),
        },
        {"round": 3, "rate": 0.5, "name": "x", "list": [1, 2.5, None]},
    )


def raw(bundle: Bundle) -> list[bytes]:
    return [bytes(frame) for frame in codec.pack(bundle)]


def test_a_bundle_comes_out_as_it_went_in() -> None:
    before = example()
    after = codec.unpack(raw(before))
    assert after.values == before.values
    assert list(after.tensors) == list(before.tensors)
    for name, tensor in before.tensors.items():
        assert after.tensors[name].dtype == tensor.dtype
        assert torch.equal(after.tensors[name], tensor)


def test_a_large_tensor_is_not_copied_on_its_way() -> None:
    tensor = torch.zeros(100_000)
    frames = codec.pack(Bundle({"t": tensor}))
    tensor[0] = 1.0
    assert torch.frombuffer(bytearray(frames[1]), dtype=torch.float32)[0] == 1.0
    received = bytearray(frames[1])
    after = codec.unpack([frames[0], received])
    received[:4] = torch.tensor([2.0]).numpy().tobytes()
    assert after.tensors["t"][0] == 2.0


def test_small_tensors_travel_in_the_manifest_until_it_is_full() -> None:
    many = Bundle({f"t{number}": torch.full((4_000,), float(number)) for number in range(100)})
    frames = raw(many)
    inside = (1 << 20) // 16_000
    assert len(frames) == 1 + 100 - inside
    assert inside * 16_000 < len(frames[0]) < inside * 16_000 + 100 * 30
    after = codec.unpack(frames)
    assert list(after.tensors) == list(many.tensors)
    assert [int(tensor[-1]) for tensor in after.tensors.values()] == list(range(100))


def test_what_was_received_can_be_written_to_and_lies_aligned() -> None:
    for tensor in codec.unpack(raw(example())).tensors.values():
        assert tensor.data_ptr() % tensor.element_size() == 0
        tensor.zero_()


def test_size_counts_manifest_and_tensors() -> None:
    frames = raw(Bundle({"logits": torch.zeros(100, 100), "classes": torch.zeros(10)}))
    # msgpack, by hand: [[["logits", "f32", [100, 100]], ["classes", "f32", [10], 40 bytes]], {}]
    manifest = 1 + 1 + (1 + 7 + 4 + 3) + (1 + 8 + 4 + 2 + 2 + 40) + 1
    assert codec.size_of(frames) == manifest + 4 * 100 * 100


def test_views_of_a_tensor_are_sent_as_they_are() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    after = codec.unpack(raw(Bundle({"column": whole[:, 1]})))
    assert after.tensors["column"].tolist() == [1.0, 5.0, 9.0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f: f[:-1], "'large' is declared, but has no frame"),
        (lambda f: [*f, b"more"], "2 tensor frames where the manifest declares 1"),
        (lambda f: f[:0], "without a manifest"),
        (lambda f: [f[0], f[1][:-4]], "declares 160000 bytes and has 159996"),
        (lambda f: [b"\xc1" + f[0], *f[1:]], "does not fit its type"),
        (lambda f: [f[0].replace(b"f32", b"q99"), *f[1:]], "unknown type"),
        (lambda f: [f[0].replace(b"count", b"empty"), *f[1:]], "comes twice"),
    ],
)
def test_a_message_that_is_not_right_is_refused(change: object, reason: str) -> None:
    with pytest.raises(codec.WireError, match=reason):
        codec.unpack(change(raw(example())))  # type: ignore[operator]


def test_a_negative_dimension_is_refused() -> None:
    manifest = msgspec.msgpack.encode([[["t", "f32", [-1, -4]]], {}])
    with pytest.raises(codec.WireError, match="does not fit"):
        codec.unpack([manifest, bytes(16)])


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (["t", "f32", [2], b"1234"], "declares 8 bytes and has 4"),
        (["t", "f32", [1], b"1234", 0], "does not fit"),
        (["t", "f32", [1], "1234"], "does not fit"),
        (["t", "f32", [1 << 40, 1 << 40, 0], b""], "impossible shape"),
        (["t", "f32", [0, 1 << 40, 1 << 40, 1 << 40], b""], "impossible shape"),
    ],
)
def test_a_tensor_in_the_manifest_is_checked_too(spec: list[object], reason: str) -> None:
    with pytest.raises(codec.WireError, match=reason):
        codec.unpack([msgspec.msgpack.encode([[spec], {}])])


def mutate(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """Change a real message the way a broken sender would."""
    frames = list(frames)
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(6)
        at = rng.randrange(len(frames)) if frames else 0
        if kind == 0 and frames:
            del frames[at]
        elif kind == 1:
            frames.insert(at, rng.randbytes(rng.randint(0, 40)))
        elif kind == 2 and frames and frames[at]:
            changed = bytearray(frames[at])
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            frames[at] = bytes(changed)
        elif kind == 3 and frames:
            frames[at] = frames[at][: rng.randint(0, len(frames[at]))]
        elif kind == 4 and frames:
            frames[at] = frames[at] + rng.randbytes(rng.randint(1, 8))
        elif kind == 5 and len(frames) > 1:
            rng.shuffle(frames)
    return frames


def fuzz(count: int) -> tuple[int, int]:
    rng = random.Random(1)
    trained = Trained(
        task=3,
        keep=None,
        metrics={"loss": 1.0},
        steps=2,
        samples=32,
        seconds=1.0,
        cpu_s=0.5,
        throttled_s=None,
        peak_bytes=None,
        anon_bytes=None,
    )
    small = Bundle({"a": torch.zeros(3, 4), "b": torch.ones(2, dtype=torch.int64)}, {"k": 1})
    real = [
        [codec.control(trained), *raw(small)],
        [codec.control(Failed(task=1, kind="crash", detail="x"))],
        [codec.control(Hello(()))],
    ]
    taken = refused = 0
    for _ in range(count):
        frames = mutate(rng.choice(real), rng)
        try:
            if not frames:
                raise codec.WireError("empty")
            codec.parse_control(from_worker, frames[0])
            codec.unpack(frames[1:])
            taken += 1
        except codec.WireError:
            refused += 1
    return taken, refused


def test_mutated_messages_are_taken_or_refused_but_never_crash() -> None:
    taken, refused = fuzz(3_000)
    assert taken + refused == 3_000
    assert refused > 1_000


@pytest.mark.slow
def test_a_hundred_thousand_mutated_messages() -> None:
    taken, refused = fuzz(100_000)
    assert taken + refused == 100_000
    assert refused > 30_000
