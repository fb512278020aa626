"""Exact attention as a policy asks for it: the model's scale and sinks filled in, a prompt computed in one of 3 ways.

Sinks are logits that take part in a softmax and carry no value (one a query head, learnt, as in GPT-OSS): they lower
what every key receives, H2O's sums included.

`prefill` says how a prompt's attention is computed. Only the first is for serving; the other two exist to test what
arXiv 2604.05012 says of stock H2O and InfiniGen (its claims are C11 to C13 in `conf/claims`):

* `blocked`: by blocks of keys; what is held beside the keys is linear in their number.
* `full_matrix`: the whole prompt at once, its matrix of scores written out for all heads, keys and values repeated for
  the query heads that share them. Memory grows with the square of the prompt, so it runs out where `blocked` does not
  (C11, C12).
* `chunked_lossy`: each chunk of `max_prefill_tokens` tokens attends to itself only, and so do H2O's sums: attention
  across chunks is lost, and another set of tokens is found heavy (C13).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvstudy.engine import attention
from kvstudy.engine.config import PrefillVariant


@dataclass(slots=True)
class Attending:
    """The attention of a model's layers; `layer` counts as the policies count."""

    scale: float
    sinks: list[torch.Tensor | None]
    """Of each layer: float32 [heads], or None."""
    variant: PrefillVariant = "blocked"

    def decode(
        self,
        layer: int,
        q: torch.Tensor,
        kv: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        mass: torch.Tensor | None = None,
    ) -> None:
        """See `attention.decode`."""
        attention.decode(q, kv, tables, lengths, self.scale, out, mass, self.sinks[layer])

    def prefill(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        start: int,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `attention.prefill`; k and v hold everything before the chunk too, whatever the variant does with it."""
        sinks = self.sinks[layer]
        if sinks is not None and lse is None:
            lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
        if self.variant == "full_matrix":
            full_matrix(q, k, v, start, self.scale, out, lse)
        else:
            first = start if self.variant == "chunked_lossy" else 0
            attention.prefill(q, k[:, first:], v[:, first:], start - first, self.scale, out, lse)
        if sinks is not None and lse is not None:
            with_sinks = torch.logaddexp(lse, sinks[:, None])
            out.mul_((lse - with_sinks).exp().T[..., None])
            lse.copy_(with_sinks)

    def column_sums(self, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, start: int) -> torch.Tensor:
        """See `attention.column_sums`; `lse` as `prefill` left it."""
        if self.variant != "chunked_lossy":
            return attention.column_sums(q, k, lse, start, self.scale)
        sums = torch.zeros((k.shape[0], k.shape[1]), dtype=torch.float32, device=q.device)
        sums[:, start:] = attention.column_sums(q, k[:, start:], lse, 0, self.scale)
        return sums


def full_matrix(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention as it is written down, with its matrix; arguments as `attention.prefill` takes them.

    Held at once, beside keys and values repeated for each query head: scores, float32 probabilities, and these in the
    model's dtype (`full_matrix_bytes`).
    """
    group = q.shape[1] // k.shape[0]
    keys, values = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2)).mul_(scale)
    chunk, n = scores.shape[1:]
    later = torch.arange(n, device=q.device) > start + torch.arange(chunk, device=q.device)[:, None]
    scores.masked_fill_(later, float("-inf"))
    p = torch.softmax(scores, dim=-1, dtype=torch.float32)
    out.copy_((p.to(q.dtype) @ values).transpose(0, 1))
    if lse is not None:
        # The greatest score's probability is exp(score - lse).
        best, at = scores.max(dim=-1, keepdim=True)
        lse.copy_((best.float() - p.gather(-1, at).log())[..., 0])


def full_matrix_bytes(tokens: int, heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes that `full_matrix` holds at most for a prompt: matrices of the model's dtype and of float32, and a mask."""
    matrix = heads * tokens * tokens
    copies = 1 if itemsize == 4 else 2  # `p.to(float32)` is p itself
    return matrix * (copies * itemsize + 4) + tokens * tokens + 2 * heads * tokens * head_dim * itemsize
