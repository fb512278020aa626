"""Requests become batches: first come, first served, prompts of one length, no padding.

The oldest waiting request chooses the length and the temperature. With it go the next oldest of the same, up to
`max_batch` and to what `fits`. A batch that is not full starts once its oldest request has waited `max_wait_s`: only
what is known at that time decides. Nobody joins a batch that runs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

#: (kind, value, time): ("token", id, t), ("end", finish reason, t), ("error", message, t).
Event = tuple[str, Any, float]


class Refused(ValueError):
    """A request that the fork cannot serve: the reason, answered with status 400."""


class Request:
    """One prompt, and the events of its answer, timed from arrival.

    Parameters
    ----------
    prompt
        Token ids.
    max_tokens
        Output tokens at most, at least 1.
    eos
        Token id that ends the answer; None where it is ignored.
    temperature
        0 is greedy.
    arrived
        Seconds on the batcher's clock.
    """

    def __init__(self, prompt: list[int], max_tokens: int, eos: int | None, temperature: float, arrived: float) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.eos = eos
        self.temperature = temperature
        self.arrived = arrived
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None
        self.output: list[int] = []
        self.reason: str | None = None
        self.cancelled = False
        self.events: queue.Queue[Event] = queue.Queue()

    @property
    def bucket(self) -> tuple[int, float]:
        """What requests of one batch have in common."""
        return len(self.prompt), self.temperature

    @property
    def done(self) -> bool:
        """Whether it needs no more tokens."""
        return self.finished is not None or self.cancelled

    def take(self, token: int, now: float) -> None:
        """Hand it its next token; one that is done takes none."""
        if self.done:
            return
        if self.first_token is None:
            self.first_token = now
        self.output.append(token)
        self.events.put(("token", token, now))
        if self.eos is not None and token == self.eos:
            self.end("stop", now)
        elif len(self.output) >= self.max_tokens:
            self.end("length", now)

    def end(self, reason: str, now: float) -> None:
        """Finish it."""
        self.reason, self.finished = reason, now
        self.events.put(("end", reason, now))

    def fail(self, message: str, now: float) -> None:
        """End it with an error."""
        self.reason, self.finished = "error", now
        self.events.put(("error", message, now))


class Batcher:
    """The queue. `submit` from any thread, `next_batch` from the one that generates."""

    def __init__(
        self,
        max_batch: int,
        max_wait_s: float,
        fits: Callable[[Sequence[Request]], bool] = lambda batch: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_batch = max_batch
        self.max_wait_s = max_wait_s
        self.fits = fits
        self.clock = clock
        self.waiting: list[Request] = []
        self._changed = threading.Condition()

    def submit(self, request: Request) -> None:
        """Queue a request."""
        with self._changed:
            self.waiting.append(request)
            self._changed.notify()

    def next_batch(self, timeout_s: float | None = None) -> list[Request]:
        """The next batch, admitted now; waits for it, `timeout_s` at most, then answers an empty one."""
        give_up = None if timeout_s is None else self.clock() + timeout_s
        with self._changed:
            while True:
                batch, ready_at = self._form()
                now = self.clock()
                if batch and now >= ready_at:
                    for request in batch:
                        request.admitted = now
                        self.waiting.remove(request)
                    return batch
                until = [at for at in (ready_at if batch else None, give_up) if at is not None]
                if give_up is not None and now >= give_up:
                    return []
                self._changed.wait(max(0.0, min(until) - now) if until else None)

    def _form(self) -> tuple[list[Request], float]:
        """Who would go now, and from when on they may."""
        self.waiting = [request for request in self.waiting if not request.cancelled]
        batch: list[Request] = []
        full = False
        for request in self.waiting:
            if batch and request.bucket != batch[0].bucket:
                continue
            # The first one always goes: what does not fit alone was refused at the door.
            if batch and not self.fits([*batch, request]):
                full = True
                break
            batch.append(request)
            if len(batch) == self.max_batch:
                full = True
                break
        if not batch:
            return [], 0.0
        return batch, batch[0].arrived if full else batch[0].arrived + self.max_wait_s


class Totals:
    """What the server has counted since it started; peaks since the last reset. Units as the metrics' names say."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {
            name: 0.0
            for name in (
                *("attended_entries", "full_entries", "kept_entries", "moved_h2d", "moved_d2h"),
                *("prompt_tokens", "generation_tokens", "batches", "batch_seconds"),
            )
        }
        self.finished: dict[str, int] = {}
        self.running = 0
        self.running_peak = 0

    def add(self, name: str, value: float) -> None:
        """Count."""
        self.counts[name] += value

    def reset(self) -> None:
        """Peaks start anew."""
        self.running_peak = self.running


def serve_batch(batch: list[Request], loop: Any, totals: Totals, clock: Callable[[], float] = time.monotonic) -> None:
    """Run one batch through a generation loop and hand out its tokens as the loop yields them.

    `loop.run(prompts, gen_len, temperature, on_tokens)` calls `on_tokens` with a token a prompt, step by step, and
    stops early where it answers True. The batch decodes to its longest output; each request is released at its own
    last token.
    """
    begun = clock()
    totals.running = len(batch)
    totals.running_peak = max(totals.running_peak, len(batch))

    def on_tokens(tokens: Sequence[int]) -> bool:
        now = clock()
        for request, token in zip(batch, tokens):  # noqa: B905  strict= came with Python 3.10
            request.take(int(token), now)
        totals.running = sum(not request.done for request in batch)
        return totals.running == 0

    try:
        loop.run([r.prompt for r in batch], max(r.max_tokens for r in batch), batch[0].temperature, on_tokens)
    finally:
        now = clock()
        for request in batch:
            if not request.done:
                request.fail("the generation loop ended before this request's last token", now)
            reason = request.reason or "abort"
            totals.finished[reason] = totals.finished.get(reason, 0) + 1
        totals.running = 0
        totals.add("prompt_tokens", sum(len(r.prompt) for r in batch))
        totals.add("generation_tokens", sum(len(r.output) for r in batch))
        totals.add("batches", 1)
        totals.add("batch_seconds", now - begun)
