"""Blocks, tables and what the operating system sees of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstudy.engine.metrics import resident_bytes
from kvstudy.engine.pool import BlockPool, BlockTable, PoolExhausted, stack_tables


def small(blocks: int = 20) -> BlockPool:
    pool = BlockPool("device", blocks * 2 * 2 * 4 * 8 * 4 + 5, kv_heads=2, head_dim=8, block_size=4)
    assert pool.num_blocks == blocks
    return pool


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 16)), max_size=40))
def test_blocks_are_never_shared_and_counts_are_exact(actions: list[tuple[int, int, int]]) -> None:
    pool = small(60)
    tables = [BlockTable(pool, 3, 16) for _ in range(4)]
    for which, layer, length in actions:
        if layer == 2 and length % 2:
            tables[which].resize_all(length)
        else:
            tables[which].resize(layer, length)
        used = [t.blocks[i, : t.num_blocks[i]] for t in tables for i in range(3)]
        flat = np.concatenate(used)
        assert len(set(flat.tolist())) == len(flat) == pool.used_blocks
        assert pool.live_entries == sum(int(t.lengths.sum()) for t in tables)
        for t in tables:
            for i in range(3):
                assert len(set(t.slots(i, 0, int(t.lengths[i])).tolist())) == t.lengths[i]
    for t in tables:
        t.release()
    assert (pool.used_blocks, pool.live_bytes) == (0, 0)


def test_an_exhausted_pool_says_so() -> None:
    pool = small(2)
    pool.allocate(2)
    with pytest.raises(PoolExhausted, match="0 of 2 free"):
        pool.allocate(1)


def test_reservations_stop_at_whole_blocks() -> None:
    pool = small(2)
    assert pool.reserve(pool.block_bytes)
    assert not pool.reserve(pool.block_bytes + 1)
    assert pool.reserve(pool.block_bytes)
    pool.unreserve(2 * pool.block_bytes)
    assert pool.reserved_bytes == 0


def test_stacked_tables_keep_each_rows_blocks() -> None:
    pool = small()
    a, b = BlockTable(pool, 2, 16), BlockTable(pool, 2, 8)
    a.resize_all(13)
    b.resize_all(3)
    stacked = stack_tables([a, b])
    assert stacked.shape == (2, 2, 4)
    assert (stacked[:, 0] == a.blocks).all()
    assert (stacked[:, 1, :1] == b.blocks[:, :1]).all()


def test_memory_is_resident_when_written_and_returned_when_freed() -> None:
    pool = BlockPool("device", 256 << 20, kv_heads=4, head_dim=64, block_size=16)
    table = BlockTable(pool, 1, 131072)
    before = resident_bytes()
    table.resize(0, 64 * 1024)  # 64 Ki entries of 2 KiB
    pool.kv[table.blocks[0, : table.num_blocks[0]].tolist()] = 1.0
    written = resident_bytes()
    assert written - before == pytest.approx(128 << 20, rel=0.1)
    table.resize(0, 16 * 1024)
    assert written - resident_bytes() == pytest.approx(96 << 20, rel=0.1)
    assert float(pool.kv[int(table.blocks[0, 0])].sum()) == pool.kv[0].numel()
