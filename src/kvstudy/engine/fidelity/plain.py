"""A plain forward of OPT and Llama, written to be read: no cache of its own, no batching, one request.

The teacher-forced rules (and the slow references of the tests) run on it; the serving rules never do. Weights and
config are read from a folder in the layout of Hugging Face (`config.json`, one `.safetensors` file).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(layer, attention input [n, D], q [H, n, d] unscaled, k [H_kv, n, d], v [H_kv, n, d]) -> context [H, n, d]."""


def rotate_half(x: Tensor) -> Tensor:
    """[..., d] -> [..., d]: (-second half, first half), the pairing of Llama's rotary embedding."""
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


class PlainModel:
    """The decoder of `config.json` with `weights` (by their Hugging Face names), computing in `dtype`."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.kind: str = config["model_type"]
        if self.kind not in ("opt", "llama"):
            raise ValueError(f"model_type {self.kind!r}: the fidelity check knows opt and llama")
        self.dtype = dtype
        self.weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads") or self.heads
        self.hidden: int = config["hidden_size"]
        self.head_dim: int = config.get("head_dim") or self.hidden // self.heads
        self.scale = self.head_dim**-0.5
        self.prefix = "model.decoder." if self.kind == "opt" else "model."

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> PlainModel:
        """Read `folder`'s config.json and its one model*.safetensors."""
        config = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("model*.safetensors"))
        if len(files) != 1:
            raise FileNotFoundError(f"{folder}: expected one model*.safetensors, found {len(files)}")
        return cls(config, load_file(files[0]), dtype)

    def _linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        base = f"{self.prefix}layers.{layer}.{name}"
        return F.linear(x, self.weights[f"{base}.weight"], self.weights.get(f"{base}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        if self.kind == "opt":
            return F.layer_norm(x, (self.hidden,), weight, self.weights[f"{name}.bias"])
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return weight * x32.to(x.dtype)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """[n, heads * d] -> [heads, n, d]."""
        return x.view(x.shape[0], heads, self.head_dim).transpose(0, 1)

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [heads, n, d] to `positions` [n] (a no-op for OPT)."""
        if self.kind == "opt":
            return x
        theta = self.config.get("rope_theta") or self.config.get("rope_parameters", {}).get("rope_theta", 10000.0)
        inverse = 1.0 / theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angle = positions.float()[:, None] * inverse
        angle = torch.cat([angle, angle], dim=-1)
        return x * angle.cos().to(x.dtype) + rotate_half(x) * angle.sin().to(x.dtype)

    def queries(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """Attention input x [n, D] -> q [H, n, d] of `layer`, rotated, not scaled."""
        return self.rope(self.split(self._linear(layer, "self_attn.q_proj", x), self.heads), positions)

    def keys(self, layer: int, x: Tensor, positions: Tensor) -> Tensor:
        """Attention input x [n, D] -> k [H_kv, n, d] of `layer`, rotated."""
        return self.rope(self.split(self._linear(layer, "self_attn.k_proj", x), self.kv_heads), positions)

    def forward(self, ids: Tensor, attend: Attend, start: int = 0) -> Tensor:
        """ids [n] at positions start.. -> logits [n, V]; attention is whatever `attend` makes of q, k and v."""
        positions = torch.arange(start, start + ids.shape[0])
        opt = self.kind == "opt"
        x = self.weights[f"{self.prefix}embed_tokens.weight"][ids]
        if opt:
            x = x + self.weights[f"{self.prefix}embed_positions.weight"][positions + 2]
        first, second = (
            ("self_attn_layer_norm", "final_layer_norm") if opt else ("input_layernorm", "post_attention_layernorm")
        )
        out_proj = "self_attn.out_proj" if opt else "self_attn.o_proj"
        for layer in range(self.layers):
            base = f"{self.prefix}layers.{layer}."
            normed = self._norm(base + first, x)
            q = self.queries(layer, normed, positions)
            k = self.keys(layer, normed, positions)
            v = self.split(self._linear(layer, "self_attn.v_proj", normed), self.kv_heads)
            context = attend(layer, normed, q, k, v)
            x = x + self._linear(layer, out_proj, context.transpose(0, 1).reshape(x.shape[0], -1))
            normed = self._norm(base + second, x)
            if opt:
                x = x + self._linear(layer, "fc2", F.relu(self._linear(layer, "fc1", normed)))
            else:
                gate = F.silu(self._linear(layer, "mlp.gate_proj", normed))
                x = x + self._linear(layer, "mlp.down_proj", gate * self._linear(layer, "mlp.up_proj", normed))
        x = self._norm(self.prefix + ("final_layer_norm" if opt else "norm"), x)
        return F.linear(x, self.weights["lm_head.weight"])


def softmax(scores: Tensor) -> Tensor:
    """Softmax in float32, back in the dtype of `scores`."""
    return scores.float().softmax(dim=-1).to(scores.dtype)
