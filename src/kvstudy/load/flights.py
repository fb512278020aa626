"""A request on its way: what is known of it while it runs, and the row that is kept of it.

Tokens are counted from the server's own cumulative usage, as differences between chunks, never by tokenising again.
Where a server gives no usage in its stream, a count that cannot be known is not invented.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvstudy.grid.records import REQUEST_COLUMNS

if TYPE_CHECKING:
    from kvstudy.load.connection import Connection

#: What is kept of a server's message.
TEXT_LIMIT = 300

_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it will be sent. `body` is the JSON of the POST."""

    index: int
    length_class: str
    prompt_tokens_asked: int
    output_tokens_asked: int
    body: bytes


class Flight:
    """A request on its way, and what is known of it."""

    __slots__ = (
        "chunk_s",
        "chunk_tokens",
        "connection",
        "connector",
        "done",
        "error",
        "finish",
        "finished",
        "prompt_tokens",
        "queue_s",
        "request",
        "retried",
        "scheduled",
        "sent",
        "status",
        "text_s",
        "tokens",
        "total",
    )

    def __init__(self, request: Request, scheduled: float) -> None:
        self.request = request
        self.scheduled = scheduled  # absolute
        self.sent = _NAN
        self.finished = _NAN
        self.chunk_s: list[float] = []  # chunks whose usage says that they carry tokens
        self.chunk_tokens: list[int] = []
        self.text_s: list[float] = []  # chunks with text and no usage
        self.tokens = 0  # cumulative, from chunks with a choice
        self.total: int | None = None  # as the server counted in the end
        self.prompt_tokens: int | None = None
        self.queue_s = _NAN
        self.finish = False
        self.done = False
        self.status = ""
        self.error: str | None = None
        self.retried = False
        self.connection: Connection | None = None
        self.connector: asyncio.Task[Any] | None = None


def frame_of(flights: Sequence[Flight], zero: float) -> pd.DataFrame:
    """Rows of `records.REQUEST_COLUMNS` from finished flights; times relative to `zero`."""
    rows: list[dict[str, Any]] = []
    for flight in flights:
        request = flight.request
        times, tokens = _chunks(flight)
        total = flight.total if flight.total is not None else (flight.tokens or None)
        rows.append(
            {
                "index": request.index,
                "length_class": request.length_class,
                "scheduled_s": flight.scheduled - zero,
                "sent_s": flight.sent - zero,
                "first_token_s": times[0] - zero if times else _NAN,
                "last_token_s": times[-1] - zero if times else _NAN,
                "finished_s": flight.finished - zero,
                "chunk_s": [round(item - zero, 7) for item in times],
                "chunk_tokens": tokens,
                "prompt_tokens_asked": request.prompt_tokens_asked,
                "prompt_tokens": flight.prompt_tokens,
                "output_tokens_asked": request.output_tokens_asked,
                "output_tokens": total,
                "server_queue_s": flight.queue_s,
                "status": flight.status,
                "error": flight.error,
                "in_window": True,
            }
        )
    return typed_frame(rows)


def typed_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A frame with exactly the columns and dtypes of `records.REQUEST_COLUMNS`."""
    frame = pd.DataFrame(rows, columns=list(REQUEST_COLUMNS))
    for name, dtype in REQUEST_COLUMNS.items():
        frame[name] = frame[name].astype(dtype)  # type: ignore[call-overload]
    return frame


def _chunks(flight: Flight) -> tuple[list[float], list[int] | None]:
    """Times of the chunks that carry tokens and their counts; None where the server's usage does not say."""
    if flight.chunk_s:
        return flight.chunk_s, flight.chunk_tokens
    if flight.text_s:
        # No usage in the chunks. One token each is a fact only if the total says so.
        counts = [1] * len(flight.text_s) if flight.total == len(flight.text_s) else None
        return flight.text_s, counts
    return [], [] if flight.total == 0 else None
