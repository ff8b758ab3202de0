"""Owns the paged KV blocks of one worker: which are free, used or cached, and the prefix cache's chained keys.

Knows no sequence and no device: it hands out block numbers. Called by the scheduler alone. A block is in exactly one
of three places:

    used    ref count > 0, in one table, or in several when it is full and published
    cached  ref count 0, still known to the prefix cache, waiting in the free queue
    free    ref count 0, nothing worth keeping in it

Free and cached blocks stand in one queue, oldest first; blocks without a key are taken before a cached one is evicted.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from msgspec import Struct

KEY_BYTES: Final = 16


class AuditError(RuntimeError):
    """The pool disagrees with itself or with the tables it is told of: a fault of ours."""


class BlockStatistics(Struct, frozen=True):
    num_blocks: int
    num_free: int  # cached ones included: they can be taken
    num_used: int
    num_cached: int
    num_evicted: int
    num_queried_tokens: int
    num_hit_tokens: int


def _tagged(*fields: bytes) -> bytes:
    """Fields joined so that no two different lists of fields give the same bytes."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


def namespace_key(model: str, adapter: str, kv_dtype: str, tenant: str, salt: str) -> bytes:
    """Who may share blocks: digest of the fields, each tagged with its length, in fixed order.

    A salt that equals somebody's adapter name is still another namespace.
    """
    fields = [part.encode("utf-8", "surrogatepass") for part in (model, adapter, kv_dtype, tenant, salt)]
    return blake2b(_tagged(*fields), digest_size=KEY_BYTES).digest()


@dataclass(slots=True, eq=False)
class _Cached:
    """What a published block holds, to be compared when its key is hit."""

    block: int
    parent: bytes
    tokens: bytes


class BlockPool:
    """`num_blocks` blocks of `block_size` positions. `key_bytes` shortens the keys, for tests of collisions only."""

    __slots__ = (
        "_by_key",
        "_empty",
        "_evictable",
        "_keys",
        "_refs",
        "block_size",
        "is_cached",
        "key_bytes",
        "num_blocks",
        "num_evicted",
        "num_hit_tokens",
        "num_queried_tokens",
    )

    def __init__(self, num_blocks: int, block_size: int, is_cached: bool = True, key_bytes: int = KEY_BYTES) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.is_cached = is_cached
        self.key_bytes = key_bytes
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        # Both in the order in which they are taken: oldest first.
        self._empty: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[bytes, _Cached] = {}
        self.num_evicted = 0
        self.num_hit_tokens = 0
        self.num_queried_tokens = 0

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out, cached ones included."""
        return len(self._empty) + len(self._evictable)

    def key(self, namespace: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Chained key of one full block. Changes nothing."""
        tokens = array("I", token_ids).tobytes()
        return blake2b(_tagged(namespace, parent, tokens), digest_size=self.key_bytes).digest()

    def lookup(self, key: bytes, namespace: bytes, parent: bytes, token_ids: Sequence[int]) -> int | None:
        """The block that holds exactly these tokens after exactly this parent, or None. Changes nothing.

        The content is compared, not only the key: a collision is a miss, never somebody else's block.
        """
        cached = self._by_key.get(key)
        if cached is None or cached.parent != namespace + parent:
            return None
        return cached.block if cached.tokens == array("I", token_ids).tobytes() else None

    def is_evictable(self, block: int) -> bool:
        """True for a cached block that no table holds. Changes nothing."""
        return block in self._evictable

    def share(self, block: int) -> None:
        """One more table holds this cached or shared block."""
        if self._refs[block] == 0:
            del self._evictable[block]
        self._refs[block] += 1

    def allocate(self) -> int:
        """A block nobody holds; evicts the oldest cached one when no other is left. Raises IndexError when none is."""
        if self._empty:
            block, _ = self._empty.popitem(last=False)
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._unpublish(block)
            self.num_evicted += 1
        else:
            raise IndexError("no block is free")
        self._refs[block] = 1
        return block

    def _unpublish(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._by_key[key]

    def publish(self, block: int, key: bytes, namespace: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """Tell the prefix cache what a full, committed block holds. The first block under a key stays the known one."""
        if self.is_cached and key not in self._by_key and self._keys[block] is None:
            self._keys[block] = key
            self._by_key[key] = _Cached(block, namespace + parent, array("I", token_ids).tobytes())

    def release(self, table: Sequence[int]) -> None:
        """Give a whole table back. Its tail goes first, so that the prefix outlives it in the cache."""
        refs = self._refs
        for block in reversed(table):
            refs[block] -= 1
            if refs[block] == 0:
                if self._keys[block] is None:
                    self._empty[block] = None
                else:
                    self._evictable[block] = None
            elif refs[block] < 0:
                raise AuditError(f"block {block} was given back twice")

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the pool with every table that holds blocks. Raises AuditError; changes nothing."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                held[block] += 1
        for block, (refs, expected) in enumerate(zip(self._refs, held, strict=True)):
            if refs != expected:
                raise AuditError(f"block {block} has {refs} references, the tables hold {expected}")
            places = (refs > 0) + (block in self._empty) + (block in self._evictable)
            if places != 1:
                raise AuditError(f"block {block} is in {places} places")
            key = self._keys[block]
            if refs > 1 and key is None:
                raise AuditError(f"block {block} is shared but not published")
            if (key is None and block in self._evictable) or (key is not None and block in self._empty):
                raise AuditError(f"block {block} waits in the wrong queue")
            if key is not None and self._by_key[key].block != block:
                raise AuditError(f"the key of block {block} leads elsewhere")
        if len(self._by_key) != sum(key is not None for key in self._keys):
            raise AuditError("the prefix cache knows blocks that do not know it")

    def statistics(self) -> BlockStatistics:
        num_free = self.num_free
        return BlockStatistics(
            self.num_blocks,
            num_free,
            self.num_blocks - num_free,
            len(self._by_key),
            self.num_evicted,
            self.num_queried_tokens,
            self.num_hit_tokens,
        )
