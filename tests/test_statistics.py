"""Intervals cover what they claim, on independent, dependent and heavy-tailed streams."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import signal
from scipy.stats import norm

from kvstudy import statistics as st

#: 95 % nominal, 93 to 97 wanted; what is added is two standard errors of the trial (0.7 points for 1,000 rounds).
ROUNDS = 1000
LEAST, MOST = 0.93 - 0.014, 0.97 + 0.011


def ar1(random: np.random.Generator, n: int, rho: float) -> np.ndarray:
    """Gaussian, marginally standard normal."""
    noise = random.standard_normal(n)
    noise[1:] *= math.sqrt(1 - rho**2)
    return signal.lfilter([1.0], [1.0, -rho], noise)


def coverage(draw: Callable[[np.random.Generator], np.ndarray], truth: dict[float, float], rounds: int) -> np.ndarray:
    """Share of intervals that hold the truth, by statistic (0 is the mean, else the quantile).

    A side that the effective size cannot carry is no bound, and does not miss.
    """
    random = np.random.default_rng(7)
    hits = np.zeros(len(truth))
    for _ in range(rounds):
        values = draw(random)
        for i, (q, wanted) in enumerate(truth.items()):
            if q == 0:
                low, high = st.mean_interval(values)
            else:
                low, high = st.quantile_interval(values, q, st.quantile_size(values, q))
            hits[i] += (low is None or low <= wanted) and (high is None or wanted <= high)
    return hits / rounds


def gaussian(*qs: float) -> dict[float, float]:
    return {q: 0.0 if q == 0 else float(norm.ppf(q)) for q in qs}


@pytest.mark.parametrize(
    ("n", "rho"), [(100, 0.0), (100, 0.5), (100, 0.8), (100, 0.9), (500, 0.5), (500, 0.8), (500, 0.9)]
)
def test_coverage_on_dependent_streams(n: int, rho: float) -> None:
    found = coverage(lambda random: ar1(random, n, rho), gaussian(0, 0.5), ROUNDS)
    assert (found >= LEAST).all() and (found <= MOST).all(), found
    # In the tail of so short a series one side is often missing: it may hold more than 95 %, not less.
    tail = coverage(lambda random: ar1(random, n, rho), gaussian(0.9), ROUNDS // 2)
    assert tail[0] >= LEAST, tail


@pytest.mark.parametrize("n", [100, 500])
def test_coverage_on_heavy_tails(n: int) -> None:
    lognormal = {0: math.exp(0.5), 0.5: 1.0, 0.9: math.exp(norm.ppf(0.9))}
    pareto = {0: 1.5, 0.5: 2 ** (1 / 3), 0.9: 10 ** (1 / 3)}
    for draw, truth in (
        (lambda random: np.exp(random.standard_normal(n)), lognormal),
        (lambda random: random.pareto(3.0, n) + 1, pareto),
        (lambda random: np.exp(ar1(random, n, 0.5)), lognormal),
    ):
        found = coverage(draw, truth, ROUNDS)
        assert (found >= LEAST).all() and (found <= MOST).all(), (truth, found)
    found = coverage(lambda random: np.exp(ar1(random, n, 0.8)), {0: math.exp(0.5)}, ROUNDS)
    assert LEAST <= found[0] <= MOST, found


def waiting(random: np.random.Generator, n: int, rho: float) -> np.ndarray:
    """Waiting times of successive customers of an M/D/1 queue in its steady state, service takes 1 (Lindley 1952)."""
    walk = np.cumsum(1.0 - random.exponential(1.0 / rho, n + 1500))
    return (walk - np.minimum(np.minimum.accumulate(walk), 0.0))[1500:]


@pytest.mark.parametrize("n", [100, 500])
def test_coverage_on_waiting_times(n: int) -> None:
    """A busy period is worth about one observation, and sums of such are as skewed as they are few."""
    rho = 0.8
    # Mean by Pollaczek and Khinchine; quantiles of sixteen million simulated customers.
    found = coverage(lambda random: waiting(random, n, rho), {0: rho / (2 * (1 - rho)), 0.5: 1.273, 0.9: 5.005}, ROUNDS)
    # A hundred customers are worth two or three observations: 92.8 % of 9,000 trials; the bound is three errors below.
    assert (LEAST if n > 100 else 0.904) <= found[0] <= MOST, found
    assert (found[1:] >= 0.9).all(), found


def test_large_values_that_come_together_are_told_from_a_heavy_tail() -> None:
    random = np.random.default_rng(3)

    def found(draw: Callable[[], np.ndarray]) -> float:
        return float(np.median([st._clustering(*st._first_order(draw())) for _ in range(100)]))  # type: ignore[misc]

    assert found(lambda: waiting(random, 200, 0.8)) > 0.9
    assert found(lambda: np.exp(ar1(random, 200, 0.8))) < 0.1


def test_there_is_no_interval_where_there_is_nothing_to_make_one_from() -> None:
    trend = np.linspace(0.0, 1.0, 60)  # one long drift is worth hardly more than one observation
    assert st.effective_size(trend) < 4
    low, high = st.quantile_interval(trend, 0.9, st.quantile_size(trend, 0.9))
    assert low is None and high is None
    assert st.mean_interval(np.array([1.0])) == (None, None)


def test_effective_size() -> None:
    random = np.random.default_rng(0)
    assert st.effective_size(random.standard_normal(2000)) > 1500
    # AR(1): n (1 - rho) / (1 + rho)
    sizes = [st.effective_size(ar1(random, 4000, 0.5)) for _ in range(10)]
    assert np.mean(sizes) == pytest.approx(4000 / 3, rel=0.15)
    assert st.effective_size(np.ones(100)) == 100
    assert st.effective_size(np.arange(5.0)) == 5


def test_the_p_value_is_where_the_interval_ends() -> None:
    random = np.random.default_rng(0)
    small = 0
    for _ in range(300):
        values = random.exponential(1.0, 40) - 1.0
        low, high = st.mean_interval(values)
        p = st.mean_p(values)
        assert low is not None and high is not None and p is not None
        assert (p < 0.05) == (not low <= 0.0 <= high)
        small += p < 0.05
    assert 3 <= small <= 32
    assert st.mean_p(np.ones(1)) is None and st.mean_p(np.zeros(30)) == 1.0


def test_holm() -> None:
    assert st.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert st.holm([0.5, math.nan, 0.9])[[0, 2]] == pytest.approx([1.0, 1.0])
    # Ten true hypotheses: hardly one family in twenty has a rejection.
    random = np.random.default_rng(0)
    wrong = np.mean([st.holm(random.random(10)).min() < 0.05 for _ in range(2000)])
    assert wrong < 0.06


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


def test_the_difference_of_paired_shares_is_covered_and_stays_within_one() -> None:
    random = np.random.default_rng(0)
    covered, widths = 0, []
    for _ in range(400):
        # Twelve facts that differ in how easily they are recalled, asked five times each under two caches.
        ease = random.uniform(0.3, 1.0, 12)
        ones, others = (random.binomial(5, ease * kept) / 5 for kept in (1.0, 0.5))
        low, high = st.paired_shares(ones, others)
        assert low is not None and high is not None and -1.0 <= low <= high <= 1.0
        covered += low <= 0.65 - 0.325 <= high
        widths.append(high - low)
    assert covered >= 0.95 * 400 and np.mean(widths) < 0.7
    low, high = st.paired_shares(np.ones(8), np.zeros(8))
    assert low is not None and 0.5 < low < 0.8 and high == 1.0
    assert st.paired_shares(np.array([]), np.array([])) == (None, None)


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
