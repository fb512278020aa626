"""The engine: schedule, one packed forward, sample, again.

    engine = Engine(EngineConfig(model_dir=...))
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=8))
    while engine.has_work():
        for output in engine.step():
            ...

Everything here runs in one thread; `server` gives it one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvstudy.engine import attention, kernels, policies, sampling
from kvstudy.engine.attending import Attending, full_matrix_bytes
from kvstudy.engine.config import EngineConfig
from kvstudy.engine.link import Link
from kvstudy.engine.model import Layers, Model
from kvstudy.engine.parallel import Group, Shard
from kvstudy.engine.policies.base import Chunk, Context, Policy, Rows
from kvstudy.engine.pool import BlockPool
from kvstudy.engine.request import Request, SamplingParams
from kvstudy.engine.scheduler import Plan, Scheduler
from kvstudy.engine.text import Detokenizer
from kvstudy.engine.windows import Windows


@dataclass(slots=True)
class Output:
    """What a step gave a request: a token, the text it adds, and why it was the last, if it was."""

    request: Request
    token: int
    text: str
    finish_reason: str | None


@dataclass(slots=True)
class StepRecord:
    """What happened in a step, by request id: for tests and for looking."""

    step: int
    decoded: list[int]
    chunks: list[tuple[int, int, int]]
    """(id, start, length)"""
    admitted: list[int]
    finished: list[int]


@dataclass(slots=True)
class Counters:
    """Totals since the start or the last `reset`."""

    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    workspace_peak_bytes: int = 0


@dataclass(slots=True)
class _Part:
    """One policy's share of a step's packed tokens: its rows come first, then its chunks."""

    policy: Policy
    rows: Rows
    rows_at: slice
    chunks: list[tuple[Chunk, slice]]


class _Routes:
    """Who answers for each of the model's layers, and under which number."""

    def __init__(self, layers: Layers) -> None:
        self.policy = {layer: at for at, layer in enumerate(layers.full)}
        self.window = {layer: at for at, layer in enumerate(layers.sliding)}
        # A policy's layer l + 1 is guessed at from the input of the layer right before it, which may be a sliding one.
        self.input = {layer - 1: at - 1 for layer, at in self.policy.items() if at > 0}


class _StepAttention:
    """The step's `Attend`: hands each segment of the packed batch to its policy, or to the windows."""

    def __init__(self, parts: list[_Part], routes: _Routes, windows: Windows | None) -> None:
        self.parts = parts
        self.routes = routes
        self.windows = windows
        self.wants_input = any(part.policy.wants_attention_input and part.rows for part in parts)

    def attention_input(self, layer: int, hidden: torch.Tensor) -> None:
        if (at := self.routes.input.get(layer)) is None:
            return
        for part in self.parts:
            if part.policy.wants_attention_input and part.rows:
                part.policy.on_attention_input(at, hidden[part.rows_at], part.rows)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self.windows is not None and layer in self.routes.window:
            self.windows.attend(self.routes.window[layer], q, k, v, out)
            return out
        number = self.routes.policy[layer]
        for part in self.parts:
            if part.rows:
                at = part.rows_at
                part.policy.decode(number, q[at], k[at], v[at], part.rows, out[at])
            for chunk, at in part.chunks:
                part.policy.prefill_chunk(number, q[at], k[at], v[at], chunk, out[at])
        return out


class Engine:
    """A model, its pools, its policies and its scheduler."""

    def __init__(self, config: EngineConfig, tokenizer: Any = None) -> None:
        """Load the model and allocate the pools. `tokenizer` is needed for stop strings and text only.

        Raises `ModelMissing`, `UnknownPolicy` or `WrongOptions`.
        """
        wanted = {config.policy: config.policy_options} | config.other_policies
        for name, options in wanted.items():
            policies.check(name, options)  # before the model is loaded, which takes a while
        if config.cores:
            os.sched_setaffinity(0, config.cores)
            torch.set_num_threads(len(config.cores))
        attention.use_kernels(config.use_kernels)
        if config.use_kernels and (lib := kernels.library()) is not None:
            lib.threads = torch.get_num_threads()
        self.config = config
        self.tokenizer = tokenizer
        self.group = Group(config.tensor_parallel, torch.device(config.device)) if config.tensor_parallel > 1 else None
        self.model = Model(config)
        geometry = self.model.geometry
        self.device_pool = self._pool("device", config.kv_memory_bytes // config.tensor_parallel, self.model.device)
        self.host_pool = self._pool("host", config.host_kv_memory_bytes // config.tensor_parallel, torch.device("cpu"))
        self.link = Link(config.link_gbps)
        layers = self.model.layers
        self.routes = _Routes(layers)
        self.windows: Windows | None = None
        if layers.sliding:
            sinks = [layers.sinks[layer] for layer in layers.sliding]
            self.windows = Windows(self.device_pool, layers.window, geometry.scale, sinks)
        self.context = context = Context(
            geometry=geometry,
            budget=config.budget,
            device_pool=self.device_pool,
            host_pool=self.host_pool,
            link=self.link,
            attention_module=self.model.full_attention,
            rotate=self.model.rotate,
            project_q=self.model.project_q,
            attending=Attending(geometry.scale, [layers.sinks[layer] for layer in layers.full], config.prefill),
            shard=self.group.shard() if self.group is not None else Shard(),
            model_dir=str(config.model_dir),
            threads=torch.get_num_threads(),
        )
        self.policies = {name: policies.create(name, context, options) for name, options in wanted.items()}
        self.scheduler = Scheduler(config, self.policies, self.windows, self.device_pool, self.host_pool)
        self.max_model_len = min(config.max_model_len or geometry.max_positions, geometry.max_positions)
        self.vocab_size: int = self.model.config.vocab_size
        self.counters = Counters()
        self.trace: list[StepRecord] | None = None
        """Set to a list to have every step recorded."""

    def _pool(self, tier: str, nbytes: int, device: torch.device) -> BlockPool:
        g = self.model.geometry
        return BlockPool(
            tier,
            nbytes,
            kv_heads=g.kv_heads,
            head_dim=g.head_dim,
            block_size=self.config.block_size,
            dtype=g.dtype,
            device=device,
            pinned=tier == "host" and g.device.type == "cuda",
        )

    # -- requests
    # --------------------------------------------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Raise `ValueError`, with a line for the user, for a request that is wrong in itself."""
        if not request.prompt:
            raise ValueError("the prompt is empty: at least one token is needed")
        if request.policy not in self.policies:
            raise policies.UnknownPolicy(
                f"policy {request.policy!r} is not served here; there are: {', '.join(self.policies)}"
            )
        if not all(0 <= token < self.vocab_size for token in request.prompt):
            raise ValueError(f"the prompt has token ids outside 0..{self.vocab_size - 1}")
        if request.params.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        total = request.prompt_tokens + request.params.max_tokens
        if total > self.max_model_len:
            raise ValueError(
                f"this model's maximum context length is {self.max_model_len} tokens; "
                f"{request.prompt_tokens} in the prompt and {request.params.max_tokens} for the output were asked"
            )

    def new_request(self, prompt: Sequence[int], params: SamplingParams, policy: str | None = None) -> Request:
        """A checked request that is not queued yet; the server does both steps in different threads."""
        request = Request(list(prompt), params, policy or self.config.policy)
        self.validate(request)
        self.scheduler.check(request)
        if self.tokenizer is not None:
            request.text = Detokenizer(self.tokenizer, request.prompt, params.stop)
        elif params.stop:
            raise ValueError("stop strings need a tokenizer")
        return request

    def submit(self, prompt: Sequence[int], params: SamplingParams, policy: str | None = None) -> Request:
        """Queue a prompt. Raises `ValueError` for one that could never run."""
        request = self.new_request(prompt, params, policy)
        self.add(request)
        return request

    def add(self, request: Request) -> None:
        """Queue a request that `new_request` made."""
        self._tell("add", (request.id, request.prompt, request.params, request.policy))
        self.scheduler.add(request)

    def _tell(self, command: str, argument: Any = None) -> None:
        """Have the other processes of a shared model do the same."""
        if self.group is not None and self.group.leads:
            self.group.tell(command, argument)

    def stop(self) -> None:
        """Let the other processes of a shared model end."""
        self._tell("stop")

    def abort(self, request: Request) -> None:
        """End a request where it stands; its KV is given back at once. Nothing happens to one that has ended."""
        if not request.is_finished:
            self._tell("abort", request.id)
            self._finish(request, "abort")

    def has_work(self) -> bool:
        """Whether a step would do anything, or wait for something that runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    # -- a step
    # ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Run one step; returns what came of it, in the order of the batch.

        Empty where there was nothing to do, or where only a part of a prompt was computed.
        """
        self._tell("step")
        begin = time.perf_counter()
        plan = self.scheduler.schedule()
        if not plan:
            return []
        now = time.monotonic()
        for request in plan.admitted:
            request.admitted = now
        parts, ids, positions = self._pack(plan)
        for part in parts:
            part.policy.begin_step(part.rows, [chunk for chunk, _ in part.chunks])
        if self.windows is not None:
            self._begin_windows(self.windows, parts)
        sampled, keep, read = _sampled(parts)
        logits = self.model.forward(ids, positions, _StepAttention(parts, self.routes, self.windows), keep)
        for part in parts:
            part.policy.end_step(part.rows, [chunk for chunk, _ in part.chunks])
        self._advance(parts)
        at = len(sampled)
        for chunk, count in read:
            sampling.read_prompt(logits[at : at + count], chunk.request, chunk.start + 1)
            at += count
        outputs = self.accept(sampled, self._sample(logits[: len(sampled)], sampled) if sampled else [])
        self._count(plan, len(ids), len(sampled), time.perf_counter() - begin)
        if self.trace is not None:
            self.trace.append(
                StepRecord(
                    step=self.counters.steps,
                    decoded=[r.id for r in plan.decode],
                    chunks=[(c.request.id, c.start, c.length) for c in plan.chunks],
                    admitted=[r.id for r in plan.admitted],
                    finished=[o.request.id for o in outputs if o.finish_reason],
                )
            )
        return outputs

    def _pack(self, plan: Plan) -> tuple[list[_Part], torch.Tensor, torch.Tensor]:
        """Lay the step's tokens side by side, policy by policy."""
        device = self.model.device
        ids: list[int] = []
        positions: list[int] = []
        parts = []
        for name, policy in self.policies.items():
            decoding = [r for r in plan.decode if r.policy == name]
            chunks = [c for c in plan.chunks if c.request.policy == name]
            if not decoding and not chunks:
                continue
            first = len(ids)
            ids += [r.output[-1] for r in decoding]
            positions += [r.computed for r in decoding]
            rows = Rows(decoding, torch.tensor(positions[first:], dtype=torch.int64, device=device))
            part = _Part(policy, rows, slice(first, len(ids)), [])
            for chunk in chunks:
                part.chunks.append((chunk, slice(len(ids), len(ids) + chunk.length)))
                ids += chunk.request.prompt[chunk.start : chunk.stop]
                positions += range(chunk.start, chunk.stop)
            parts.append(part)
        return parts, torch.tensor(ids, device=device), torch.tensor(positions, device=device)

    def _sample(self, logits: torch.Tensor, requests: list[Request]) -> list[int]:
        """A token a request; where several processes share the model, what the first of them draws."""
        if self.group is None:
            return sampling.sample(logits, requests)
        drawn = sampling.sample(logits, requests) if self.group.leads else None
        return self.group.tokens(drawn, len(requests))

    @staticmethod
    def _begin_windows(windows: Windows, parts: list[_Part]) -> None:
        requests = [request for part in parts for request in part.rows.requests]
        at = [i for part in parts for i in range(part.rows_at.start, part.rows_at.stop)]
        windows.begin_step(requests, at, [placed for part in parts for placed in part.chunks])

    def _advance(self, parts: list[_Part]) -> None:
        for part in parts:
            for request in part.rows.requests:
                request.computed += 1
            for chunk, _ in part.chunks:
                chunk.request.computed = chunk.stop
                self.counters.prompt_tokens += chunk.length
                if chunk.last:
                    chunk.request.prefilled = time.monotonic()
                    self.scheduler.prompt_done(chunk.request)

    def accept(self, requests: list[Request], tokens: list[int]) -> list[Output]:
        """Give each request its next token; ends those that are done."""
        outputs = []
        for request, token in zip(requests, tokens, strict=True):
            forced = request.forced_token is not None
            request.output.append(token)
            params = request.params
            reason = None
            if token in self.model.eos_ids and not params.ignore_eos and not forced:
                reason = "stop"
            elif len(request.output) >= params.max_tokens:
                reason = "length"
            text = ""
            if (detokenizer := request.text) is not None:
                if reason != "stop":
                    text = detokenizer.add(token)
                if reason and not detokenizer.stopped:
                    text += detokenizer.flush()
                if detokenizer.stopped:
                    reason = "stop"
            outputs.append(Output(request, token, text, reason))
            if reason:
                self._finish(request, reason)
        return outputs

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request)
        request.finish_reason = reason
        request.finished = time.monotonic()
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1

    def _count(self, plan: Plan, tokens: int, sampled: int, seconds: float) -> None:
        self.counters.steps += 1
        self.counters.step_seconds += seconds
        self.counters.generation_tokens += sampled
        longest = max((chunk.stop for chunk in plan.chunks), default=0)
        used = self.model.workspace_bytes(tokens, sampled, longest)
        if self.config.prefill == "full_matrix" and longest:
            g = self.model.geometry
            used += full_matrix_bytes(longest, g.heads, g.head_dim, g.dtype.itemsize)
        self.counters.workspace_peak_bytes = max(self.counters.workspace_peak_bytes, used)

    # -- in-process use
    # --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        policy: str | None = None,
        on_step: Callable[[list[Output]], None] | None = None,
    ) -> list[Request]:
        """Run prompts (token ids) to their end, all queued at once; returns the requests in the order given."""
        prompts = list(prompts)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        requests = [self.submit(prompt, p, policy) for prompt, p in zip(prompts, each, strict=True)]
        while self.has_work():
            outputs = self.step()
            if on_step is not None:
                on_step(outputs)
        return requests

    def reset(self) -> None:
        """Begin the counters and peaks anew; what is running goes on."""
        self._tell("reset")
        self.counters = Counters()
        if self.model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.scheduler.reset()
        for pool in (self.device_pool, self.host_pool):
            pool.reset_peaks()
        for policy in self.policies.values():
            policy.counted.reset()
        self.link.reset()


def _sampled(parts: list[_Part]) -> tuple[list[Request], torch.Tensor, list[tuple[Chunk, int]]]:
    """Whose logits are wanted, and where in the packed batch they are.

    First the requests that get a token from this step, then the chunks whose own tokens are reported, with how many
    rows each has: a prompt's last token says nothing of the prompt.
    """
    requests: list[Request] = []
    keep: list[int] = []
    read: list[tuple[Chunk, int]] = []
    also: list[int] = []
    for part in parts:
        requests += part.rows.requests
        keep += range(part.rows_at.start, part.rows_at.stop)
        for chunk, at in part.chunks:
            if chunk.last:
                requests.append(chunk.request)
                keep.append(at.stop - 1)
            if chunk.request.params.prompt_logprobs:
                read.append((chunk, chunk.length - chunk.last))
                also += range(at.start, at.stop - chunk.last)
    device = parts[0].rows.positions.device
    return requests, torch.tensor(keep + also, dtype=torch.int64, device=device), read


def follow(engine: Engine) -> None:
    """Do what rank 0 does until it stops; the life of every other process."""
    assert engine.group is not None
    known: dict[int, Request] = {}
    while True:
        command, argument = engine.group.hear()
        if command == "step":
            engine.step()
        elif command == "add":
            number, prompt, params, policy = argument
            known[number] = request = engine.new_request(prompt, params, policy)
            engine.add(request)
        elif command == "abort":
            engine.abort(known[argument])
        elif command == "reset":
            engine.reset()
        else:
            return
        known = {number: request for number, request in known.items() if not request.is_finished}
