"""Intervals that say what the data can carry: failures as +inf, dependence between requests allowed for.

Requests that queue behind each other are not independent. Every interval here is computed with an *effective*
sample size, estimated from the series in order of arrival:

* mean: Student's t over the effective size, corrected for skewness (Hall 1992);
* quantile: order statistics, ranks from the binomial over the effective size, interpolated;
* share: Wilson;
* a mean against a value: the p value at which the interval of the mean just holds it; families of such are
  adjusted by Holm's procedure.

The effective size is n over the *inflation* of the variance, the largest of four estimates. Geyer's initial
monotone sequence of autocovariances (1992) supposes nothing and is too small on short series. A first-order
autoregression whose coefficient is corrected for its bias (Marriott and Pope 1954) is right for short series
whose dependence fades geometrically; fitted to ratios of autocorrelations, also where noise hides it, as a
service time does the wait before it. The same of the normal scores of the values, turned into that of the
values by the Hermite expansion of what maps the one to the other (as Cario and Nelson 1996 generate such
series), is not misled by a heavy tail.

Where values depend on each other more than their ranks do, the large ones come together, as waiting times do
in a busy period: `_clustering`, 0 to 1. Their sums are then more skewed than those of independent blocks, and
their exceedances fewer than they look. So the skewness of a dependent mean counts up to three times, and the
inflation at a quantile is up to that of the values, in the tail half as much again. The two factors are
set by simulated M/M/1 and M/D/1 queues, the only numbers here that are.

Where the effective size is too small for a bound of a percentile there is none (None, NA in the summary), on
one side or on both; a mean's interval is then as wide as three observations make it. `python -m
benchmarks.coverage` has what intervals of means cover, `tests/test_statistics.py` holds some of it: 93 to 97 %
at 95 from 100 requests on, for AR(1) up to 0.9 with Gaussian and with lognormal values and for heavy tails, and
from 300 on for waiting times of queues. Too narrow they still are where a short series is one busy period or
two (100 waiting times at rho 0.9: 83 %; at 0.8 with services that vary added to them: 88 %).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import special

Values = npt.NDArray[np.float64]
Interval = tuple[float | None, float | None]

CONFIDENCE = 0.95
#: A series is not taken for less than so many observations where its mean is concerned: at the t of two degrees of
#: freedom an interval is as wide as it can usefully be.
FEWEST = 3.0
#: Shorter series do not tell how they depend on themselves: they count as independent.
SHORTEST = 20

_TAIL = (1.0 - CONFIDENCE) / 2.0
_Z = float(special.ndtri(1.0 - _TAIL))
#: Terms of Hermite expansions: of a quantile function (estimated, few), of an indicator (known).
_FEW_TERMS, _TERMS = 12, 60


def effective_size(values: Values) -> float:
    """Number of independent observations worth as much as this series, between 1 and its length.

    Series shorter than `SHORTEST`, constant ones, and those that alternate count as independent (never more).
    """
    found = _first_order(values)
    if found is None:
        return float(len(values))
    correlation = _autocorrelation(values)
    return _size(len(values), _geyer(correlation), _through_noise(correlation), *found)


def quantile_size(values: Values, q: float) -> float:
    """Effective sample size for the q-quantile of a series in order of arrival.

    What counts is how the indicators `value <= quantile` depend on each other. Geyer's estimate is made of them, at
    q and at the median (far out there are too few exceedances to see that they come in clusters); the autoregression
    is fitted to the normal scores of the values, which say more than ones and zeros do, and turned into that of the
    indicators by the tetrachoric series of the bivariate normal. Where large values come together the indicators
    depend on each other as the values do.
    """
    n = len(values)
    found = [1.0]
    for at in {q, 0.5}:
        indicators = (values <= quantile(values, at)).astype(np.float64)
        if _lag_one(indicators) is not None:
            found.append(_geyer(_autocorrelation(indicators)))
    scores = _lag_one(_scores(values))
    if scores is not None:
        found.append(_inflation(_coefficient(scores, n), _tetrachoric(q)))
    first = _first_order(values)
    if first is not None:
        found.append(1.0 + _clustering(*first) * (1.0 + 1.25 * abs(q - 0.5)) * (first[0] - 1.0))
    return _size(n, *found)


def _first_order(values: Values) -> tuple[float, float] | None:
    """Inflations of the mean's variance by the values' own autoregression and by that of their normal scores.

    None of a series that is short, constant or not finite.
    """
    lag = _lag_one(values)
    if lag is None:
        return None
    n = len(values)
    own, scored = _coefficient(lag, n), _coefficient(_lag_one(_scores(values)) or 0.0, n)
    expansion = _score_table(n)[1] @ (np.sort(values) - values.mean())
    weights = expansion**2
    return (1.0 + own) / (1.0 - own), _inflation(scored, weights / weights.sum())


def _clustering(own: float, scored: float) -> float:
    """How far large values come together, 0 to 1: from inflations by the values and by their ranks."""
    return min(max(4.0 * (own / scored - 1.0), 0.0), 1.0)


def _inflation(coefficient: float, weights: Values) -> float:
    """Inflation of the mean's variance for a function of a normal autoregression whose Hermite terms weigh so much."""
    powers = coefficient ** np.arange(1, len(weights) + 1)
    return 1.0 + 2.0 * float((weights * powers / (1.0 - powers)).sum())


def _size(n: int, *inflation: float) -> float:
    return max(1.0, n / max(1.0, *inflation))


def _lag_one(values: Values) -> float | None:
    """Autocorrelation of neighbours; None of a series that is short, constant or not finite."""
    if len(values) < SHORTEST or not np.isfinite(values).all():
        return None
    centred = values - values.mean()
    variance = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / variance if variance > 0.0 else None


def _autocorrelation(values: Values) -> Values:
    """Autocorrelations by lag, `[n]`, of a series that varies."""
    n = len(values)
    centred = values - values.mean()
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    found = np.fft.irfft(spectrum * np.conj(spectrum), size)[:n].real
    return np.asarray(found / found[0])


def _scores(values: Values) -> Values:
    """Normal scores (Blom 1958), `[n]`; equal values have equal ones, +inf is the largest."""
    ordered = np.sort(values)
    twice = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    return np.asarray(_score_table(len(values))[0][twice])


@functools.lru_cache(maxsize=64)
def _score_table(n: int) -> tuple[Values, Values]:
    """(score by rank in halves, `[2 n + 1]`; terms of a quantile function's expansion over n, `[_FEW_TERMS, n]`)."""
    table = special.ndtri(np.clip(((np.arange(2 * n + 1) + 1.0) / 2.0 - 0.375) / (n + 0.25), 1e-9, 1.0 - 1e-9))
    z = table[1 : 2 * n : 2]
    terms = [np.ones(n), z]  # Hermite polynomials over the roots of the factorials
    for k in range(1, _FEW_TERMS):
        terms.append((z * terms[k] - math.sqrt(k) * terms[k - 1]) / math.sqrt(k + 1.0))
    return table, np.array(terms[1:]) / n


def _geyer(correlation: Values) -> float:
    """Inflation of the variance of the mean by Geyer's initial monotone sequence."""
    n = len(correlation)
    total = 0.0
    previous = math.inf
    for lag in range(0, n - 1, 2):
        pair = float(correlation[lag] + correlation[lag + 1])
        if pair <= 0.0:
            break
        previous = min(previous, pair)
        total += previous
    inflation = max(1.0, 2.0 * total - 1.0)
    # The autocovariances of a finite series around its own mean are too small by about inflation / n.
    return inflation * (1.0 + 3.0 * (inflation - 1.0) / n)


def _through_noise(correlation: Values) -> float:
    """Inflation by a first-order autoregression to which independent noise was added.

    Noise makes all its autocorrelations smaller by one factor, so that their ratios still say how it fades.
    """
    n = len(correlation)
    first, second, third = (float(one) for one in correlation[1:4])
    if first < 2.0 / math.sqrt(n) or first + second <= 0.0:  # nothing to see
        return 1.0
    own = _coefficient(first, n)
    return 1.0 + 2.0 * own / (1.0 - max(own, _coefficient((second + third) / (first + second), n)))


def _coefficient(correlation: float, n: int) -> float:
    """Coefficient of a first-order autoregression, corrected for its bias of -(1 + 3 x) / n; 0 to below 1."""
    return min(max((n * correlation + 1.0) / (n - 3.0), 0.0), 1.0 - 2.0 / n)


@functools.cache
def _tetrachoric(q: float) -> Values:
    """Weights of the powers of a normal correlation in that of the indicators of its q-quantile, `[_TERMS]`, sum 1."""
    z = float(special.ndtri(q))
    hermite = [1.0, z]  # over the root of the factorial
    for k in range(1, _TERMS):
        hermite.append((z * hermite[k] - math.sqrt(k) * hermite[k - 1]) / math.sqrt(k + 1.0))
    weights = np.array([hermite[j - 1] ** 2 / j for j in range(1, _TERMS + 1)])
    return np.asarray(weights / weights.sum())


def quantile(values: Values, q: float) -> float:
    """The q-quantile by linear interpolation between order statistics (as numpy does), +inf allowed.

    An interpolation that touches +inf is +inf, unless its weight there is nought.
    """
    return _at_rank(np.sort(values), q * (len(values) - 1))


def _at_rank(ordered: Values, position: float) -> float:
    low = math.floor(position)
    weight = position - low
    if weight == 0.0 or low + 1 >= len(ordered):
        return float(ordered[low])
    if not math.isfinite(ordered[low + 1]):
        return float(ordered[low + 1])
    return float(ordered[low] + weight * (ordered[low + 1] - ordered[low]))


def quantile_interval(values: Values, q: float, size: float | None = None) -> Interval:
    """Order-statistic interval of the q-quantile; a side is None where there are too few observations for it.

    `size` is the effective sample size of the indicators `value <= quantile` where they are dependent.
    """
    n = len(values)
    if n == 0:
        return None, None
    m = min(float(n), size if size is not None else float(n))
    ordered = np.sort(values)
    if m < n:
        # The effective size is itself an estimate, from about half as many independent stretches: as Student's t
        # is to the normal.
        wider = float(special.stdtrit(max(m / 2.0 - 1.0, 1.0), 1.0 - _TAIL)) / _Z
        m = max(1.0, m / wider**2)
    # The share of observations below the quantile is q give or take a binomial of the effective size; its
    # bounds (Jeffreys, which has the nominal coverage on average and needs no whole sizes) are ranks of the
    # real sample.
    bounds = special.betaincinv(q * m + 0.5, (1.0 - q) * m + 0.5, (_TAIL, 1.0 - _TAIL))
    below, above = (min(max(float(share) * n - 0.5, 0.0), n - 1.0) for share in bounds)
    # A side exists if the binomial leaves it room: (1 - q)^m <= tail for the lower one, q^m <= tail for the
    # upper.
    low = _at_rank(ordered, below) if (1.0 - q) ** m <= _TAIL else None
    high = _at_rank(ordered, above) if q**m <= _TAIL else None
    return low, high


def mean_interval(values: Values, size: float | None = None) -> Interval:
    """Hall's skewness-corrected t interval of the mean over the effective size; None below two observations."""
    return mean_test(values, size)[:2]


def mean_p(values: Values, size: float | None = None) -> float | None:
    """Two-sided p value of a mean of nought: below 0.05 exactly where `mean_interval` leaves it out; None as there."""
    return mean_test(values, size)[2]


def mean_test(values: Values, size: float | None = None) -> tuple[float | None, float | None, float | None]:
    """(low, high) of `mean_interval` and the p value of `mean_p`.

    `size` is the effective size of the series where it is known, as of one that is pooled from several.
    """
    if len(values) < 2:
        return None, None, None
    m = min(float(len(values)), max(FEWEST, size if size is not None else effective_size(values)))
    mean, deviation, skew = _moments(values, m)
    if deviation == 0.0:
        return mean, mean, 1.0 if mean == 0.0 else 0.0
    root = math.sqrt(m)
    t = float(special.stdtrit(m - 1.0, 1.0 - _TAIL))

    def back(target: float) -> float:
        # Hall's monotone transformation of the t statistic keeps the interval a proper one for any skewness.
        if abs(skew) < 1e-9:
            return target
        x = 1.0 + skew * (target / root - skew / (6.0 * m))
        return 3.0 * root * (math.copysign(abs(x) ** (1.0 / 3.0), x) - 1.0) / skew

    x = mean / deviation
    at = root * (x + skew * x**2 / 3.0 + skew**2 * x**3 / 27.0 + skew / (6.0 * m))
    p = 2.0 * float(special.stdtr(m - 1.0, -abs(at)))
    return mean - back(t) * deviation / root, mean - back(-t) * deviation / root, p


def _moments(values: Values, m: float) -> tuple[float, float, float]:
    """(mean, standard deviation, skewness as it counts) of a series that is worth `m` observations."""
    n = len(values)
    mean, deviation = float(values.mean()), float(values.std(ddof=1))
    if deviation == 0.0:
        return mean, 0.0, 0.0
    skew = float(((values - mean) ** 3).mean()) / deviation**3
    first = _first_order(values) if m < n else None
    if first is not None:
        skew *= 1.0 + 2.0 * (1.0 - m / n) * _clustering(*first)
    # Around its own mean a dependent series spreads less than it does: by one part in its effective size.
    return mean, deviation * math.sqrt(m / (m - 1.0) * (n - 1.0) / n), skew


def holm(p: Sequence[float] | Values) -> Values:
    """P values adjusted for their number (Holm 1979), in the same order; NaN is no comparison and stays NaN.

    Rejecting those below 0.05 errs in the whole family with a probability of at most 0.05, however they depend.
    """
    given = np.asarray(p, dtype=np.float64)
    adjusted = np.full(len(given), np.nan)
    order = [i for i in np.argsort(given, kind="stable") if not math.isnan(given[i])]
    least = 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * float(given[i])))
        adjusted[i] = least
    return adjusted


def wilson(successes: float, n: int) -> Interval:
    """Wilson's score interval of a share; `successes` may be a sum of shares, which spread no more than yes and no."""
    if n == 0:
        return None, None
    z = _Z
    share = successes / n
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else max(0.0, (centre - half) / scale)
    return low, 1.0 if successes == n else min(1.0, (centre + half) / scale)


def paired_shares(ones: Values, others: Values) -> Interval:
    """Interval of the mean difference of two shares of the same items, each a yes or no or a share itself.

    Newcombe's square-and-add interval of paired proportions (1998, Statistics in Medicine 17, 2635), method 10 with the
    correlation as it is. It stays within -1..1, which a t interval leaves, and has a width where few items agree.
    """
    n = len(ones)
    (low, high), (other_low, other_high) = (wilson(float(each.sum()), n) for each in (ones, others))
    if low is None or high is None or other_low is None or other_high is None:
        return None, None
    share, other = float(ones.mean()), float(others.mean())
    varied = ones.std() > 0 and others.std() > 0
    together = float(np.corrcoef(ones, others)[0, 1]) if varied else 0.0

    def half(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * together * a * b + b * b))

    difference = share - other
    return (
        difference - half(share - low, other_high - other),
        difference + half(high - share, other - other_low),
    )


def supports(q: float, n: int) -> bool:
    """Whether n observations are enough to headline the q-quantile: at least ten beyond it."""
    return n >= 10.0 / (1.0 - q) - 1e-9


def mser(values: Sequence[float] | Values, batch: int = 5) -> int:
    """How many leading observations to cut so that the rest is steady (MSER-5, White 1997).

    The cut minimises the standard error of the mean of what remains, over batches of `batch`. Cuts beyond
    half of the series mean that no steady state was found: -1.
    """
    series = np.asarray(values, dtype=np.float64)
    count = len(series) // batch
    if count < 8:
        return 0
    means = series[: count * batch].reshape(count, batch).mean(axis=1)
    limit = count - max(5, count // 10)  # the last few make any statistic look good
    scores = [float(means[cut:].var()) / (count - cut) for cut in range(limit)]
    best = int(np.argmin(scores))
    if scores[best] > 0.75 * scores[0]:
        return 0  # noise alone moves the minimum about; only a transient worth cutting moves the score so far
    return -1 if best > count // 2 else best * batch
