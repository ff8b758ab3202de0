"""A socket on a loop: nothing is left lying in it, nothing blocks, and the paths are what they should be."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
import zmq

from ipc.channel import SOCKET_PATH_MAX, Channel, Sent, clear_stale_socket, dealer, ipc_address, router
from ipc.errors import EngineError


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.destroy(0)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_burst_then_trickle_beside_a_busy_descriptor(context: zmq.Context, tmp_path: Path, run: Callable):
    """The descriptor is edge-triggered: what one wake-up leaves behind would wait for the next message, or for ever."""
    address = f"ipc://{tmp_path}/s"

    async def scenario() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        server, peer = router(context, 1 << 20, 10_000), dealer(context, 10_000)
        server.bind(address)
        peer.connect(address)
        received: list[int] = []
        channel = Channel(server)

        def on_frames(frames: list[bytes]) -> None:
            received.append(int(frames[1]))
            channel.send_nowait([frames[0], b"ok"])  # a send in the handler may take the edge

        channel.attach(loop, on_frames)
        left, right = os.pipe()
        os.set_blocking(left, False)
        os.set_blocking(right, False)

        def keep_busy() -> None:
            os.read(left, 1)
            os.write(right, b"x")

        os.write(right, b"x")
        loop.add_reader(left, keep_busy)
        number = 0
        for burst in (1000, 1, 1, 700, 1, 3, 1):
            for _ in range(burst):
                peer.send_multipart([b"%d" % number])
                number += 1
            async with asyncio.timeout(5):
                while len(received) < number:
                    await asyncio.sleep(0)
        loop.remove_reader(left)
        os.close(left)
        os.close(right)
        assert received == list(range(number))
        told = channel.statistics()
        channel.close()
        peer.close(0)
        return number, told.num_received

    sent, seen = run(scenario())
    assert sent == seen == 1707


def test_a_send_to_nobody_is_gone(context: zmq.Context, tmp_path: Path):
    """PrimeIntellect-ai/verifiers#951, zeromq/jzmq#158: host unreachable raised out of the loop."""
    server = router(context, 1 << 20, 10)
    server.bind(f"ipc://{tmp_path}/s")
    channel = Channel(server)
    assert channel.send_nowait([b"nobody", b"x"]) is Sent.GONE
    assert channel.statistics().num_gone == 1
    channel.close(0)


def test_a_peer_that_does_not_read_is_full_not_a_wait(context: zmq.Context, tmp_path: Path):
    server, peer = router(context, 1 << 20, 5), dealer(context)
    peer.setsockopt(zmq.RCVHWM, 1)
    address = f"ipc://{tmp_path}/s"
    server.bind(address)
    peer.connect(address)
    peer.send(b"hello")
    channel = Channel(server)
    assert server.poll(5000)
    identity = channel.receive_nowait()[0]
    assert channel.receive_nowait() is None
    results = [channel.send_nowait([identity, b"x" * 60_000]) for _ in range(200)]
    assert results[0] is Sent.YES
    assert results[-1] is Sent.FULL
    assert channel.statistics().num_full > 0
    channel.close(0)
    peer.close(0)


def test_a_closed_channel_is_quiet(context: zmq.Context, tmp_path: Path):
    async def scenario() -> None:
        server = router(context, 1 << 20, 5)
        server.bind(f"ipc://{tmp_path}/s")
        channel = Channel(server)
        channel.attach(asyncio.get_running_loop(), lambda _: None)
        channel.close()
        channel.close()
        assert channel.is_closed
        await asyncio.sleep(0.12)  # two safety polls would have come

    asyncio.run(scenario())


def test_a_path_that_the_kernel_does_not_take_is_named_with_its_size():
    """LMCache/LMCache#3530, saltstack/salt#3036: cryptic failure or a restart loop."""
    with pytest.raises(EngineError) as caught:
        ipc_address("/" + "ä" * 60, "client")
    assert caught.value.field == "run_dir"
    assert "128 bytes" in caught.value.message
    assert str(SOCKET_PATH_MAX) in caught.value.message
    assert ipc_address("/" + "x" * (SOCKET_PATH_MAX - 8), "client")


def test_a_stale_socket_goes_and_a_file_stays(tmp_path: Path):
    """smg-project/smg#2076: the socket file of a dead process blocked binding for ever."""
    path = tmp_path / "client"
    clear_stale_socket(path)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    clear_stale_socket(path)
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(EngineError, match="not a socket"):
        clear_stale_socket(path)
    assert path.read_text() == "precious"
