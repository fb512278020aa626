"""A Hugging Face decoder model run on a packed batch, its attention handed to whoever serves the step.

One forward a step: all tokens of the step lie side by side in one row, `input_ids [1, T]` with their true
positions, so the linear layers run over the union of all requests. Attention goes through the library's
attention interface: our function gets q, k, v of the new tokens only and asks the step's `Attend` for the
result. The library's own cache is not used.

`fused` replaces the library's layer loop, with the same weights and the same arithmetic, for the families it
knows.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvstudy.engine import fused
from kvstudy.engine.attending import Attending
from kvstudy.engine.config import EngineConfig
from kvstudy.engine.fused import Attend
from kvstudy.engine.policies.base import Geometry
from kvstudy.engine.windows import windowed


class ModelMissing(FileNotFoundError):
    """There is no model in the folder; the message says what is missing."""


class ModelUnsupported(ValueError):
    """The model does something that this engine does not; the message says what."""


@dataclass(slots=True)
class Layers:
    """The model's layers by what they attend to. Policies and `windows.Windows` each count their own from 0."""

    full: list[int]
    sliding: list[int]
    window: int
    """Tokens that a sliding layer sees, the current one included; 0 where there is no such layer."""
    sinks: list[torch.Tensor | None]
    """Of every layer: float32 [heads], or None."""


class _Probe:
    """An `Attend` that learns how the library calls: head counts come from the shapes."""

    wants_input = False

    def __init__(self) -> None:
        self.scale = 1.0
        self.windows: dict[int, int | None] = {}
        self.sinks: dict[int, torch.Tensor | None] = {}

    def see(self, layer: int, scale: float, given: dict[str, Any]) -> None:
        """Note what a layer's call says beside q, k and v. Raises `ModelUnsupported` for what we cannot do."""
        if given.get("softcap"):
            raise ModelUnsupported("this model caps its attention scores (softcap): it is not supported")
        self.scale = scale
        self.windows[layer] = given.get("sliding_window")
        sinks = given.get("s_aux")
        self.sinks[layer] = None if sinks is None else sinks.detach().float()

    def layers(self, max_positions: int) -> Layers:
        """What was seen, in order. Raises `ModelUnsupported` where windows differ."""
        windows = {layer: w for layer, w in self.windows.items() if w is not None and w < max_positions}
        if len(set(windows.values())) > 1:
            raise ModelUnsupported("this model's layers have sliding windows of different sizes: it is not supported")
        if len(windows) == len(self.windows):
            raise ModelUnsupported("every layer of this model has a sliding window: there is nothing for a policy")
        return Layers(
            full=[layer for layer in sorted(self.windows) if layer not in windows],
            sliding=sorted(windows),
            window=next(iter(windows.values()), 0),
            sinks=[self.sinks[layer] for layer in sorted(self.sinks)],
        )

    def attention_input(self, layer: int, hidden: torch.Tensor) -> None:
        pass

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.heads, self.kv_heads, self.head_dim = q.shape[1], k.shape[1], q.shape[2]
        return torch.zeros_like(q)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Registered with the library as `kvstudy`: q `[1, heads, T, d]` -> `[1, T, heads, d]`."""
    model: Model = module.kvstudy  # type: ignore[assignment]
    if isinstance(model.attend, _Probe):
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        model.attend.see(module.layer_idx, scale, kwargs)  # type: ignore[arg-type]
    out = model.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
    )
    return out[None], None


AttentionInterface.register("kvstudy", _attention)


class Model:
    """A loaded model: `forward` runs one step; `geometry` is what policies know of it."""

    def __init__(self, config: EngineConfig) -> None:
        self.device = torch.device(config.device)
        if config.tensor_parallel > 1 and config.device == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.lm = load(config, self.dtype).to(self.device).eval().requires_grad_(False)
        self.config = self.lm.config
        self.attention_modules = self._find_attention()
        self.attend: Attend = _Probe()
        self.fused: fused.Llama | None = None
        self.angles: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        """The positions last rotated to, with their cosines and sines: every layer of a step asks for the same."""
        self.geometry, self.layers = self._probe()
        self.eos_ids = _eos_ids(config.model_dir, self.config)
        self._check_shards(config.tensor_parallel)
        if config.use_kernels and config.tensor_parallel == 1:
            self.fused = fused.build(self.lm, self.geometry)
        for layer, module in enumerate(self.attention_modules):
            module.register_forward_pre_hook(self._input_hook(layer), with_kwargs=True)
        gc.collect()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers; what is tied or shared counts once."""
        held = [t.to_local() if isinstance(t, DTensor) else t for t in self.lm.state_dict().values()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())

    def workspace_bytes(self, tokens: int, sampled: int, longest: int) -> int:
        """Bytes of activations a step of this size holds at most, by its shapes.

        That is residual, normed input, q, k, v, attention output and the MLP's two halves of each token, the logits
        (and their float32 copy) of the sampled ones, and one layer's K and V of the longest prompt, gathered.
        """
        g, c = self.geometry, self.config
        mlp = int(getattr(c, "intermediate_size", None) or getattr(c, "ffn_dim", None) or 4 * g.hidden_size)
        per_token = 3 * g.hidden_size + 2 * (g.heads + g.kv_heads) * g.head_dim + 2 * mlp
        gathered = 2 * longest * g.kv_heads * g.head_dim
        logits = sampled * c.vocab_size
        return int((tokens * per_token + gathered + logits) * self.dtype.itemsize + 4 * logits)

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, keep: torch.Tensor) -> torch.Tensor:
        """One step: ids, positions int64 `[T]` -> logits `[len(keep), vocab]` of the tokens that `keep` indexes."""
        self.attend = attend
        if self.fused is not None:
            return self.fused.forward(ids, positions, attend, keep)
        out = self.lm(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
        logits: torch.Tensor = out.logits[0]
        return logits

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE of x `[T, heads, head_dim]` at `positions`; x itself for models without it."""
        rotary = getattr(self.lm.base_model, "rotary_emb", None)
        if rotary is None:
            return x
        if self.angles is None or self.angles[0] is not positions:
            self.angles = (positions, *self._cos_sin(rotary, positions, x.shape[-1]))
        _, cos, sin = self.angles
        half = x.shape[-1] // 2
        turned: torch.Tensor = x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
        return turned

    def _cos_sin(self, rotary: Any, positions: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both `[T, 1, head_dim]`."""
        if self.fused is not None:
            cos, sin = self.fused.cos[positions], self.fused.sin[positions]
        else:
            like = torch.empty(0, dtype=self.dtype, device=positions.device)
            cos, sin = (t[0] for t in rotary(like, position_ids=positions[None]))
        if cos.shape[-1] * 2 == dim:  # GPT-OSS gives each angle once
            cos, sin = (torch.cat((t, t), dim=-1) for t in (cos, sin))
        return cos[:, None], sin[:, None]

    def full_attention(self, layer: int) -> torch.nn.Module:
        """The library's attention module of a full-attention layer, counted as policies count."""
        return self.attention_modules[self.layers.full[layer]]

    def attend_alone(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """A layer's own attention over one whole sequence that no policy touches; arguments as `Attend` has them."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        keys, values, scale = k.transpose(0, 1), v.transpose(0, 1), self.geometry.scale
        if layer in self.layers.sliding:
            windowed(q, keys, values, self.layers.window, scale, out, self.layers.sinks[layer])
        else:
            Attending(scale, self.layers.sinks).prefill(layer, q, keys, values, 0, out)
        return out

    def project_q(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """A full-attention layer's queries from an attention input `[T, hidden]`.

        With bias and the model's scaling, not rotated.
        """
        module: Any = self.full_attention(layer)
        q: torch.Tensor = module.q_proj(hidden)
        if self.geometry.scale == 1.0:
            q = q * getattr(module, "scaling", 1.0)
        return q.view(hidden.shape[0], self.geometry.heads, self.geometry.head_dim)

    def _find_attention(self) -> list[torch.nn.Module]:
        found = [m for m in self.lm.modules() if hasattr(m, "q_proj") and hasattr(m, "layer_idx")]
        found.sort(key=lambda m: m.layer_idx)
        if len(found) != self.config.num_hidden_layers:
            raise ModelUnsupported(
                f"{type(self.lm).__name__}: no attention layers with q_proj found; this model is not supported"
            )
        for module in found:
            module.kvstudy = self  # type: ignore[assignment]
        return found

    def _probe(self) -> tuple[Geometry, Layers]:
        """Run one token through, to see shapes, scale, windows and sinks as the library itself gives them."""
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        probe = _Probe()
        self.forward(one, one, probe, one)
        layers = probe.layers(self.config.max_position_embeddings)
        geometry = Geometry(
            layers=len(layers.full),
            heads=probe.heads,
            kv_heads=probe.kv_heads,
            head_dim=probe.head_dim,
            hidden_size=self.config.hidden_size,
            max_positions=self.config.max_position_embeddings,
            scale=probe.scale,
            dtype=self.dtype,
            device=self.device,
        )
        return geometry, layers

    def _check_shards(self, size: int) -> None:
        """Raise `ModelUnsupported` where the library's plan has not given each process its share of the heads."""
        wanted = (self.config.num_attention_heads, getattr(self.config, "num_key_value_heads", None))
        have = (self.geometry.heads * size, self.geometry.kv_heads * size)
        if any(b is not None and a != b for a, b in zip(have, wanted, strict=True)):
            raise ModelUnsupported(
                f"{type(self.lm).__name__}: the library's tensor-parallel plan does not share {wanted[0]} query and "
                f"{wanted[1]} KV heads evenly among {size} processes; choose a number of GPUs that divides them, or 1"
            )

    def _input_hook(self, layer: int) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.attend.wants_input:
                hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                self.attend.attention_input(layer, hidden[0])

        return hook


def load(config: EngineConfig, dtype: torch.dtype) -> Any:
    """The library's model, its attention ours. Raises `ModelMissing` or `ModelUnsupported`."""
    folder = config.model_dir
    if not (folder / "config.json").is_file():
        raise ModelMissing(f"no model in {folder}: config.json is missing")
    shared: dict[str, Any] = {}
    if config.tensor_parallel > 1:
        if config.random_weights:
            raise ModelUnsupported("random_weights are drawn on one device: prepare the model, then share it")
        if not getattr(AutoConfig.from_pretrained(folder), "base_model_tp_plan", None):
            raise ModelUnsupported(f"the library has no tensor-parallel plan for {folder.name}: it needs model.gpus=1")
        from transformers.distributed import DistributedConfig  # only where it is wanted: older releases lack it

        shared["distributed_config"] = DistributedConfig(tp_size=config.tensor_parallel, tp_plan="auto")
    if config.random_weights:
        torch.manual_seed(config.seed)
        hf = AutoConfig.from_pretrained(folder)
        return AutoModelForCausalLM.from_config(hf, dtype=dtype, attn_implementation="kvstudy")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelMissing(f"no weights in {folder}: neither *.safetensors nor *.bin (random_weights draws them)")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="kvstudy", **shared)


def _eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """Ids that end a generation: the model's config and, where there is one, its generation config."""
    found: set[int] = set()
    sources = [config]
    if (folder / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(folder))
    for source in sources:
        ids = source.eos_token_id
        if ids is not None:
            found |= {ids} if isinstance(ids, int) else set(ids)
    return frozenset(found)
