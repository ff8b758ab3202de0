"""Who is let in, by bytes alone."""

import hashlib
from pathlib import Path

import pytest

from engine.gateway.keyring import Keyring
from engine.keys import Key, class_within, new_api_key, new_curve_pair, read, read_secret
from ipc.errors import EngineError

SECRET = b"sk-Bearer k\xc3\xa9y"
KEY = Key(hashlib.sha256(SECRET).hexdigest(), "tenant", "interactive")
RING = Keyring([Key("0" * 64), KEY])


@pytest.mark.parametrize(
    "header",
    [b"Bearer " + SECRET, b"bearer " + SECRET, b"BEARER  " + SECRET + b" "],
)
def test_a_right_key(header: bytes):
    assert RING.find([header]) is KEY


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Basic " + SECRET],
        [SECRET],
        [b"Bearer " + SECRET[:-1]],
        [b"Bearer " + SECRET.replace(b"Bearer ", b"")],
        [b"Bearer Bearer " + SECRET],
        [b"Bearer " + SECRET.decode().encode("latin-1")],
        [b"Bearer " + b"x" * 5000],
        [b"Bearer " + SECRET, b"Bearer " + SECRET],
    ],
)
def test_no_right_key(headers: list[bytes]):
    """Rapid-MLX#1271: "Bearer " was removed anywhere in a key."""
    assert RING.find(headers) is None


def test_without_keys_everybody_is_nobody_in_particular():
    found = Keyring([]).find([])
    assert found is not None
    assert (found.tenant, found.ceiling) == ("", "realtime")


@pytest.mark.parametrize(
    ("asked", "ceiling", "got"),
    [
        ("realtime", "realtime", "realtime"),
        ("realtime", "batch", "batch"),
        ("batch", "interactive", "batch"),
        ("", "realtime", ""),
        ("", "batch", "batch"),
        ("odd", "batch", "odd"),  # refused by its own name later
    ],
)
def test_no_class_above_the_ceiling(asked: str, ceiling: str, got: str):
    assert class_within(asked, ceiling) == got


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "key"),
        ("[[key]]\n", "sha256"),
        ('[[key]]\nsha256 = "abc"\n', "sha256"),
        (f'[[key]]\nsha256 = "{"0" * 64}"\ntenat = "x"\n', "tenat"),
        (f'[[key]]\nsha256 = "{"0" * 64}"\nceiling = "all"\n', "all"),
        ("[[key\n", "line 1"),
        ('[[key]]\ntenant = "x"\n', "neither"),
        (2 * f'[[key]]\nsha256 = "{"0" * 64}"\n', "second"),
        ('[[key]]\ncurve = "short"\n', "curve"),
        (f'[[key]]\nsha256 = "{"0" * 64}"\nopen_max = -1\n', "open_max"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, told: str):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(EngineError) as caught:
        read(str(path), "http.api_keys_file")
    assert caught.value.field == "http.api_keys_file"
    assert str(path) in caught.value.message
    assert told in caught.value.message


def test_a_file_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(EngineError, match="No such file"):
        read(str(tmp_path / "none.toml"), "http.api_keys_file")


@pytest.mark.parametrize(
    ("mode", "text", "told"), [(0o644, "", "chmod"), (0o600, "short", "CURVE"), (0o600, "é" * 40, "ascii")]
)
def test_a_secret_is_one_and_its_owners_alone(tmp_path: Path, mode: int, text: str, told: str):
    path = tmp_path / "secret"
    secret, _ = new_curve_pair()
    path.write_text(text or secret)
    path.chmod(mode)
    with pytest.raises(EngineError, match=told) as caught:
        read_secret(str(path), "front.curve_secret_file")
    assert secret not in caught.value.message
    path.write_text(secret + "\n")
    path.chmod(0o400)
    assert read_secret(str(path), "x") == secret


def test_new_keys_are_what_the_file_takes(tmp_path: Path):
    (text, digest), (_, public) = new_api_key(), new_curve_pair()
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nsha256 = "{digest}"\ncurve = "{public}"\n')
    (key,) = read(str(path), "x")
    assert Keyring([key]).find([b"Bearer " + text.encode()]) is key
    assert Keyring([Key(curve=public)]).find([b"Bearer x"]) is None
