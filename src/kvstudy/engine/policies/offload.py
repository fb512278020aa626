"""The whole cache on the host: every decode step moves all of it to the device, a layer ahead of its use.

What offloading costs without a rule that says what to leave behind, as FlexGen serves (Sheng et al., "FlexGen:
High-Throughput Generative Inference of Large Language Models with a Single GPU", ICML 2023, arXiv 2303.06865, section
3): the control that InfiniGen's gain is measured against. While layer l is computed, layer l + 1's entries are moved
into the other of two staging buffers. Attends to exactly what `full` does.
"""

from __future__ import annotations

import numpy as np
import torch

from kvstudy.engine import attention
from kvstudy.engine.policies import register
from kvstudy.engine.policies.base import Chunk, Context, Options, Reservation, Rows
from kvstudy.engine.policies.full import Full
from kvstudy.engine.pool import BlockPool
from kvstudy.engine.request import Request


@register
class Offload(Full):
    """`full` whose blocks lie in the host's pool."""

    name = "offload"

    def __init__(self, context: Context, options: Options) -> None:
        super().__init__(context, options)
        self.staged_bytes = 0
        self._stage(0)

    @property
    def pool(self) -> BlockPool:
        return self.context.host_pool

    def reserve(self, prompt_tokens: int, max_tokens: int) -> Reservation:
        """Host: whole blocks of all entries in every layer. Device: two layers' worth of them, past the prompt."""
        total = prompt_tokens + max_tokens - 1
        return Reservation(
            device_prefill_bytes=0,
            device_bytes=2 * self.context.device_pool.bytes_for(total),
            host_bytes=self.pool.bytes_for(total, self.geometry.layers),
        )

    def close(self, request: Request) -> None:
        super().close(request)
        self._stage(0)  # the next step makes room for those who stay

    def _stage(self, blocks: int) -> None:
        """Two buffers of so many blocks on the device; pinned memory in between where the device is not the host."""
        device, shape = self.geometry.device, self.pool.kv.shape[1:]
        self.buffers = [torch.empty((blocks, *shape), dtype=self.geometry.dtype, device=device) for _ in range(2)]
        on_host = device.type == "cpu"
        self.pinned = [b if on_host else torch.empty_like(b, device="cpu").pin_memory() for b in self.buffers]
        nbytes = sum(b.numel() * b.element_size() for b in self.buffers)
        self.context.device_pool.count_aux(nbytes - self.staged_bytes)
        self.staged_bytes = nbytes
        self.due = [0.0, 0.0]

    def begin_step(self, rows: Rows, chunks: list[Chunk]) -> None:
        super().begin_step(rows, chunks)
        if not rows:
            return
        device, size = self.geometry.device, self.pool.block_size
        tables = self.tables.cpu()
        # The rows' blocks one after another in a buffer, the same in every layer.
        counts = -(-self.lengths.cpu().long() // size)
        first = counts.cumsum(0) - counts
        column = torch.arange(tables.shape[2])
        used = column < counts[:, None]
        self.blocks = tables[:, used].long()
        self.staged_tables = torch.where(used, first[:, None] + column, 0).int().to(device)
        newest = self.lengths.cpu().long() - 1
        self.staged_slots = ((first + newest // size) * size + newest % size).to(device)
        self.moved = int(newest.sum()) * self.pool.entry_bytes
        if len(self.buffers[0]) < self.blocks.shape[1]:
            self._stage(sum(self.pool.blocks_for(r.prompt_tokens + r.params.max_tokens - 1) for r in rows.requests))
        self._send(0)

    def _send(self, layer: int) -> None:
        """Begin to move a layer's entries."""
        buffer, pinned = (b[layer % 2][: self.blocks.shape[1]] for b in (self.buffers, self.pinned))
        self.due[layer % 2] = self.context.link.start(self.moved, "h2d")
        torch.index_select(self.pool.kv, 0, self.blocks[layer], out=pinned)
        if buffer.device.type != "cpu":
            buffer.copy_(pinned, non_blocking=True)

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        if layer + 1 < self.geometry.layers:
            self._send(layer + 1)
        host, staged, link = self.pool.kv, self.buffers[layer % 2], self.context.link
        link.start(len(rows) * self.pool.entry_bytes, "d2h")
        attention.store(host, self.slots[layer].to(host.device), k.to(host.device), v.to(host.device))
        link.wait(self.due[layer % 2])
        attention.store(staged, self.staged_slots, k, v)
        self.context.attending.decode(layer, q, staged, self.staged_tables, self.lengths, out)

    def prefill_chunk(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, out: torch.Tensor
    ) -> None:
        slots, blocks = self.chunk_slots[id(chunk)][layer], chunk.request.kv.table.blocks[layer]
        keys, values = chunk_on_host(self.context, slots, blocks, k, v, chunk)
        self.context.attending.prefill(layer, q, keys, values, chunk.start, out)


def chunk_on_host(
    context: Context, slots: torch.Tensor, blocks: np.ndarray, k: torch.Tensor, v: torch.Tensor, chunk: Chunk
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move a chunk's entries of a layer to the host, and those before it to the device.

    slots: int64 [chunk.length], where its k and v `[chunk.length, kv_heads, head_dim]` go; blocks: the layer's row of
    the request's table. Returns keys and values of the prompt so far, `[kv_heads, chunk.stop, head_dim]`.
    """
    host, link = context.host_pool, context.link
    link.start(chunk.length * host.entry_bytes, "d2h")
    at = host.kv.device
    attention.store(host.kv, slots.to(at), k.to(at), v.to(at))
    if not chunk.start:
        return k.transpose(0, 1), v.transpose(0, 1)
    due = link.start(chunk.start * host.entry_bytes, "h2d")
    keys, values = attention.gather(host.kv, blocks, chunk.stop)
    link.wait(due)
    return keys.to(k.device), values.to(k.device)
