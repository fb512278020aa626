"""The selection rules of InfiniGen, as plain tensor functions on one layer's speculated scores.

InfiniGen (Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache
Management", OSDI 2024, arXiv 2406.19707) keeps the KV on the host and fetches, for each decode step and layer, the
entries that a cheap guess of the attention scores finds important. The guess multiplies a few columns of a *skewed*
query with the same columns of the skewed keys (section 4.2 of the paper), where skewing rotates each head so that few
columns carry most of the product. The authors' speed code, their accuracy code and the paper's text differ; each
reading is here under its name, once, and serves the engine, the quality evaluation and the fidelity check alike.
`docs/fidelity.md` says how.

Shapes: scores are [..., H, n], H the KV heads and n the earlier tokens, in units of the logit (after 1/sqrt(d)); a KV
head with several query heads takes the greatest of their scores (`group_max`). alpha is a difference of logits: a token
whose logit is alpha below the greatest has e^-alpha of its weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "PoolRule",
    "WholeSequenceRule",
    "column_mask",
    "columns",
    "fetch_number",
    "group_max",
    "halve_saturated",
    "pool_victim",
    "qualifying",
    "skew_matrix",
    "top_entries",
]

PoolRule = Literal["fifo", "lru", "counter"]
HIDDEN = -10000.0
"""Score of an entry that has left the simulated pool, and what is added to the logit of an entry not fetched (accuracy
code)."""
APART = 2.0**-20
"""Logits between what a group's query heads like best, so that none are tied."""
COUNTER_LIMIT = 255
"""Where a fetch counter of the paper's pool saturates, and all of its head's are halved (section 4.4; the width is
ours)."""


def skew_matrix(queries: Tensor) -> Tensor:
    """The orthogonal matrix that skews one head, from the queries of a calibration text.

    queries: [..., n, d], n >= d: of one head, or of all query heads of a KV head one after another; after bias and
    after RoPE. Returns A [..., d, d], the right singular vectors as columns (their order and signs do not matter): (q
    A)·(k A) = q·k.
    """
    if queries.shape[-2] < queries.shape[-1]:
        raise ValueError(
            f"skewing needs at least head_dim = {queries.shape[-1]} calibration queries, not {queries.shape[-2]}"
        )
    right: Tensor = torch.linalg.svd(queries.float(), full_matrices=False).Vh.mT
    return right.contiguous()


def columns(magnitudes: Tensor, ratio: float) -> Tensor:
    """The int(ratio * d) columns of greatest magnitude, at least one: magnitudes [..., d] -> indices [..., d']."""
    return magnitudes.topk(max(1, int(magnitudes.shape[-1] * ratio)), dim=-1).indices


def column_mask(query_magnitudes: Tensor, key_magnitudes: Tensor, ratio: float) -> Tensor:
    """`accuracy`: the top columns of the queries together with those of the keys, up to 2 d': bool [..., d]."""
    mask = torch.zeros_like(query_magnitudes, dtype=torch.bool)
    for magnitudes in (query_magnitudes, key_magnitudes):
        mask.scatter_(-1, columns(magnitudes, ratio), True)
    return mask


def group_max(scores: Tensor, kv_heads: int) -> Tensor:
    """Scores of query heads [..., H_q, n] -> of KV heads [..., H, n]: the greatest of the group.

    Of several query heads each one's scores are taken from its own greatest. A softmax knows logits only up to what is
    added to all of a head's, so those of two heads cannot be compared as they are: the head with the largest would
    choose for all. So an entry is within alpha if it is within alpha of what any of the heads likes best. Their
    favourites would be tied: the second head's comes `APART` after the first's, and so on.
    """
    *batch, heads, size = scores.shape
    group = heads // kv_heads
    grouped = scores.view(*batch, kv_heads, group, size)
    if group > 1:
        after = APART * torch.arange(group, device=scores.device, dtype=torch.float32)
        grouped = grouped.float() - grouped.amax(dim=-1, keepdim=True) - after[:, None]
    return grouped.amax(dim=-2)


def qualifying(scores: Tensor, alpha: float, *, strict: bool = True, head_zero: bool = False) -> Tensor:
    """How many entries of each head are within alpha of the head's greatest score: [..., H, n] -> [..., H].

    `strict` (speed, paper, request) counts scores > max - alpha, else (accuracy) >=. `head_zero` takes the greatest
    score of head 0 for every head, as the authors' accuracy code for Llama does.
    """
    best = scores.amax(dim=-1, keepdim=True)
    if head_zero:
        best = best[..., :1, :]
    floor = best - alpha
    return (scores > floor if strict else scores >= floor).sum(dim=-1)


def fetch_number(counts: Tensor, most: int | Tensor, over: int = 1) -> Tensor:
    """How many entries each head fetches: the mean of counts over their last `over` axes, rounded down, at most `most`.

    `over = 1`: counts [..., H], one number a request. `over = 2`: counts [B, H], one for the whole batch (`speed`).
    """
    mean = counts.float().mean(dim=tuple(range(-over, 0)))
    return torch.minimum(mean.long(), torch.as_tensor(most, device=counts.device))


def top_entries(scores: Tensor, number: int, *, ranked: bool = True) -> Tensor:
    """Each head's own `number` best entries: [..., H, n] -> indices [..., H, number], best first if `ranked`."""
    return scores.topk(number, dim=-1, sorted=ranked).indices


def pool_victim(rule: PoolRule, history: Tensor, positions: Tensor, newest: Tensor | int) -> Tensor:
    """The entry that leaves a full pool, one a head.

    history: integers [..., m], when an entry was last fetched (`lru`) or how often (`counter`), not looked at for
    `fifo`; positions: integers [..., m] of the tokens in it; newest: the token that comes in (broadcastable to [...,
    1]). Returns [...] indices.

    As in the authors' accuracy code lru and counter choose in the older half of the sequence (positions below newest //
    2), the earliest of equals. Where a real pool has nothing left of that half, and for fifo, the oldest entry goes.
    """
    positions = positions.long()
    if rule == "fifo":
        return positions.argmin(dim=-1)
    outside = positions >= newest // 2
    history = history.long().masked_fill(outside, 1 << 30)
    return (history * (1 << 32) + positions).argmin(dim=-1)


def halve_saturated(counters: Tensor) -> None:
    """`paper`: in place, halve all counters [..., m] of a head one of whose counters has reached `COUNTER_LIMIT`."""
    full = counters.amax(dim=-1, keepdim=True) >= COUNTER_LIMIT
    if bool(full.any()):
        counters.copy_(torch.where(full, counters // 2, counters))


class WholeSequenceRule:
    """`accuracy` (and, with `head_zero=False` on Llama, its correction): the rule on a whole teacher-forced sequence.

    scores: [H, n, n] speculated scores of one layer, row i the query. Row i < int(budget * n) fetches all it can see.
    Later rows fetch their own count, at most int(budget * n). Where capacity < 1 the pool holds int(capacity * n)
    entries a head: from that row on one entry a row is hidden from all later rows. As in the authors' code counts are
    taken before anything is hidden, and a victim may be one that is hidden already. Cannot be used to decode token by
    token.

    Rows are walked with `row` and closed with `commit`, so that a caller may commit another set where two scores tie.
    """

    def __init__(
        self,
        scores: Tensor,
        alpha: float,
        budget: float,
        capacity: float,
        pool: PoolRule,
        *,
        head_zero: bool = False,
    ) -> None:
        heads, size, _ = scores.shape
        self.size, self.pool = size, pool
        self.most = int(budget * size)
        self.store = int(capacity * size) if capacity < 1 else size
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        self.scores = scores.masked_fill(~causal, torch.finfo(scores.dtype).min)
        counts = qualifying(self.scores.transpose(0, 1), alpha, strict=False, head_zero=head_zero)
        self.numbers = fetch_number(counts, self.most)
        self.hidden = torch.zeros(heads, size, dtype=torch.bool)
        self.last_fetch = torch.zeros(heads, size, dtype=torch.int64)
        self.fetches = torch.zeros(heads, size, dtype=torch.int64)

    def visible(self, row: int) -> Tensor:
        """Row `row`'s scores as they are ranked, [H, n]: what has left the pool comes before only the future."""
        scores = self.scores[:, row].clone()
        scores[:, : row + 1] = scores[:, : row + 1].masked_fill(self.hidden[:, : row + 1], HIDDEN)
        return scores

    def row(self, row: int) -> Tensor:
        """The set of row `row`, bool [H, n]. Empty where no entry qualifies (only with `head_zero`)."""
        chosen = torch.zeros_like(self.hidden)
        if row < self.most:
            chosen[:, : row + 1] = True
        elif self.numbers[row]:
            # One top-k of the greatest number, cut to the row's own, as a ranking of ties goes by k.
            best = top_entries(self.visible(row), self.most)[:, : int(self.numbers[row])]
            chosen.scatter_(1, best, True)
        return chosen

    def commit(self, row: int, chosen: Tensor) -> None:
        """Take `chosen` as row `row`'s set, and let an entry leave the pool for the next token's."""
        self.last_fetch[chosen] = row
        self.fetches += chosen
        if row < self.store or self.store >= self.size:
            return
        if self.pool == "fifo":
            leaving = torch.full((self.hidden.shape[0],), row - self.store)
        else:
            history = self.last_fetch if self.pool == "lru" else self.fetches
            positions = torch.arange(self.size).expand_as(history)
            leaving = pool_victim(self.pool, history, positions, row)
        self.hidden.scatter_(1, leaving[:, None], True)

    def __iter__(self) -> Iterator[Tensor]:
        for row in range(self.size):
            chosen = self.row(row)
            self.commit(row, chosen)
            yield chosen
