"""The byte meter against the socket: what is counted is what a TCP connection carries, less ZeroMQ's own framing."""

from __future__ import annotations

import socket
import threading
from itertools import pairwise

import pytest
import torch
import zmq

from fleetbed.emulator.method.bundle import Bundle
from fleetbed.emulator.wire import codec

BUNDLES = {
    "logits": Bundle({"logits": torch.randn(10, 10), "classes": torch.arange(10.0)}),
    "weights": Bundle({"w": torch.randn(300, 400), "b": torch.randn(300), "n": torch.tensor(7)}, {"round": 3}),
    "nothing": Bundle(),
}


class CountingProxy:
    """Passes one TCP connection on and counts what the client sends."""

    def __init__(self, target: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0
        self._target = target
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._target))
        self._sockets += [client, server]
        threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()
        self._pass(client, server, True)

    def _pass(self, source: socket.socket, target: socket.socket, count: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if count:
                    self.sent += len(data)
                target.sendall(data)
        except OSError:
            return  # closed by the test

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def framing(frames: list[codec.Buffer]) -> int:
    """ZMTP: flags and a length of one byte, or of eight for frames above 255 bytes."""
    return sum(2 if codec.size_of([frame]) <= 255 else 9 for frame in frames)


@pytest.mark.parametrize("name", BUNDLES)
def test_the_meter_counts_what_the_socket_carries(name: str) -> None:
    frames = codec.pack(BUNDLES[name])
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        proxy = CountingProxy(pull.bind_to_random_port("tcp://127.0.0.1"))
        push.connect(f"tcp://127.0.0.1:{proxy.port}")
        carried = []
        for _ in range(3):
            push.send_multipart(frames)
            received = pull.recv_multipart()
            assert codec.size_of(received) == codec.size_of(frames)
            carried.append(proxy.sent)
        proxy.close()
    # the handshake came before the first message, so differences hold one message each
    assert [later - earlier for earlier, later in pairwise(carried)] == [codec.size_of(frames) + framing(frames)] * 2
