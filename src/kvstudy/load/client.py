"""The open-loop client: one process that sends requests at absolute times, whatever becomes of earlier ones.

Three things make it trustworthy. Requests are due at times drawn ahead, and nothing (no semaphore, no pool
limit) makes one wait for another; what the client is late by is recorded (`sent_s - scheduled_s`). Tokens are
counted from the server's own cumulative usage, as differences between chunks, never by tokenising again. And
it is cheap: HTTP/1.1 and server-sent events are read by a hand-written asyncio protocol over a pool of
kept-alive connections, because at thousands of requests a second a general client's own cost would be
measured instead of the server's.

In an open loop a request's clock starts when it is due; in a closed loop, when its slot is free. After an
error a slot of a closed loop stays empty for `CLOSED_BACKOFF_S`, so that a server that refuses does not burn
the workload.

Classes of error (the part of `error` before the colon): `http <status>`, `refused` (`sent_s` is the attempt),
`reset` (before any byte of the answer), `stream cut`, `error in stream`, `malformed`, `timeout`, `censored`
(still running when the drain ended), `server died`, `not sent` (the load was broken off before it was due).
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvstudy.load.connection import Connection
from kvstudy.load.flights import Flight, Request, frame_of

#: A kept-alive connection idle for longer is not trusted (uvicorn closes its own after 5 s).
IDLE_LIMIT_S = 3.0
CLOSED_BACKOFF_S = 0.1
_SWEEP_S = 0.1
_POLL_S = 0.25
_PREOPEN_LIMIT = 2048


@dataclass(frozen=True)
class Plan:
    """What to send: `times` (seconds, ascending, `[len(requests)]`) for an open loop, else `concurrency`.

    `timeout_s` is a request's own bound, from when it is due; `drain_s` bounds the wait after `duration_s`
    for those still running.
    """

    requests: Sequence[Request]
    duration_s: float
    timeout_s: float
    drain_s: float
    times: npt.NDArray[np.float64] | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if (self.times is None) == (self.concurrency is None):
            raise ValueError("a plan has either times (open loop) or a concurrency (closed loop)")
        if self.times is not None:
            if len(self.times) != len(self.requests):
                raise ValueError(f"{len(self.times)} times for {len(self.requests)} requests")
            if len(self.times) and float(np.diff(self.times, prepend=0.0).min()) < 0:
                raise ValueError("times must be ascending and not negative")


@dataclass(frozen=True)
class Bound:
    """Breaks a load off when more than `allowed` requests have missed a bound (seconds) for good."""

    allowed: int
    ttft_s: float | None = None
    e2el_s: float | None = None

    def missed(self, flight: Flight, now: float) -> bool:
        """Whether the request has missed a bound, or would if its next token came now."""
        if flight.status and flight.status != "ok":
            return True
        first = flight.chunk_s[0] if flight.chunk_s else now
        last = (flight.chunk_s[-1] if flight.chunk_s else now) if flight.status else now
        return (self.ttft_s is not None and first - flight.scheduled > self.ttft_s) or (
            self.e2el_s is not None and last - flight.scheduled > self.e2el_s
        )


@dataclass
class Progress:
    """How far a load is, for a person to watch."""

    elapsed_s: float = 0.0
    duration_s: float = 0.0
    planned: int | None = None
    sent: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0


@dataclass
class Result:
    """What came of a load. Times of `frame` count from `zero` (`time.monotonic`)."""

    frame: pd.DataFrame
    zero: float
    load_s: float
    drain_s: float
    aborted: str | None = None
    exhausted: bool = False  # a closed loop used up every drawn request before its time was over
    retried: int = 0  # sent again because a kept-alive connection had been closed by the server
    notes: list[str] = field(default_factory=list)


def completion_body(
    model: str,
    prompt: Sequence[int] | npt.NDArray[np.int32],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    ignore_eos: bool = True,
) -> bytes:
    """JSON body of a streaming `/v1/completions` request with token ids and usage in every chunk."""
    ids = np.asarray(prompt).tolist()
    return _body({"model": model, "prompt": ids}, max_tokens, temperature, ignore_eos)


def chat_body(model: str, text: str, max_tokens: int, *, temperature: float = 0.0, ignore_eos: bool = True) -> bytes:
    """JSON body of a streaming `/v1/chat/completions` request with one user message."""
    return _body({"model": model, "messages": [{"role": "user", "content": text}]}, max_tokens, temperature, ignore_eos)


def _body(start: dict[str, Any], max_tokens: int, temperature: float, ignore_eos: bool) -> bytes:
    start |= {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if ignore_eos:
        start["ignore_eos"] = True
    return json.dumps(start, separators=(",", ":")).encode()


def run(
    plan: Plan,
    url: str,
    *,
    path: str = "/v1/completions",
    api_key: str | None = None,
    abort: Callable[[], str | None] | None = None,
    progress: Callable[[Progress], None] | None = None,
    progress_every_s: float = 5.0,
    bound: Bound | None = None,
) -> Result:
    """Offer a load to `url` (http only) and return a row a request, in order of index.

    `abort` is asked four times a second; a reason ends the load at once: what is running becomes `server
    died`, what was not due yet `not sent`. With a `bound`, so does a load of which too many requests have
    missed it (`aborted` is then "hopeless", and what is running is `censored`). Always ends within
    `duration_s + min(drain_s, timeout_s)` and a second.
    """
    _raise_file_limit()
    client = _Client(plan, url, path, api_key, abort, progress, progress_every_s, bound)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            return runner.run(client.run())
        finally:
            gc.enable()
            gc.unfreeze()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    return factory


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else hard
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Client:
    """The event loop's side: what is due, what is running, what has come back."""

    def __init__(
        self,
        plan: Plan,
        url: str,
        path: str,
        api_key: str | None,
        abort: Callable[[], str | None] | None,
        progress: Callable[[Progress], None] | None,
        progress_every_s: float,
        bound: Bound | None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"the client speaks plain http, not {url!r}")
        self._plan = plan
        self._host = parts.hostname
        self._port = parts.port or 80
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self.head = (
            f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\n{key}Content-Length: "
        ).encode()
        self._abort = abort
        self._progress = progress
        self._every = progress_every_s
        self._bound = bound
        self._missed = 0  # among those that are over, up to self._counted
        self._counted = 0
        self.idle: deque[Connection] = deque()
        self.retried = 0
        self._running: dict[int, Flight] = {}  # in order of scheduling, so that the oldest come first
        self._over: list[Flight] = []
        self._next = 0
        self._sent_count = 0
        self._failed = 0
        self._zero = 0.0
        self._end = 0.0  # of issuing, absolute
        self._issuing = True
        self._aborted: str | None = None
        self._exhausted = False
        self._times: list[float] = []
        self._closing = False

    # --- the run ---------------------------------------------------------------------------------

    async def run(self) -> Result:
        plan = self._plan
        self._loop = asyncio.get_running_loop()
        self._drained = asyncio.Event()
        await self._preopen()
        # A little ahead, so that the first request is not late by the work of starting.
        self._zero = time.monotonic() + 0.02
        self._end = self._zero + plan.duration_s
        if plan.times is not None:
            self._times = (plan.times + self._zero).tolist()
            self._at(self._times[0] if self._times else self._end, self._dispatch)
        else:
            self._at(self._zero, self._fill)
        self._at(self._end, self._stop_issuing)
        watch = asyncio.create_task(self._watch())
        try:
            await self._drained.wait()
        finally:
            watch.cancel()
            self._closing = True
            for flight in list(self._running.values()):
                self._give_up(flight, "censored", "censored: broken off")
            for connection in self.idle:
                connection.drop()
        over = time.monotonic()
        await asyncio.sleep(0)
        ended = min(over, self._end) if self._aborted is None else over
        return Result(
            frame=self._frame(),
            zero=self._zero,
            load_s=max(0.0, ended - self._zero),
            drain_s=max(0.0, over - max(ended, self._zero)),
            aborted=self._aborted,
            exhausted=self._exhausted,
            retried=self.retried,
        )

    def _at(self, when: float, callback: Callable[[], None]) -> None:
        """Call at a time of `time.monotonic`; the loop's own clock may have another zero and coarser ticks."""
        self._loop.call_later(max(0.0, when - time.monotonic()), callback)

    async def _preopen(self) -> None:
        """Open connections ahead where many requests are due at once: connecting is dearer than sending."""
        plan = self._plan
        if plan.concurrency is not None:
            wanted = plan.concurrency
        elif plan.times is not None and len(plan.times):
            # The most that fall due within 10 ms, and some for a server that takes its time.
            ahead = np.searchsorted(plan.times, plan.times + 0.01, side="right") - np.arange(len(plan.times))
            wanted = int(ahead.max()) + 8
        else:
            return
        wanted = min(wanted, _PREOPEN_LIMIT) - len(self.idle)
        for start in range(0, wanted, 64):
            made = await asyncio.gather(
                *(
                    self._loop.create_connection(lambda: Connection(self), self._host, self._port)
                    for _ in range(min(64, wanted - start))
                ),
                return_exceptions=True,
            )
            now = time.monotonic()
            for item in made:
                if isinstance(item, BaseException):
                    return  # the server refuses: each request will find out, and be counted
                item[1].idle_since = now
                self.idle.append(item[1])

    def _dispatch(self) -> None:
        """Send everything that is due, then sleep until the next."""
        times = self._times
        count = len(times)
        requests = self._plan.requests
        while self._issuing and self._next < count:
            due = times[self._next]
            if due > time.monotonic():
                self._at(due, self._dispatch)
                return
            flight = Flight(requests[self._next], due)
            self._next += 1
            self._issue(flight)

    def _fill(self) -> None:
        for _ in range(self._plan.concurrency or 0):
            self._next_closed()

    def _next_closed(self) -> None:
        now = time.monotonic()
        if not self._issuing or now >= self._end:
            return
        if self._next >= len(self._plan.requests):
            self._exhausted = True
            self._stop_issuing()
            return
        flight = Flight(self._plan.requests[self._next], now)
        self._next += 1
        self._issue(flight)

    def _issue(self, flight: Flight) -> None:
        self._running[flight.request.index] = flight
        self._sent_count += 1
        now = time.monotonic()
        while self.idle:
            connection = self.idle.pop()
            transport = connection.transport
            if transport is None or transport.is_closing():
                continue
            if now - connection.idle_since > IDLE_LIMIT_S:
                connection.drop()
                continue
            connection.send(flight)
            return
        self.open(flight)

    def open(self, flight: Flight) -> None:
        """Send a request on a connection of its own making."""
        flight.connection = None
        flight.connector = self._loop.create_task(self._connect(flight))

    def rest(self, connection: Connection) -> None:
        """Keep a connection for a later request."""
        self.idle.append(connection)

    async def _connect(self, flight: Flight) -> None:
        def protocol() -> Connection:
            connection = Connection(self)
            connection.flight = flight
            return connection

        attempted = time.monotonic()
        try:
            await self._loop.create_connection(protocol, self._host, self._port)
        except OSError as error:
            if not flight.status:
                flight.sent = attempted  # the client did its part in time; the server would not have it
                self.finished(flight, "error", f"refused: {error.strerror or error}", time.monotonic())
        finally:
            flight.connector = None

    def finished(self, flight: Flight, status: str, error: str | None, now: float) -> None:
        """A request is over; in a closed loop its slot is free."""
        if flight.status:
            return
        flight.status = status
        flight.error = error
        flight.finished = now
        flight.connection = None
        self._running.pop(flight.request.index, None)
        self._over.append(flight)
        if status != "ok":
            self._failed += 1
        if self._plan.concurrency is not None and self._issuing:
            if status == "ok":
                self._next_closed()
            else:
                self._loop.call_later(CLOSED_BACKOFF_S, self._next_closed)
        if not self._running and not self._issuing:
            self._drained.set()

    def _give_up(self, flight: Flight, status: str, error: str) -> None:
        connection, connector = flight.connection, flight.connector
        self.finished(flight, status, error, time.monotonic())
        if connector is not None:
            connector.cancel()
        if connection is not None:
            connection.flight = None
            connection.drop()

    def _stop_issuing(self) -> None:
        if self._times and self._next < len(self._times) and self._aborted is None:
            # The last arrivals may be due in this same tick of the loop; they are sent, not forgotten.
            self._dispatch()
            if self._next < len(self._times):
                self._at(self._times[-1], self._stop_issuing)
                return
        self._issuing = False
        if not self._running:
            self._drained.set()

    async def _watch(self) -> None:
        """Time-outs, the drain's end, a dead server, and news for whoever watches."""
        drain_until = self._end + min(self._plan.drain_s, self._plan.timeout_s)
        polled = reported = time.monotonic()
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            expired = []
            for flight in self._running.values():
                if now - flight.scheduled <= self._plan.timeout_s:
                    break
                expired.append(flight)
            for flight in expired:
                self._give_up(flight, "timeout", f"timeout: no end within {self._plan.timeout_s:g} s")
            if now > drain_until:
                self._issuing = False
                for flight in list(self._running.values()):
                    self._give_up(flight, "censored", "censored: still running when the drain ended")
                self._drained.set()
            if self._abort is not None and now - polled >= _POLL_S:
                polled = now
                reason = self._abort()
                if reason is not None and self._aborted is None:
                    self._aborted = reason
                    self._issuing = False
                    for flight in list(self._running.values()):
                        self._give_up(flight, "error", f"server died: {reason}")
                    self._drained.set()
            if self._bound is not None and self._hopeless(now):
                self._aborted = "hopeless"
                self._issuing = False
                for flight in list(self._running.values()):
                    self._give_up(flight, "censored", "censored: too many had missed the bound")
                self._drained.set()
            if self._progress is not None and now - reported >= self._every:
                reported = now
                self._progress(self._state(now))

    def _hopeless(self, now: float) -> bool:
        assert self._bound is not None
        if self._aborted is not None:
            return False
        for flight in self._over[self._counted :]:
            self._missed += self._bound.missed(flight, now)
        self._counted = len(self._over)
        running = sum(self._bound.missed(flight, now) for flight in self._running.values())
        return self._missed + running > self._bound.allowed

    def _state(self, now: float) -> Progress:
        return Progress(
            elapsed_s=max(0.0, now - self._zero),
            duration_s=self._plan.duration_s,
            planned=len(self._times) if self._plan.times is not None else None,
            sent=self._sent_count,
            done=len(self._over) - self._failed,
            failed=self._failed,
            in_flight=len(self._running),
        )

    def _frame(self) -> pd.DataFrame:
        zero = self._zero
        flights = list(self._over)
        if self._plan.times is not None:
            for position in range(self._next, len(self._times)):
                flight = Flight(self._plan.requests[position], self._times[position])
                flight.status = "error"
                flight.error = f"not sent: {self._aborted or 'the load was broken off'}"
                flights.append(flight)
        flights.sort(key=lambda flight: flight.request.index)
        return frame_of(flights, zero)
