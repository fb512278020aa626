"""One kept-alive HTTP/1.1 connection of the client, and the server-sent events that it reads.

Hand-written because at thousands of requests a second a general client's own cost would be measured instead of the
server's (`benchmarks/client.py` has both). Whatever a broken server sends ends its one request only.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvstudy.load.flights import TEXT_LIMIT, Flight

try:
    import orjson

    _loads: Callable[[bytes], Any] = orjson.loads
except ImportError:  # pragma: no cover - a faster parser where there is one
    _loads = json.loads


class Owner(Protocol):
    """Whose connection it is: it gets back what is over, and the connection for its next request."""

    head: bytes  # of every request, up to the number of its Content-Length
    retried: int

    def open(self, flight: Flight) -> None:
        """Send a request on a new connection."""

    def finished(self, flight: Flight, status: str, error: str | None, now: float) -> None:
        """A request is over."""

    def rest(self, connection: Connection) -> None:
        """A connection has nothing to do."""


_HEAD, _CHUNKED, _LENGTH, _TO_CLOSE = range(4)


class Connection(asyncio.Protocol):
    """One kept-alive connection: writes a request, reads its answer, gives itself back."""

    __slots__ = (
        "_body",
        "_buffer",
        "_events",
        "_left",
        "_owner",
        "_state",
        "_status",
        "flight",
        "idle_since",
        "keep",
        "served",
        "transport",
    )

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.transport: asyncio.Transport | None = None
        self.flight: Flight | None = None
        self.served = 0
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._state = _HEAD
        self._status = 0
        self._buffer = b""
        self._events = b""
        self._body = b""
        self._left = 0
        self.keep = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open: the request that it was opened for goes out."""
        self.transport = transport  # type: ignore[assignment]
        if self.flight is not None:
            self.send(self.flight)

    def send(self, flight: Flight) -> None:
        """Hand the request's bytes to the socket."""
        self.flight = flight
        flight.connection = self
        assert self.transport is not None
        self._reset()
        body = flight.request.body
        flight.sent = time.monotonic()
        self.transport.write(b"%b%d\r\n\r\n%b" % (self._owner.head, len(body), body))

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer; their time is when they are here, not when they are understood."""
        now = time.monotonic()
        flight = self.flight
        if flight is None:  # bytes after an answer's end: not a connection to use again
            self.drop()
            return
        buffer = self._buffer + data if self._buffer else data
        try:
            if self._state == _HEAD:
                end = buffer.find(b"\r\n\r\n")
                if end < 0:
                    self._buffer = buffer
                    return
                self._read_head(buffer[:end])
                buffer = buffer[end + 4 :]
            if self._state == _CHUNKED:
                self._read_chunks(buffer, flight, now)
            elif self._state == _LENGTH:
                self._content(buffer, flight, now)
                self._left -= len(buffer)
                self._buffer = b""
                if self._left <= 0:
                    self._finish(flight, now)
            else:
                self._content(buffer, flight, now)
                self._buffer = b""
        except Exception as error:  # whatever a broken server sends must end this request only
            self.keep = False
            flight.error = flight.error or f"malformed: {type(error).__name__} {error}"[:TEXT_LIMIT]
            self._finish(flight, now)

    def _read_head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        self._status = int(lines[0].split(b" ", 2)[1])
        self._state = _TO_CLOSE
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            name = name.lower()
            if name == b"transfer-encoding" and b"chunked" in value.lower():
                self._state = _CHUNKED
            elif name == b"content-length" and self._state != _CHUNKED:
                self._state = _LENGTH
                self._left = int(value)
            elif name == b"connection" and b"close" in value.lower():
                self.keep = False

    def _read_chunks(self, buffer: bytes, flight: Flight, now: float) -> None:
        position = 0
        while True:
            line_end = buffer.find(b"\r\n", position)
            if line_end < 0:
                break
            size = int(buffer[position:line_end].split(b";", 1)[0], 16)
            start = line_end + 2
            if size == 0:
                if buffer.find(b"\r\n", start) < 0:
                    break
                self._buffer = b""
                self._finish(flight, now)
                return
            stop = start + size
            if len(buffer) < stop + 2:
                break
            self._content(buffer[start:stop], flight, now)
            position = stop + 2
        self._buffer = buffer[position:] if position else buffer

    def _content(self, content: bytes, flight: Flight, now: float) -> None:
        if self._status != 200:
            self._body = (self._body + content)[:65536]
            return
        events = self._events + content if self._events else content
        if b"\r" in events:
            events = events.replace(b"\r\n", b"\n")
        parts = events.split(b"\n\n")
        self._events = parts.pop()
        for event in parts:
            if event.startswith(b"data: "):
                payload = event[6:]
            else:
                payload = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
                if not payload:
                    continue
            if payload == b"[DONE]":
                flight.done = True
            else:
                _read_event(flight, _loads(payload), now)

    def _finish(self, flight: Flight, now: float) -> None:
        """The answer is complete."""
        self.flight = None
        self.served += 1
        if self._status != 200:
            status = "error"
            error = flight.error or f"http {self._status}: {_error_text(self._body)}"
        elif flight.error is not None:
            status, error = "error", flight.error
        elif not (flight.done or flight.finish):
            status, error = "error", "stream cut: the answer ended without a finish"
        else:
            status, error = "ok", None
        self._owner.finished(flight, status, error, now)
        if self.keep and self.transport is not None and not self.transport.is_closing():
            self.idle_since = now
            self._owner.rest(self)
        else:
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed: an answer that is not whole is an error, or is tried once more where it never began."""
        flight, self.flight = self.flight, None
        if flight is None:
            return
        now = time.monotonic()
        if self._state == _TO_CLOSE and exc is None:
            self.flight = flight
            self.keep = False
            self._finish(flight, now)
        elif self._state == _HEAD and not self._buffer:
            if self.served and not flight.retried:
                # The server had closed this connection while it was idle: that is not the server's failure.
                flight.retried = True
                self._owner.retried += 1
                self._owner.open(flight)
            else:
                self._owner.finished(flight, "error", f"reset: {exc or 'closed before any answer'}", now)
        else:
            self._owner.finished(
                flight,
                "error",
                flight.error or f"stream cut: {exc or 'connection closed in mid-answer'}",
                now,
            )

    def drop(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()


def _read_event(flight: Flight, event: Any, now: float) -> None:
    """Take what one event says. Only chunks with a choice count for tokens; the last one has totals alone."""
    failure = event.get("error")
    if failure is not None:
        message = failure.get("message", failure) if isinstance(failure, dict) else failure
        flight.error = f"error in stream: {message}"[:TEXT_LIMIT]
        return
    usage = event.get("usage")
    choices = event.get("choices")
    if choices:
        choice = choices[0]
        if choice.get("finish_reason") is not None:
            flight.finish = True
        if usage is not None:
            tokens = usage.get("completion_tokens") or 0
            if tokens > flight.tokens:
                flight.chunk_s.append(now)
                flight.chunk_tokens.append(tokens - flight.tokens)
                flight.tokens = tokens
        else:
            delta = choice.get("delta")
            if choice.get("text") or (delta and (delta.get("content") or delta.get("reasoning_content"))):
                flight.text_s.append(now)
    if usage is not None:
        flight.total = usage.get("completion_tokens")
        flight.prompt_tokens = usage.get("prompt_tokens", flight.prompt_tokens)
    extension = event.get("kvstudy")
    if isinstance(extension, dict) and extension.get("queue_s") is not None:
        flight.queue_s = float(extension["queue_s"])


def _error_text(body: bytes) -> str:
    try:
        parsed = json.loads(body)
        failure = parsed.get("error", parsed)
        text = str(failure.get("message", failure)) if isinstance(failure, dict) else str(failure)
    except (ValueError, AttributeError):
        text = body.decode(errors="replace")
    return " ".join(text.split())[:TEXT_LIMIT]
