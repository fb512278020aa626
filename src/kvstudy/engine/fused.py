"""The library's Llama layers with fewer, larger operations: same weights, same arithmetic, less time between.

The library runs some thirty operations a layer; for a small model and few tokens, starting them costs more
than computing. Here a layer is: norm, one product for q, k and v, RoPE, attention, output product, norm, one
product for gate and up, SiLU, down product. On a CPU in bfloat16 the parts around the attention are two calls
into `kernels/layers.c` for up to `Library.max_tokens` tokens, and torch's products with our small kernels
between them for more. Elsewhere it is plain torch.

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
        elif len(ids) <= self.lib.max_tokens:
            self._few(self.lib, hidden, cos, sin, attend)
        else:
            hidden = self._many(self.lib, hidden, cos, sin, attend)
        hidden = hidden if len(keep) == len(hidden) else hidden[keep]
        if self.lib is None or not 0 < len(hidden) <= self.lib.max_tokens:
            return F.linear(F.rms_norm(hidden, self.norm.shape, self.norm, self.eps), self.head)
        normed = self.lib.norm(hidden, self.norm, self.eps)
        return self.lib.linear(normed, self.head)

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = self.geometry
        heads = qkv.view(len(qkv), -1, g.head_dim)
        return heads[:, : g.heads], heads[:, g.heads : g.heads + g.kv_heads], heads[:, g.heads + g.kv_heads :]

    def _few(
        self, lib: kernels.Library, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> None:
        """Two calls a layer around the attention; `hidden` is updated in place."""
        g = self.geometry
        first = self.layers[0]
        tokens = len(hidden)
        normed = torch.empty_like(hidden)
        qkv = torch.empty((tokens, first.qkv.shape[0]), dtype=hidden.dtype)
        act = torch.empty((tokens, first.down.shape[1]), dtype=hidden.dtype)
        q, k, v = self._split(qkv)
        for index, layer in enumerate(self.layers):
            lib.llama_before(hidden, layer.norm_in, self.eps, layer.qkv, cos, sin, g.heads + g.kv_heads, normed, qkv)
            if attend.wants_input:
                attend.attention_input(index, normed)
            attended = attend(index, q, k, v)
            lib.llama_after(
                hidden, attended, layer.out, layer.norm_mlp, self.eps, layer.gate_up, layer.down, normed, act
            )

    def _many(
        self, lib: kernels.Library, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Torch's products, our kernels between them."""
        g = self.geometry
        for index, layer in enumerate(self.layers):
            normed = lib.norm(hidden, layer.norm_in, self.eps)
            if attend.wants_input:
                attend.attention_input(index, normed)
            qkv = F.linear(normed, layer.qkv)
            lib.rotate(qkv, cos, sin, g.heads + g.kv_heads)
            attended = attend(index, *self._split(qkv))
            hidden += F.linear(attended.view(len(hidden), -1), layer.out)
            normed = lib.norm(hidden, layer.norm_mlp, self.eps)
            hidden += F.linear(lib.gate(F.linear(normed, layer.gate_up)), layer.down)
        return hidden

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
