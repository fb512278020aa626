"""The registry of metrics: what each is, in words, and how it is computed from the requests of a cell.

Every latency clock starts at the *scheduled* arrival, n is the number of output tokens, and what is undefined
is NA, never 0. Failures (error, timeout, censored) are +inf in percentiles of TTFT, TPOT and E2EL, and absent
from means, whose `n` says over how many they are. A censored request whose first token was seen has that
TTFT. The names other tools give a metric (or the metric of theirs that comes nearest) are part of the
registry; importers rename by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvstudy import statistics
from kvstudy.grid.records import Metric
from kvstudy.grid.schema import Slo

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Definition:
    """A metric: id, formula in words, unit, the event that starts its clock, when it is NA, and what others call it."""

    id: str
    title: str
    formula: str
    unit: str
    start: str
    undefined: str
    vllm: str | None = None
    aiperf: str | None = None
    guidellm: str | None = None
    better: str = "lower"


_DEFINITIONS = (
    Definition(
        "ttft",
        "time to first token",
        "scheduled arrival to first non-empty token",
        "s",
        "scheduled arrival",
        "n = 0",
        vllm="ttft (from the send)",
        aiperf="time_to_first_token (from the send)",
        guidellm="time_to_first_token_ms (from the send)",
    ),
    Definition(
        "tpot",
        "time per output token",
        "(last token - first token) / (n - 1)",
        "s",
        "first token",
        "n < 2",
        vllm="tpot",
        aiperf="inter_token_latency (denominator: n - tokens of the first chunk)",
        guidellm="inter_token_latency_ms (its time_per_output_token_ms includes the first token)",
    ),
    Definition(
        "itl",
        "inter-token latency",
        "gaps between tokens; a chunk of k tokens is k tokens at that time",
        "s",
        "each token but the first",
        "n < 2, or chunk counts unknown",
        vllm=None,
        aiperf=None,
        guidellm=None,
    ),
    Definition(
        "icl",
        "inter-chunk latency",
        "gaps between chunks that carry tokens",
        "s",
        "each chunk but the first",
        "fewer than two chunks",
        vllm="itl",
        aiperf="inter_chunk_latency",
        guidellm=None,
    ),
    Definition(
        "e2el",
        "end-to-end latency",
        "scheduled arrival to last token",
        "s",
        "scheduled arrival",
        "failed or n = 0",
        vllm="e2el (from the send; e2el_including_client_queue from the schedule)",
        aiperf="effective_latency (request_latency is from the send)",
        guidellm="request_latency (from the send)",
    ),
    Definition(
        "queue.client",
        "queue at the client",
        "scheduled arrival to send",
        "s",
        "scheduled arrival",
        "never sent",
        vllm="client_queue_time (from the release to the semaphore)",
        aiperf=None,
        guidellm="request_dispatch_delay",
    ),
    Definition(
        "queue.server",
        "queue at the server",
        "submission to admission, as the server reports it per request",
        "s",
        "server's submission",
        "the server reports only aggregates",
    ),
    Definition(
        "throughput.output",
        "output throughput",
        "output tokens that arrived in the steady window / its length",
        "tokens/s",
        "window",
        "no window",
        vllm="output_throughput (over the whole run, drain included)",
        aiperf="output_token_throughput",
        guidellm="output_tokens_per_second",
        better="higher",
    ),
    Definition(
        "throughput.requests",
        "request throughput",
        "requests completed in the steady window / its length",
        "requests/s",
        "window",
        "no window",
        vllm="request_throughput (over the whole run, drain included)",
        aiperf="request_throughput",
        guidellm="requests_per_second",
        better="higher",
    ),
    Definition(
        "throughput.total",
        "total throughput",
        "output tokens in the steady window + prompt tokens of requests whose first token fell in it, / its length",
        "tokens/s",
        "window",
        "no window",
        vllm="total_token_throughput (over the whole run)",
        aiperf="total_token_throughput",
        guidellm="tokens_per_second",
        better="higher",
    ),
    Definition(
        "rate.offered",
        "offered rate",
        "scheduled arrivals in the window / its length",
        "requests/s",
        "window",
        "closed loop",
        better="neither",
    ),
    Definition(
        "rate.achieved",
        "achieved rate",
        "requests sent in the window / its length",
        "requests/s",
        "window",
        "no window",
        better="neither",
    ),
    Definition(
        "goodput",
        "goodput",
        "share of offered requests that met every SLO; a failure never meets one",
        "share",
        "scheduled arrival",
        "no SLO given",
        vllm="request_goodput (a rate, of completed requests)",
        aiperf="goodput (a rate)",
        guidellm=None,
        better="higher",
    ),
    Definition(
        "capacity",
        "capacity",
        "highest rate at which the goal's share of offered requests meets the SLO, by bracket and bisection",
        "requests/s",
        "scheduled arrival",
        "not searched for, or the lowest rate fails",
        better="higher",
    ),
    Definition(
        "failures",
        "failed share",
        "share of offered requests that ended as error, timeout or censored",
        "share",
        "scheduled arrival",
        "nothing offered",
    ),
)

REGISTRY: dict[str, Definition] = {item.id: item for item in _DEFINITIONS}

#: Latencies of a request each, of which mean and percentiles are reported.
LATENCIES = ("ttft", "tpot", "e2el", "queue.client", "queue.server")
GAPS = ("itl", "icl")
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Window:
    """The steady window in seconds of the cell: [start, end)."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Its length."""
        return max(0.0, self.end_s - self.start_s)


def split(metric: str) -> tuple[str, str | None, str | None]:
    """(definition, length class, statistic) of an id: `ttft.p50`, `ttft.long.p50`, `throughput.output`."""
    for name in sorted(REGISTRY, key=len, reverse=True):
        if metric == name:
            return name, None, None
        if metric.startswith(f"{name}."):
            parts = metric[len(name) + 1 :].split(".")
            return (name, parts[0], parts[1]) if len(parts) == 2 else (name, None, parts[0])
    raise KeyError(f"no metric '{metric}'")


# --- from a request to its numbers ---------------------------------------------------------------


def per_request(frame: pd.DataFrame) -> pd.DataFrame:
    """A column a latency, a row a request, same index: NaN where NA, +inf where the request failed.

    `queue.client` and `queue.server` are NaN where they were not observed, failed or not.
    """
    ok = (frame["status"] == "ok").to_numpy(dtype=bool)
    censored = (frame["status"] == "censored").to_numpy(dtype=bool)
    scheduled = frame["scheduled_s"].to_numpy(dtype=np.float64)
    first = frame["first_token_s"].to_numpy(dtype=np.float64)
    last = frame["last_token_s"].to_numpy(dtype=np.float64)
    tokens = frame["output_tokens"].astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan)
    asked = frame["output_tokens_asked"].to_numpy(dtype=np.int64)
    failed = ~ok
    ttft = first - scheduled
    ttft[failed & ~(censored & ~np.isnan(first))] = np.inf
    e2el = last - scheduled
    e2el[failed] = np.inf
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(tokens >= 2, (last - first) / (tokens - 1), np.nan)
    tpot[failed] = np.where(asked[failed] >= 2, np.inf, np.nan)
    return pd.DataFrame(
        {
            "ttft": ttft,
            "tpot": tpot,
            "e2el": e2el,
            "queue.client": frame["sent_s"].to_numpy(dtype=np.float64) - scheduled,
            "queue.server": frame["server_queue_s"].to_numpy(dtype=np.float64),
        },
        index=frame.index,
    )


def token_gaps(times: npt.ArrayLike, tokens: npt.ArrayLike) -> Values:
    """Gaps between the tokens of one stream: n - 1 of them, 0 inside a chunk."""
    moments = np.repeat(np.asarray(times, dtype=np.float64), np.asarray(tokens, dtype=np.int64))
    return np.diff(moments)


def _gaps(frame: pd.DataFrame, kind: str) -> list[Values]:
    """Gaps of each successful request that has any."""
    found = []
    for status, times, tokens in zip(frame["status"], frame["chunk_s"], frame["chunk_tokens"], strict=True):
        if status != "ok" or times is None:
            continue
        if kind == "icl":
            gaps = np.diff(np.asarray(times, dtype=np.float64))
        elif tokens is None:
            continue
        else:
            gaps = token_gaps(times, tokens)
        if len(gaps):
            found.append(gaps)
    return found


# --- from numbers to metrics ---------------------------------------------------------------------


def percentile_metric(values: Values, q: float, unit: str) -> Metric:
    """A percentile of values in order of arrival; +inf among them are failures, NaN are left out."""
    known = values[~np.isnan(values)]
    n = len(known)
    if n == 0:
        return Metric(value=None, unit=unit, n=0, starred=True)
    value = statistics.quantile(known, q)
    low, high = statistics.quantile_interval(known, q, statistics.quantile_size(known, q))
    return Metric(
        value=value if math.isfinite(value) else None,
        unit=unit,
        n=n,
        low=low if low is not None and math.isfinite(low) else None,
        high=high if high is not None and math.isfinite(high) else None,
        infinite=not math.isfinite(value),
        starred=not statistics.supports(q, n),
    )


def mean_metric(values: Values, unit: str) -> Metric:
    """Mean over those that have a finite value, in order of arrival."""
    known = values[np.isfinite(values)]
    if len(known) == 0:
        return Metric(value=None, unit=unit, n=0)
    low, high = statistics.mean_interval(known)
    # Times and counts: an interval symmetric in t may reach below zero, the quantity cannot.
    return Metric(
        value=float(known.mean()), unit=unit, n=len(known), low=None if low is None else max(0.0, low), high=high
    )


def _pooled(gaps: list[Values], unit: str) -> dict[str, Metric]:
    """Mean and percentiles of gaps pooled over requests; intervals by resampling whole requests.

    As many are drawn as the requests are worth: those that share a batch share its pace.
    """
    if not gaps:
        empty = Metric(value=None, unit=unit, n=0)
        return {"mean": empty, **{name: empty.model_copy(update={"starred": True}) for name in PERCENTILES}}
    pooled = np.concatenate(gaps)
    means: dict[str, list[float]] = {name: [] for name in ("mean", *PERCENTILES)}
    random = np.random.default_rng(0)
    # As many rounds as take about a second; below 40 there is no interval worth giving.
    rounds = min(200, 4_000_000 // len(pooled)) if len(gaps) >= 5 else 0
    rounds = rounds if rounds >= 40 else 0
    worth = round(statistics.effective_size(np.array([float(own.mean()) for own in gaps])))
    quantiles = list(PERCENTILES.values())
    for _ in range(rounds):
        again = np.concatenate([gaps[i] for i in random.integers(len(gaps), size=worth)])
        means["mean"].append(float(again.mean()))
        for name, value in zip(PERCENTILES, np.quantile(again, quantiles), strict=True):
            means[name].append(float(value))
    values = {"mean": float(pooled.mean())}
    values |= {name: statistics.quantile(pooled, q) for name, q in PERCENTILES.items()}
    out = {}
    for name, value in values.items():
        low, high = (float(x) for x in np.quantile(means[name], [0.025, 0.975])) if rounds else (None, None)
        starred = name in PERCENTILES and not statistics.supports(PERCENTILES[name], len(pooled))
        out[name] = Metric(value=value, unit=unit, n=len(pooled), low=low, high=high, starred=starred)
    return out


def _rate(times: Values, weights: Values, window: Window, unit: str) -> Metric:
    """Weight that fell in the window, by its length; interval by means of ten equal parts of it."""
    inside = (times >= window.start_s) & (times < window.end_s)
    n = int(inside.sum())
    if window.length_s <= 0:
        return Metric(value=None, unit=unit, n=n)
    value = float(weights[inside].sum()) / window.length_s
    low = high = None
    if n >= 20:
        parts, _ = np.histogram(times[inside], bins=10, range=(window.start_s, window.end_s), weights=weights[inside])
        low, high = statistics.mean_interval(parts / (window.length_s / 10))
    return Metric(value=value, unit=unit, n=n, low=None if low is None else max(0.0, low), high=high)


def tokens_at(frame: pd.DataFrame) -> tuple[Values, Values]:
    """(times, counts) of all output tokens of requests that did not fail; censored ones included.

    Where the server does not say how many tokens a chunk has, all of a request's tokens count at its last
    one.
    """
    times: list[Values] = []
    counts: list[Values] = []
    for status, at, tokens, total, last in zip(
        frame["status"],
        frame["chunk_s"],
        frame["chunk_tokens"],
        frame["output_tokens"],
        frame["last_token_s"],
        strict=True,
    ):
        if status not in ("ok", "censored"):
            continue
        if tokens is not None and at is not None:
            times.append(np.asarray(at, dtype=np.float64))
            counts.append(np.asarray(tokens, dtype=np.float64))
        elif not pd.isna(total) and not pd.isna(last):
            times.append(np.array([last]))
            counts.append(np.array([float(total)]))
    if not times:
        return np.empty(0), np.empty(0)
    return np.concatenate(times), np.concatenate(counts)


def goodput(frame: pd.DataFrame, slo: Slo) -> Metric:
    """Share of offered requests that met every bound; NA of an undefined latency (n < 2) meets its bound."""
    n = len(frame)
    if n == 0:
        return Metric(value=None, unit="share", n=n)
    values = per_request(frame)
    good = (frame["status"] == "ok").to_numpy(dtype=bool)
    for name, bound in slo.bounds().items():
        column = values[name].to_numpy(dtype=np.float64)
        good &= (column <= bound) | np.isnan(column)
    low, high = statistics.wilson(int(good.sum()), n)
    return Metric(value=float(good.mean()), unit="share", n=n, low=low, high=high)


def compute(frame: pd.DataFrame, window: Window, *, closed: bool = False, slo: Slo | None = None) -> dict[str, Metric]:
    """Every metric of a cell by id. Latencies are of requests scheduled in the window, whenever they ended."""
    inside = frame[frame["in_window"]].sort_values("scheduled_s", kind="stable")
    found: dict[str, Metric] = {}
    groups: dict[str, pd.DataFrame] = {"": inside}
    classes = sorted(set(inside["length_class"].dropna()))
    if len(classes) > 1:
        groups |= {f"{name}.": inside[inside["length_class"] == name] for name in classes}
    for prefix, rows in groups.items():
        values = per_request(rows)
        for name in LATENCIES:
            column = values[name].to_numpy(dtype=np.float64)
            unit = REGISTRY[name].unit
            found[f"{name}.{prefix}mean"] = mean_metric(column, unit)
            for label, q in PERCENTILES.items():
                found[f"{name}.{prefix}{label}"] = percentile_metric(column, q, unit)
        for name in GAPS:
            for label, metric in _pooled(_gaps(rows, name), REGISTRY[name].unit).items():
                found[f"{name}.{prefix}{label}"] = metric
    times, counts = tokens_at(frame)
    found["throughput.output"] = _rate(times, counts, window, "tokens/s")
    ended = frame.loc[frame["status"] == "ok", "finished_s"].to_numpy(dtype=np.float64)
    found["throughput.requests"] = _rate(ended, np.ones(len(ended)), window, "requests/s")
    begun = frame.loc[frame["first_token_s"].notna() & frame["prompt_tokens"].notna()]
    prompts = begun["prompt_tokens"].astype("float64").to_numpy()
    starts = begun["first_token_s"].to_numpy(dtype=np.float64)
    found["throughput.total"] = _rate(
        np.concatenate([times, starts]), np.concatenate([counts, prompts]), window, "tokens/s"
    )
    scheduled = frame["scheduled_s"].to_numpy(dtype=np.float64)
    sent = frame["sent_s"].to_numpy(dtype=np.float64)
    sent = sent[~np.isnan(sent)]
    if not closed:
        found["rate.offered"] = _rate(scheduled, np.ones(len(scheduled)), window, "requests/s")
    found["rate.achieved"] = _rate(sent, np.ones(len(sent)), window, "requests/s")
    failed = int((inside["status"] != "ok").sum())
    low, high = statistics.wilson(failed, len(inside))
    found["failures"] = Metric(
        value=failed / len(inside) if len(inside) else None, unit="share", n=len(inside), low=low, high=high
    )
    if slo is not None:
        found["goodput"] = goodput(inside, slo)
    return found


def find_window(
    frame: pd.DataFrame, duration_s: float, *, burst: bool = False, saturated: bool = False
) -> tuple[Window, dict[str, float | bool]]:
    """The steady window, and how it was found.

    It ends with the load (a burst's: with its last token). Its start is where MSER-5 over the end-to-end
    latencies, in order of arrival, says the start-up transient has passed. Nothing is cut from fewer than 40
    requests; nothing if no steady state is found, as where the queue grew all along (`steady` is then false).
    """
    if burst:
        last = frame["last_token_s"].max()
        return Window(0.0, float(last) if not pd.isna(last) else duration_s), {
            "steady": True,
            "cut_requests": 0,
        }
    whole = Window(0.0, duration_s)
    if saturated:
        return whole, {"steady": False, "cut_requests": 0}
    ordered = frame.sort_values("scheduled_s", kind="stable")
    values = per_request(ordered)["e2el"].to_numpy(dtype=np.float64)
    finite = np.isfinite(values)
    times = ordered["scheduled_s"].to_numpy(dtype=np.float64)[finite]
    cut = statistics.mser(values[finite])
    if cut <= 0:
        return whole, {"steady": cut == 0, "cut_requests": 0}
    return Window(float(times[cut]), duration_s), {"steady": True, "cut_requests": cut}


def summarise(frame: pd.DataFrame) -> Mapping[str, int]:
    """Counts of a cell: offered, sent, by status, in the window."""
    status = frame["status"].value_counts()
    return {
        "offered": len(frame),
        "sent": int(frame["sent_s"].notna().sum()),
        **{name: int(status.get(name, 0)) for name in ("ok", "error", "timeout", "censored")},
        "in_window": int(frame["in_window"].sum()),
    }
