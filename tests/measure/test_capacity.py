"""The search for capacity: on a function, and on a scripted M/D/1 server whose capacity is known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvstudy.grid.schema import KneeLoad, PoissonLoad, Slo
from kvstudy.load.arrivals import schedule, unit_arrivals
from kvstudy.load.client import Bound, Plan, Request, completion_body, run
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
UNIT = unit_arrivals(PoissonLoad(rate=1, duration_s=1), 2, 4096)


def own_capacity() -> float:
    """The rate at which a share `GOAL` of the very arrivals that are offered meets the bound in an M/D/1 queue."""

    def share(rate: float) -> float:
        good, free = 0, 0.0
        times = schedule(PoissonLoad(rate=rate, duration_s=SECONDS), UNIT).tolist()
        for at in times:
            free = max(free, at) + SERVICE_S
            good += free - at <= BOUND_S
        return good / len(times)

    low, high = 0.1 / SERVICE_S, 1.5 / SERVICE_S
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if share(middle) >= GOAL else (low, middle)
    return low


@pytest.mark.long
def test_the_capacity_of_a_scripted_queue_is_found_within_five_percent() -> None:
    truth = own_capacity()
    body = completion_body("mock", [1, 2, 3], 1)
    with running(Script(service_s=SERVICE_S)) as mock:

        def probe(rate: float) -> Probe:
            times = schedule(PoissonLoad(rate=rate, duration_s=SECONDS), UNIT)
            requests = [Request(i, "short", 3, 1, body) for i in range(len(times))]
            stop = Bound(int((1 - GOAL) * len(times)), ttft_s=BOUND_S)
            result = run(Plan(requests, SECONDS, 5.0, 1.0, times=times), mock.url, bound=stop)
            good = metrics.goodput(result.frame, Slo(ttft_s=BOUND_S))
            return Probe(rate, good.n, round((good.value or 0) * good.n), result.aborted is not None)

        found = find(probe, low=truth * 0.6, high=truth * 2.4, goal=GOAL, precision=0.04)
    assert found.rate == pytest.approx(truth, rel=0.05)
    assert any(item.stopped_early for item in found.probes)


def test_a_knee_needs_a_service_level(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bounds at least one"):
        Slo()
    with pytest.raises(ValueError, match="above high"):
        KneeLoad(slo=Slo(ttft_s=1), low=4, high=2, duration_s=1)
