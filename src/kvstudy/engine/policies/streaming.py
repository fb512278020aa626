"""Attention sinks and a recent window (StreamingLLM).

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, arXiv 2309.17453: a model
keeps working when the first few tokens, onto which attention drains, stay beside the most recent ones.

Of a budget of n entries the first `sinks` tokens and the latest n - sinks are kept, the same in every layer
and head; the current token is one of them. The prompt itself is computed with full attention and dropped from
when its last chunk is done (as kvpress's StreamingLLMPress does); then each new token overwrites the oldest
of the window in place. Keys keep the rotation of their true positions, where the paper's code rotates by the
place in the cache.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from pydantic import Field

from kvstudy.engine import attention
from kvstudy.engine.policies import register
from kvstudy.engine.policies.base import Chunk, Options, Prompt, Reservation
from kvstudy.engine.policies.full import Full
from kvstudy.engine.pool import BlockTable
from kvstudy.engine.request import Request


class StreamingOptions(Options):
    """What can be chosen beside the budget."""

    sinks: int = Field(4, ge=0)
    """First tokens that are never dropped; at most the budget less one."""


@dataclass(slots=True)
class State:
    """A request's KV."""

    table: BlockTable
    window: deque[int]
    """Entries of the recent window, oldest first."""
    sinks: int


@register
class Streaming(Full):
    """Entries 0 .. sinks - 1 are the first tokens; the rest is a ring."""

    name = "streaming"
    Options = StreamingOptions

    def limit(self, prompt_tokens: int, tokens: int) -> int:
        """Entries kept when there have been `tokens` tokens, the current one included."""
        budget = self.context.budget
        return tokens if budget.is_full else min(tokens, budget.entries(prompt_tokens, tokens))

    def reserve(self, prompt_tokens: int, max_tokens: int) -> Reservation:
        """The whole prompt until its last chunk, then the budget at the end of the output; whole blocks."""
        pool, layers = self.context.device_pool, self.geometry.layers
        most = self.limit(prompt_tokens, prompt_tokens + max_tokens - 1)
        return Reservation(pool.bytes_for(prompt_tokens, layers), pool.bytes_for(most, layers))

    def open(self, request: Request) -> None:
        most = self.limit(request.prompt_tokens, request.prompt_tokens + request.params.max_tokens - 1)
        table = BlockTable(self.context.device_pool, self.geometry.layers, max(request.prompt_tokens, most))
        request.kv = State(table, deque(), min(self.options.sinks, most - 1))

    def prefill_chunk(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, out: torch.Tensor
    ) -> None:
        super().prefill_chunk(layer, q, k, v, chunk, out)
        if chunk.last:
            self._end_of_prompt(layer, chunk.request, chunk.stop)

    def adopt(self, request: Request, prompt: Prompt) -> None:
        super().adopt(request, prompt)
        for layer in range(self.geometry.layers):
            self._end_of_prompt(layer, request, request.prompt_tokens)

    def _end_of_prompt(self, layer: int, request: Request, tokens: int) -> None:
        """The last chunk's layer is done: the sinks stay where they are, the window moves up behind them."""
        state: State = request.kv
        kept = self.limit(tokens, tokens)
        if kept < tokens:
            sinks = min(self.options.sinks, kept - 1)
            kv, heads = self.context.device_pool.kv, self.geometry.kv_heads
            recent = torch.from_numpy(state.table.slots(layer, tokens - kept + sinks, tokens)).to(kv.device)
            k, v = attention.gather_slots(kv, recent.expand(heads, -1))
            slots = torch.from_numpy(state.table.slots(layer, sinks, kept)).to(kv.device)
            attention.store(kv, slots, k.transpose(0, 1), v.transpose(0, 1))
            state.table.resize(layer, kept)
            state.sinks = sinks
        if layer == self.geometry.layers - 1:
            state.window = deque(range(min(state.sinks, kept), kept))

    def place(self, request: Request) -> int:
        """The next free entry while the budget allows it, else that of the window's oldest token."""
        state: State = request.kv
        held = int(state.table.lengths[0])
        if held < self.limit(request.prompt_tokens, request.computed + 1):
            state.table.resize_all(held + 1)
            entry = held
        else:
            entry = state.window.popleft()
        if entry >= state.sinks:
            state.window.append(entry)
        return entry
