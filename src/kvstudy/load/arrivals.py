"""Arrival processes: drawn ahead at unit rate from a seed, then divided by the rate.

Every rate of a study divides the same unit draws, so cells that differ in rate alone see the same requests in
the same order. Draws are prefix-stable: the first k arrivals do not depend on how many are drawn.

`unit_arrivals` gives cumulative times whose mean gap is 1 (traces: seconds of the trace); `schedule` turns
them into seconds of the cell. Closed loops have no arrivals: there a request is due when a slot is free.
"""

from __future__ import annotations

import csv
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstudy.grid import traces
from kvstudy.grid.schema import (
    BurstLoad,
    ClosedLoad,
    ConstantLoad,
    GammaLoad,
    KneeLoad,
    Load,
    PoissonLoad,
    RampLoad,
    TraceLoad,
)

Times = npt.NDArray[np.float64]


class ArrivalError(Exception):
    """The arrivals cannot be drawn; one line that says why."""


def generator(*key: int | str) -> np.random.Generator:
    """A random generator of its own for a key: the same key gives the same draws on every machine."""
    words = [int.from_bytes(hashlib.sha256(str(part).encode()).digest()[:8], "big") for part in key]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words)))


def unit_arrivals(load: Load, seed: int, count: int) -> Times:
    """Cumulative arrival times at unit rate, `[count]`; NaN for a closed loop, which has none.

    Poisson and ramp share exponential gaps (so a ramp is a warped Poisson of the same seed); gamma gaps have
    mean 1 and squared coefficient of variation `burstiness`; constant arrivals are 0, 1, 2, ...
    """
    if isinstance(load, ClosedLoad):
        return np.full(count, np.nan)
    if isinstance(load, BurstLoad):
        return np.zeros(count)
    if isinstance(load, ConstantLoad):
        return np.arange(count, dtype=np.float64)
    if isinstance(load, TraceLoad):
        trace = read_trace(load)
        return trace.times[:count]
    random = generator("arrivals", seed)
    if isinstance(load, GammaLoad):
        gaps = random.standard_gamma(1.0 / load.burstiness, size=count) * load.burstiness
    else:
        gaps = random.standard_exponential(size=count)
    return np.asarray(np.cumsum(gaps), dtype=np.float64)


def schedule(load: Load, unit: Times) -> Times:
    """Seconds from the cell's zero at which requests are due, those before the load's end only.

    Raises
    ------
    ArrivalError
        `unit` ends before the load does: more arrivals must be drawn.
    """
    if isinstance(load, ClosedLoad):
        return np.full(len(unit), np.nan)
    if isinstance(load, BurstLoad):
        return np.zeros(min(load.requests, len(unit)))
    if isinstance(load, TraceLoad):
        times = unit / load.speed
        return np.asarray(times[times < load.duration_s])
    if isinstance(load, RampLoad):
        # Integrated rate r0 t + (r1 - r0) t^2 / 2D equals the unit arrival; solved without cancellation.
        slope = (load.end_rate - load.rate) / (2.0 * load.duration_s)
        with np.errstate(invalid="ignore"):
            times = 2.0 * unit / (load.rate + np.sqrt(load.rate**2 + 4.0 * slope * unit))
        times = np.where(np.isnan(times), np.inf, times)  # a falling ramp never reaches these arrivals
    elif isinstance(load, PoissonLoad | GammaLoad | ConstantLoad):
        times = unit / load.rate
    else:  # pragma: no cover - the union is closed
        raise TypeError(type(load))
    due = times[times < load.duration_s]
    if len(due) == len(times):
        raise ArrivalError(f"{len(unit)} drawn arrivals end before {load.duration_s:g} s")
    return np.asarray(due)


def requests_needed(load: Load, seed: int) -> int:
    """How many requests must be drawn so that the load never runs out.

    A power of two, but exact for burst and trace. A closed loop's need is not known ahead: room for a request
    a slot every quarter of a second, at least 16 a slot.
    """
    if isinstance(load, BurstLoad):
        return load.requests
    if isinstance(load, TraceLoad):
        times = read_trace(load).times
        return int(np.searchsorted(times / load.speed, load.duration_s))
    if isinstance(load, KneeLoad):
        return requests_needed(PoissonLoad(rate=load.high, duration_s=load.duration_s), seed)
    if isinstance(load, ClosedLoad):
        return _power_of_two(load.concurrency * max(16, int(np.ceil(load.duration_s * 4))))
    size = 64
    while True:
        try:
            due = schedule(load, unit_arrivals(load, seed, size))
        except ArrivalError:
            size *= 2
            continue
        return _power_of_two(len(due) + 1)  # one more than are due shows that the load has ended


def _power_of_two(count: int) -> int:
    return 1 << max(4, (count - 1).bit_length())


# --- recorded traces -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """Rows of a recorded trace from `start_s` on: times in seconds from there, lengths in tokens.

    `shared` holds Mooncake's `hash_ids` (one id per 512 prompt tokens; equal ids mean an equal prefix), else
    None.
    """

    times: Times
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    shared: tuple[tuple[int, ...], ...] | None = None


_TRACES: dict[tuple[str, str, float, int, int], Trace] = {}


def read_trace(load: TraceLoad) -> Trace:
    """Read the trace a load names, sorted by time; requests of no output are kept as one token.

    Raises
    ------
    ArrivalError
        The file is missing, its hash or its columns are others, or the window is empty.
    """
    path = Path(load.path)
    try:
        stat = path.stat()
    except OSError as error:
        raise ArrivalError(f"cannot read the trace: {error}; name your own copy (load.path)") from error
    key = (str(path), load.format, load.start_s, stat.st_mtime_ns, stat.st_size)
    if key in _TRACES:
        return _TRACES[key]
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ArrivalError(f"cannot read the trace: {error}") from error
    if load.sha256 is not None:
        found = hashlib.sha256(raw).hexdigest()
        if found != load.sha256:
            raise ArrivalError(f"{path} is not the trace the load pins: sha256 {found}, wanted {load.sha256}")
    try:
        rows = [row for _, row in traces.rows(raw.decode("utf-8-sig").splitlines(), load.format)]
    except (ValueError, csv.Error) as error:
        raise ArrivalError(f"{path} does not read as a trace of format '{load.format}': {error}") from error
    start = traces.origin([row[0] for row in rows], load.format)
    rows = [(t - start, p, o, h) for t, p, o, h in rows]
    rows.sort(key=lambda row: row[0])
    rows = [(t - load.start_s, p, o, h) for t, p, o, h in rows if t >= load.start_s]
    if not rows:
        raise ArrivalError(f"{path} holds no request after {load.start_s:g} s (load.start_s)")
    shared = tuple(h for *_, h in rows if h is not None)
    trace = Trace(
        np.array([row[0] for row in rows]),
        np.array([max(1, row[1]) for row in rows], dtype=np.int64),
        np.array([max(1, row[2]) for row in rows], dtype=np.int64),
        shared if len(shared) == len(rows) else None,
    )
    _TRACES[key] = trace
    return trace
