"""InfiniGen: the cache lives on the host, and each layer fetches what the layer before expects it to attend to.

Lee et al., "InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management", OSDI
2024, arXiv 2406.19707, sections 4.2 to 4.4; the rules in `infinigen_rules`, what they agree with in `docs/fidelity.md`.

Layers 0 and 1 are whole on the device. From the attention input of layer l (l >= 1) a few columns of layer l + 1's
skewed query are computed and multiplied with the same columns of its earlier keys, which stay on the device (*partial
keys*). Entries whose guessed score is within alpha of the head's greatest are counted, the mean over the heads is
fetched for each head, its own best, into a staging buffer while layer l runs; layer l + 1 attends to them and to the
new token.

Rules: `request` (columns and number of each request its own), `speed` (the authors' speed code: columns of the batch's
first request, one number for the batch), `paper` (columns by |Q| + |K|). The authors' `accuracy` code is a
whole-sequence simulation, see `infinigen_rules.WholeSequenceRule`. For models with RoPE speculation uses rotated
queries and keys, as the authors' Llama code does.

Budget. Of the k entries that a step may attend to (k = b x prompt, b x current, or absolute) one is the new token: at
most k - 1 are fetched, fewer where fewer are within alpha (never, with `alpha: none`). b = 1 is the full cache, on the
device. `max_num_kv` is the speed code's own cap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from kvstudy.engine import attention, kernels
from kvstudy.engine.policies import infinigen_rules as rules
from kvstudy.engine.policies import register
from kvstudy.engine.policies.base import Chunk, Context, Policy, Prompt, Reservation, Rows, Seen
from kvstudy.engine.policies.base import Options as BaseOptions
from kvstudy.engine.policies.infinigen_kernel import kernel
from kvstudy.engine.policies.offload import chunk_on_host
from kvstudy.engine.pool import BlockTable, stack_tables
from kvstudy.engine.request import Request
from kvstudy.engine.skew import load_skew

WHOLE_LAYERS = 2
"""Layers that are not speculated: nothing runs before layer 0, and layer 0's input says little about layer 1 (section
4.3)."""
HISTORY_BYTES = 4 + 4
"""Beside each entry of a limited pool, layer and KV head: its token's position and its history (int32)."""


class InfiniGenOptions(BaseOptions):
    """Knobs of the authors' code."""

    rule: Literal["request", "speed", "paper"] = "request"
    skew: Path | Literal["none"] | None = None
    """What `python -m kvstudy.engine.skew` wrote for this model; "none" does without skewing (the paper's ablation)."""
    alpha: Annotated[float, Field(ge=0)] | Literal["none"] | None = None
    """In logits; None takes the authors' values: 4 for OPT, 5 (Llama-2) for models with RoPE. "none": no threshold, a
    step fetches all that its budget allows."""
    partial_ratio: float | None = Field(None, gt=0, le=1)
    """Share of a head's columns; None takes 0.2 (the authors' scripts), and 0.3 with rule `paper`."""
    max_num_kv: int | None = Field(None, ge=1)
    """Most entries fetched a layer and head, instead of a budget."""
    pool_capacity: float = Field(1.0, gt=0, le=1)
    """Share of prompt + max_tokens - 1 entries that the host pool holds of each request."""
    pool_rule: Literal["fifo", "lru", "counter"] = "counter"

    @property
    def ratio(self) -> float:
        """`partial_ratio` or its default."""
        return self.partial_ratio or (0.3 if self.rule == "paper" else 0.2)


@dataclass(slots=True)
class State:
    """One request. S = layers that are speculated, m = entries of its host pool, d' = partial columns."""

    near: BlockTable
    """Layers 0 and 1 (all layers where the policy is off), on the device."""
    far: BlockTable
    """The others, on the host."""
    magnitudes: torch.Tensor
    """float32 [S, kv_heads, head_dim]: sums of the prompt's skewed |q| (`paper`: |q| + |k|)."""
    columns: torch.Tensor
    """int64 [S, kv_heads, d']"""
    turn: torch.Tensor
    """[S, kv_heads, head_dim, d']: the chosen columns of the skew."""
    partial: torch.Tensor
    """[S, kv_heads, d', m]: the partial keys, a line a column."""
    positions: torch.Tensor
    """int32 [S, kv_heads, m] (m = 0 unless the pool is limited): whose token lies in each entry."""
    history: torch.Tensor
    """int32, as `positions`: when an entry was last fetched, or how often."""
    most: int
    held: int = 0
    """Entries of each host layer."""
    aux: int = 0


@dataclass(slots=True)
class Fetched:
    """What one step's speculation chose for a layer, shown to `InfiniGen.watch`."""

    layer: int
    rows: Rows
    scores: torch.Tensor
    """float32 [rows, kv_heads, longest]; -inf beyond a row's length"""
    numbers: np.ndarray
    """int [rows]: entries fetched for each head"""
    entries: list[torch.Tensor]
    """of each row, int64 [kv_heads, number]"""


class _Batch:
    """What the decoding requests of a step share; rebuilt when one joins or leaves."""

    def __init__(self, requests: list[Request]) -> None:
        self.ids = [request.id for request in requests]
        states: list[State] = [request.kv for request in requests]
        self.turn = torch.stack([state.turn for state in states], dim=1)
        # The stack holds them now: not twice.
        for row, state in enumerate(states):
            state.turn = self.turn[:, row]


class Staging:
    """Two buffers on the device for fetched entries: layer l attends to one while layer l + 1's is filled.

    A filled buffer is [rows, 2, kv_heads, width, head_dim], a pool of one block a row. On CUDA the host's entries are
    gathered into pinned memory and copied on a side stream; `wait` orders the layer after it.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        g = context.geometry
        self.cuda = g.device.type == "cuda"
        self.buffers = [torch.empty(0, g.head_dim, dtype=g.dtype, device=g.device) for _ in range(2)]
        self.pinned = [torch.empty(0, g.head_dim, dtype=g.dtype) for _ in range(2)]
        self.turn = 0
        self.due = [0.0, 0.0]
        self.stream = torch.cuda.Stream() if self.cuda else None  # type: ignore[no-untyped-call]
        self.copied = [torch.cuda.Event() for _ in range(2)] if self.cuda else []  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Device bytes of both buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def fit(self, entries: int) -> None:
        """Make each buffer large enough for `entries` entries, and no larger."""
        g = self.context.geometry
        vectors = 2 * g.kv_heads * entries
        if len(self.buffers[0]) == vectors:
            return
        self.buffers = [torch.empty(vectors, g.head_dim, dtype=g.dtype, device=g.device) for _ in range(2)]
        if self.cuda:
            self.pinned = [torch.empty(vectors, g.head_dim, dtype=g.dtype, pin_memory=True) for _ in range(2)]

    def fetch(self, vectors: torch.Tensor, nbytes: int) -> tuple[int, torch.Tensor]:
        """Gather the host pool's vectors int64 [rows, 2, kv_heads, width], `nbytes` of which are wanted.

        Returns which buffer, to be given to `wait`, and the buffer.
        """
        pool = self.context.host_pool.kv.view(-1, self.context.geometry.head_dim)
        rows, _, _, places = vectors.shape
        turn, staged = self.next(rows, places, nbytes)
        into = staged.view(-1, staged.shape[-1])
        if self.stream is None:
            torch.index_select(pool, 0, vectors.flatten(), out=into)
        else:
            pinned = self.pinned[self.turn][: vectors.numel()]
            # What was copied from this buffer last has to be through before it is overwritten.
            self.copied[self.turn].synchronize()
            # The indices are needed on the host: the one wait of a layer, before its attention is even queued.
            torch.index_select(pool, 0, vectors.flatten().cpu(), out=pinned)
            # The layer that read this device buffer two layers ago is queued on the current stream.
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                into.copy_(pinned, non_blocking=True)
                self.copied[self.turn].record(self.stream)
        return turn, staged

    def next(self, rows: int, places: int, nbytes: int) -> tuple[int, torch.Tensor]:
        """Begin a move of `nbytes`: the buffer whose turn it is, by number and as [rows, 2, kv_heads, places, d]."""
        g = self.context.geometry
        self.turn ^= 1
        self.due[self.turn] = self.context.link.start(nbytes, "h2d")
        vectors = rows * 2 * g.kv_heads * places
        return self.turn, self.buffers[self.turn][:vectors].view(rows, 2, g.kv_heads, places, g.head_dim)

    def wait(self, buffer: int) -> None:
        """What was fetched into `buffer` is there, as far as the device (or the paced link) is concerned."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_event(self.copied[buffer])
        self.context.link.wait(self.due[buffer])


@register
class InfiniGen(Policy):
    """See the module."""

    name = "infinigen"
    Options = InfiniGenOptions
    options: InfiniGenOptions
    wants_attention_input = True

    def __init__(self, context: Context, options: InfiniGenOptions) -> None:
        super().__init__(context, options)
        if options.max_num_kv is not None and not context.budget.is_full:
            raise ValueError("infinigen: give a budget or max_num_kv, not both")
        g = self.geometry
        self.off = (context.budget.is_full and options.max_num_kv is None) or g.layers <= WHOLE_LAYERS
        self.sparse = 0 if self.off else g.layers - WHOLE_LAYERS
        self.width = max(1, int(g.head_dim * options.ratio))
        self.limited = options.pool_capacity < 1 and not self.off
        self.alpha = self._alpha()
        if not self.off:
            heads = g.kv_heads * context.shard.size
            skew = load_skew(options.skew, context.model_dir, g.layers, heads, g.head_dim)
            skew = skew[:, context.shard.mine(g.kv_heads)]
            self.skew = skew[WHOLE_LAYERS:].to(g.device, g.dtype)
        self.staging = Staging(context)
        usable = g.device.type == "cpu" and g.dtype in kernels.DTYPES and attention.kernels_enabled()
        self.kernel = kernel() if usable else None
        self.staging_aux = 0
        self.open_requests: dict[int, Request] = {}
        self.batch: _Batch | None = None
        self.fetched: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """By layer, until it has attended: (numbers [rows], buffer, what is in it [rows, 2, kv_heads, widest + 1,
        head_dim])."""
        self.watch: Callable[[Fetched], None] | None = None
        """None, or a test's: sees what each layer fetches."""

    def _alpha(self) -> float:
        asked = self.options.alpha
        if asked is None:
            return 5.0 if self._has_rope() else 4.0
        return math.inf if asked == "none" else asked

    def _has_rope(self) -> bool:
        g = self.geometry
        one = torch.ones(1, 1, g.head_dim, dtype=g.dtype, device=g.device)
        return not torch.equal(one, self.context.rotate(one, torch.ones(1, dtype=torch.int64, device=g.device)))

    # -- sizes -----------------------------------------------------------------------------------------------------

    def most_fetched(self, prompt_tokens: int, current_tokens: int) -> int:
        """The cap: how many entries a step may fetch a head when `current_tokens` exist, the new one included."""
        if self.options.max_num_kv is not None:
            return min(self.options.max_num_kv, current_tokens - 1)
        return min(self.context.budget.entries(prompt_tokens, current_tokens), current_tokens) - 1

    def pool_entries(self, prompt_tokens: int, max_tokens: int) -> int:
        """Entries of a layer that the host pool holds of a request past its prompt."""
        total = prompt_tokens + max_tokens - 1
        return max(1, int(self.options.pool_capacity * total)) if self.limited else total

    def _beside(self, pool_entries: int) -> int:
        """Device bytes beside blocks and staging: partial keys, which grow with the pool; columns; sums; history."""
        g = self.geometry
        item = g.dtype.itemsize
        a_head = pool_entries * self.width * item + g.head_dim * self.width * item + g.head_dim * 4 + self.width * 8
        if self.limited:
            a_head += pool_entries * HISTORY_BYTES
        return self.sparse * g.kv_heads * a_head

    def reserve(self, prompt_tokens: int, max_tokens: int) -> Reservation:
        """Bytes at most, device and host.

        Device: blocks of all tokens in layers 0 and 1; in each layer >= 2 and KV head, pool entries x d' partial keys,
        head_dim x d' of the skew, and column sums; past the prompt, two staging buffers of cap + 1 entries of one
        layer. Host: blocks of the prompt or of the pool, whichever is more, in layers >= 2 (a limited pool shrinks when
        the prompt ends).
        """
        g, device, host = self.geometry, self.context.device_pool, self.context.host_pool
        total = prompt_tokens + max_tokens - 1
        if self.off:
            held = device.bytes_for(total, g.layers)
            return Reservation(device_prefill_bytes=held, device_bytes=held)
        pool_entries = self.pool_entries(prompt_tokens, max_tokens)
        beside = self._beside(pool_entries)
        staged = 2 * (self.most_fetched(prompt_tokens, total) + 1) * device.entry_bytes
        return Reservation(
            device_prefill_bytes=device.bytes_for(prompt_tokens, WHOLE_LAYERS) + beside,
            device_bytes=device.bytes_for(total, WHOLE_LAYERS) + beside + staged,
            host_bytes=host.bytes_for(max(prompt_tokens, pool_entries), self.sparse),
        )

    # -- a request's life ------------------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        g = self.geometry
        prompt, most = request.prompt_tokens, request.params.max_tokens
        total = prompt + most - 1
        entries = self.pool_entries(prompt, most)
        shape = (self.sparse, g.kv_heads)
        width = self.width if self.sparse else 0
        limited = entries if self.limited else 0
        request.kv = State(
            near=BlockTable(self.context.device_pool, g.layers - self.sparse, total),
            far=BlockTable(self.context.host_pool, self.sparse, max(prompt, entries)),
            magnitudes=torch.zeros((*shape, g.head_dim), device=g.device),
            columns=torch.zeros((*shape, width), device=g.device, dtype=torch.int64),
            turn=torch.empty((*shape, g.head_dim, width), dtype=g.dtype, device=g.device),
            partial=torch.empty((*shape, width, entries), dtype=g.dtype, device=g.device),
            positions=torch.zeros((*shape, limited), device=g.device, dtype=torch.int32),
            history=torch.zeros((*shape, limited), device=g.device, dtype=torch.int32),
            most=self.most_fetched(prompt, total),
        )
        if not self.off:
            self._count_aux(request.kv, self._beside(entries))
        self.open_requests[request.id] = request

    def close(self, request: Request) -> None:
        state: State = request.kv
        self._count_aux(state, 0)
        state.near.release()
        if self.sparse:
            state.far.release()
        request.kv = None
        del self.open_requests[request.id]
        if self.batch is not None and request.id in self.batch.ids:
            self.batch = None
        if not self.open_requests:
            self._fit_staging([])

    def _count_aux(self, state: State, nbytes: int) -> None:
        self.context.device_pool.count_aux(nbytes - state.aux)
        state.aux = nbytes

    def _fit_staging(self, requests: list[Request]) -> None:
        widest = max((request.kv.most + 1 for request in requests), default=0)
        self.staging.fit(widest * len(requests))
        self.context.device_pool.count_aux(self.staging.nbytes - self.staging_aux)
        self.staging_aux = self.staging.nbytes

    # -- a step's frame --------------------------------------------------------------------------------------------

    def begin_step(self, rows: Rows, chunks: list[Chunk]) -> None:
        self.chunk_slots: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for chunk in chunks:
            state: State = chunk.request.kv
            near, far = (self._slots(table, chunk) if len(table.lengths) else None for table in (state.near, state.far))
            assert near is not None
            self.chunk_slots[id(chunk)] = (near.to(self.geometry.device), far)
        if rows:
            self._begin_rows(rows)

    @staticmethod
    def _slots(table: BlockTable, chunk: Chunk) -> torch.Tensor:
        table.resize_all(chunk.stop)
        return torch.from_numpy(table.slots_all(chunk.start, chunk.stop))

    def _begin_rows(self, rows: Rows) -> None:
        g, device = self.geometry, self.geometry.device
        states: list[State] = [request.kv for request in rows.requests]
        last = np.array([request.computed for request in rows.requests])
        for state, at in zip(states, last.tolist(), strict=True):
            state.near.resize_all(at + 1)
        self.near_tables, self.near_slots = self._tables([state.near for state in states], last)
        self.near_lengths = torch.from_numpy((last + 1).astype(np.int32)).to(device)
        self.attended = np.repeat((last + 1)[:, None], g.layers, axis=1)
        if self.off:
            return
        if self.batch is None or self.batch.ids != [request.id for request in rows.requests]:
            self.batch = _Batch(rows.requests)
            self._fit_staging(rows.requests)
        self.held = np.array([state.held for state in states])
        tables = stack_tables([state.far for state in states])
        self.far_tables = torch.from_numpy(tables).to(device)
        self.room = np.array([state.partial.shape[3] for state in states])
        self.partial_at = np.array([state.partial.data_ptr() for state in states])
        self.partial_step = np.array([state.partial.stride(0) * g.dtype.itemsize for state in states])
        count = len(rows)
        self.caps = torch.tensor(
            [min(self.most_fetched(r.prompt_tokens, r.computed + 1), r.kv.held) for r in rows.requests],
            device=device,
        )
        self.scores = torch.full((count, g.kv_heads, int(self.held.max())), -torch.inf, device=device)
        self.row_index = torch.arange(count, device=device)
        self.row_blocks = torch.arange(count, dtype=torch.int32, device=device)[:, None]
        self.head_index = torch.arange(g.kv_heads, device=device)[:, None]
        self.new_k = torch.empty((self.sparse, count, g.kv_heads, g.head_dim), dtype=g.dtype, device=device)
        self.new_v = torch.empty_like(self.new_k)

    def _tables(self, tables: list[BlockTable], entry: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Block tables side by side, and in each layer the slot of entry `entry[row]`."""
        size = self.context.device_pool.block_size
        stacked = stack_tables(tables)
        slots = stacked[:, np.arange(len(tables)), entry // size].astype(np.int64) * size + entry % size
        device = self.geometry.device
        return torch.from_numpy(stacked).to(device), torch.from_numpy(slots).to(device)

    # -- the prompt ------------------------------------------------------------------------------------------------

    def prefill_chunk(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, out: torch.Tensor
    ) -> None:
        state: State = chunk.request.kv
        near_slots, far_slots = self.chunk_slots[id(chunk)]
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        if layer < len(state.near.lengths):
            kv = self.context.device_pool.kv
            attention.store(kv, near_slots[layer], k, v)
            if chunk.start:
                keys, values = attention.gather(kv, state.near.blocks[layer], chunk.stop)
            self.context.attending.prefill(layer, q, keys, values, chunk.start, out)
            return
        assert far_slots is not None
        at = layer - WHOLE_LAYERS
        keys, values = chunk_on_host(self.context, far_slots[at], state.far.blocks[at], k, v, chunk)
        self.context.attending.prefill(layer, q, keys, values, chunk.start, out)
        state.magnitudes[at] += self._magnitudes(at, q, k)
        if chunk.last:
            self._end_of_prompt(at, chunk.request, keys)

    def counts(self) -> Hashable | None:
        return None if self.off else ("magnitudes", self.options.rule == "paper", str(self.options.skew))

    def new_counts(self, prompt_tokens: int) -> torch.Tensor:
        g = self.geometry
        return torch.zeros((self.sparse, g.kv_heads, g.head_dim), device=g.device)

    def count_chunk(self, into: torch.Tensor, seen: Seen) -> None:
        if (at := seen.layer - WHOLE_LAYERS) >= 0:
            into[at] += self._magnitudes(at, seen.q, seen.k)

    def unforkable(self) -> str | None:
        coupled = self.options.rule == "speed" and not self.off
        return "infinigen's rule 'speed' lets a batch's first request decide for the others" if coupled else None

    def adopt(self, request: Request, prompt: Prompt) -> None:
        self.open(request)
        state: State = request.kv
        state.near.copy_from(prompt.table, slice(0, len(state.near.lengths)))
        name = self.counts()
        if name is None:
            return
        state.far.copy_from(prompt.table, slice(WHOLE_LAYERS, None))
        state.magnitudes.copy_(prompt.statistics[name])
        for at in range(self.sparse):
            keys, _ = attention.gather(self.context.host_pool.kv, state.far.blocks[at], request.prompt_tokens)
            self._end_of_prompt(at, request, keys.to(self.geometry.device))

    def _magnitudes(self, at: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Sums over a chunk's tokens and a group's heads of skewed |q|; `paper` adds |k|: [kv_heads, head_dim]."""
        g = self.geometry
        grouped = q.view(-1, g.kv_heads, g.group, g.head_dim).permute(1, 0, 2, 3).reshape(g.kv_heads, -1, g.head_dim)
        total = (grouped @ self.skew[at]).abs().float().sum(dim=1) * g.scale
        if self.options.rule == "paper":
            total = total + (k.transpose(0, 1) @ self.skew[at]).abs().float().sum(dim=1)
        return total

    def _end_of_prompt(self, at: int, request: Request, keys: torch.Tensor) -> None:
        """Choose a layer's columns and make its partial keys from its keys [kv_heads, n, head_dim].

        A limited pool shrinks to its size.
        """
        state: State = request.kv
        leader: State = next(iter(self.open_requests.values())).kv if self.options.rule == "speed" else state
        columns = leader.columns[at] if leader is not state else rules.columns(state.magnitudes[at], self.options.ratio)
        state.columns[at] = columns
        state.turn[at] = self.skew[at].gather(2, columns[:, None].expand(-1, self.geometry.head_dim, -1))
        prompt, most = keys.shape[1], state.partial.shape[3]
        kept = min(prompt, most)
        state.partial[at, :, :, :kept] = (keys[:, prompt - kept :] @ state.turn[at]).mT
        if self.limited:
            # No entry has been fetched yet: every pool rule lets the oldest go.
            state.positions[at, :, :kept] = torch.arange(prompt - kept, prompt, device=keys.device, dtype=torch.int32)
        if kept < prompt:
            host = self.context.host_pool.kv
            slots = state.far.slots(at, 0, prompt)
            where = torch.from_numpy(slots[prompt - kept :])
            k, v = attention.gather_slots(host, where.expand(self.geometry.kv_heads, -1))
            attention.store(host, torch.from_numpy(slots[:kept]), k.transpose(0, 1), v.transpose(0, 1))
            state.far.resize(at, kept)
        state.held = kept

    # -- a decode step ---------------------------------------------------------------------------------------------

    def on_attention_input(self, layer: int, hidden: torch.Tensor, rows: Rows) -> None:
        """Speculate the next layer and begin its fetch."""
        at = layer + 1 - WHOLE_LAYERS
        if self.off or not 0 <= at < self.sparse:
            return
        counts = self.context.shard.gather(self._speculate(layer + 1, hidden, rows))
        if self.options.rule == "speed":
            numbers = torch.minimum(rules.fetch_number(counts, int(self.caps.max()), over=2), self.caps)
        else:
            numbers = rules.fetch_number(counts, self.caps)
        # Layer l + 1's fetch begins before layer l has attended to its own.
        self.fetched[layer + 1] = (numbers, *self._fetch(layer + 1, rows, numbers.cpu().numpy()))

    def _speculate(self, layer: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Guess a layer's scores from its predecessor's input; returns how many qualify, [rows, kv_heads]."""
        assert self.batch is not None
        g, at = self.geometry, layer - WHOLE_LAYERS
        q = self.context.rotate(self.context.project_q(layer, hidden), rows.positions)
        turn = self.batch.turn[at]
        if self.kernel is not None:
            addresses = self.partial_at + at * self.partial_step
            return self.kernel.scores(q, turn, g.scale, addresses, self.held, self.room, self.alpha, self.scores)
        partial_q = q.view(len(rows), g.kv_heads, g.group, g.head_dim) @ turn * g.scale
        for row, request in enumerate(rows.requests):
            state: State = request.kv
            guess = partial_q[row] @ state.partial[at, :, :, : state.held]
            self.scores[row, :, : state.held] = rules.group_max(guess.flatten(0, 1), g.kv_heads)
        return rules.qualifying(self.scores, self.alpha)

    def _fetch(self, layer: int, rows: Rows, numbers: np.ndarray) -> tuple[int, torch.Tensor]:
        at = layer - WHOLE_LAYERS
        # One place more than is fetched, for the new token.
        entries = self._select(numbers, int(numbers.max()) + 1)
        buffer, staged = self._gather(at, entries, numbers)
        self.attended[:, layer] = numbers + 1
        if self.limited:
            self._remember(at, rows, numbers, entries)
        if self.watch is not None:
            chosen = [entries[row, :, :number] for row, number in enumerate(numbers.tolist())]
            self.watch(Fetched(layer, rows, self.scores, numbers, chosen))
        return buffer, staged

    def _select(self, numbers: np.ndarray, places: int) -> torch.Tensor:
        if self.kernel is not None:
            return self.kernel.select(self.scores, self.held, numbers, places)
        return self._best(numbers, places)

    def _gather(self, at: int, entries: torch.Tensor, numbers: np.ndarray) -> tuple[int, torch.Tensor]:
        """Begin to move entries [rows, kv_heads, places]: into which buffer, and the buffer."""
        host, (rows, _, places) = self.context.host_pool, entries.shape
        nbytes = int(numbers.sum()) * host.entry_bytes
        if self.kernel is None:
            return self.staging.fetch(self._vectors(at, entries), nbytes)
        buffer, staged = self.staging.next(rows, places, nbytes)
        self.kernel.gather(entries, numbers, self.far_tables[at], host.kv, staged)
        return buffer, staged

    def _best(self, numbers: np.ndarray, places: int) -> torch.Tensor:
        """Each row's and head's best entries, int64 [rows, kv_heads, places]; unused places repeat entry 0."""
        g = self.geometry
        entries = torch.zeros((len(numbers), g.kv_heads, places), dtype=torch.int64, device=g.device)
        if (numbers == places - 1).all() and (self.held == self.held[0]).all():
            entries[:, :, :-1] = rules.top_entries(self.scores, places - 1, ranked=False)
            return entries
        for row, number in enumerate(numbers.tolist()):
            own = self.scores[row, :, : self.held[row]]
            entries[row, :, :number] = rules.top_entries(own, number, ranked=False)
        return entries

    def _vectors(self, at: int, entries: torch.Tensor) -> torch.Tensor:
        """Which vectors of the host pool, seen as [..., head_dim], entries are: [rows, 2, kv_heads, places]."""
        heads, size = self.geometry.kv_heads, self.context.host_pool.block_size
        flat = entries.view(len(entries), -1)
        blocks = self.far_tables[at].long().gather(1, flat // size)
        keys = blocks.mul_(2 * heads * size).add_(flat % size).view(entries.shape).add_(self.head_index * size)
        return torch.stack((keys, keys + heads * size), dim=1)

    def _remember(self, at: int, rows: Rows, numbers: np.ndarray, entries: torch.Tensor) -> None:
        """Note what was fetched in the history that a limited pool's rule looks at."""
        for row, request in enumerate(rows.requests):
            history, chosen = request.kv.history[at], entries[row, :, : numbers[row]]
            if self.options.pool_rule == "lru":
                history.scatter_(1, chosen, request.computed)
            elif self.options.pool_rule == "counter":
                history.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=history.dtype))
                if self.options.rule == "paper":
                    rules.halve_saturated(history)

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        attending = self.context.attending
        if self.off or layer < WHOLE_LAYERS:
            kv = self.context.device_pool.kv
            attention.store(kv, self.near_slots[layer], k, v)
            attending.decode(layer, q, kv, self.near_tables[layer], self.near_lengths, out)
            return
        numbers, buffer, staged = self.fetched.pop(layer)
        self.staging.wait(buffer)
        attention.store(staged, self.row_index * staged.shape[3] + numbers, k, v)
        self.new_k[layer - WHOLE_LAYERS], self.new_v[layer - WHOLE_LAYERS] = k, v
        attending.decode(layer, q, staged, self.row_blocks, (numbers + 1).int(), out)

    def end_step(self, rows: Rows, chunks: list[Chunk]) -> None:
        if not rows:
            return
        full = np.array([request.computed + 1 for request in rows.requests])
        if not self.off:
            self._put_away(rows)
        kept = np.repeat(full[:, None], self.geometry.layers, axis=1)
        if not self.off:
            kept[:, WHOLE_LAYERS:] = np.array([r.kv.held for r in rows.requests])[:, None]
        self.counted.add(rows.requests, attended=self.attended, full=full, kept=kept)

    def _put_away(self, rows: Rows) -> None:
        """Move the new token's entries of all layers to the host, in one go, and add their partial keys."""
        assert self.batch is not None
        g, host = self.geometry, self.context.host_pool
        partial = (self.new_k[:, :, :, None] @ self.batch.turn)[:, :, :, 0]
        entries = torch.empty((self.sparse, len(rows), g.kv_heads), dtype=torch.int64, device=g.device)
        for row, request in enumerate(rows.requests):
            state: State = request.kv
            if state.held < state.partial.shape[3]:
                entries[:, row] = state.held
                state.partial[:, :, :, state.held] = partial[:, row]
                state.held += 1
                state.far.resize_all(state.held)
            else:
                leaving = rules.pool_victim(self.options.pool_rule, state.history, state.positions, request.computed)
                entries[:, row] = leaving
                into = leaving[:, :, None, None].expand(-1, -1, self.width, -1)
                state.partial.scatter_(3, into, partial[:, row, :, :, None])
            if self.limited:
                at = entries[:, row, :, None]
                state.positions.scatter_(2, at, request.computed)
                state.history.scatter_(2, at, 0)
        size = host.block_size
        tables = torch.from_numpy(stack_tables([request.kv.far for request in rows.requests])).long()
        entries = entries.cpu()
        slots = tables.gather(2, entries // size) * size + entries % size
        self.context.link.start(self.sparse * len(rows) * host.entry_bytes, "d2h")
        k, v = (x.flatten(0, 1).to(host.kv.device) for x in (self.new_k, self.new_v))
        attention.store(host.kv, slots.flatten(0, 1), k, v)
