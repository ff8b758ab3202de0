"""Who passes the handshake, frame by frame."""

import pytest
import zmq
import zmq.utils.z85

from engine.front.zap import DOMAIN, answer

PUBLIC = zmq.curve_keypair()[0]
KNOWN = {PUBLIC.decode()}


def question(**changes: bytes) -> list[bytes]:
    frames = {
        "id": b"\x00abcd",
        "delimiter": b"",
        "version": b"1.0",
        "request": b"7",
        "domain": DOMAIN.encode(),
        "address": b"10.0.0.1",
        "identity": b"",
        "mechanism": b"CURVE",
        "credentials": zmq.utils.z85.decode(PUBLIC),
    }
    return list({**frames, **changes}.values())


def test_a_known_key_is_its_own_user_id():
    assert answer(question(), KNOWN) == [b"\x00abcd", b"", b"1.0", b"7", b"200", b"OK", PUBLIC, b""]


@pytest.mark.parametrize(
    "frames",
    [
        question(credentials=zmq.utils.z85.decode(zmq.curve_keypair()[0])),
        question(credentials=b""),
        question(credentials=b"x" * 31),
        question(mechanism=b"PLAIN"),
        question(mechanism=b"NULL"),
        question(domain=b"other"),
        question(version=b"2.0"),
        question()[:-1],
        [*question(), b"more"],
        [b"\x00abcd"],
    ],
)
def test_everybody_else_is_refused(frames: list[bytes]):
    assert answer(frames, KNOWN)[4:7:2] == [b"400", b""]
    assert answer(question(), set())[4] == b"400"
