"""Capacity: the highest rate at which a deployment still meets its service level (`load=knee`).

A *probe* offers one rate for `duration_s` and is answered by the share of offered requests that met every
bound (goodput; a failure never does). Rates are bracketed by doubling from `low`, then bisected geometrically
until the bracket is within `precision`. All probes divide the same unit draws, so that what differs between
them is the rate and not luck. A probe that cannot pass any more is broken off.

The answer is the middle of the final bracket. Its interval also has what each probe's size can carry: it goes
from the highest rate whose goodput is above the goal beyond doubt (Wilson's lower bound) to the lowest rate
whose goodput is below it beyond doubt (upper bound).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvstudy.statistics import wilson


@dataclass(frozen=True)
class Probe:
    """What a rate was answered by: `good` of `offered` requests met the service level."""

    rate: float
    offered: int
    good: int
    stopped_early: bool = False

    @property
    def share(self) -> float:
        """Goodput."""
        return self.good / self.offered if self.offered else 0.0

    def passes(self, goal: float) -> bool:
        """Whether the goal was met."""
        return self.share >= goal


@dataclass(frozen=True)
class Capacity:
    """The answer: None where even `low` fails. `low` and `high` are None where no probe bounds that side."""

    rate: float | None
    low: float | None
    high: float | None
    probes: tuple[Probe, ...]

    @property
    def censored(self) -> bool:
        """Whether the capacity lies above the highest rate that was tried."""
        return self.rate is not None and self.high is None


def find(
    probe: Callable[[float], Probe], *, low: float, high: float, goal: float, precision: float = 0.05, most: int = 12
) -> Capacity:
    """Bracket and bisect; at most `most` probes between the rates `low` and `high`."""
    probes: list[Probe] = []

    def passes(rate: float) -> bool:
        probes.append(probe(rate))
        return probes[-1].passes(goal)

    passing: float | None = None
    failing: float | None = None
    rate = low
    while len(probes) < most:
        if passes(rate):
            passing = rate
            if rate >= high:
                break
            rate = min(high, rate * 2.0)
        else:
            failing = rate
            break
    if passing is not None and failing is not None:
        while failing / passing > 1.0 + precision and len(probes) < most:
            middle = math.sqrt(passing * failing)
            if passes(middle):
                passing = middle
            else:
                failing = middle
    return _answer(probes, passing, failing, goal)


def _answer(probes: list[Probe], passing: float | None, failing: float | None, goal: float) -> Capacity:
    sure_low: float | None = None
    sure_high: float | None = None
    for item in probes:
        # A probe that was broken off has failed for good; what it has seen of its requests is no sample of
        # them.
        lower, upper = (0.0, 0.0) if item.stopped_early else wilson(item.good, item.offered)
        if lower is not None and lower >= goal:
            sure_low = item.rate if sure_low is None else max(sure_low, item.rate)
        if upper is not None and upper < goal:
            sure_high = item.rate if sure_high is None else min(sure_high, item.rate)
    if passing is None:
        return Capacity(None, None, sure_high, tuple(probes))
    rate = passing if failing is None else math.sqrt(passing * failing)
    return Capacity(rate, sure_low, sure_high, tuple(probes))
