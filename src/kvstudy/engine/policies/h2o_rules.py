"""The selection rules of H2O, as plain tensor functions on one layer's scores.

H2O (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", NeurIPS 2023,
arXiv 2306.14048) keeps the `recent` newest tokens and the `heavy` tokens that have received the most attention so far.
Four readings of that sentence exist in the authors' own code and text; each is here under its name, once, and serves
the engine, the quality evaluation and the fidelity check alike. `docs/fidelity.md` says how they differ.

Shapes: every function takes scores with the keys on the last axis and treats all axes before it (request, KV head) as
independent. With grouped queries a KV head's score is the sum over the query heads that share it. Scores are
probabilities summed over queries, so a token's score is at most the number of queries that could see it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

EMPTY = 2**31 - 1
"""Position of a slot that holds nothing: newer than anything, so never a victim."""

__all__ = [
    "EMPTY",
    "MaskedRule",
    "cache_rule",
    "column_sums_block",
    "keep_after_prompt",
    "lm_eval_static",
    "lm_eval_streaming",
    "victim",
]


def column_sums_block(probs: Tensor, groups: int) -> Tensor:
    """Attention received by each key from a block of queries.

    probs: [H, q, K] softmax probabilities of H query heads; groups: query heads a KV head. Returns [H // groups, K]:
    summed over the block's queries and over the query heads of a group.
    """
    heads, _, keys = probs.shape
    return probs.sum(dim=1).view(heads // groups, groups, keys).sum(dim=1)


def keep_after_prompt(scores: Tensor, heavy: int, recent: int) -> Tensor:
    """Which of S cached tokens stay once the prompt has been read (`realdrop`, `flexgen`, `paper`).

    scores: [..., S] accumulated attention. Returns [..., min(S, heavy + recent)] indices in rising order: the top
    `heavy` of all but the last `recent` tokens, and those last ones. Everything stays while S <= heavy + recent.
    """
    size = scores.shape[-1]
    if size <= heavy + recent:
        return torch.arange(size, device=scores.device).expand(scores.shape)
    older = scores[..., : size - recent]
    top = older.topk(heavy, dim=-1).indices.sort(dim=-1).values
    window = torch.arange(size - recent, size, device=scores.device).expand(*scores.shape[:-1], recent)
    return torch.cat([top, window], dim=-1)


def victim(scores: Tensor, positions: Tensor, newest: Tensor | int, protected: Tensor | int) -> Tensor:
    """The slot that a decode step empties: the least attended token outside the protected window.

    scores: [..., S] accumulated attention, this step included; positions: [..., S] of the token in each slot, `EMPTY`
    where there is none; newest: position of the token just decoded; protected: how many of the newest positions may not
    leave (both broadcastable to [..., 1]). Returns [...] slot indices.

    `protected = recent` lets the token that falls out of the window compete with the heavy hitters (`realdrop`, and the
    greedy rule of the paper's algorithm 1); `recent + 1` promotes it unconditionally, in the place of the weakest heavy
    hitter (`flexgen`).
    """
    return scores.masked_fill(positions > newest - protected, torch.inf).argmin(dim=-1)


def cache_rule(rule: str, heavy: int, recent: int) -> int:
    """How many of the newest tokens rule `rule` protects from `victim`."""
    return {"realdrop": recent, "paper": recent, "flexgen": recent + 1}[rule]


@dataclass
class MaskedRule:
    """`masked`: the simulation of the authors' generation scripts (h2o_hf/utils_hh), which frees nothing.

    After each call over K keys the mask of the *next* call, over K + 1 keys, is fixed: its last `recent` columns, the
    coming token's among them, and the top `heavy` of the K - recent oldest scores. The token in between (index K -
    recent) is hidden for one step though its score is kept, and may come back as a heavy hitter. Scores are forgotten
    of what neither the mask nor the last `recent` scored columns cover. With `recent = 0` nothing is forgotten and the
    coming token is hidden from itself, as in the authors' code.
    """

    heavy: int
    recent: int
    scores: Tensor | None = field(default=None, repr=False)
    gap: Tensor | None = field(default=None, repr=False)
    """[H]: by how much the last heavy hitter of the last call was ahead of the next (the fidelity check's
    near-ties)."""

    def update(self, received: Tensor) -> Tensor:
        """Add the attention `received` [H, K] in this call; returns the next call's mask, bool [H, K + 1]."""
        acc = received.clone()
        if self.scores is not None:
            acc[:, : self.scores.shape[-1]] += self.scores
        heads, keys = acc.shape
        mask = acc.new_ones((heads, keys + 1), dtype=torch.bool)
        self.gap = acc.new_full((heads,), torch.inf)
        if keys > self.heavy + self.recent:
            mask[:] = False
            mask[:, keys + 1 - self.recent :] = True
            older = acc[:, : keys - self.recent]
            if self.heavy:
                mask.scatter_(1, older.topk(self.heavy, dim=-1).indices, True)
                if older.shape[-1] > self.heavy:
                    best = older.topk(self.heavy + 1, dim=-1).values
                    self.gap = best[:, -2] - best[:, -1]
        if self.recent:
            remembered = mask[:, :-1].clone()
            remembered[:, max(keys - self.recent, 0) :] = True
            acc = acc.masked_fill(~remembered, 0.0)
        self.scores = acc
        return mask


def _band(size: int, recent: int, device: torch.device) -> Tensor:
    """Bool [size, size]: a query sees itself and the `recent` tokens before it."""
    distance = torch.arange(size, device=device)[:, None] - torch.arange(size, device=device)[None, :]
    return (distance >= 0) & (distance <= recent)


def lm_eval_streaming(probs: Tensor, heavy: int, recent: int) -> Tensor:
    """Teacher-forced rule of the authors' lm-eval code for OPT: which keys each row may see.

    probs: [H, n, n] causal softmax *without* pruning. Returns bool [H, n, n]. The first `heavy` rows see everything.
    Row t keeps the top heavy - 1 scores and itself; scores then take up row t's unpruned probabilities, restricted to
    what it kept. The window of `recent` tokens and the query itself is added on top.
    """
    heads, size, _ = probs.shape
    causal = torch.ones(size, size, dtype=torch.bool, device=probs.device).tril()
    if heavy == 0:
        return _band(size, recent, probs.device).expand(heads, -1, -1)
    allowed = torch.zeros_like(probs, dtype=torch.bool)
    allowed[:, :heavy] = causal[:heavy]
    acc = probs[:, :heavy].sum(dim=1)
    acc[:, heavy:] = 0.0
    for row in range(heavy, size):
        kept = torch.zeros_like(acc, dtype=torch.bool)
        kept.scatter_(1, acc[:, :row].topk(heavy - 1, dim=-1).indices, True)
        kept[:, row] = True
        allowed[:, row] = kept
        acc = (acc + probs[:, row]).masked_fill(~kept, 0.0)
    return allowed | _band(size, recent, probs.device)


def lm_eval_static(probs: Tensor, heavy: int, recent: int) -> Tensor:
    """Teacher-forced rule of the authors' lm-eval code for Llama: one set a head for all rows.

    probs: [H, n, n] causal softmax. Returns bool [H, n, n]: the top `heavy` column sums of the whole matrix, later
    queries included, so that a row's set knows the future; plus the window.
    """
    heads, size, _ = probs.shape
    heavies = torch.zeros(heads, size, dtype=torch.bool, device=probs.device)
    if heavy:
        heavies.scatter_(1, probs.sum(dim=1).topk(heavy, dim=-1).indices, True)
    causal = torch.ones(size, size, dtype=torch.bool, device=probs.device).tril()
    return (heavies[:, None, :] & causal) | _band(size, recent, probs.device)
