"""Owns API keys: a file of hashes, and whether a request carries one of them.

Pure but for reading the file. Keys are kept as SHA-256 alone and compared in constant time. Called by the handlers.
"""

import hashlib
import hmac
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from ipc.errors import Code, EngineError

TOKEN_BYTES_MAX: Final = 4096
CLASSES: Final = ("realtime", "interactive", "batch")  # most urgent first


class Key(Struct, frozen=True, forbid_unknown_fields=True):
    """One key: the hash of its text, whose it is, and the most urgent class that its requests may have."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Annotated[str, Meta(max_length=64)] = ""
    ceiling: Annotated[Literal["realtime", "interactive", "batch"], Meta(description="most urgent class")] = "realtime"


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    key: Annotated[list[Key], Meta(min_length=1, max_length=10_000)]


def read(path: str) -> list[Key]:
    """The keys of a file. Raises EngineError naming what is wrong with it, never a key."""
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        return msgspec.convert(tree, _File).key
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise EngineError(Code.INVALID, f"{path}: {error}", "http.api_keys_file") from error


class Keyring:
    """Who may ask. Without keys everybody may, as nobody in particular."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key) for key in keys]

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    def find(self, headers: Sequence[bytes]) -> Key | None:
        """The key of a request by its Authorization headers; None when it carries no right one."""
        if not self._keys:
            return Key("0" * 64)
        if len(headers) != 1 or len(headers[0]) > TOKEN_BYTES_MAX:
            return None
        scheme, _, token = headers[0].strip().partition(b" ")
        if scheme.lower() != b"bearer" or not token:
            return None
        digest = hashlib.sha256(token.strip()).digest()
        found = None
        for known, key in self._keys:  # all of them, always: how long it takes tells nothing
            if hmac.compare_digest(known, digest):
                found = key
        return found


def class_within(asked: str, ceiling: str) -> str:
    """The class of a request under its key's ceiling: never more urgent than that. "" stays the route's default."""
    if asked in CLASSES and CLASSES.index(asked) < CLASSES.index(ceiling):
        return ceiling
    return asked or ("" if ceiling == "realtime" else ceiling)
