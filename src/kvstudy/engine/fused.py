"""The library's Llama layers with fewer, larger operations: same weights, same arithmetic, less time between.

The library runs some thirty operations a layer; for a small model and few tokens, starting them costs more
than computing. Here a layer is: norm, one product for q, k and v, RoPE, attention, output product, norm, one
product for gate and up, SiLU, down product. On a CPU in bfloat16 all of it but the attention is two calls into
`kernels/layers.c` for each `Library.max_tokens` tokens. Elsewhere it is plain torch.

The fused weights replace the library's storage, whose own parameters become views of them: nothing is held
twice, and `q_proj` and its like go on working.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from kvstudy.engine import kernels
from kvstudy.engine.policies.base import Geometry

if TYPE_CHECKING:
    from kvstudy.engine.model import Attend


@dataclass(slots=True)
class _Layer:
    norm_in: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def build(lm: Any, geometry: Geometry) -> Llama | None:
    """The fused form of a library model, or None for a family or an option that it does not cover."""
    config = lm.config
    if not isinstance(lm, LlamaForCausalLM) or config.hidden_act != "silu":
        return None
    if (
        config.attention_bias
        or config.mlp_bias
        or config.rope_parameters["rope_type"] not in ("default", "linear", "llama3")
    ):
        return None
    return Llama(lm, geometry)


class Llama:
    """A fused `LlamaForCausalLM`."""

    def __init__(self, lm: Any, geometry: Geometry) -> None:
        self.geometry = geometry
        self.embedding: torch.Tensor = lm.model.embed_tokens.weight
        self.head: torch.Tensor = lm.lm_head.weight
        self.norm: torch.Tensor = lm.model.norm.weight
        self.eps: float = lm.config.rms_norm_eps
        self.layers = [_fuse(layer) for layer in lm.model.layers]
        positions = torch.arange(geometry.max_positions, device=geometry.device)
        cos, sin = lm.model.rotary_emb(self.embedding, position_ids=positions[None])
        self.cos: torch.Tensor = cos[0].contiguous()
        self.sin: torch.Tensor = sin[0].contiguous()
        lib = kernels.library() if geometry.device.type == "cpu" and geometry.dtype is torch.bfloat16 else None
        sizes = (
            geometry.hidden_size,
            geometry.heads * geometry.head_dim,
            geometry.kv_heads * geometry.head_dim,
        )
        fits = all(n % 32 == 0 for n in (*sizes, self.layers[0].down.shape[1])) and self.head.shape[0] % 16 == 0
        self.lib = lib if lib is not None and lib.max_tokens and fits else None

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, keep: torch.Tensor) -> torch.Tensor:
        """See `Model.forward`."""
        hidden = F.embedding(ids, self.embedding)
        cos, sin = self.cos[positions], self.sin[positions]
        if self.lib is None:
            hidden = self._plain(hidden, cos, sin, attend)
        else:
            self._compiled(self.lib, hidden, cos, sin, attend)
        every = len(keep) == len(hidden) and torch.equal(keep, torch.arange(len(keep), device=keep.device))
        hidden = self._last_norm(hidden if every else hidden[keep])
        if self.lib is None or len(hidden) > self.lib.max_tokens:
            return F.linear(hidden, self.head)
        return self.lib.linear(hidden, self.head)

    def _last_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the library rounds it: `F.rms_norm` does not, and decides near ties otherwise."""
        x = hidden.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.norm * x.to(hidden.dtype)

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = self.geometry
        heads = qkv.view(len(qkv), -1, g.head_dim)
        return heads[:, : g.heads], heads[:, g.heads : g.heads + g.kv_heads], heads[:, g.heads + g.kv_heads :]

    def _compiled(
        self, lib: kernels.Library, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> None:
        """Two calls a layer around the attention, for each part of the tokens; `hidden` is updated in place."""
        g, first, tokens = self.geometry, self.layers[0], len(hidden)
        rotated = g.heads + g.kv_heads
        normed = torch.empty_like(hidden)
        qkv = torch.empty((tokens, first.qkv.shape[0]), dtype=hidden.dtype)
        act = torch.empty((min(tokens, lib.max_tokens), first.down.shape[1]), dtype=hidden.dtype)
        q, k, v = self._split(qkv)
        parts = [slice(at, min(at + lib.max_tokens, tokens)) for at in range(0, tokens, lib.max_tokens)]
        before = [(hidden[p], cos[p], sin[p], normed[p], qkv[p]) for p in parts]
        for index, layer in enumerate(self.layers):
            for x, c, s, n, out in before:
                lib.llama_before(x, layer.norm_in, self.eps, layer.qkv, c, s, rotated, n, out)
            if attend.wants_input:
                attend.attention_input(index, normed)
            attended = attend(index, q, k, v)
            for (x, _, _, n, _), p in zip(before, parts, strict=True):
                lib.llama_after(x, attended[p], layer.out, layer.norm_mlp, self.eps, layer.gate_up, layer.down, n, act)

    def _plain(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        cos, sin = cos[:, None], sin[:, None]
        half = self.geometry.head_dim // 2

        def rotated(x: torch.Tensor) -> torch.Tensor:
            return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

        for index, layer in enumerate(self.layers):
            normed = F.rms_norm(hidden, layer.norm_in.shape, layer.norm_in, self.eps)
            if attend.wants_input:
                attend.attention_input(index, normed)
            q, k, v = self._split(F.linear(normed, layer.qkv))
            attended = attend(index, rotated(q), rotated(k), v)
            hidden = hidden + F.linear(attended.view(len(hidden), -1), layer.out)
            normed = F.rms_norm(hidden, layer.norm_mlp.shape, layer.norm_mlp, self.eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return hidden


def _fuse(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        norm_in=layer.input_layernorm.weight,
        qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.o_proj.weight,
        norm_mlp=layer.post_attention_layernorm.weight,
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight,
    )


def _joined(*projections: torch.nn.Linear) -> torch.Tensor:
    """One weight for several projections of the same input; theirs become views of it."""
    joined = torch.cat([p.weight for p in projections])
    at = 0
    for p in projections:
        p.weight.data = joined[at : at + p.out_features]
        at += p.out_features
    return joined
