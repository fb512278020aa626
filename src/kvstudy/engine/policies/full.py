"""The whole cache: every decode step attends to every earlier token. The control of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvstudy.engine import attention
from kvstudy.engine.policies import register
from kvstudy.engine.policies.base import Chunk, Policy, Prompt, Reservation, Rows
from kvstudy.engine.pool import BlockPool, BlockTable, stack_tables
from kvstudy.engine.request import Request


@dataclass(slots=True)
class State:
    """A request's KV."""

    table: BlockTable


@register
class Full(Policy):
    """Entry i of every layer is token i; the table grows by a block every `block_size` tokens."""

    name = "full"

    @property
    def pool(self) -> BlockPool:
        """Where the blocks lie."""
        return self.context.device_pool

    def reserve(self, prompt_tokens: int, max_tokens: int) -> Reservation:
        """Whole blocks for prompt_tokens + max_tokens - 1 entries in every layer."""
        held = self.pool.bytes_for(prompt_tokens + max_tokens - 1, self.geometry.layers)
        return Reservation(device_prefill_bytes=held, device_bytes=held)

    def open(self, request: Request) -> None:
        most = request.prompt_tokens + request.params.max_tokens - 1
        request.kv = State(BlockTable(self.pool, self.geometry.layers, most))

    def close(self, request: Request) -> None:
        request.kv.table.release()
        request.kv = None

    def adopt(self, request: Request, prompt: Prompt) -> None:
        self.open(request)
        request.kv.table.copy_from(prompt.table)

    def begin_step(self, rows: Rows, chunks: list[Chunk]) -> None:
        device, size = self.geometry.device, self.pool.block_size
        for chunk in chunks:
            chunk.request.kv.table.resize_all(chunk.stop)
        self.chunk_slots = {
            id(c): torch.from_numpy(c.request.kv.table.slots_all(c.start, c.stop)).to(device) for c in chunks
        }
        if not rows:
            return
        new = np.array([self.place(request) for request in rows.requests])
        tables = stack_tables([request.kv.table for request in rows.requests])
        slots = tables[:, np.arange(len(rows)), new // size].astype(np.int64) * size + new % size
        lengths = np.array([request.kv.table.lengths[0] for request in rows.requests], dtype=np.int32)
        self.tables = torch.from_numpy(tables).to(device)
        self.slots = torch.from_numpy(np.ascontiguousarray(slots)).to(device)
        self.lengths = torch.from_numpy(lengths).to(device)

    def place(self, request: Request) -> int:
        """Make room for a request's next token; returns the index of its entry, the same in every layer."""
        request.kv.table.resize_all(request.computed + 1)
        return request.computed

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        kv = self.context.device_pool.kv
        attention.store(kv, self.slots[layer], k, v)
        self.context.attending.decode(layer, q, kv, self.tables[layer], self.lengths, out)

    def prefill_chunk(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, out: torch.Tensor
    ) -> None:
        kv = self.context.device_pool.kv
        attention.store(kv, self.chunk_slots[id(chunk)][layer], k, v)
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        if chunk.start:
            keys, values = attention.gather(kv, chunk.request.kv.table.blocks[layer], chunk.stop)
        self.context.attending.prefill(layer, q, keys, values, chunk.start, out)

    def end_step(self, rows: Rows, chunks: list[Chunk]) -> None:
        if rows:
            held = np.array([request.kv.table.lengths[0] for request in rows.requests])
            self.counted.add(rows.requests, attended=held, full=np.array([r.computed + 1 for r in rows.requests]))
