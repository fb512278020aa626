"""H2O: keep the tokens that attention has dwelt on, and the newest ones; forget the rest.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", NeurIPS 2023,
arXiv 2306.14048, algorithm 1; the rules in `h2o_rules`, what they agree with in `docs/fidelity.md`.

The prompt is read whole, chunk by chunk, while each key's column of the attention matrix is summed up; with its last
chunk all but the kept entries go, and their blocks are free. A decode step writes the new token over the entry that the
step before dropped, in each KV head its own, so that nothing is ever moved. With grouped queries a selection is one per
KV head, by the sum of its query heads' scores.

Budget. Of the k entries that a step attends to (k = b x prompt, or b x current, or absolute), the new token included,
int(heavy_fraction x k) are heavy hitters and the others the newest tokens. Between steps k - 1 stay. `flexgen` needs an
even number: k // 2 heavy, as many recent. b = 1 is the full cache. The authors' own knobs may be given instead of a
budget.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from kvstudy.engine import attention
from kvstudy.engine.policies import h2o_rules as rules
from kvstudy.engine.policies import register
from kvstudy.engine.policies.base import Chunk, Context, Policy, Prompt, Reservation, Rows, Seen
from kvstudy.engine.policies.base import Options as BaseOptions
from kvstudy.engine.pool import BlockTable, stack_tables
from kvstudy.engine.request import Request

SCORE_BYTES = POSITION_BYTES = 4
"""Beside each entry and KV head: its score (float32) and its token's position (int32)."""


class H2OOptions(BaseOptions):
    """The rule, and either the engine's budget, split by `heavy_fraction`, or the knobs of the authors' code."""

    rule: Literal["realdrop", "flexgen", "masked", "paper"] = "realdrop"
    heavy_fraction: float = Field(0.5, ge=0, le=1)
    hh_size: int | None = Field(None, ge=0)
    recent_size: int | None = Field(None, ge=0)
    """`realdrop`: heavy and recent entries kept between steps."""
    hh_ratio: float | None = Field(None, gt=0, le=1)
    """`flexgen`: k = int(hh_ratio x prompt) heavy entries and k - 1 recent ones."""
    heavy_ratio: float | None = Field(None, ge=0, le=1)
    recent_ratio: float | None = Field(None, ge=0, le=1)
    """`masked`: shares of the prompt; the coming token counts as recent."""

    @model_validator(mode="after")
    def _knobs_of_the_rule(self) -> H2OOptions:
        given = {
            name for name in ("hh_size", "recent_size", "hh_ratio", "heavy_ratio", "recent_ratio") if self._set(name)
        }
        own = {
            "realdrop": {"hh_size", "recent_size"},
            "flexgen": {"hh_ratio"},
            "masked": {"heavy_ratio", "recent_ratio"},
        }
        if given and given != own.get(self.rule, set()):
            raise ValueError(
                f"rule {self.rule!r} takes all or none of {sorted(own.get(self.rule, ()))}, not {sorted(given)}"
            )
        return self

    def _set(self, name: str) -> bool:
        return getattr(self, name) is not None

    @property
    def own_knobs(self) -> bool:
        """Whether the authors' knobs, and not the budget, say how much stays."""
        return any(self._set(name) for name in ("hh_size", "hh_ratio", "heavy_ratio"))


@dataclass(slots=True)
class State:
    """One request.

    `size` entries of each layer's table are in use; with `hole` one of them, a different one in each head, is to be
    overwritten by the next token.
    """

    table: BlockTable
    scores: torch.Tensor
    """[layers, kv_heads, prompt], then [layers, kv_heads, capacity]: accumulated attention, float32."""
    positions: torch.Tensor
    """int32 [layers, kv_heads, capacity]: whose token lies in each entry (the coming one's, in a hole); -1 where none
    does."""
    free: torch.Tensor
    """int64 [layers, kv_heads]: the entry that the next token takes."""
    capacity: int
    size: int = 0
    hole: bool = False
    masked: list[tuple[rules.MaskedRule, torch.Tensor]] = field(default_factory=list)
    aux: int = 0


@dataclass(slots=True)
class Dropped:
    """What one decode step dropped, shown to `H2O.watch`. All `[layers, rows, kv_heads, ...]`."""

    rows: Rows
    dropping: np.ndarray
    """bool [rows]"""
    victims: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor
    protected: torch.Tensor


class _Batch:
    """The decoding requests' states side by side; rebuilt when a request joins or leaves."""

    def __init__(self, requests: list[Request]) -> None:
        self.ids = [request.id for request in requests]
        states: list[State] = [request.kv for request in requests]
        widest = max(state.capacity for state in states)
        layers, heads, _ = states[0].scores.shape
        like = states[0].scores
        self.scores = like.new_zeros((layers, len(states), heads, widest))
        self.positions = states[0].positions.new_full(self.scores.shape, rules.EMPTY)
        self.free = states[0].free.new_empty((layers, len(states), heads))
        # The kernel leaves what is beyond a row's length as it is: zero.
        self.mass = torch.zeros_like(self.scores)
        for row, state in enumerate(states):
            width = state.capacity
            for name in ("scores", "positions"):
                mine = getattr(self, name)[:, row, :, :width]
                mine.copy_(getattr(state, name))
                setattr(state, name, mine)
            self.free[:, row] = state.free
            state.free = self.free[:, row]


@register
class H2O(Policy):
    """Real eviction (`realdrop`, `flexgen`, `paper`) or its simulation (`masked`, which frees nothing)."""

    name = "h2o"
    Options: ClassVar[type[BaseOptions]] = H2OOptions
    options: H2OOptions

    def __init__(self, context: Context, options: H2OOptions) -> None:
        super().__init__(context, options)
        if options.own_knobs and not context.budget.is_full:
            raise ValueError("h2o: give a budget or the rule's own knobs, not both")
        if options.rule == "masked" and context.budget.of == "current":
            raise ValueError(
                "h2o: rule 'masked' fixes its sizes with the prompt; budget.of 'current' has no meaning for it"
            )
        self.off = context.budget.is_full and not options.own_knobs
        self.batch: _Batch | None = None
        self.watch: Callable[[Dropped], None] | None = None
        self.look: Callable[[Request], None] | None = None
        """Both are None, or of a test: `watch` sees what each decode step drops, `look` each request past its prompt at
        the end of each step."""

    # -- sizes -----------------------------------------------------------------------------------------------------

    def sizes(self, prompt_tokens: int, current_tokens: int | None = None) -> tuple[int, int]:
        """(heavy, recent) entries that stay between steps when `current_tokens` (default: the prompt) exist."""
        o = self.options
        if o.hh_size is not None and o.recent_size is not None:
            return o.hh_size, o.recent_size
        if o.heavy_ratio is not None and o.recent_ratio is not None:
            return int(o.heavy_ratio * prompt_tokens), int(o.recent_ratio * prompt_tokens)
        k = self.context.budget.entries(prompt_tokens, current_tokens)
        if o.rule == "flexgen":
            half = int(prompt_tokens * o.hh_ratio) if o.hh_ratio is not None else k // 2
            if o.hh_ratio is not None and half < 2:
                raise ValueError(f"h2o: flexgen needs hh_ratio x prompt >= 2; {o.hh_ratio} x {prompt_tokens} is less")
            half = max(half, 2)
            return half, half - 1
        heavy = int(o.heavy_fraction * k)
        if o.rule == "masked":
            return heavy, k - heavy
        return min(heavy, k - 1), max(k - 1 - heavy, 0)

    def _largest(self, prompt_tokens: int, max_tokens: int) -> int:
        """Entries of a layer that a request holds at most once its prompt is done, the new token's included."""
        total = prompt_tokens + max_tokens - 1
        if self.off or self.options.rule == "masked":
            return total
        return min(total, sum(self.sizes(prompt_tokens, total)) + 1)

    def reserve(self, prompt_tokens: int, max_tokens: int) -> Reservation:
        """H2O holds the whole prompt until its last chunk, and then what the rule keeps.

        Prefill: blocks of the prompt in every layer, and 4 bytes a token, layer and KV head for its score. Then: blocks
        of min(heavy + recent + 1, all) entries, and 8 bytes an entry, layer and KV head (score and position).
        """
        g, pool = self.geometry, self.context.device_pool
        largest = self._largest(prompt_tokens, max_tokens)
        per_layer = g.layers * g.kv_heads
        if self.off:
            held = pool.bytes_for(prompt_tokens + max_tokens - 1, g.layers)
            return Reservation(device_prefill_bytes=held, device_bytes=held)
        if self.options.rule == "masked":
            total = prompt_tokens + max_tokens - 1
            # Scores, and the coming step's mask.
            held = pool.bytes_for(total, g.layers) + per_layer * (4 * total + total + 1)
            return Reservation(device_prefill_bytes=held, device_bytes=held)
        in_prefill = per_layer * (SCORE_BYTES * prompt_tokens + POSITION_BYTES * largest + 8)
        beside = per_layer * ((SCORE_BYTES + POSITION_BYTES) * largest + 8)
        return Reservation(
            device_prefill_bytes=pool.bytes_for(prompt_tokens, g.layers) + in_prefill,
            device_bytes=pool.bytes_for(largest, g.layers) + beside,
        )

    # -- a request's life ------------------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        g = self.geometry
        prompt, most = request.prompt_tokens, request.params.max_tokens
        capacity = self._largest(prompt, most)
        table = BlockTable(self.context.device_pool, g.layers, max(prompt, capacity))
        evicts = not self.off and self.options.rule != "masked"
        shape = (g.layers, g.kv_heads)
        state = State(
            table,
            scores=torch.zeros((*shape, 0 if self.off else prompt), device=g.device),
            positions=torch.full((*shape, capacity if evicts else 0), rules.EMPTY, dtype=torch.int32, device=g.device),
            free=torch.zeros(shape, dtype=torch.int64, device=g.device),
            capacity=capacity,
        )
        request.kv = state
        self._count_aux(state, self._aux(state) if not self.off else 0)

    def close(self, request: Request) -> None:
        state: State = request.kv
        self._count_aux(state, 0)
        state.table.release()
        request.kv = None
        if self.batch is not None and request.id in self.batch.ids:
            self.batch = None

    def _aux(self, state: State) -> int:
        if self.options.rule == "masked":
            return sum(4 * rule.scores.numel() + mask.numel() for rule, mask in state.masked if rule.scores is not None)
        return 4 * state.scores.numel() + 4 * state.positions.numel() + 8 * state.free.numel()

    def _count_aux(self, state: State, nbytes: int) -> None:
        self.context.device_pool.count_aux(nbytes - state.aux)
        state.aux = nbytes

    # -- a step ----------------------------------------------------------------------------------------------------

    def begin_step(self, rows: Rows, chunks: list[Chunk]) -> None:
        device = self.geometry.device
        for chunk in chunks:
            chunk.request.kv.table.resize_all(chunk.stop)
        self.chunk_slots = {
            id(c): torch.from_numpy(c.request.kv.table.slots_all(c.start, c.stop)).to(device) for c in chunks
        }
        if not rows:
            return
        states: list[State] = [request.kv for request in rows.requests]
        for state in states:
            if not state.hole:
                state.free.fill_(state.size)
                state.size += 1
                state.table.resize_all(state.size)
        self.sizes_now = np.array([state.size for state in states])
        tables = torch.from_numpy(stack_tables([state.table for state in states])).to(device)
        if self.off or self.options.rule == "masked":
            free = torch.stack([state.free for state in states], dim=1)
        else:
            if self.batch is None or self.batch.ids != [request.id for request in rows.requests]:
                self.batch = _Batch(rows.requests)
            free = self.batch.free
            # An entry taken for the first time: give it its position (a hole has had it since it was made).
            self.batch.positions.scatter_(
                3, free[..., None], rows.positions.int()[None, :, None, None].expand(*free.shape, 1)
            )
        size = self.context.device_pool.block_size
        self.slots = tables.long().gather(2, free // size) * size + free % size
        self.tables = tables
        self.lengths = torch.from_numpy(self.sizes_now.astype(np.int32)).to(device)

    def decode(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, out: torch.Tensor
    ) -> None:
        kv = self.context.device_pool.kv
        attention.store(kv, self.slots[layer], k, v)
        if self.options.rule == "masked" and not self.off:
            for row, request in enumerate(rows.requests):
                self._decode_masked(layer, q[row], request.kv, out[row])
            return
        mass = None if self.off or self.batch is None else self.batch.mass[layer]
        self.context.attending.decode(layer, q, kv, self.tables[layer], self.lengths, out, mass)

    def prefill_chunk(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, out: torch.Tensor
    ) -> None:
        kv, state, attending = self.context.device_pool.kv, chunk.request.kv, self.context.attending
        attention.store(kv, self.chunk_slots[id(chunk)][layer], k, v)
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        if chunk.start:
            keys, values = attention.gather(kv, state.table.blocks[layer], chunk.stop)
        if self.off:
            attending.prefill(layer, q, keys, values, chunk.start, out)
        else:
            lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
            attending.prefill(layer, q, keys, values, chunk.start, out, lse)
            self.count_chunk(state.scores, Seen(layer, q, k, keys, lse, chunk))
        if chunk.last:
            self._end_of_prompt(layer, state, chunk.stop)

    def counts(self) -> Hashable | None:
        return None if self.off else "attention received"

    def new_counts(self, prompt_tokens: int) -> torch.Tensor:
        g = self.geometry
        return torch.zeros((g.layers, g.kv_heads, prompt_tokens), device=g.device)

    def count_chunk(self, into: torch.Tensor, seen: Seen) -> None:
        sums = self.context.attending.column_sums(seen.q, seen.keys, seen.lse, seen.chunk.start)
        into[seen.layer, :, : seen.chunk.stop] += sums

    def adopt(self, request: Request, prompt: Prompt) -> None:
        self.open(request)
        state: State = request.kv
        state.table.copy_from(prompt.table)
        name = self.counts()
        if name is not None:
            state.scores.copy_(prompt.statistics[name])
        for layer in range(self.geometry.layers):
            self._end_of_prompt(layer, state, request.prompt_tokens)
        if not self.off:
            self._prompt_done(state)

    def _end_of_prompt(self, layer: int, state: State, prompt: int) -> None:
        """The last chunk's layer is done: keep what the rule keeps, in the first entries, and free the rest."""
        state.size = prompt
        if self.off:
            return
        heavy, recent = self.sizes(prompt)
        if self.options.rule == "masked":
            rule = rules.MaskedRule(heavy, recent)
            state.masked.append((rule, rule.update(state.scores[layer])))
            return
        keep = rules.keep_after_prompt(state.scores[layer], heavy, recent)
        size = keep.shape[-1]
        if size < prompt:
            kv, table = self.context.device_pool.kv, state.table
            where = torch.from_numpy(table.slots(layer, 0, prompt)).to(keep.device)
            k, v = attention.gather_slots(kv, where[keep])
            attention.store(kv, where[:size], k.transpose(0, 1), v.transpose(0, 1))
            table.resize(layer, size)
        state.positions[layer, :, :size] = keep.int()
        kept = state.scores[layer].gather(1, keep)
        state.scores[layer, :, :size] = kept
        state.size = size

    def _prompt_done(self, state: State) -> None:
        """Every layer has kept its own: give up the prompt's scores."""
        if self.options.rule != "masked":
            scores = state.scores.new_zeros((*state.scores.shape[:2], state.capacity))
            scores[:, :, : state.size] = state.scores[:, :, : state.size]
            state.scores = scores
        else:
            state.scores = state.scores[:, :, :0]
        self._count_aux(state, self._aux(state))

    def _decode_masked(self, layer: int, q: torch.Tensor, state: State, out: torch.Tensor) -> None:
        """One row of the simulation, in plain torch: nothing about it is meant to be fast."""
        g = self.geometry
        k, v = attention.gather(self.context.device_pool.kv, state.table.blocks[layer], state.size)
        rule, mask = state.masked[layer]
        logits = torch.einsum("hgd,hnd->hgn", q.view(g.kv_heads, g.group, g.head_dim).float(), k.float()) * g.scale
        hidden = logits.masked_fill(~mask[:, None], torch.finfo(torch.float32).min)
        probs = attention.softmax(hidden, self.context.attending.sinks[layer])
        out.copy_(torch.einsum("hgn,hnd->hgd", probs, v.float()).reshape(out.shape))
        state.masked[layer] = (rule, rule.update(probs.sum(dim=1)))

    def end_step(self, rows: Rows, chunks: list[Chunk]) -> None:
        done = [chunk.request for chunk in chunks if chunk.last]
        if not self.off:
            for request in done:
                self._prompt_done(request.kv)
        if rows:
            self._count_rows(rows)
        if self.look is not None:
            for request in (*rows.requests, *done):
                self.look(request)

    def _count_rows(self, rows: Rows) -> None:
        full = np.array([request.computed + 1 for request in rows.requests])
        if self.off:
            self.counted.add(rows.requests, attended=full, full=full)
        elif self.options.rule == "masked":
            states: list[State] = [request.kv for request in rows.requests]
            for state in states:
                self._count_aux(state, self._aux(state))
            seen = [np.minimum(full[i], sum(self.sizes(r.prompt_tokens))) for i, r in enumerate(rows.requests)]
            self.counted.add(rows.requests, attended=np.array(seen), full=full, kept=full)
        else:
            kept = self._evict(rows)
            self.counted.add(rows.requests, attended=self.sizes_now, full=full, kept=kept)

    def _evict(self, rows: Rows) -> np.ndarray:
        """Add this step's attention to the scores and make the holes that the next tokens fill.

        Returns the number of entries kept, [rows].
        """
        batch = self.batch
        assert batch is not None
        batch.scores += batch.mass
        sizes = np.array([self.sizes(r.prompt_tokens, r.computed + 1) for r in rows.requests])
        dropping = self.sizes_now > sizes.sum(axis=1)
        for request, drops in zip(rows.requests, dropping.tolist(), strict=True):
            request.kv.hole = drops
        if dropping.any():
            protected = np.array([rules.cache_rule(self.options.rule, int(h), int(r)) for h, r in sizes])
            guard = torch.from_numpy(protected).to(rows.positions.device)
            newest = rows.positions.int()
            victims = rules.victim(
                batch.scores, batch.positions, newest[None, :, None, None], guard[None, :, None, None]
            )
            if self.watch is not None:
                self.watch(Dropped(rows, dropping, victims, batch.scores, batch.positions, guard))
            self._open_holes(batch, victims, newest, dropping)
        kept: np.ndarray = self.sizes_now - dropping
        return kept

    @staticmethod
    def _open_holes(batch: _Batch, victims: torch.Tensor, newest: torch.Tensor, dropping: np.ndarray) -> None:
        """Hand the victims' entries [layers, rows, kv_heads] to the coming tokens: score 0, and their position."""
        at = victims[..., None]
        score = batch.scores.new_zeros(at.shape)
        position = (newest + 1)[None, :, None, None].expand(at.shape)
        if not dropping.all():
            # A row that drops nothing keeps what its "victim" has, and takes a fresh entry when the next token comes.
            stays = torch.from_numpy(~dropping).to(at.device)[None, :, None, None]
            score = torch.where(stays, batch.scores.gather(3, at), score)
            position = torch.where(stays, batch.positions.gather(3, at), position)
        batch.scores.scatter_(3, at, score)
        batch.positions.scatter_(3, at, position)
        batch.free.copy_(victims)

    def contents(self, request: Request, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a layer holds of a request past its prompt, oldest first.

        Returns positions [kv_heads, m], k and v [kv_heads, m, head_dim]; a hole is not among them.
        """
        state: State = request.kv
        entries = torch.arange(state.size)
        if self.off or self.options.rule == "masked":
            positions = entries.int().expand(self.geometry.kv_heads, -1)
        else:
            positions = state.positions[layer, :, : state.size].cpu()
        order = positions.argsort(dim=-1)
        # A hole has the coming token's position, the highest of all.
        order = order[:, : state.size - state.hole]
        where = torch.from_numpy(state.table.slots(layer, 0, state.size))
        k, v = attention.gather_slots(self.context.device_pool.kv, where[order].to(self.geometry.device))
        return positions.gather(1, order), k, v

    def report(self) -> dict[str, Any]:
        return {"simulated": int(self.options.rule == "masked" and not self.off)}
