"""H2O's teacher-forced cases: `masked` and the two lm-eval rules, on a plain forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..policies.h2o_rules import MaskedRule, column_sums_block, lm_eval_static, lm_eval_streaming
from .plain import PlainModel, softmax
from .report import Case


def unpack(packed: Tensor, size: int) -> Tensor:
    """uint8 [..., ceil(size / 8)] as numpy.packbits writes it -> bool [..., size]."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), axis=-1)[..., :size].astype(bool))


def causal(scores: Tensor, start: int) -> Tensor:
    """Hide from the queries of scores [H, q, K], which stand at start.., the keys that come after them."""
    q, keys = scores.shape[-2:]
    later = torch.arange(keys)[None, :] > torch.arange(start, start + q)[:, None]
    return scores.masked_fill(later, torch.finfo(scores.dtype).min)


def _repeat(x: Tensor, groups: int) -> Tensor:
    return x.repeat_interleave(groups, dim=0)


class MaskedRun:
    """`masked` over one request: a growing cache in each layer, the rule's mask at each step after the first."""

    def __init__(self, model: PlainModel, heavy_ratio: float, recent_ratio: float) -> None:
        self.model = model
        self.ratios = heavy_ratio, recent_ratio
        self.rules: list[MaskedRule] = []
        self.masks: list[Tensor] = []
        self.cache: list[tuple[Tensor, Tensor]] = []

    def attend(self, layer: int, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A call over the keys so far and these, under the mask of the call before: context [H, q, d]."""
        first = layer == len(self.rules)
        start = 0
        if first:
            heavy, recent = (int(ratio * k.shape[1]) for ratio in self.ratios)
            self.rules.append(MaskedRule(heavy, recent))
            self.cache.append((k, v))
        else:
            start = self.cache[layer][0].shape[1]
            before = self.cache[layer]
            self.cache[layer] = torch.cat([before[0], k], dim=1), torch.cat([before[1], v], dim=1)
        k, v = self.cache[layer]
        groups = self.model.heads // self.model.kv_heads
        scores = causal(q @ _repeat(k, groups).mT * self.model.scale, start)
        if not first:
            hidden_keys = ~_repeat(self.masks[layer], groups)[:, None]
            scores = scores.masked_fill(hidden_keys, torch.finfo(scores.dtype).min)
        probs = softmax(scores)
        received = column_sums_block(probs, groups)
        rule = self.rules[layer]
        mask = rule.update(received)
        if first:
            self.masks.append(mask)
        else:
            self.masks[layer] = mask
        return probs @ _repeat(v, groups)


def masked_cases(folder: str, model: PlainModel, meta: dict[str, Any], expected: dict[str, Tensor]) -> Iterator[Case]:
    """Every `hh{h}_r{r}` case of an h2o_* folder."""
    ids, prompt, decode = expected["input_ids"][0], meta["prompt_len"], meta["decode_len"]
    for knobs in meta["cases"]:
        tag = knobs["tag"]
        if f"mask_next_{tag}" not in expected:
            continue
        case = Case(folder, f"masked {tag}", "teacher-forced")
        run = MaskedRun(model, knobs["heavy_ratio"], knobs["recent_ratio"])
        want_masks = unpack(expected[f"mask_next_{tag}"], prompt + decode + 1)
        scores = expected.get(f"scores_{tag}")
        rows = {0: 0, 1: 1, decode: 2}
        for step in range(decode + 1):
            start = 0 if step == 0 else prompt + step - 1
            stop = prompt + step
            logits = model.forward(ids[start:stop], run.attend, start)
            if step == 0:
                case.number(logits, expected["logits_full"][:prompt], "prompt logits")
            else:
                case.number(logits[0], expected[f"logits_{tag}"][step - 1], f"step {step}")
            for layer in range(model.layers):
                want = want_masks[step, layer, :, : stop + 1]
                kept, gap = run.rules[layer].scores, run.rules[layer].gap
                assert kept is not None and gap is not None
                case.select(run.masks[layer], want, gap, f"step {step}, layer {layer}")
                if scores is not None and step in rows:
                    case.number(
                        kept,
                        scores[rows[step], layer, :, :stop],
                        f"scores, step {step}, layer {layer}",
                        False,
                    )
        yield case


def lm_eval_cases(folder: str, model: PlainModel, meta: dict[str, Any], expected: dict[str, Tensor]) -> Iterator[Case]:
    """Every `lmeval_hh{h}_r{r}` case: the streaming rule for OPT, the static one for Llama."""
    ids = expected["input_ids"][0]
    rule = lm_eval_streaming if model.kind == "opt" else lm_eval_static
    groups = model.heads // model.kv_heads
    for knobs in meta["cases"]:
        tag = knobs["tag"]
        if not tag.startswith("lmeval_"):
            continue
        heavy, recent = (int(knobs[f"{kind}_ratio"] * len(ids)) for kind in ("heavy", "recent"))
        case = Case(folder, f"{rule.__name__} {tag}", "teacher-forced", note="logits only: no mask is stored")

        def attend(
            layer: int, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor, heavy: int = heavy, recent: int = recent
        ) -> Tensor:
            scores = causal(q @ _repeat(k, groups).mT * model.scale, 0)
            allowed = rule(softmax(scores), heavy, recent)
            probs = softmax(scores.masked_fill(~allowed, torch.finfo(scores.dtype).min))
            return probs @ _repeat(v, groups)

        case.number(model.forward(ids, attend), expected[f"logits_{tag}"], "logits")
        yield case
