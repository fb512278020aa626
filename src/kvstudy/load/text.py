"""Where the words of prompts come from: documents as a list of strings, and their hash.

Three sources, by `TextSource.kind`:

* `pydoc`: the Python language reference that every Python carries (`pydoc_data.topics`), about 465 KB of
  English. A stand-in for machines without network; captions say so.
* `jsonl`: a local file with one JSON object a line.
* `hub`: a Hugging Face dataset at a pinned revision, read in order until `MAX_CHARS` (imported only here).
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstudy.grid.schema import TextSource

#: No more text than this is read: prompts of a study need a few megabytes, a dataset may have terabytes.
MAX_CHARS = 32_000_000


class TextError(Exception):
    """The text is not there; the message is one line that says what to do."""


@dataclass(frozen=True)
class Text:
    """Documents in a fixed order, and the SHA-256 of all of them."""

    documents: tuple[str, ...]
    sha256: str
    label: str


def read_text(source: TextSource) -> Text:
    """The documents of a source, in its own order.

    Raises
    ------
    TextError
        The file, dataset or library is missing, or has no text in the named field.
    """
    if source.kind == "pydoc":
        return _collect(_pydoc(), "Python documentation (pydoc)")
    if source.kind == "jsonl":
        return _collect(_jsonl(Path(str(source.path)), source.field), f"{source.path}")
    return _collect(_hub(source), f"{source.hub_id}@{source.revision}")


def _collect(documents: Iterable[str], label: str) -> Text:
    kept: list[str] = []
    total = 0
    hasher = hashlib.sha256()
    for document in documents:
        text = document.strip()
        if not text:
            continue
        kept.append(text)
        hasher.update(text.encode() + b"\0")
        total += len(text)
        if total >= MAX_CHARS:
            break
    if not kept:
        raise TextError(f"no text in {label}: the field may have another name (workload.text.field)")
    return Text(tuple(kept), hasher.hexdigest(), label)


def _pydoc() -> Iterator[str]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield topics[name]


def _flatten(value: Any) -> str:
    """Text of a field: a string, or a conversation (list of {"content"}), as LMSYS-Chat-1M has it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n\n".join(_flatten(item) for item in value)
    if isinstance(value, dict):
        return _flatten(value.get("content") or value.get("value") or "")
    return ""


def _jsonl(path: Path, field: str) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise TextError(f"{path}:{number} is not JSON: {error}") from error
                if not isinstance(row, dict) or field not in row:
                    known = ", ".join(sorted(row)) if isinstance(row, dict) else "none"
                    raise TextError(f"{path}:{number} has no field '{field}' (fields: {known})")
                yield _flatten(row[field])
    except OSError as error:
        raise TextError(f"cannot read the text of the workload: {error}") from error


def _hub(source: TextSource) -> Iterator[str]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise TextError(
            f"text from the hub ({source.hub_id}) needs the package 'datasets': pip install datasets, "
            "or name a local file (workload.text.kind=jsonl)"
        ) from error
    try:
        rows = datasets.load_dataset(
            source.hub_id, source.subset, revision=source.revision, split=source.split, streaming=True
        )
        for row in rows:
            if source.field not in row:
                raise TextError(f"{source.hub_id} has no field '{source.field}' (fields: {', '.join(sorted(row))})")
            yield _flatten(row[source.field])
    except TextError:
        raise
    except Exception as error:  # the library raises a dozen unrelated classes when it is offline or refused
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TextError(f"cannot read {source.hub_id}@{source.revision} from the hub: {reason}") from error
