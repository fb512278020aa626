"""Intervals cover what they claim, on independent, dependent and heavy-tailed streams."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from kvstudy.measure import statistics as st

ROUNDS = 400


def ar1(random: np.random.Generator, n: int, rho: float) -> np.ndarray:
    noise = random.standard_normal(n + 100)
    values = np.empty(n + 100)
    values[0] = noise[0] / math.sqrt(1 - rho**2)
    for i in range(1, n + 100):
        values[i] = rho * values[i - 1] + noise[i]
    return values[100:]


def coverage(draw: Callable[[np.random.Generator], np.ndarray], mean: float, median: float, p90: float) -> list[float]:
    random = np.random.default_rng(7)
    hits = np.zeros(3)
    for _ in range(ROUNDS):
        values = draw(random)
        intervals = [st.mean_interval(values)]
        intervals += [st.quantile_interval(values, q, st.quantile_size(values, q)) for q in (0.5, 0.9)]
        for i, ((low, high), truth) in enumerate(zip(intervals, (mean, median, p90), strict=True)):
            # No bound on a side that the effective size cannot carry: that side does not miss.
            hits[i] += (low is None or low <= truth) and (high is None or truth <= high)
    return list(hits / ROUNDS)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_coverage_on_dependent_streams(rho: float) -> None:
    scale = 1 / math.sqrt(1 - rho**2)
    found = coverage(lambda random: ar1(random, 500, rho), 0.0, 0.0, 1.2816 * scale)
    # 95 % nominal; 93 to 97 with the resolution of 400 rounds (one standard error is 1.1 points).
    assert all(0.92 <= share <= 0.985 for share in found), found


def test_coverage_on_heavy_tails() -> None:
    lognormal = coverage(lambda random: np.exp(random.standard_normal(500)), math.exp(0.5), 1.0, math.exp(1.2816))
    pareto = coverage(lambda random: random.pareto(3.0, 500) + 1, 1.5, 2 ** (1 / 3), 10 ** (1 / 3))
    assert all(0.92 <= share <= 0.98 for share in [*lognormal, *pareto]), (lognormal, pareto)


def test_effective_size() -> None:
    random = np.random.default_rng(0)
    assert st.effective_size(random.standard_normal(2000)) > 1500
    # AR(1): n (1 - rho) / (1 + rho)
    sizes = [st.effective_size(ar1(random, 4000, 0.5)) for _ in range(10)]
    assert np.mean(sizes) == pytest.approx(4000 / 3, rel=0.15)
    assert st.effective_size(np.ones(100)) == 100
    assert st.effective_size(np.arange(5.0)) == 5


def test_quantiles_with_failures() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0, math.inf])
    assert st.quantile(values, 0.5) == 3.0
    assert st.quantile(values, 0.75) == 4.0
    assert st.quantile(values, 0.9) == math.inf
    assert st.quantile(np.array([1.0, 2.0]), 0.5) == 1.5
    assert st.quantile_interval(np.arange(10.0), 0.99)[1] is None
    assert st.quantile_interval(np.empty(0), 0.5) == (None, None)


def test_a_percentile_needs_samples() -> None:
    assert st.supports(0.5, 20) and not st.supports(0.5, 19)
    assert st.supports(0.99, 1000) and not st.supports(0.99, 999)


def test_wilson() -> None:
    low, high = st.wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=1e-3) and high == pytest.approx(0.9433, abs=1e-3)
    assert st.wilson(0, 20)[0] == 0.0
    assert st.wilson(0, 0) == (None, None)


def test_mser_cuts_a_transient_and_leaves_a_steady_series_alone() -> None:
    random = np.random.default_rng(0)
    steady = random.standard_normal(400) + 10
    slow_start = np.concatenate([np.linspace(60, 10, 50), steady])
    assert 35 <= st.mser(slow_start) <= 80
    cuts = [st.mser(random.standard_normal(200) + 10) for _ in range(100)]
    assert np.mean([cut > 0 for cut in cuts]) < 0.15
    assert st.mser(random.standard_normal(20)) == 0
