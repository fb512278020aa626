"""A prompt is read once, and its state forked for every policy and budget that would have read it in the same way.

    branches = Branches(engine, {"h2o 0.2": ("h2o", {}, Budget(share=0.2)), "full": ("full", {}, Budget())})
    with branches.read(prompt) as read:
        for label in branches.labels:
            request = branches.fork(read, label, SamplingParams(max_tokens=8))
        while engine.has_work():
            engine.step()

All policies here compute a prompt's exact attention and choose what to keep when it ends. So one reader computes it and
counts, chunk by chunk, what any of them counts beside it (H2O the attention that each key receives, InfiniGen the
magnitudes of skewed queries); a fork copies the entries and goes through the policy's own end of the prompt. What comes
out is what the policy's own prefill would have given, but for rounding: `tests/engine/test_fork.py` holds it to that,
and the quality stage compares it with a served deployment. A first token is drawn from the reader's logits: it is the
prompt's, and no policy has a part in it, as in serving.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvstudy.engine import attention, policies, sampling
from kvstudy.engine.config import Budget
from kvstudy.engine.core import Engine
from kvstudy.engine.policies.base import Chunk, Options, Policy, Prompt, Seen
from kvstudy.engine.policies.full import Full
from kvstudy.engine.pool import BlockTable
from kvstudy.engine.request import Request, SamplingParams, Status
from kvstudy.engine.scheduler import RequestTooLarge

READER = "reader"


class Reader(Full):
    """Computes a prompt and keeps all of it, with whatever the policies behind it count."""

    name = READER
    counting: tuple[Policy, ...] = ()

    def open(self, request: Request) -> None:
        """Room for the prompt, and for what is counted of it."""
        table = BlockTable(self.context.device_pool, self.geometry.layers, request.prompt_tokens + 1)
        request.kv = Prompt(table, {p.counts(): p.new_counts(request.prompt_tokens) for p in self.counting})

    def prefill_chunk(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, out: torch.Tensor
    ) -> None:
        """As `full` does, and each policy counts."""
        kv, read = self.context.device_pool.kv, chunk.request.kv
        attention.store(kv, self.chunk_slots[id(chunk)][layer], k, v)
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        if chunk.start:
            keys, values = attention.gather(kv, read.table.blocks[layer], chunk.stop)
        lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
        self.context.attending.prefill(layer, q, keys, values, chunk.start, out, lse)
        seen = Seen(layer, q, k, keys, lse, chunk)
        for policy in self.counting:
            policy.count_chunk(read.statistics[policy.counts()], seen)


class Branches:
    """Policies with budgets of their own in one engine, by label, and a reader for all of them."""

    def __init__(self, engine: Engine, wanted: Mapping[str, tuple[str, dict[str, Any], Budget]]) -> None:
        """`wanted` maps a label to a policy's name, options and budget. Raises as `policies.create` does."""
        self.engine = engine
        self.labels = tuple(wanted)
        for label, (name, options, budget) in wanted.items():
            engine.policies[label] = policies.create(name, replace(engine.context, budget=budget), options)
        reader = Reader(replace(engine.context, budget=Budget()), Options())
        reader.counting = tuple({p.counts(): p for p in map(engine.policies.get, wanted) if p and p.counts()}.values())
        engine.policies[READER] = reader

    def policy(self, label: str) -> Policy:
        """The policy behind a label."""
        return self.engine.policies[label]

    @contextmanager
    def read(self, prompt: list[int]) -> Iterator[Request]:
        """Compute a prompt; the request that comes out can be forked until the block ends.

        Other requests that run meanwhile go on.
        """
        engine = self.engine
        request = engine.submit(prompt, SamplingParams(max_tokens=2, ignore_eos=True, return_logits=True), READER)
        try:
            while request.in_prefill:
                if not engine.step() and not engine.scheduler.running:
                    raise RequestTooLarge(f"a prompt of {len(prompt)} tokens does not fit the pools now")
            engine.scheduler.running.remove(request)
            yield request
        finally:
            if not request.is_finished:
                if request.status is Status.RUNNING and request not in engine.scheduler.running:
                    engine.scheduler.running.append(request)
                engine.abort(request)

    def fork(self, read: Request, label: str, params: SamplingParams) -> Request:
        """A request that stands where `label`'s policy would be after the prompt, its first token drawn, running.

        Raises
        ------
        RequestTooLarge
            The pools cannot hold it now.
        NotImplementedError
            The policy cannot begin from a prompt that was read for others; the message says why.
        """
        engine = self.engine
        if (reason := self.policy(label).unforkable()) is not None:
            raise NotImplementedError(reason)
        request = engine.new_request(read.prompt, params, label)
        if not engine.scheduler.promise(request):
            raise RequestTooLarge(f"a prompt of {len(read.prompt)} tokens does not fit the pools now, with {label!r}")
        self.policy(label).adopt(request, read.kv)
        if engine.windows is not None:
            engine.windows.adopt(request, read)
        request.status = Status.RUNNING
        request.computed = len(read.prompt)
        engine.scheduler.running.append(request)
        engine.scheduler.prompt_done(request)
        request.admitted, request.prefilled = read.admitted, read.prefilled
        with torch.inference_mode():
            engine.accept([request], sampling.sample(read.logits[0][None], [request]))
        return request
