"""What every part of the schema has in common: strict records, and the hash that names what they measure."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict

#: Fields that cannot change a measured number.
NOT_IDENTITY = frozenset({"title", "bring_up_s", "cluster"})


class Strict(BaseModel):
    """A frozen record that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """First 10 hex digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:10]


def identity(value: Any) -> Any:
    """A dumped record without the fields that cannot change a measured number."""
    if isinstance(value, dict):
        return {
            key: identity(inner) if isinstance(inner, dict | list) else inner
            for key, inner in value.items()
            if key not in NOT_IDENTITY
        }
    if isinstance(value, list):
        return [identity(inner) for inner in value]
    return value


def content_hash(record: BaseModel) -> str:
    """The hash that names a record: equal for records that measure the same."""
    return digest(identity(record.model_dump(mode="json")))


def number(value: float) -> str:
    """A number as it reads in a folder's name: 0.5, 2, 12.25."""
    return f"{value:g}"
