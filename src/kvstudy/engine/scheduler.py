"""Who runs in the next step: first come, first served, admitted by what the pools can promise.

`continuous`: every request past its prompt decodes one token a step, and up to `max_prefill_tokens` prompt
tokens ride along, so a long prompt stalls nobody; requests join as soon as they fit and leave when they are
done. `static`: a batch is formed from the queue when nothing runs, its prompts are computed one by one, then
all decode together, and nobody joins until the last of them is done (as the paper and the authors' forks do).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvstudy.engine.config import EngineConfig
from kvstudy.engine.policies.base import Chunk, Policy, Reservation
from kvstudy.engine.pool import BlockPool
from kvstudy.engine.request import Request, Status
from kvstudy.engine.windows import Windows


class RequestTooLarge(ValueError):
    """The request could never be admitted, however long it waited."""


@dataclass(slots=True)
class Plan:
    """One step: requests that decode a token, and parts of prompts."""

    decode: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decode or self.chunks)


class Scheduler:
    """Holds the queue and the running requests; moves requests between them, and their promises with them."""

    def __init__(
        self,
        config: EngineConfig,
        policies: dict[str, Policy],
        windows: Windows | None,
        device_pool: BlockPool,
        host_pool: BlockPool,
    ) -> None:
        self.config = config
        self.policies = policies
        self.windows = windows
        self.device_pool = device_pool
        self.host_pool = host_pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.peak_running = 0
        self.peak_waiting = 0
        self.queued: dict[str, int] = {"memory": 0, "seats": 0, "turn": 0}
        """Requests that a step left waiting, each once, by what the head of the queue was short of (`turn`: other
        prompts, or a static batch, went first).
        """
        self._short_of = "turn"

    def reset(self) -> None:
        """Begin the counts and peaks anew from what is queued and running now."""
        self.peak_running, self.peak_waiting = len(self.running), len(self.waiting)
        self.queued = dict.fromkeys(self.queued, 0)

    def check(self, request: Request) -> None:
        """Raises `RequestTooLarge` for a request that could never run."""
        need = self._need(request)
        for pool, nbytes in ((self.device_pool, need.device_peak_bytes), (self.host_pool, need.host_bytes)):
            if nbytes > pool.usable_bytes:
                asked = f"{request.prompt_tokens} prompt and {request.params.max_tokens} output tokens"
                raise RequestTooLarge(
                    f"{asked} need {nbytes:,} bytes of {pool.tier} KV memory with policy {request.policy!r}; "
                    f"the pool has {pool.usable_bytes:,}"
                )

    def _need(self, request: Request) -> Reservation:
        """What the policy and the sliding-window layers need for a request."""
        size = (request.prompt_tokens, request.params.max_tokens)
        need = self.policies[request.policy].reserve(*size)
        if self.windows is None:
            return need
        rings = self.windows.bytes_for(*size)
        return Reservation(need.device_prefill_bytes + rings, need.device_bytes + rings, need.host_bytes)

    def add(self, request: Request) -> None:
        """Queue a request that `check` has passed."""
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """Choose the next step. An empty plan means that there is nothing to do."""
        self._short_of = "turn"
        plan = self._static() if self.config.scheduler == "static" else self._continuous()
        for request in reversed(self.waiting):
            if request.has_waited:
                break  # and so have all before it
            request.has_waited = True
            self.queued[self._short_of] += 1
        self.peak_running = max(self.peak_running, len(self.running))
        self.peak_waiting = max(self.peak_waiting, len(self.waiting))
        return plan

    def _continuous(self) -> Plan:
        plan = Plan(decode=[r for r in self.running if not r.in_prefill])
        left = self.config.max_prefill_tokens
        for request in self.running:
            if request.in_prefill and left:
                left -= self._chunk(plan, request, left)
        while left and (admitted := self._admit()) is not None:
            plan.admitted.append(admitted)
            left -= self._chunk(plan, admitted, left)
        return plan

    def _static(self) -> Plan:
        plan = Plan()
        if not self.running:
            while (request := self._admit()) is not None:
                plan.admitted.append(request)
        for request in self.running:
            if request.in_prefill:
                self._chunk(plan, request, self.config.max_prefill_tokens)
                return plan
        plan.decode = list(self.running)
        return plan

    def _chunk(self, plan: Plan, request: Request, most: int) -> int:
        """Plan a part of a prompt; returns how much of `most` it uses up."""
        length = left = request.prompt_tokens - request.computed
        if self.config.prefill != "full_matrix":  # its prompts are computed whole, one by one
            length = min(most, left)
        plan.chunks.append(Chunk(request, request.computed, length, length == left))
        return min(most, length) if self.config.prefill != "full_matrix" else most

    def _admit(self) -> Request | None:
        """Move the head of the queue to the running requests, if its promise can be made; nobody overtakes it."""
        if not self.waiting:
            return None
        request = self.waiting[0]
        if len(self.running) >= self.config.max_num_seqs:
            self._short_of = "seats"
            return None
        if not self.promise(request):
            self._short_of = "memory"
            return None
        self.waiting.popleft()
        request.status = Status.RUNNING
        self.policies[request.policy].open(request)
        if self.windows is not None:
            self.windows.open(request)
        self.running.append(request)
        return request

    def promise(self, request: Request) -> bool:
        """Promise a request what it needs; False, and nothing promised, where the pools do not have it now."""
        need = self._need(request)
        if not self.device_pool.reserve(need.device_peak_bytes):
            return False
        if not self.host_pool.reserve(need.host_bytes):
            self.device_pool.unreserve(need.device_peak_bytes)
            return False
        request.reserved = (need.device_peak_bytes, need.host_bytes)
        return True

    def prompt_done(self, request: Request) -> None:
        """Take back what was promised for the prompt alone."""
        need = self._need(request)
        self.device_pool.unreserve(request.reserved[0] - need.device_bytes)
        request.reserved = (need.device_bytes, need.host_bytes)

    def finish(self, request: Request) -> None:
        """Remove a request, running or waiting, and give back all that it holds."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.policies[request.policy].close(request)
            if self.windows is not None:
                self.windows.close(request)
            self.device_pool.unreserve(request.reserved[0])
            self.host_pool.unreserve(request.reserved[1])
            request.reserved = (0, 0)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.status = Status.FINISHED
