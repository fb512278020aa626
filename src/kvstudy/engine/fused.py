"""The library's Llama layers with fewer, larger operations: same weights, same arithmetic, less time between.

The library runs some thirty operations a layer; for a small model and few tokens, starting them costs more
than computing. Here a layer is: norm, one product for q, k and v, RoPE, attention, output product, norm, one
product for gate and up, SiLU, down product. On a CPU in bfloat16 all of it but the attention is two calls into
`kernels/layers.c` for each `Library.max_tokens` tokens. Elsewhere it is plain torch.

The fused weights replace the library's, which become views of them: nothing is held twice, and `q_proj` and its like
go on working. The C kernels want weights packed (`Library.pack`), the embedding included where it is the head's too;
the library's modules are replaced by ones that read these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from kvstudy.engine import kernels
from kvstudy.engine.policies.base import Geometry


class Attend(Protocol):
    """What a step's attention is asked through."""

    wants_input: bool

    def attention_input(self, layer: int, hidden: torch.Tensor) -> None:
        """See the input of a layer's attention, `[T, hidden]`. Only called where `wants_input`."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend: q `[T, heads, head_dim]`, k and v `[T, kv_heads, head_dim]`, rotated -> like q."""


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
        self.norm: torch.Tensor = lm.model.norm.weight
        self.eps: float = lm.config.rms_norm_eps
        positions = torch.arange(geometry.max_positions, device=geometry.device)
        cos, sin = lm.model.rotary_emb(lm.model.embed_tokens.weight, position_ids=positions[None])
        self.cos: torch.Tensor = cos[0].contiguous()
        self.sin: torch.Tensor = sin[0].contiguous()
        self.lib = _library(lm, geometry)
        self.inner: int = lm.config.intermediate_size
        self.qkv_width = (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim
        self.layers = [_fuse(layer, self.lib) for layer in lm.model.layers]
        if self.lib is not None:
            tied = lm.lm_head.weight is lm.model.embed_tokens.weight
            lm.lm_head = _Packed(self.lib, self.lib.pack(lm.lm_head.weight))
            if tied:
                lm.model.embed_tokens = _PackedEmbedding(lm.lm_head.weight)
        self.embed, self.head = lm.model.embed_tokens, lm.lm_head

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, keep: torch.Tensor) -> torch.Tensor:
        """See `Model.forward`."""
        hidden = self.embed(ids)
        cos, sin = self.cos[positions], self.sin[positions]
        if self.lib is None:
            hidden = self._plain(hidden, cos, sin, attend)
        else:
            self._compiled(self.lib, hidden, cos, sin, attend)
        every = len(keep) == len(hidden) and torch.equal(keep, torch.arange(len(keep), device=keep.device))
        logits: torch.Tensor = self.head(self._last_norm(hidden if every else hidden[keep]))
        return logits

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
        g, tokens = self.geometry, len(hidden)
        rotated = g.heads + g.kv_heads
        normed = torch.empty_like(hidden)
        qkv = torch.empty((tokens, self.qkv_width), dtype=hidden.dtype)
        act = torch.empty((min(tokens, lib.max_tokens), self.inner), dtype=hidden.dtype)
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


def _library(lm: Any, geometry: Geometry) -> kernels.Library | None:
    """The compiled kernels, where they are for this device, type and shape."""
    if geometry.device.type != "cpu" or geometry.dtype is not torch.bfloat16:
        return None
    lib = kernels.library()
    sizes = (
        geometry.hidden_size,
        geometry.heads * geometry.head_dim,
        geometry.kv_heads * geometry.head_dim,
        lm.config.intermediate_size,
        lm.lm_head.weight.shape[0],
    )
    fits = all(size % kernels.PACKED_ROWS == 0 for size in sizes)
    return lib if lib is not None and lib.max_tokens and fits else None


class _Packed(torch.nn.Module):
    """A linear layer without bias whose weight is packed, or a part of a packed one."""

    weight: torch.Tensor

    def __init__(self, lib: kernels.Library, weight: torch.Tensor) -> None:
        super().__init__()
        self.lib = lib
        self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self.lib.linear(rows, self.weight).view(*x.shape[:-1], len(self.weight) * kernels.PACKED_ROWS)


class _PackedEmbedding(torch.nn.Module):
    """The rows of a packed weight."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids // kernels.PACKED_ROWS, :, ids % kernels.PACKED_ROWS].flatten(-2)


def _fuse(layer: Any, lib: kernels.Library | None) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        norm_in=layer.input_layernorm.weight,
        qkv=_joined(lib, attention, "q_proj", "k_proj", "v_proj"),
        out=_joined(lib, attention, "o_proj"),
        norm_mlp=layer.post_attention_layernorm.weight,
        gate_up=_joined(lib, mlp, "gate_proj", "up_proj"),
        down=_joined(lib, mlp, "down_proj"),
    )


def _joined(lib: kernels.Library | None, parent: Any, *names: str) -> torch.Tensor:
    """One weight for several projections of the same input, packed where `lib` is given; theirs become views of it."""
    projections = [getattr(parent, name) for name in names]
    joined = torch.cat([p.weight for p in projections]) if len(names) > 1 else projections[0].weight
    if lib is not None:
        joined = lib.pack(joined)
    at = 0
    for name, p in zip(names, projections, strict=True):
        if lib is None:
            p.weight.data = joined[at : at + p.out_features]
            at += p.out_features
        else:
            tiles = p.out_features // kernels.PACKED_ROWS
            setattr(parent, name, _Packed(lib, joined[at : at + tiles]))
            at += tiles
    return joined
