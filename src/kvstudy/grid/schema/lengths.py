"""How long prompts and outputs are."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from kvstudy.grid.schema.base import Strict, number


class FixedLength(Strict):
    """Every request has `tokens` tokens."""

    kind: Literal["fixed"] = "fixed"
    tokens: PositiveInt


class _Between(Strict):
    """Lengths from low to high, both included."""

    low: PositiveInt = 1
    high: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class UniformLength(_Between):
    """Lengths uniform over the integers low..high."""

    kind: Literal["uniform"] = "uniform"
    low: PositiveInt


class LognormalLength(_Between):
    """exp(N(ln median, sigma)), rounded, clipped to low..high (the shape of most chat traces)."""

    kind: Literal["lognormal"] = "lognormal"
    median: PositiveFloat
    sigma: PositiveFloat


class NormalLength(_Between):
    """N(mean, sd), rounded, clipped to low..high."""

    kind: Literal["normal"] = "normal"
    mean: PositiveFloat
    sd: PositiveFloat


class TraceLength(Strict):
    """Lengths of the load's own trace, row by row, cut to `high` (needs `load: trace`)."""

    kind: Literal["trace"] = "trace"
    high: PositiveInt


class EmpiricalLength(Strict):
    """Lengths of the rows of a recorded trace, drawn with replacement and cut to `high`, under any load.

    Prompt and output of the same file are taken from the same row, so that they go together as they did.
    """

    kind: Literal["empirical"] = "empirical"
    path: str
    format: Literal["azure", "mooncake", "burstgpt"]
    sha256: str | None = None
    high: PositiveInt


Length = Annotated[
    FixedLength | UniformLength | LognormalLength | NormalLength | TraceLength | EmpiricalLength,
    Field(discriminator="kind"),
]


def mean_tokens(length: Length) -> float:
    """Mean of a length in tokens, clipping aside.

    Raises
    ------
    ValueError
        It is a trace's, which only the trace knows.
    """
    if isinstance(length, FixedLength):
        return float(length.tokens)
    if isinstance(length, UniformLength):
        return (length.low + length.high) / 2.0
    if isinstance(length, NormalLength):
        return length.mean
    if isinstance(length, LognormalLength):
        return length.median * math.exp(length.sigma**2 / 2.0)
    raise ValueError("load.token_rate needs lengths whose mean is known; a trace's are not")


def length_label(length: Length) -> str:
    """The part of a length that reads in a cell's name: 256, 128-384, m512 (median or mean), t3072 (a trace's)."""
    if isinstance(length, FixedLength):
        return number(length.tokens)
    if isinstance(length, UniformLength):
        return f"{length.low}-{length.high}"
    if isinstance(length, TraceLength | EmpiricalLength):
        return f"{length.kind[0]}{length.high}"
    return f"m{number(length.median if isinstance(length, LognormalLength) else length.mean)}"
