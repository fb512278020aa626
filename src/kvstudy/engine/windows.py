"""Layers whose attention reaches a fixed number of tokens back: they keep those, whatever the policy.

Models such as GPT-OSS alternate layers of full attention with layers that see the last `window` tokens only (the
current one among them). A policy decides over the former; the latter hold at most `window` entries a request, as a
ring in the same pool: token p lies in entry p mod window, and so the newest overwrites the one that has just left.
"""

from __future__ import annotations

import numpy as np
import torch

from kvstudy.engine import attention
from kvstudy.engine.policies.base import Chunk
from kvstudy.engine.pool import BlockPool, BlockTable, stack_tables
from kvstudy.engine.request import Request


class Windows:
    """The sliding-window layers of a model; `layer` counts these alone."""

    def __init__(self, pool: BlockPool, window: int, scale: float, sinks: list[torch.Tensor | None]) -> None:
        self.pool = pool
        self.window = window
        self.scale = scale
        self.sinks = sinks
        self.layers = len(sinks)
        self.chunks: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        """Of the step in hand: where a chunk lies; the slots of the tokens before it, and of its own that stay, int64
        [layers, ...].
        """

    def bytes_for(self, prompt_tokens: int, max_tokens: int) -> int:
        """Pool bytes that a request needs at most."""
        return self.pool.bytes_for(min(self.window, prompt_tokens + max_tokens - 1), self.layers)

    def open(self, request: Request) -> None:
        """Set a request's ring up."""
        request.window_kv = BlockTable(self.pool, self.layers, self.window)

    def adopt(self, request: Request, other: Request) -> None:
        """Set a request's ring up as a copy of another's."""
        self.open(request)
        request.window_kv.copy_from(other.window_kv)

    def close(self, request: Request) -> None:
        """Give a request's ring back."""
        request.window_kv.release()
        request.window_kv = None

    def begin_step(self, requests: list[Request], at: list[int], chunks: list[tuple[Chunk, slice]]) -> None:
        """Before the first layer: make room, build the step's tables.

        `requests` decode one token each, which lies at `at` of the step's packed tokens, as each chunk does at its
        slice.
        """
        device = self.pool.kv.device
        self.chunks = []
        for chunk, where in chunks:
            table: BlockTable = chunk.request.window_kv
            before = self._slots(table, max(0, chunk.start - self.window + 1), chunk.start)
            table.resize_all(min(self.window, chunk.stop))
            into = self._slots(table, max(chunk.start, chunk.stop - self.window), chunk.stop)
            self.chunks.append((where, torch.from_numpy(before).to(device), torch.from_numpy(into).to(device)))
        self.rows = torch.tensor(at, dtype=torch.int64, device=device)
        if not requests:
            return
        tables: list[BlockTable] = [request.window_kv for request in requests]
        for request, table in zip(requests, tables, strict=True):
            table.resize_all(min(self.window, request.computed + 1))
        slots = [self._slots(r.window_kv, r.computed, r.computed + 1)[:, 0] for r in requests]
        lengths = np.array([table.lengths[0] for table in tables], dtype=np.int32)
        self.tables = torch.from_numpy(stack_tables(tables)).to(device)
        self.slots = torch.from_numpy(np.stack(slots, axis=1)).to(device)
        self.lengths = torch.from_numpy(lengths).to(device)

    def _slots(self, table: BlockTable, start: int, stop: int) -> np.ndarray:
        """Slots of tokens start .. stop - 1 in every layer."""
        entry, size = np.arange(start, stop) % self.window, self.pool.block_size
        slots: np.ndarray = table.blocks[:, entry // size].astype(np.int64) * size + entry % size
        return slots

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Attend for a whole step: q, out `[tokens, heads, head_dim]`, k, v `[tokens, kv_heads, head_dim]`."""
        kv, sinks = self.pool.kv, self.sinks[layer]
        if len(self.rows):
            attention.store(kv, self.slots[layer], k[self.rows], v[self.rows])
            attended = torch.empty_like(q[self.rows])
            attention.decode(q[self.rows], kv, self.tables[layer], self.lengths, self.scale, attended, None, sinks)
            out[self.rows] = attended
        for where, before, into in self.chunks:
            # Gathered before the ring is overwritten.
            old = attention.gather_slots(kv, before[layer].expand(k.shape[1], -1))
            keys, values = (torch.cat((a, b[where].transpose(0, 1)), 1) for a, b in zip(old, (k, v), strict=True))
            windowed(q[where], keys, values, self.window, self.scale, out[where], sinks)
            stays = into.shape[1]
            attention.store(kv, into[layer], k[where][-stays:], v[where][-stays:])


def windowed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    scale: float,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal attention of a chunk's queries over the last `window` keys each, itself the last of them.

    q, out: `[c, heads, head_dim]`; k, v: `[kv_heads, m + c, head_dim]`, m earlier tokens first. By blocks of queries:
    the largest thing held is heads x window x 2 window.
    """
    chunk, heads, dim = q.shape
    kv_heads, total, _ = k.shape
    earlier = total - chunk
    grouped = q.view(chunk, kv_heads, heads // kv_heads, dim)
    for first in range(0, chunk, window):
        last = min(first + window, chunk)
        low, high = max(0, earlier + first - window + 1), earlier + last
        scores = torch.einsum("chgd,hnd->chgn", grouped[first:last].float(), k[:, low:high].float()) * scale
        back = torch.arange(earlier + first, high, device=q.device)[:, None] - torch.arange(low, high, device=q.device)
        outside = (back < 0) | (back >= window)
        p = attention.softmax(scores.masked_fill_(outside[:, None, None], float("-inf")), sinks)
        out[first:last] = torch.einsum("chgn,hnd->chgd", p, v[:, low:high].float()).flatten(1, 2)
