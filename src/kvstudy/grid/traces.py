"""Recorded traces as rows: who reads them line by line, and the look at one that a plan takes before anything runs.

`azure`: CSV with TIMESTAMP, ContextTokens, GeneratedTokens. `burstgpt`: CSV with Timestamp (s), Request tokens,
Response tokens. `mooncake`: a JSON object a line, with timestamp (ms), input_length, output_length and hash_ids.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

#: A request of a trace: seconds, prompt tokens, output tokens, Mooncake's ids of shared blocks.
Row = tuple[float, int, int, tuple[int, ...] | None]
#: A row with the number of its line.
Numbered = Iterator[tuple[int, Row]]

#: What a file of each format looks like, for people.
LOOKS = {
    "azure": "a CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens",
    "burstgpt": "a CSV with the columns Timestamp, Request tokens, Response tokens",
    "mooncake": "a JSON object a line with timestamp, input_length, output_length",
}


def rows(lines: Iterable[str], form: str) -> Numbered:
    """Rows of a trace of a format, as they come. Raises ValueError with the line's number."""
    for number, row in _READERS[form](lines):
        time, prompt, output, _ = row
        if not math.isfinite(time):
            raise ValueError(f"line {number}: its time is {time}")
        if prompt < 0 or output < 0:
            raise ValueError(f"line {number}: {min(prompt, output)} tokens")
        yield number, row


def fault(path: Path, form: str, window: tuple[float, float] | None = None) -> str | None:
    """Why a file is no trace of the format, by its first lines; None where it reads as one.

    With a `window` (seconds of the trace, from and to) rows are read until one lies in it, usually the first: a
    window without a request is a fault too.
    """
    times: list[float] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            for _, row in rows(lines, form):
                times.append(row[0])
                if window is None or window[0] <= row[0] - origin(times[:1], form) < window[1]:
                    return None
    except OSError as error:
        return f"{error.strerror or error}"
    except (ValueError, csv.Error, OverflowError, RecursionError) as error:
        return "it is not text" if isinstance(error, UnicodeDecodeError) else f"{' '.join(str(error).split())[:200]}"
    if not times:
        return "it holds no request"
    start = origin(times, form)
    if window is None or any(window[0] <= time - start < window[1] for time in times):
        return None
    return f"it holds no request between {window[0]:g} and {window[1]:g} s of it (start_s, duration_s x speed)"


def origin(times: Sequence[float], form: str) -> float:
    """The time from which a trace is counted: Mooncake's is its own 0, the others' their first request."""
    return 0.0 if form == "mooncake" else min(times, default=0.0)


def _records(lines: Iterable[str], columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV that has at least these columns, blank lines left out."""
    reader = csv.DictReader(lines)
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        shown = ", ".join(reader.fieldnames or ["none"])[:200]
        raise ValueError(f"no column '{missing[0]}' (its columns: {shown})")
    for row in reader:
        values = [row[name] for name in columns]
        if not any((value or "").strip() for value in values):
            continue
        if any(value is None for value in values):
            raise ValueError(f"line {reader.line_num} is cut short")
        yield reader.line_num, row


def _number(text: str, number: int, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"line {number}: {name} is {text!r}, not a number") from None


def _tokens(text: str, number: int, name: str) -> int:
    value = _number(text, number, name)
    if not math.isfinite(value):
        raise ValueError(f"line {number}: {name} is {text!r}, not a number of tokens")
    return int(value)


def _azure(lines: Iterable[str]) -> Numbered:
    first: datetime | None = None
    for number, row in _records(lines, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        # Seven decimals of a second (and, in the 2024 traces, an offset): fromisoformat takes six.
        whole, _, fraction = row["TIMESTAMP"].split("+")[0].partition(".")
        try:
            when = datetime.fromisoformat(whole)
        except ValueError:
            raise ValueError(f"line {number}: TIMESTAMP is {row['TIMESTAMP']!r}, not a date and time") from None
        first = first or when
        seconds = (when - first).total_seconds() + (_number(f"0.{fraction}", number, "TIMESTAMP") if fraction else 0.0)
        prompt, output = (_tokens(row[name], number, name) for name in ("ContextTokens", "GeneratedTokens"))
        yield number, (seconds, prompt, output, None)


def _mooncake(lines: Iterable[str]) -> Numbered:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            values = (float(row["timestamp"]) / 1000.0, int(row["input_length"]), int(row["output_length"]))
            ids = tuple(int(item) for item in row.get("hash_ids") or ())
        except KeyError as error:
            raise ValueError(f"line {number}: no field {error}") from None
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from None
        yield number, (*values, ids)


def _burstgpt(lines: Iterable[str]) -> Numbered:
    for number, row in _records(lines, ("Timestamp", "Request tokens", "Response tokens")):
        prompt, output = (_tokens(row[name], number, name) for name in ("Request tokens", "Response tokens"))
        yield number, (_number(row["Timestamp"], number, "Timestamp"), prompt, output, None)


_READERS = {"azure": _azure, "mooncake": _mooncake, "burstgpt": _burstgpt}
