"""The interface of a KV policy: which entries a request keeps, where, and which a decode step attends to.

A policy is ONE object an engine; what it knows of a request it puts into `request.kv`, and nothing else of
the engine looks in there. It answers four questions: `reserve`, `on_attention_input`, `prefill_chunk` and
`decode`; `open`/`close` bracket a request's life and `begin_step`/`end_step` a step. In each step the engine
calls, in this order:

    begin_step(rows, chunks)                   once, before layer 0: make room, build the step's block tables
    for layer in range(layers):
        on_attention_input(layer, hidden, rows)     only if `wants_attention_input`, only with rows
        decode(layer, q, k, v, rows, out)           once, for all the policy's decoding requests
        prefill_chunk(layer, q, k, v, chunk, out)   once a chunk
    end_step(rows, chunks)                     once: count what was attended and kept

and `open(request)` when a request is admitted (before its first chunk), `close(request)` when it ends or is
aborted. A request is either in `rows` or in `chunks` of a step, never both. Everything runs in one thread.

What every policy must hold to:

* At least one entry is attended (n_kept >= 1). A budget that `is_full` (b = 1) gives exactly what `full`
  gives.
* A request's output does not depend on who shares its batch, unless the policy's rule says so.
* It holds no more pool bytes than `reserve` said: `device_prefill_bytes` until the end of the step of its
  last chunk (`end_step`), `device_bytes` from then on. The engine takes the difference back after that step.
* Keys come rotated (RoPE applied at the true position, `request.computed` + offset), so an entry may lie in
  any slot.
* Tensors are token-major: q and out `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`;
  query head h belongs to KV head h // (heads // kv_heads). `out` is written in place. They need not be
  contiguous, but for the last two dimensions, which are.

A policy's module ends in a class registered by name with `@register` (see `policies/__init__`), whose
`Options` (a pydantic model that forbids unknown keys) are its own knobs; what follows from the budget b it
derives in `__init__`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from kvstudy.engine.attending import Attending
from kvstudy.engine.config import Budget
from kvstudy.engine.link import Link
from kvstudy.engine.parallel import Shard
from kvstudy.engine.pool import BlockPool, BlockTable
from kvstudy.engine.request import Request


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pool bytes a request needs at most: on the device until its prompt is done, then, and on the host."""

    device_prefill_bytes: int
    device_bytes: int
    host_bytes: int = 0

    @property
    def device_peak_bytes(self) -> int:
        return max(self.device_prefill_bytes, self.device_bytes)


@dataclass(slots=True)
class Rows:
    """The policy's decoding requests of one step: one new token each, in the order of q's rows."""

    requests: list[Request]
    positions: torch.Tensor
    """int64 [rows], on the device: the true position of each new token (= `request.computed`)."""

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(slots=True)
class Chunk:
    """A part of one request's prompt: tokens start .. start + length - 1; `last` if the prompt ends with it."""

    request: Request
    start: int
    length: int
    last: bool

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(slots=True)
class Geometry:
    """The model as a policy sees it: of its layers those with full attention, counted from 0."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    max_positions: int
    scale: float
    """Factor on q.k before the softmax (1.0 for models that scale q themselves, as OPT does)."""
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads


@dataclass(slots=True)
class Context:
    """All that a policy is given of its engine."""

    geometry: Geometry
    budget: Budget
    device_pool: BlockPool
    host_pool: BlockPool
    link: Link
    attention_module: Callable[[int], torch.nn.Module]
    """The library's own attention module of a layer, with q_proj, k_proj, ... (weights as loaded)."""
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """`rotate(x, positions)`: RoPE of x [tokens, any heads, head_dim] at positions int64 [tokens], in a new
    tensor; the identity for models without rotary positions. In x's dtype, as the model itself does it.
    """
    project_q: Callable[[int, torch.Tensor], torch.Tensor]
    """`project_q(layer, hidden)`: the layer's queries [tokens, heads, head_dim] from an attention input
    [tokens, hidden], bias and the model's own scaling of q included, not rotated.
    """
    attending: Attending
    """The exact attention of a layer; policies go through it, so that sinks and prefill variants are theirs too."""
    shard: Shard = field(default_factory=Shard)
    """Which of the model's KV heads this process has."""
    model_dir: str = ""
    threads: int = 1


@dataclass(slots=True)
class Prompt:
    """A prompt that was read once for several policies (`kvstudy.engine.fork`): all that any of them needs of it."""

    table: BlockTable
    """Every token's entry of every layer, on the device."""
    statistics: dict[Hashable, torch.Tensor]
    """By `Policy.counts`: what was counted while the prompt was read."""


class Attended:
    """The measured budget: entries attended, entries that `full` would have attended, and entries kept.

    int64 `[layers, kv_heads]` each, summed over decode steps and requests. Prefill is not counted.
    """

    def __init__(self, layers: int, kv_heads: int) -> None:
        self.attended = np.zeros((layers, kv_heads), dtype=np.int64)
        self.full = np.zeros((layers, kv_heads), dtype=np.int64)
        self.kept = np.zeros((layers, kv_heads), dtype=np.int64)

    def add(
        self,
        requests: Sequence[Request],
        attended: np.ndarray,
        full: np.ndarray,
        kept: np.ndarray | None = None,
    ) -> None:
        """Count one decode step.

        `attended` and `kept` (default: as attended) are `[rows]`, `[rows, layers]` or `[rows, layers,
        kv_heads]`; `full` is `[rows]`: tokens so far, the new one included.
        """
        per_row = attended if attended.ndim == 1 else attended.reshape(len(requests), -1).mean(axis=1)
        for request, mine, whole in zip(requests, per_row.tolist(), full.tolist(), strict=True):
            request.attended_entries += mine
            request.full_entries += whole
        self.attended += self._total(attended)
        self.full += int(full.sum())
        self.kept += self._total(attended if kept is None else kept)

    @staticmethod
    def _total(entries: np.ndarray) -> Any:
        total = entries.sum(axis=0)
        return total[:, None] if total.ndim == 1 else total

    def reset(self) -> None:
        self.attended[:] = 0
        self.full[:] = 0
        self.kept[:] = 0


class Options(BaseModel):
    """Base of a policy's own options: unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What passes through one layer for a chunk of a prompt, and what its attention leaves behind.

    q and k as in `prefill_chunk`; keys `[kv_heads, chunk.stop, head_dim]`; lse `[heads, chunk.length]` is the log of
    each query's sum of exp(scores).
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    keys: torch.Tensor
    lse: torch.Tensor
    chunk: Chunk


class Policy(ABC):
    """See the module's docstring for the order of calls and for what must hold."""

    name: ClassVar[str]
    Options: ClassVar[type[Options]] = Options
    wants_attention_input: ClassVar[bool] = False

    def __init__(self, context: Context, options: Any) -> None:
        """`options` is an instance of the class's own `Options`."""
        self.context = context
        self.options = options
        self.geometry = context.geometry
        self.counted = Attended(context.geometry.layers, context.geometry.kv_heads)

    # -- the four questions
    # ----------------------------------------------------------------------------------------

    @abstractmethod
    def reserve(self, prompt_tokens: int, max_tokens: int) -> Reservation:
        """Bytes a request of this size needs at most, blocks and everything beside them included.

        The last output token never goes through the model: at most `prompt_tokens + max_tokens - 1` entries
        exist.
        """

    def on_attention_input(self, layer: int, hidden: torch.Tensor, rows: Rows) -> None:  # noqa: B027
        """See the input [rows, hidden] of a layer's attention, after the layer norm, before that layer's `decode`."""

    @abstractmethod
    def prefill_chunk(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, out: torch.Tensor
    ) -> None:
        """Store a chunk's k and v; write the causal attention of its queries over entries 0 .. itself to `out`.

        On the `last` chunk a policy may already drop entries, once `out` is computed.
        """

    @abstractmethod
    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        """Store each row's new entry and write its attention over the entries the policy chooses to `out`."""

    # -- a prompt that is read once for several policies
    # ------------------------------------------------------------

    def counts(self) -> Hashable | None:
        """Names what the policy counts of a prompt beside its KV; None: nothing. Equal names count the same."""
        return None

    def new_counts(self, prompt_tokens: int) -> torch.Tensor:
        """Where `count_chunk` adds up, zero."""
        raise NotImplementedError(f"{self.name} counts nothing of a prompt")

    def count_chunk(self, into: torch.Tensor, seen: Seen) -> None:
        """Add one layer's chunk."""
        raise NotImplementedError(f"{self.name} counts nothing of a prompt")

    def unforkable(self) -> str | None:
        """Why a request of this policy cannot begin from a prompt that was read for others; None where it can."""
        has_none = type(self).adopt is Policy.adopt
        return f"{self.name} cannot begin from a prompt that was read for others" if has_none else None

    def adopt(self, request: Request, prompt: Prompt) -> None:
        """Set `request.kv` up as it is after the step of the prompt's last chunk, from what was read for all."""
        raise NotImplementedError(self.unforkable())

    # -- a request's life, a step's frame
    # --------------------------------------------------------------------------

    @abstractmethod
    def open(self, request: Request) -> None:
        """Set `request.kv` up. Pool blocks may be taken now or as the request grows."""

    @abstractmethod
    def close(self, request: Request) -> None:
        """Give back all that `request.kv` holds. Also called for a request that is aborted in the middle."""

    def begin_step(self, rows: Rows, chunks: list[Chunk]) -> None:  # noqa: B027
        """Before layer 0. `rows` may be empty, and so may `chunks`."""

    def end_step(self, rows: Rows, chunks: list[Chunk]) -> None:  # noqa: B027
        """After the last layer; `request.computed` still is what it was in `begin_step`."""

    def report(self) -> dict[str, Any]:
        """More numbers for `GET /metrics` and the tests, name -> int or float; names in snake_case."""
        return {}
