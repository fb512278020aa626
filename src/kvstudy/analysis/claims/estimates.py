"""Numbers that decisions rest on: an estimate, its interval, and where it lies against a bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstudy.analysis.attribution import t_interval
from kvstudy.analysis.claims.schema import Status
from kvstudy.analysis.replicates import ENOUGH_SEEDS

#: A ratio, its interval, and the cells it came from.
Numbers = tuple[float, float, float, list[str]]

#: Relative margin for a quantity that is counted, not timed, and so has no interval: bytes of memory.
MARGIN = 0.05


class NotTestable(Exception):
    """A predicate lacks what it needs; the text says what."""


@dataclass
class Estimate:
    """A number that a decision rests on."""

    what: str
    value: float
    low: float
    high: float
    bound: str
    status: str
    cells: list[str] = field(default_factory=list)


def estimate(what: str, one: Numbers, bound: str, status: str) -> Estimate:
    """An estimate from a ratio, its interval and its cells."""
    return Estimate(what, one[0], one[1], one[2], bound, status, one[3])


def log_estimate(logs: Sequence[float], variances: Sequence[float | None]) -> tuple[float, float, float]:
    """(value, low, high) on the original scale from log values and the variance of each, where known."""
    values = np.asarray(logs, dtype=float)
    mean = float(values.mean())
    if len(values) >= ENOUGH_SEEDS:
        low, high, _ = t_interval(values)
    elif all(v is not None for v in variances):
        half = 1.96 * float(np.sqrt(sum(v for v in variances if v is not None))) / len(values)
        low, high = mean - half, mean + half
    else:
        low, high = mean + np.log1p(-MARGIN), mean + np.log1p(MARGIN)
    return float(np.exp(mean)), float(np.exp(low)), float(np.exp(high))


def exact(metric: str) -> bool:
    """Whether a metric is bytes that were counted."""
    return metric.startswith(("kv_", "device_", "host_", "process_"))


def variance(one: tuple[float, float, float, str]) -> float | None:
    """Variance of the logarithm of a value from its interval, None where it has none."""
    _, low, high, _ = one
    if not (np.isfinite(low) and np.isfinite(high) and low > 0):
        return None
    return float((np.log(high / low) / (2 * 1.96)) ** 2)


def judge(low: float, high: float, minimum: float | None, maximum: float | None) -> Status:
    """Where an interval lies against bounds."""
    if (minimum is None or low >= minimum) and (maximum is None or high <= maximum):
        return "supported"
    if (minimum is not None and high < minimum) or (maximum is not None and low > maximum):
        return "contradicted"
    return "inconclusive"


def bound_text(minimum: float | None, maximum: float | None) -> str:
    """A bound as a reader sees it."""
    parts = [f"≥ {minimum:g}"] if minimum is not None else []
    parts += [f"≤ {maximum:g}"] if maximum is not None else []
    return " and ".join(parts)


def all_of(statuses: Iterable[str]) -> Status:
    """What becomes of a claim that must hold everywhere."""
    found = list(statuses)
    if "contradicted" in found:
        return "contradicted"
    return "inconclusive" if "inconclusive" in found else "supported"


def any_of(statuses: Iterable[str]) -> Status:
    """What becomes of a claim that must hold somewhere."""
    found = list(statuses)
    if "supported" in found:
        return "supported"
    return "inconclusive" if "inconclusive" in found else "contradicted"
