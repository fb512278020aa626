"""Attention over block tables: store, decode, prefill, gather.

Each function is written twice: here in plain torch, which runs on any device and is what the tests hold to be
true, and in C for the CPU (`kernels/attention.c`), which is taken where the tensors are on the CPU and a
compiler was found. `use_kernels(False)` turns the C off.

Shapes: `kv` is a pool, `[num_blocks, 2, kv_heads, block_size, head_dim]`; a *slot* is block * block_size +
offset. It may also be a staging buffer of the same layout that is in no pool. Grouped heads are never
repeated in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstudy.engine import kernels

_enabled = True
KEY_BLOCK = 1024
"""Keys looked at a time where scores are computed by blocks, so that no score matrix is n x n."""


def use_kernels(enabled: bool) -> None:
    """Choose between the compiled kernels (where they exist) and plain torch."""
    global _enabled
    _enabled = enabled


def kernels_enabled() -> bool:
    """Whether compiled kernels may be used; there may still be none."""
    return _enabled


def _library(kv: Tensor) -> kernels.Library | None:
    if not _enabled or kv.device.type != "cpu" or kv.dtype not in kernels.DTYPES:
        return None
    return kernels.library()


def store(kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k, v `[tokens, kv_heads, head_dim]` into slots.

    Slots are int64 `[tokens]`, or `[tokens, kv_heads]` where each KV head has its own; they are to be distinct.
    """
    if (lib := _library(kv)) is not None:
        return lib.store(kv, slots, k, v)
    size, heads = kv.shape[3], kv.shape[2]
    slots = slots.view(len(slots), -1).expand(-1, heads)
    head = torch.arange(heads, device=kv.device)
    kv[slots // size, 0, head, slots % size] = k
    kv[slots // size, 1, head, slots % size] = v


def decode(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    out: Tensor,
    mass: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """One query a row over that row's first `lengths[row]` entries (at least 1), softmax in float32.

    q, out: `[rows, heads, head_dim]`; tables: int32 `[rows, max_blocks]`; lengths: int32 `[rows]`. `mass`,
    where given, is float32 `[rows, kv_heads, >= max(lengths)]` and receives the probabilities summed over
    each KV head's query heads, by position in the table; beyond a row's length it is left as it was.
    `sinks`, float32 `[heads]`, are logits of the softmax that carry no value; there is no C for them.
    """
    if sinks is None and (lib := _library(kv)) is not None:
        return lib.decode(q, kv, tables, lengths, scale, out, mass)
    rows, heads, dim = q.shape
    kv_heads, size = kv.shape[2], kv.shape[3]
    # Whole tables: the greatest length is on the device, and asking for it would wait for all that is queued there.
    n = tables.shape[1] * size if mass is None else min(tables.shape[1] * size, mass.shape[2])
    blocks = tables[:, : -(-n // size)].long()
    # [rows, blocks, 2, kv_heads, size, dim] -> [rows, 2, kv_heads, blocks * size, dim]
    entries = kv[blocks].permute(0, 2, 3, 1, 4, 5).reshape(rows, 2, kv_heads, -1, dim)[:, :, :, :n].float()
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, dim).float()
    scores = torch.einsum("rhgd,rhnd->rhgn", grouped, entries[:, 0]) * scale
    beyond = torch.arange(n, device=q.device) >= lengths[:, None]
    p = softmax(scores.masked_fill(beyond[:, None, None], float("-inf")), sinks)
    # A padded entry may be memory never written: its probability is 0, but 0 x NaN is not.
    values = entries[:, 1].masked_fill(beyond[:, None, :, None], 0.0)
    out.copy_(torch.einsum("rhgn,rhnd->rhgd", p, values).reshape(rows, heads, dim))
    if mass is not None:
        mass[:, :, :n] = torch.where(beyond[:, None], mass[:, :, :n], p.sum(2))


def softmax(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the last axis of `[..., kv_heads, group, n]`; `sinks` `[heads]`, where there are any, take part."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.view(scores.shape[-3], scores.shape[-2], 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def gather(kv: Tensor, table: Tensor | object, n: int) -> tuple[Tensor, Tensor]:
    """The first n entries of a table (int32 `[max_blocks]`, tensor or array): k, v `[kv_heads, n, head_dim]`."""
    table = torch.as_tensor(table, device=kv.device)
    if (lib := _library(kv)) is not None:
        return lib.gather(kv, table, n)
    entries = kv[table[: -(-n // kv.shape[3])].long()]  # [blocks, 2, kv_heads, size, dim]
    entries = entries.permute(1, 2, 0, 3, 4).reshape(2, kv.shape[2], -1, kv.shape[4])[:, :, :n]
    return entries[0], entries[1]


def gather_slots(kv: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Entries by slot, each KV head its own: slots int64 `[kv_heads, m]` -> k, v `[kv_heads, m, head_dim]`."""
    if (lib := _library(kv)) is not None:
        return lib.gather_slots(kv, slots)
    size = kv.shape[3]
    head = torch.arange(kv.shape[2], device=kv.device)[:, None]
    return kv[slots // size, 0, head, slots % size], kv[slots // size, 1, head, slots % size]


def prefill(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, out: Tensor, lse: Tensor | None = None) -> None:
    """Causal attention of a chunk: query i, at position start + i, over keys 0 .. start + i.

    q, out: `[c, heads, head_dim]`; k, v: `[kv_heads, start + c, head_dim]`, any strides but a contiguous last
    dimension. `lse`, where given, is float32 `[heads, c]` and receives the log of the sum of exp(scores).
    Works by blocks: memory beyond the arguments is linear in the number of keys.
    """
    if (lib := _library(k)) is not None and lib.can_prefill(q) and (lse is None or lse.is_contiguous()):
        lib.prefill(q, k, v, start, scale, out, lse)
    elif q.device.type == "cpu":
        _prefill_flash(q, k, v, start, scale, out, lse)
    else:
        _prefill_blocks(q, k, v, start, scale, out, lse)


def _prefill_flash(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, out: Tensor, lse: Tensor | None) -> None:
    """Torch's blocked CPU kernel, twice: over the keys before the chunk, and causally over the chunk."""
    c, heads, dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    queries = q.view(c, kv_heads, group, dim).permute(1, 2, 0, 3)  # batch = KV head, heads = its group

    def part(keys: Tensor, values: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        keys = keys[:, None].expand(-1, group, -1, -1)  # a view: stride 0 over the group
        values = values[:, None].expand(-1, group, -1, -1)
        result: tuple[Tensor, Tensor] = flash(queries, keys, values, 0.0, causal, scale=scale)
        return result

    o, s = part(k[:, start:], v[:, start:], True)  # o [kv_heads, group, c, dim], s [kv_heads, group, c]
    if start:
        o0, s0 = part(k[:, :start], v[:, :start], False)
        both = torch.logaddexp(s, s0)
        o = o * (s - both).exp()[..., None] + o0 * (s0 - both).exp()[..., None]
        s = both
    out.view(c, kv_heads, group, dim).copy_(o.permute(2, 0, 1, 3))
    if lse is not None:
        lse.view(kv_heads, group, c).copy_(s)


def _prefill_blocks(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, out: Tensor, lse: Tensor | None) -> None:
    """Online softmax over blocks of keys, in float32: the reference, and any device's fallback."""
    c, heads, dim = q.shape
    kv_heads, n, _ = k.shape
    group = heads // kv_heads
    queries = q.reshape(c, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * c, dim).float() * scale
    position = (start + torch.arange(c, device=q.device)).repeat(group)[:, None]
    peak = torch.full((kv_heads, group * c, 1), float("-inf"), device=q.device)
    total = torch.zeros_like(peak)
    acc = torch.zeros_like(queries)
    for first in range(0, n, KEY_BLOCK):
        keys, values = k[:, first : first + KEY_BLOCK].float(), v[:, first : first + KEY_BLOCK].float()
        scores = queries @ keys.transpose(1, 2)
        column = first + torch.arange(keys.shape[1], device=q.device)
        scores = scores.masked_fill(column > position, float("-inf"))
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        p = (scores - higher).exp()
        shrink = (peak - higher).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        acc = acc * shrink + p @ values
        peak = higher
    result = (acc / total).view(kv_heads, group, c, dim)
    out.view(c, kv_heads, group, dim).copy_(result.permute(2, 0, 1, 3))
    if lse is not None:
        lse.view(kv_heads, group, c).copy_((peak + total.log()).view(kv_heads, group, c))


def column_sums(q: Tensor, k: Tensor, lse: Tensor, start: int, scale: float) -> Tensor:
    """How much attention each key received from a chunk, summed over its queries and each KV head's query heads.

    Returns float32 `[kv_heads, start + c]`. Arguments as `prefill` takes and gives them. By blocks of keys: the
    largest thing held is c x heads x `KEY_BLOCK`.
    """
    if (lib := _library(k)) is not None and lib.can_prefill(q):
        return lib.column_sums(q, k, lse, start, scale)
    c, heads, dim = q.shape
    kv_heads, n, _ = k.shape
    group = heads // kv_heads
    queries = q.reshape(c, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * c, dim)
    norm = lse.reshape(kv_heads, group * c, 1)
    position = (start + torch.arange(c, device=q.device)).repeat(group)[:, None]
    sums = torch.empty((kv_heads, n), dtype=torch.float32, device=q.device)
    for first in range(0, n, KEY_BLOCK):
        keys = k[:, first : first + KEY_BLOCK]
        scores = (queries @ keys.transpose(1, 2)).float().mul_(scale).sub_(norm)
        if first + keys.shape[1] > start:
            column = first + torch.arange(keys.shape[1], device=q.device)
            scores.masked_fill_(column > position, float("-inf"))
        torch.sum(scores.exp_(), 1, out=sums[:, first : first + KEY_BLOCK])
    return sums
