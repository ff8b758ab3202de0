"""Owns whether an HTTP request carries a right key. Pure. Compares in constant time. Called by the handlers."""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from engine.keys import Key

TOKEN_BYTES_MAX: Final = 4096


class Keyring:
    """Who may ask. Without keys everybody may, as nobody in particular."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key) for key in keys if key.sha256]
        self._is_open = not keys

    @property
    def has_keys(self) -> bool:
        return not self._is_open

    def find(self, headers: Sequence[bytes]) -> Key | None:
        """The key of a request by its Authorization headers; None when it carries no right one."""
        if self._is_open:
            return Key()
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
