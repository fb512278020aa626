"""H2O and InfiniGen written a second time, slowly: Python loops over one request, one head and one token at a time.

Nothing here comes from `kvstudy.engine.policies`. It can do grouped heads, which the authors' code cannot.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvstudy.engine.fidelity.plain import PlainModel

LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def random_llama(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A model with pointed attention (weights larger than a fresh one's), grouped heads, float32."""
    config = LLAMA | changes
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    hidden, dim, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    weights = {
        "model.embed_tokens.weight": draw(config["vocab_size"], hidden, std=1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": draw(config["vocab_size"], hidden, std=0.5),
    }
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        weights |= {
            base + "input_layernorm.weight": torch.ones(hidden),
            base + "post_attention_layernorm.weight": torch.ones(hidden),
            base + "self_attn.q_proj.weight": draw(heads * dim, hidden, std=0.25),
            base + "self_attn.k_proj.weight": draw(kv_heads * dim, hidden, std=0.25),
            base + "self_attn.v_proj.weight": draw(kv_heads * dim, hidden, std=0.15),
            base + "self_attn.o_proj.weight": draw(hidden, heads * dim, std=0.15),
            base + "mlp.gate_proj.weight": draw(inner, hidden, std=0.1),
            base + "mlp.up_proj.weight": draw(inner, hidden, std=0.1),
            base + "mlp.down_proj.weight": draw(hidden, inner, std=0.1),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


class Slow:
    """One request on a plain model: the prompt whole, then token by token. `kept[layer][head]` are positions."""

    def __init__(self, model: PlainModel) -> None:
        self.model = model
        self.group = model.heads // model.kv_heads
        self.k: list[Tensor] = [torch.empty(0)] * model.layers
        self.v: list[Tensor] = [torch.empty(0)] * model.layers
        self.attended: list[list[list[list[int]]]] = []
        """[decode step][layer][KV head] -> positions attended to, in order."""

    def run(self, ids: list[int], prompt: int) -> Tensor:
        """Logits [1 + decode steps, V] of the prompt's last token and of those after it."""
        logits = [self.model.forward(torch.tensor(ids[:prompt]), self.prefill)[-1]]
        for at in range(prompt, len(ids)):
            self.attended.append([[] for _ in range(self.model.layers)])
            logits.append(self.model.forward(torch.tensor(ids[at : at + 1]), self.decode, at)[0])
        return torch.stack(logits)

    def probabilities(self, q: Tensor, keys: Tensor) -> list[float]:
        logits = [float(q.double() @ key.double()) * self.model.scale for key in keys]
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        return [w / sum(weights) for w in weights]

    def prefill(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k[layer], self.v[layer] = k, v
        out = torch.zeros_like(q)
        matrix = torch.zeros(q.shape[0], q.shape[1], q.shape[1], dtype=torch.float64)
        for head in range(q.shape[0]):
            for row in range(q.shape[1]):
                p = self.probabilities(q[head, row], k[head // self.group, : row + 1])
                matrix[head, row, : row + 1] = torch.tensor(p, dtype=torch.float64)
                out[head, row] = (torch.tensor(p)[:, None] * v[head // self.group, : row + 1]).sum(0)
        self.after_prompt(layer, x, q, k, matrix)
        return out

    def decode(self, layer: int, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = self.k[layer].shape[1]
        self.k[layer] = torch.cat([self.k[layer], k], dim=1)
        self.v[layer] = torch.cat([self.v[layer], v], dim=1)
        out = torch.zeros_like(q)
        for kv_head in range(k.shape[0]):
            positions = self.choose(layer, kv_head, at)
            self.attended[-1][layer].append(positions)
            received = [0.0] * len(positions)
            for head in range(kv_head * self.group, (kv_head + 1) * self.group):
                p = self.probabilities(q[head, 0], self.k[layer][kv_head, positions])
                received = [a + b for a, b in zip(received, p, strict=True)]
                out[head, 0] = (torch.tensor(p)[:, None] * self.v[layer][kv_head, positions]).sum(0)
            self.after_step(layer, kv_head, at, positions, received)
        self.end_layer(layer, x, at)
        return out

    def after_prompt(self, layer: int, x: Tensor, q: Tensor, k: Tensor, matrix: Tensor) -> None: ...

    def choose(self, layer: int, kv_head: int, at: int) -> list[int]:
        return list(range(at + 1))

    def after_step(self, layer: int, kv_head: int, at: int, positions: list[int], received: list[float]) -> None: ...

    def end_layer(self, layer: int, x: Tensor, at: int) -> None: ...


class SlowH2O(Slow):
    """`sizes(current tokens)` -> (heavy, recent); `promote`: what leaves the window becomes heavy in any case."""

    def __init__(self, model: PlainModel, sizes, promote: bool) -> None:
        super().__init__(model)
        self.sizes, self.promote = sizes, promote
        self.scores: list[list[dict[int, float]]] = [[] for _ in range(model.layers)]

    def after_prompt(self, layer, x, q, k, matrix):
        size = k.shape[1]
        heavy, recent = self.sizes(size)
        for kv_head in range(k.shape[0]):
            group = matrix[kv_head * self.group : (kv_head + 1) * self.group]
            score = {token: float(group[:, :, token].sum()) for token in range(size)}
            if size > heavy + recent:
                older = sorted(range(size - recent), key=lambda t, s=score: -s[t])[:heavy]
                score = {t: score[t] for t in sorted([*older, *range(size - recent, size)])}
            self.scores[layer].append(score)

    def choose(self, layer, kv_head, at):
        return [*self.scores[layer][kv_head], at]

    def after_step(self, layer, kv_head, at, positions, received):
        score = self.scores[layer][kv_head]
        score[at] = 0.0
        for token, p in zip(positions, received, strict=True):
            score[token] += p
        heavy, recent = self.sizes(at + 1)
        if len(score) > heavy + recent:
            window = recent + 1 if self.promote else recent
            older = sorted(score)[: len(score) - window]
            del score[min(older, key=lambda t: score[t])]


class SlowInfiniGen(Slow):
    """Rule `request` (`paper`: columns by |q| + |k|), threshold `>`; an unlimited pool."""

    def __init__(self, model: PlainModel, skew: Tensor, ratio: float, alpha: float, cap, paper: bool = False) -> None:
        super().__init__(model)
        self.skew, self.ratio, self.alpha, self.cap, self.paper = skew, ratio, alpha, cap, paper
        self.columns: dict[tuple[int, int], list[int]] = {}
        self.guess: dict[int, list[list[int]]] = {}

    def after_prompt(self, layer, x, q, k, matrix):
        for kv_head in range(k.shape[0]):
            turned = q[kv_head * self.group : (kv_head + 1) * self.group] @ self.skew[layer, kv_head]
            size = turned.abs().sum(dim=(0, 1)) * self.model.scale
            if self.paper:
                size = size + (k[kv_head] @ self.skew[layer, kv_head]).abs().sum(dim=0)
            order = sorted(range(len(size)), key=lambda c, s=size: -float(s[c]))
            self.columns[layer, kv_head] = order[: max(1, int(len(order) * self.ratio))]

    def choose(self, layer, kv_head, at):
        return [*sorted(self.guess[layer][kv_head]), at] if layer >= 2 else list(range(at + 1))

    def end_layer(self, layer, x, at):
        following = layer + 1
        if following < 2 or following >= self.model.layers:
            return
        q = self.model.queries(following, x, torch.tensor([at]))[:, 0]
        scores = []
        for kv_head in range(self.model.kv_heads):
            columns = self.columns[following, kv_head]
            turn = self.skew[following, kv_head][:, columns]
            keys = self.k[following][kv_head] @ turn
            mine = q[kv_head * self.group : (kv_head + 1) * self.group] @ turn
            own = [[float(one @ key) * self.model.scale for key in keys] for one in mine]
            # Each query head counts from what it likes best: logits of two heads have no common zero. The first head's
            # favourite goes before the second's.
            scores.append([max(s[t] - max(s) - n * 2**-20 for n, s in enumerate(own)) for t in range(len(keys))])
        counts = [sum(s > max(head) - self.alpha for s in head) for head in scores]
        number = min(sum(counts) // len(counts), self.cap(at))
        self.guess[following] = [sorted(range(len(head)), key=lambda t, h=head: -h[t])[:number] for head in scores]
