"""Drives a policy as the engine does, with random queries, keys and values for a model: small, fast, any geometry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvstudy.engine import policies
from kvstudy.engine.attending import Attending
from kvstudy.engine.config import Budget
from kvstudy.engine.link import Link
from kvstudy.engine.policies.base import Chunk, Context, Geometry, Policy, Rows
from kvstudy.engine.pool import BlockPool
from kvstudy.engine.request import Request, SamplingParams


@dataclass(eq=False)
class Tokens:
    """All that passes through the layers for one request: q [layers, n, heads, d], k and v [layers, n, kv_heads, d]."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor
    out: Tensor
    request: Request


@dataclass
class Driver:
    policy_name: str
    options: dict[str, Any]
    budget: Budget
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    block_size: int = 4
    seed: int = 0
    pool_bytes: int = 1 << 22
    link: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        size = self.heads * self.head_dim
        geometry = Geometry(
            self.layers,
            self.heads,
            self.kv_heads,
            self.head_dim,
            size,
            4096,
            self.head_dim**-0.5,
            torch.float32,
            torch.device("cpu"),
        )
        like = {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "block_size": self.block_size}
        self.device = BlockPool("device", self.pool_bytes, **like)
        self.host = BlockPool("host", self.pool_bytes, **like)
        self.project = torch.randn(self.layers, size, size, generator=self.random) * size**-0.5
        self.context = Context(
            geometry=geometry,
            budget=self.budget,
            device_pool=self.device,
            host_pool=self.host,
            link=self.link,
            attention_module=lambda layer: torch.nn.Identity(),
            rotate=lambda x, positions: x,
            attending=Attending(geometry.scale, [None] * self.layers),
            project_q=lambda layer, hidden: (hidden @ self.project[layer]).view(len(hidden), self.heads, self.head_dim),
        )
        self.policy: Policy = policies.create(self.policy_name, self.context, self.options)
        self.peak = 0
        """Greatest number of device bytes held at the end of any layer or step."""

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def held(self) -> tuple[int, int]:
        """Bytes held now, device and host: whole blocks and what lies beside them."""
        return tuple(p.used_blocks * p.block_bytes + p.aux_bytes for p in (self.device, self.host))

    def open(self, prompt: int, max_tokens: int) -> Tokens:
        total = prompt + max_tokens - 1

        def draw(heads: int) -> Tensor:
            return torch.randn(self.layers, total, heads, self.head_dim, generator=self.random) * 2

        request = Request([0] * prompt, SamplingParams(max_tokens=max_tokens), self.policy_name)
        tokens = Tokens(
            draw(self.heads),
            draw(self.kv_heads),
            draw(self.kv_heads),
            draw(self.heads).flatten(2),
            draw(self.heads),
            request,
        )
        self.policy.open(request)
        return tokens

    def step(self, decoding: list[Tokens], chunks: list[tuple[Tokens, int]]) -> None:
        """One engine step: each of `decoding` one token, each of `chunks` so many prompt tokens."""
        policy = self.policy
        positions = [t.request.computed for t in decoding]
        rows = Rows([t.request for t in decoding], torch.tensor(positions, dtype=torch.int64))
        parts = []
        for tokens, length in chunks:
            start, prompt = tokens.request.computed, tokens.request.prompt_tokens
            parts.append((tokens, Chunk(tokens.request, start, length, start + length == prompt)))
        policy.begin_step(rows, [chunk for _, chunk in parts])
        self.peak = max(self.peak, self.held()[0])
        for layer in range(self.layers):
            if decoding:
                if policy.wants_attention_input:
                    hidden = torch.stack([t.hidden[layer, at] for t, at in zip(decoding, positions, strict=True)])
                    policy.on_attention_input(layer, hidden, rows)
                q, k, v = (
                    torch.stack([getattr(t, name)[layer, at] for t, at in zip(decoding, positions, strict=True)])
                    for name in "qkv"
                )
                out = torch.empty_like(q)
                policy.decode(layer, q, k, v, rows, out)
                for row, (t, at) in enumerate(zip(decoding, positions, strict=True)):
                    t.out[layer, at] = out[row]
            for tokens, chunk in parts:
                at = slice(chunk.start, chunk.stop)
                policy.prefill_chunk(
                    layer, tokens.q[layer, at], tokens.k[layer, at], tokens.v[layer, at], chunk, tokens.out[layer, at]
                )
            self.peak = max(self.peak, self.held()[0])
        policy.end_step(rows, [chunk for _, chunk in parts])
        for tokens in decoding:
            tokens.request.computed += 1
        for tokens, chunk in parts:
            tokens.request.computed = chunk.stop
        self.peak = max(self.peak, self.held()[0])

    def prefill(self, tokens: Tokens, chunk: int) -> None:
        while tokens.request.in_prefill:
            self.step([], [(tokens, min(chunk, tokens.request.prompt_tokens - tokens.request.computed))])

    def close(self, tokens: Tokens) -> None:
        self.policy.close(tokens.request)

    def dense(self, tokens: Tokens, layer: int, at: int, kept: list[list[int]]) -> Tensor:
        """Attention of token `at` over the given positions of each KV head: [heads, d]."""
        out = torch.empty(self.heads, self.head_dim)
        for head in range(self.heads):
            kv_head = head // self.group
            k, v = (x[layer, kept[kv_head], kv_head] for x in (tokens.k, tokens.v))
            p = (k @ tokens.q[layer, at, head] * self.head_dim**-0.5).softmax(0)
            out[head] = p @ v
        return out
