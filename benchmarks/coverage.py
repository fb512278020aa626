"""Do 95 % intervals of means cover 95 %? `python -m benchmarks.coverage --json`, a few minutes of one core.

Streams whose mean is known, many times over: independent ones, first-order autoregressions, and queues, where a busy
period is worth about one observation. A row a stream and length; `tests/test_statistics.py` holds some of them.
The target, 93 to 97 %, is for streams that are long enough for their dependence; a row says by how much others miss it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import signal

from benchmarks.common import Row, main
from kvstudy.statistics import mean_interval

Values = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Values]

TRIALS = 2000
LENGTHS = (100, 300, 1000)
#: Customers before the first that counts: a queue at 0.9 has forgotten by then that it was empty.
BURN = 2500


def autoregression(rho: float) -> Draw:
    """Gaussian, marginally standard normal."""

    def draw(random: np.random.Generator, n: int) -> Values:
        noise = random.standard_normal(n)
        noise[1:] *= math.sqrt(1.0 - rho**2)
        return np.asarray(signal.lfilter([1.0], [1.0, -rho], noise))

    return draw


def queue(rho: float, service: Draw | None = None, *, then: Draw | None = None) -> Draw:
    """Waits of a queue with Poisson arrivals, service 1 on average (Lindley 1952); `then` is added to each."""

    def draw(random: np.random.Generator, n: int) -> Values:
        served = np.ones(n + BURN) if service is None else service(random, n + BURN)
        walk = np.cumsum(served - random.exponential(1.0 / rho, n + BURN))
        waits = (walk - np.minimum(np.minimum.accumulate(walk), 0.0))[BURN:]
        return np.asarray(waits if then is None else waits + then(random, n))

    return draw


def exponential(random: np.random.Generator, n: int) -> Values:
    """Service times of an M/M/1 queue."""
    return random.exponential(1.0, n)


def gamma(random: np.random.Generator, n: int) -> Values:
    """What comes after a wait, as decoding after a queue: 1 on average."""
    return random.gamma(4.0, 0.25, n)


def waits(rho: float, squares: float) -> float:
    """Mean wait, by Pollaczek and Khinchine; `squares` is the mean square of the service time."""
    return rho * squares / (2.0 * (1.0 - rho))


STREAMS: dict[str, tuple[Draw, float]] = {
    "independent normal": (autoregression(0.0), 0.0),
    "independent lognormal": (lambda random, n: random.lognormal(0.0, 1.0, n), math.exp(0.5)),
    "independent Pareto 3": (lambda random, n: random.pareto(3.0, n), 0.5),
    "AR(1) 0.5": (autoregression(0.5), 0.0),
    "AR(1) 0.8": (autoregression(0.8), 0.0),
    "AR(1) 0.9": (autoregression(0.9), 0.0),
    "lognormal of AR(1) 0.8": (lambda random, n: np.exp(autoregression(0.8)(random, n)), math.exp(0.5)),
    "M/D/1 waits, rho 0.5": (queue(0.5), waits(0.5, 1.0)),
    "M/D/1 waits, rho 0.8": (queue(0.8), waits(0.8, 1.0)),
    "M/D/1 waits, rho 0.9": (queue(0.9), waits(0.9, 1.0)),
    "M/M/1 waits, rho 0.8": (queue(0.8, exponential), waits(0.8, 2.0)),
    "M/D/1 waits 0.8 and a service that varies": (queue(0.8, then=gamma), waits(0.8, 1.0) + 1.0),
}


def rows() -> list[Row]:
    """The share of intervals that hold the mean, in percent."""
    found = []
    for name, (draw, truth) in STREAMS.items():
        for n in LENGTHS:
            random = np.random.default_rng([11, n])
            hits = 0
            for _ in range(TRIALS):
                low, high = mean_interval(draw(random, n))
                hits += low is not None and high is not None and low <= truth <= high
            share = 100.0 * hits / TRIALS
            error = 100.0 * math.sqrt(0.95 * 0.05 / TRIALS)
            met = 93.0 - 2 * error <= share <= 97.0 + 2 * error
            found.append(Row(f"{name}, {n}", share, "%", target=95.0, met=met, beside={"standard error": error}))
    return found


if __name__ == "__main__":
    main(__doc__ or "", rows)
