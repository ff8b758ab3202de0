"""Owns the file of keys: who may ask, over HTTP and over ZeroMQ, as which tenant, how urgently and how much at once.

Pure but for files. API keys are kept as SHA-256 alone; a CURVE key is public by its nature. Called by the gateway for
the first kind, by the front for the second, and by the command line to make new ones.
"""

import hashlib
import os
import secrets
import struct
import tomllib
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import zmq
import zmq.utils.z85
from msgspec import Meta, Struct

from ipc.errors import Code, EngineError

CURVE_BYTES: Final = 32
CLASSES: Final = ("realtime", "interactive", "batch")  # most urgent first


class Key(Struct, frozen=True, forbid_unknown_fields=True):
    """One key: the hash of its text for HTTP, the public key of its program for ZeroMQ, or both; whose it is.

    `ceiling` is the most urgent class of its requests; `open_max` bounds the open requests of its tenant, 0 does not.
    """

    sha256: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""
    curve: Annotated[str, Meta(pattern="^([0-9A-Za-z.:+=^!/*?&<>()\\[\\]{}@%$#-]{40})?$")] = ""
    tenant: Annotated[str, Meta(max_length=64)] = ""
    ceiling: Annotated[Literal["realtime", "interactive", "batch"], Meta(description="most urgent class")] = "realtime"
    open_max: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    key: Annotated[list[Key], Meta(min_length=1, max_length=10_000)]


def read(path: str, field: str) -> list[Key]:
    """The keys of a file. Raises EngineError naming what is wrong with it and the setting `field`, never a key."""
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        keys = msgspec.convert(tree, _File).key
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise EngineError(Code.INVALID, f"{path}: {error}", field) from error
    for index, key in enumerate(keys):
        if not key.sha256 and not key.curve:
            raise EngineError(Code.INVALID, f"{path}: key[{index}] has neither sha256 nor curve", field)
    for name in ("sha256", "curve"):
        values = [value for key in keys if (value := getattr(key, name))]
        if len(values) != len(set(values)):
            raise EngineError(Code.INVALID, f"{path}: a second key with the same {name}", field)
    return keys


def read_secret(path: str, field: str) -> str:
    """The secret half of a CURVE key pair, 40 characters. Raises EngineError when others may read the file."""
    try:
        if os.stat(path).st_mode & 0o077:
            raise EngineError(Code.INVALID, f"{path}: others than its owner may read it (chmod 600)", field)
        text = Path(path).read_text(encoding="ascii").strip()
        if len(zmq.utils.z85.decode(text.encode())) != CURVE_BYTES:
            raise ValueError("is no secret CURVE key of 40 characters")
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise EngineError(Code.INVALID, f"{path}: {error}", field) from error
    return text


def new_api_key() -> tuple[str, str]:
    """A key of 256 random bits, and its SHA-256."""
    text = "sk-" + secrets.token_urlsafe(32)
    return text, hashlib.sha256(text.encode()).hexdigest()


def class_within(asked: str, ceiling: str) -> str:
    """The class of a request under its key's ceiling: never more urgent than that. "" stays the route's default."""
    if asked in CLASSES and CLASSES.index(asked) < CLASSES.index(ceiling):
        return ceiling
    return asked or ("" if ceiling == "realtime" else ceiling)


def new_curve_pair() -> tuple[str, str]:
    """A secret and a public CURVE key, 40 characters each."""
    public, secret = zmq.curve_keypair()
    return secret.decode(), public.decode()
