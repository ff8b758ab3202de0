"""Exact block numbers, free order, eviction order; and a state machine that tries to leak."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.llm.blocks import AuditError, BlockPool, namespace_key


def publish(pool: BlockPool, block: int, tokens: list[int], namespace: bytes = b"n", parent: bytes = b"") -> bytes:
    key = pool.key(namespace, parent, tokens)
    pool.publish(block, key, namespace, parent, tokens)
    return key


def test_blocks_are_handed_out_in_order():
    pool = BlockPool(4, 2)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        pool.allocate()


def test_a_released_table_comes_back_tail_first():
    pool = BlockPool(4, 2)
    table = [pool.allocate() for _ in range(3)]
    pool.release(table)
    assert [pool.allocate() for _ in range(4)] == [3, 2, 1, 0]


def test_blocks_without_a_key_are_taken_before_cached_ones():
    pool = BlockPool(4, 2)
    table = [pool.allocate() for _ in range(3)]
    publish(pool, 0, [1, 2])
    pool.release(table)
    assert [pool.allocate() for _ in range(3)] == [3, 2, 1]
    assert pool.statistics().num_cached == 1
    assert pool.allocate() == 0
    assert pool.num_evicted == 1
    assert pool.statistics().num_cached == 0


def test_the_oldest_freed_cached_block_is_evicted_first():
    pool = BlockPool(3, 2)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        publish(pool, block, [block, block])
    for block in (1, 0, 2):
        pool.release([block])
    assert [pool.allocate() for _ in range(3)] == [1, 0, 2]


def test_a_shared_block_is_free_after_its_last_holder():
    pool = BlockPool(2, 2)
    block = pool.allocate()
    key = publish(pool, block, [7, 8])
    found = pool.lookup(key, b"n", b"", [7, 8])
    assert found == block
    pool.share(block)
    pool.audit([[block], [block]])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    pool.audit([])


def test_a_cached_block_can_be_shared_again_and_is_not_evicted_then():
    pool = BlockPool(2, 2)
    block = pool.allocate()
    publish(pool, block, [7, 8])
    pool.release([block])
    pool.share(block)
    assert pool.allocate() == 1
    with pytest.raises(IndexError):
        pool.allocate()


def test_a_block_given_back_twice_is_noticed():
    pool = BlockPool(2, 2)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AuditError):
        pool.release([block])


def test_the_audit_sees_a_lost_block_and_a_block_in_two_tables():
    pool = BlockPool(3, 2)
    first, second = pool.allocate(), pool.allocate()
    pool.audit([[first], [second]])
    with pytest.raises(AuditError):
        pool.audit([[first]])
    with pytest.raises(AuditError):
        pool.audit([[first], [first], [second]])


def test_a_salt_equal_to_an_adapter_is_another_namespace():
    """vllm-project/vllm#44701, sgl-project/sglang#24638: kinds of keys shared one string space."""
    made = {
        namespace_key("m", "X", "", "", ""),
        namespace_key("m", "", "X", "", ""),
        namespace_key("m", "", "", "X", ""),
        namespace_key("m", "", "", "", "X"),
        namespace_key("mX", "", "", "", ""),
        namespace_key("", "mX", "", "", ""),
    }
    assert len(made) == 6


def test_another_namespace_or_parent_never_hits():
    pool = BlockPool(4, 2)
    key = publish(pool, pool.allocate(), [1, 2], b"a")
    assert pool.lookup(key, b"a", b"", [1, 2]) == 0
    assert pool.lookup(key, b"b", b"", [1, 2]) is None
    assert pool.lookup(key, b"a", b"p", [1, 2]) is None
    assert pool.lookup(key, b"a", b"", [1, 3]) is None


class PoolMachine(RuleBasedStateMachine):
    """Tables grow, share, end; every block is in exactly one place at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, 2, key_bytes=1)
        self.tables: list[list[int]] = []
        self.keys: dict[bytes, tuple[bytes, list[int]]] = {}

    @rule(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def open_table(self, tokens: list[int]) -> None:
        """A table of blocks whose contents follow from `tokens`; hits are shared, the rest allocated and published."""
        table: list[int] = []
        parent, is_hit = b"", True
        for token in tokens:
            content = [token, token]
            key = self.pool.key(b"n", parent, content)
            block = self.pool.lookup(key, b"n", parent, content) if is_hit else None
            is_hit = block is not None
            if block is not None:
                self.pool.share(block)
            elif self.pool.num_free:
                block = self.pool.allocate()
                self.pool.publish(block, key, b"n", parent, content)
            else:
                break
            table.append(block)
            parent = key
        if table:
            self.tables.append(table)

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        if self.tables and self.pool.num_free:
            data.draw(st.sampled_from(self.tables)).append(self.pool.allocate())

    @rule(data=st.data())
    def end_table(self, data: st.DataObject) -> None:
        if self.tables:
            index = data.draw(st.integers(0, len(self.tables) - 1))
            self.pool.release(self.tables.pop(index))

    @invariant()
    def adds_up(self) -> None:
        self.pool.audit(self.tables)
        told = self.pool.statistics()
        assert told.num_free + told.num_used == told.num_blocks

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        self.pool.audit([])
        assert self.pool.num_free == 8


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
