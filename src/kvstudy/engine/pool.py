"""Where KV lies: one preallocated pool of blocks a tier, and a request's table of blocks.

A *block* holds `block_size` entries of ONE layer, all KV heads: `[2 (K, V), kv_heads, block_size, head_dim]`,
so that each head's part of a block is contiguous. A block id is good for any layer of any request; policies
may hold different numbers of entries in each layer, and what they free is reused by whoever asks next.

The pool counts three things, exactly: what it could hold (`capacity_bytes`), what admitted requests were
promised (`reserved_bytes`, by what their policy's `reserve` said), and what is in use (`live_bytes` = entries
x bytes an entry). An untouched block is not resident, and a large free is handed back to the operating
system, so that the process's own RSS shows what a policy saves.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch

RETURN_TO_OS_BYTES = 1 << 20
"""Frees of at least this many contiguous bytes are handed back to the operating system (CPU only)."""


class PoolExhausted(RuntimeError):
    """More blocks were asked for than there are: a policy held more than it reserved."""


class BlockPool:
    """KV memory of one tier (`device` or `host`).

    `kv` is `[num_blocks, 2, kv_heads, block_size, head_dim]`. A *slot* is `block * block_size + offset`: it
    names one entry (all heads) of one layer. An entry is `entry_bytes` = 2 x kv_heads x head_dim x itemsize
    bytes.
    """

    def __init__(
        self,
        tier: str,
        capacity_bytes: int,
        *,
        kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pinned: bool = False,
    ) -> None:
        self.tier = tier
        self.block_size = block_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.capacity_bytes = capacity_bytes
        self.entry_bytes = 2 * kv_heads * head_dim * dtype.itemsize
        self.block_bytes = self.entry_bytes * block_size
        self.num_blocks = capacity_bytes // self.block_bytes
        self._map: mmap.mmap | None = None
        self.kv = self._allocate(dtype, torch.device(device), pinned)
        # A stack whose top is its end: fresh blocks come off it in ascending order, so neighbours stay
        # neighbours, and blocks freed last (still warm, still resident) are reused first.
        self._stack = np.arange(self.num_blocks - 1, -1, -1, dtype=np.int32)
        self._free = self.num_blocks
        self.reserved_bytes = 0
        self.live_entries = 0
        self.peak_live_entries = 0
        self.aux_bytes = 0
        self.peak_aux_bytes = 0

    def _allocate(self, dtype: torch.dtype, device: torch.device, pinned: bool) -> torch.Tensor:
        shape = (self.num_blocks, 2, self.kv_heads, self.block_size, self.head_dim)
        if device.type != "cpu" or pinned or self.num_blocks == 0:
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
        self._map = mmap.mmap(-1, self.num_blocks * self.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(self._map, dtype=dtype).view(shape)

    # -- admission
    # -------------------------------------------------------------------------------------------------

    def blocks_for(self, entries: int) -> int:
        """How many blocks hold this many entries of one layer."""
        return -(-entries // self.block_size)

    def bytes_for(self, entries: int, layers: int = 1) -> int:
        """Bytes of pool that `entries` entries take in each of `layers` layers: whole blocks."""
        return self.blocks_for(entries) * self.block_bytes * layers

    def reserve(self, nbytes: int) -> bool:
        """Promise `nbytes` to a request; False, and nothing promised, where they are not to be had now."""
        if self.reserved_bytes + nbytes > self.usable_bytes:
            return False
        self.reserved_bytes += nbytes
        return True

    def unreserve(self, nbytes: int) -> None:
        """Take back a promise, or the part of it that a policy no longer needs."""
        self.reserved_bytes -= nbytes
        assert self.reserved_bytes >= 0

    @property
    def usable_bytes(self) -> int:
        """Bytes that can be promised: whole blocks."""
        return self.num_blocks * self.block_bytes

    # -- blocks
    # ----------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._free

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self._free

    def allocate(self, n: int) -> np.ndarray:
        """Take n blocks; returns their ids, int32 [n]. Raises `PoolExhausted` where there are fewer."""
        if n > self._free:
            raise PoolExhausted(f"{self.tier} KV pool: {n} blocks wanted, {self._free} of {self.num_blocks} free")
        self._free -= n
        return self._stack[self._free : self._free + n][::-1].copy()

    def free(self, blocks: np.ndarray) -> None:
        """Give blocks back. A large free returns its pages to the operating system."""
        n = len(blocks)
        if n == 0:
            return
        self._stack[self._free : self._free + n] = np.sort(blocks)[::-1]
        self._free += n
        if self._map is not None and n * self.block_bytes >= RETURN_TO_OS_BYTES:
            self._return_to_os(np.sort(blocks))

    def _return_to_os(self, blocks: np.ndarray) -> None:
        assert self._map is not None
        breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
        for run in np.split(blocks, breaks):
            start = int(run[0]) * self.block_bytes
            stop = (int(run[-1]) + 1) * self.block_bytes
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = stop // mmap.PAGESIZE * mmap.PAGESIZE
            if stop - start >= 16 * mmap.PAGESIZE:
                self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    # -- accounting
    # ------------------------------------------------------------------------------------------------

    def count(self, entries: int) -> None:
        """Add to (a negative number: take from) the entries in use; an entry is one layer's, all KV heads."""
        self.live_entries += entries
        if self.live_entries > self.peak_live_entries:
            self.peak_live_entries = self.live_entries

    def count_aux(self, nbytes: int) -> None:
        """Add to (or take from) bytes a policy holds on this tier beside entries: scores, partial keys."""
        self.aux_bytes += nbytes
        self.peak_aux_bytes = max(self.peak_aux_bytes, self.aux_bytes)

    @property
    def live_bytes(self) -> int:
        """Entries in use x bytes an entry."""
        return self.live_entries * self.entry_bytes

    @property
    def peak_live_bytes(self) -> int:
        """The highest `live_bytes` since `reset_peaks`."""
        return self.peak_live_entries * self.entry_bytes

    def reset_peaks(self) -> None:
        """Begin the peaks anew from what is held now."""
        self.peak_live_entries = self.live_entries
        self.peak_aux_bytes = self.aux_bytes


class BlockTable:
    """Where one request's entries lie in a pool: for each layer a row of block ids and a length.

    `blocks` is int32 `[layers, max_blocks]`, unused places 0; `lengths` is int64 `[layers]`. Entry i of layer
    l lies in slot `blocks[l, i // block_size] * block_size + i % block_size`. Every change of length is
    counted in the pool.
    """

    def __init__(self, pool: BlockPool, layers: int, max_entries: int) -> None:
        self.pool = pool
        self.blocks = np.zeros((layers, pool.blocks_for(max_entries)), dtype=np.int32)
        self.num_blocks = np.zeros(layers, dtype=np.int64)
        self.lengths = np.zeros(layers, dtype=np.int64)

    def resize(self, layer: int, length: int) -> None:
        """Make a layer hold `length` entries: take blocks when it grows, give them back when it shrinks.

        Entries below the smaller of both lengths stay where they are.
        """
        have, want = int(self.num_blocks[layer]), self.pool.blocks_for(length)
        if want > have:
            self.blocks[layer, have:want] = self.pool.allocate(want - have)
        elif want < have:
            self.pool.free(self.blocks[layer, want:have])
            self.blocks[layer, want:have] = 0
        self.num_blocks[layer] = want
        self.pool.count(length - int(self.lengths[layer]))
        self.lengths[layer] = length

    def resize_all(self, length: int) -> None:
        """`resize` in every layer; one step when all layers hold the same number, as `full`'s do."""
        first = int(self.lengths[0])
        if length < first or (self.lengths != first).any():
            for layer in range(len(self.lengths)):
                self.resize(layer, length)
            return
        have, want = int(self.num_blocks[0]), self.pool.blocks_for(length)
        if want > have:
            layers = len(self.lengths)
            self.blocks[:, have:want] = self.pool.allocate((want - have) * layers).reshape(layers, want - have)
            self.num_blocks[:] = want
        self.pool.count((length - first) * len(self.lengths))
        self.lengths[:] = length

    def slots(self, layer: int, start: int, stop: int) -> np.ndarray:
        """Slots of entries start..stop-1 of a layer, int64 [stop - start]."""
        entry = np.arange(start, stop)
        size = self.pool.block_size
        found: np.ndarray = self.blocks[layer, entry // size].astype(np.int64) * size + entry % size
        return found

    def slots_all(self, start: int, stop: int) -> np.ndarray:
        """`slots` in every layer, int64 [layers, stop - start]."""
        entry = np.arange(start, stop)
        size = self.pool.block_size
        return np.take(self.blocks, entry // size, axis=1).astype(np.int64) * size + entry % size

    def copy_from(self, other: BlockTable, layers: slice = slice(None)) -> None:
        """Hold copies of all the entries of some of `other`'s layers, which are as many as this table has.

        The pools may be different ones, on different devices, of one geometry and block size.
        """
        blocks, lengths = other.blocks[layers], other.lengths[layers]
        for layer, length in enumerate(lengths.tolist()):
            self.resize(layer, length)
        used = self.num_blocks.tolist()
        mine = torch.from_numpy(np.concatenate([row[:n] for row, n in zip(self.blocks, used, strict=True)])).long()
        theirs = torch.from_numpy(np.concatenate([row[:n] for row, n in zip(blocks, used, strict=True)])).long()
        self.pool.kv[mine.to(self.pool.kv.device)] = other.pool.kv[theirs.to(other.pool.kv.device)].to(
            self.pool.kv.device
        )

    def release(self) -> None:
        """Give everything back. The table is empty afterwards."""
        used = np.concatenate([row[:n] for row, n in zip(self.blocks, self.num_blocks, strict=True)])
        self.pool.free(used)
        self.pool.count(-int(self.lengths.sum()))
        self.blocks[:] = 0
        self.num_blocks[:] = 0
        self.lengths[:] = 0


def stack_tables(tables: Sequence[BlockTable]) -> np.ndarray:
    """The block tables of a batch side by side: int32 [layers, rows, widest], unused places 0."""
    widest = max(int(t.num_blocks.max()) for t in tables)
    out = np.zeros((tables[0].blocks.shape[0], len(tables), widest), dtype=np.int32)
    for row, table in enumerate(tables):
        n = min(widest, table.blocks.shape[1])
        out[:, row, :n] = table.blocks[:, :n]
    return out
