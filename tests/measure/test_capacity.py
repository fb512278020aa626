"""The search for capacity: on a function, and on a scripted M/D/1 server whose capacity is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstudy.grid.schema import KneeLoad, PoissonLoad, Slo
from kvstudy.load.arrivals import schedule, unit_arrivals
from kvstudy.load.client import Bound, Plan, completion_body, run
from kvstudy.load.flights import Request
from kvstudy.load.mock import Script, running
from kvstudy.measure import metrics
from kvstudy.measure.capacity import Probe, find


def step(capacity: float, offered: int = 1000):  # type: ignore[no-untyped-def]
    return lambda rate: Probe(rate, offered, offered if rate <= capacity else offered // 2)


@pytest.mark.parametrize("capacity", [1.0, 3.3, 17.0, 60.0])
def test_the_search_brackets_and_bisects(capacity: float) -> None:
    found = find(step(capacity), low=0.5, high=64.0, goal=0.9)
    assert found.rate is not None and found.low is not None and found.high is not None
    assert found.rate == pytest.approx(capacity, rel=0.05)
    assert found.low <= capacity <= found.high and len(found.probes) <= 12


def test_ends_of_the_range() -> None:
    above = find(step(1000.0), low=1.0, high=8.0, goal=0.9)
    assert above.rate == 8.0 and above.censored
    below = find(step(0.1), low=1.0, high=8.0, goal=0.9)
    assert below.rate is None and below.high == 1.0 and len(below.probes) == 1
    assert len(find(step(3.0), low=1.0, high=8.0, goal=0.9, precision=1e-9, most=7).probes) == 7


def test_small_probes_have_wide_intervals() -> None:
    # 10 of 10 is no proof of 90 %: no lower bound can be given.
    found = find(step(3.0, offered=10), low=1.0, high=8.0, goal=0.9)
    assert found.rate is not None and found.low is None


SERVICE_S, BOUND_S, GOAL, SECONDS = 0.02, 0.12, 0.9, 6.0
SLO = Slo(ttft_s=BOUND_S)


def met(times: np.ndarray) -> int:
    """How many of these arrivals an M/D/1 queue answers within the bound."""
    good, free = 0, 0.0
    for at in times.tolist():
        free = max(free, at) + SERVICE_S
        good += free - at <= BOUND_S
    return good


def rate_where(share: Callable[[float], float]) -> float:
    """The highest rate at which `share` (falling) is at least the goal."""
    low, high = 0.1 / SERVICE_S, 1.5 / SERVICE_S
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if share(middle) >= GOAL else (low, middle)
    return low


def known_share(rate: float) -> float:
    """Share of requests that an M/D/1 queue answers within the bound in the long run (Erlang 1909).

    P(W <= t) = (1 - rho) sum over k <= t/D of (rate (kD - t))^k / k! exp(-rate (kD - t)).
    """
    rho, t = rate * SERVICE_S, BOUND_S - SERVICE_S
    if rho >= 1:
        return 0.0
    terms = range(int(t / SERVICE_S + 1e-9) + 1)
    x = [rate * (k * SERVICE_S - t) for k in terms]
    return (1 - rho) * sum(x[k] ** k / math.factorial(k) * math.exp(-x[k]) for k in terms)


@pytest.mark.parametrize("seed", range(5))
def test_the_known_capacity_of_an_md1_queue_is_found_within_five_percent(seed: int) -> None:
    known = rate_where(known_share)
    assert 0.6 < known * SERVICE_S < 0.95
    unit = unit_arrivals(PoissonLoad(rate=1, duration_s=1), seed, 40_000)
    found = find(
        lambda rate: Probe(rate, len(unit), met(unit / rate)), low=known / 4, high=known * 4, goal=GOAL, precision=0.02
    )
    assert found.rate == pytest.approx(known, rel=0.05)
    assert found.low is not None and found.high is not None and found.low <= found.rate <= found.high


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 5))
def test_the_capacity_of_a_scripted_queue_is_found_within_five_percent(seed: int) -> None:
    """In real time, against what the very arrivals that are offered allow: six seconds are no long run."""
    unit = unit_arrivals(PoissonLoad(rate=1, duration_s=1), seed, 4096)

    def times_at(rate: float) -> np.ndarray:
        return schedule(PoissonLoad(rate=rate, duration_s=SECONDS), unit)

    truth = rate_where(lambda rate: met(times_at(rate)) / len(times_at(rate)))
    body = completion_body("mock", [1, 2, 3], 1)
    with running(Script(service_s=SERVICE_S)) as mock:

        def probe(rate: float) -> Probe:
            times = times_at(rate)
            requests = [Request(i, "short", 3, 1, body) for i in range(len(times))]
            stop = Bound(int((1 - GOAL) * len(times)), ttft_s=BOUND_S)
            result = run(Plan(requests, SECONDS, 5.0, 1.0, times=times), mock.url, bound=stop)
            good = metrics.goodput(result.frame, SLO)
            return Probe(rate, good.n, round((good.value or 0) * good.n), result.aborted is not None)

        found = find(probe, low=truth * 0.6, high=truth * 2.4, goal=GOAL, precision=0.04)
    assert found.rate == pytest.approx(truth, rel=0.05)
    assert any(item.stopped_early for item in found.probes)


def test_a_knee_needs_a_service_level(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bounds at least one"):
        Slo()
    with pytest.raises(ValueError, match="above high"):
        KneeLoad(slo=Slo(ttft_s=1), low=4, high=2, duration_s=1)
