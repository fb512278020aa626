"""Gates: what a cell must pass to be believed, each with its own numbers in `summary.json`.

A gate that fails makes the verdict INVALID with a reason; a flag says something true about the *server* (it
was saturated) and leaves the cell valid. Whether the generator draws the process it names is not asked of a
cell (several tests at 5 % would fail a sixth of all sound ones); that is tested over many seeds in the tests.

reasons   client_bound    more than 1 % of requests (and more than one) were sent late: by over 5 ms and over 5 %
                          of the median TTFT
          not_as_drawn    fewer requests sent than drawn, or the sent rate off by more than 1 %
          prompt_lengths  realised prompts differ from the asked ones by more than 1 % in the mean (chat: 5 %)
          output_lengths  realised outputs of successful requests differ by more than 1 % though EOS is ignored
          littles_law     requests in the server, as it reports them, do not match what the client saw
          prefix_hits     the server answered from cached prefixes more than the workload explains
          config          the server does not run with what it was asked for
          no_usage        the server does not count its tokens, so nothing that needs them can be said
flags     prefix_evicted  cached prefixes answered less than the workload shares: there was no room to keep them
          saturated       the queue grew over the load: latencies are those of this duration, no steady state's
          not_steady      no steady state was found (MSER-5)
          failures        some requests failed
          exhausted       a closed loop used up the drawn requests before its time
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import spearmanr

from kvstudy.frameworks.base import Counters
from kvstudy.grid.records import Verdict
from kvstudy.grid.schema import Cell, ClosedLoad, Load, RampLoad
from kvstudy.measure.metrics import Window

LAG_S = 0.005
LAG_SHARE = 0.05
RATE_TOLERANCE = 0.01
LENGTH_TOLERANCE = 0.01
CHAT_LENGTH_TOLERANCE = 0.05
PREFIX_TOLERANCE = 0.01
GROWTH = 0.1
KEEPS_UP = 0.9
LEAST_REQUESTS = 30


@dataclass
class Gates:
    """The outcome of all gates."""

    reasons: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    checks: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """VALID unless a gate gave a reason."""
        return Verdict(status="INVALID" if self.reasons else "VALID", reasons=self.reasons)

    def _check(self, name: str, passed: bool | None, **numbers: Any) -> None:
        self.checks[name] = {"passed": passed, **{key: _plain(value) for key, value in numbers.items()}}
        if passed is False:
            self.reasons.append(name)


def _plain(value: Any) -> Any:
    """JSON-able, NaN and infinity as null."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def judge(
    cell: Cell,
    frame: pd.DataFrame,
    window: Window,
    *,
    planned: int | None,
    aborted: bool = False,
    exhausted: bool = False,
    steady: bool = True,
    samples: Sequence[Mapping[str, Any]] = (),
    before: Counters | None = None,
    after: Counters | None = None,
    asked: Mapping[str, Any] | None = None,
    effective: Mapping[str, Any] | None = None,
    expected_hits: float = 0.0,
) -> Gates:
    """All gates over one cell's requests.

    `planned` is the number of drawn arrivals (None in a closed loop); `samples` are the memory sampler's,
    with times relative to the cell's zero under `t_s`.
    """
    gates = Gates()
    closed = isinstance(cell.load, ClosedLoad)
    _client(gates, frame)
    _as_drawn(gates, frame, planned, aborted)
    _lengths(gates, cell, frame)
    _littles_law(gates, frame, window, samples)
    _prefix(gates, before, after, expected_hits)
    _config(gates, asked, effective)
    saturated, numbers = saturation(frame, offered_rate(cell.load))
    gates.checks["saturation"] = {
        "saturated": saturated,
        **{key: _plain(value) for key, value in numbers.items()},
    }
    if saturated and not closed:
        gates.flags.append("saturated")
    if not steady:
        gates.flags.append("not_steady")
    if bool((frame["status"] != "ok").any()):
        gates.flags.append("failures")
    if exhausted:
        gates.flags.append("exhausted")
    return gates


def offered_rate(load: Load) -> float | None:
    """The mean rate a load names, in requests a second; None where it names none (or it changes)."""
    return None if isinstance(load, RampLoad) else getattr(load, "rate", None)


def _client(gates: Gates, frame: pd.DataFrame) -> None:
    lag = (frame["sent_s"] - frame["scheduled_s"]).to_numpy(dtype=np.float64)
    lag = lag[~np.isnan(lag)]
    if len(lag) == 0:
        gates._check("client_bound", None, n=0)
        return
    ttft = (frame["first_token_s"] - frame["scheduled_s"]).to_numpy(dtype=np.float64)
    typical = float(np.nanmedian(ttft)) if not np.isnan(ttft).all() else 0.0
    limit = max(LAG_S, LAG_SHARE * typical)
    p99 = float(np.quantile(lag, 0.99))
    late = int((lag > limit).sum())
    gates._check(
        "client_bound",
        late <= max(1.0, 0.01 * len(lag)),
        n=len(lag),
        p50_s=float(np.median(lag)),
        p99_s=p99,
        max_s=float(lag.max()),
        limit_s=limit,
        late=late,
    )


def client_bound(frame: pd.DataFrame) -> bool:
    """Whether the client was too late for these requests to be believed."""
    gates = Gates()
    _client(gates, frame)
    return "client_bound" in gates.reasons


def _as_drawn(gates: Gates, frame: pd.DataFrame, planned: int | None, aborted: bool) -> None:
    if planned is None:
        gates._check("not_as_drawn", None, sent=int(frame["sent_s"].notna().sum()))
        return
    sent = frame.loc[frame["sent_s"].notna(), "sent_s"].to_numpy(dtype=np.float64)
    drawn = frame["scheduled_s"].to_numpy(dtype=np.float64)
    ratio = 1.0
    if len(sent) > 1 and len(drawn) > 1 and float(np.ptp(drawn)) > 0 and float(np.ptp(sent)) > 0:
        ratio = (len(sent) - 1) / float(np.ptp(sent)) / ((len(drawn) - 1) / float(np.ptp(drawn)))
    # What a dying server cut short is the server's doing; the outcome says so.
    passed = True if aborted else len(sent) == planned and abs(ratio - 1.0) <= RATE_TOLERANCE
    if float(np.ptp(drawn)) < 1.0 and len(sent) == planned:
        passed = True  # a burst: all at once has no rate to compare
    gates._check("not_as_drawn", passed, planned=planned, sent=len(sent), rate_ratio=ratio)


def _lengths(gates: Gates, cell: Cell, frame: pd.DataFrame) -> None:
    ok = frame[frame["status"] == "ok"]
    if len(ok) == 0:
        for name in ("prompt_lengths", "output_lengths", "no_usage"):
            gates._check(name, None, n=0)
        return
    counted = ok["output_tokens"].notna()
    gates._check("no_usage", bool(counted.all()), n=len(ok), counted=int(counted.sum()))
    known = ok[ok["prompt_tokens"].notna()]
    tolerance = CHAT_LENGTH_TOLERANCE if cell.workload.api == "chat" else LENGTH_TOLERANCE
    passed, numbers = _difference(known["prompt_tokens_asked"], known["prompt_tokens"], tolerance)
    gates._check("prompt_lengths", passed, **numbers)
    known = ok[counted]
    passed, numbers = _difference(known["output_tokens_asked"], known["output_tokens"], LENGTH_TOLERANCE)
    gates._check("output_lengths", passed if cell.workload.ignore_eos else None, **numbers)


def _difference(
    asked: pd.Series[Any], realised: pd.Series[Any], tolerance: float
) -> tuple[bool | None, dict[str, Any]]:
    """Mean absolute difference over the mean asked, and whether it is within tolerance."""
    if len(asked) == 0:
        return None, {"n": 0}
    wanted = asked.astype("float64").to_numpy()
    got = realised.astype("float64").to_numpy()
    off = float(np.abs(got - wanted).mean() / wanted.mean())
    return off <= tolerance, {
        "n": len(asked),
        "asked_mean": float(wanted.mean()),
        "realised_mean": float(got.mean()),
        "relative_error": off,
        "limit": tolerance,
    }


def _littles_law(gates: Gates, frame: pd.DataFrame, window: Window, samples: Sequence[Mapping[str, Any]]) -> None:
    """L as the server reports it (running + waiting, sampled) against lambda x W as the client saw it.

    Both are taken at the same moments, those of the server's samples; `lambda_w` is the time-average of requests
    between send and end over the whole window. The tolerance is a tenth, growing with residence time over window
    (what straddles the ends weighs more, and the law is one of long runs), the sampling error of the difference,
    and half a request for what is on the wire.
    """
    sent = frame["sent_s"].to_numpy(dtype=np.float64)
    ended = frame["finished_s"].to_numpy(dtype=np.float64)
    known = ~np.isnan(sent) & ~np.isnan(ended)
    sent, ended = sent[known], ended[known]
    inside = [
        item for item in samples if window.start_s <= item["t_s"] < window.end_s and item.get("running") is not None
    ]
    if len(inside) < 5 or len(sent) == 0 or window.length_s <= 0:
        gates._check("littles_law", None, samples=len(inside))
        return
    at = np.array([item["t_s"] for item in inside], dtype=np.float64)
    server = np.array([(item["running"] or 0.0) + (item.get("waiting") or 0.0) for item in inside], dtype=np.float64)
    # The client's view at the same moments: what is left is what the two disagree about, not sampling noise.
    client = _in_flight(sent, ended, at)
    residence = float((ended - sent).mean())
    overlap = np.clip(np.minimum(ended, window.end_s) - np.maximum(sent, window.start_s), 0.0, None)
    average = float(overlap.sum()) / window.length_s
    gap = float((server - client).mean())
    scale = float(client.mean())
    relative = 0.1 + min(0.2, residence / window.length_s)
    tolerance = max(0.5, relative * scale + 3.0 * float((server - client).std()) / math.sqrt(len(inside)))
    gates._check(
        "littles_law",
        abs(gap) <= tolerance,
        samples=len(inside),
        l_server=float(server.mean()),
        l_client=scale,
        lambda_w=average,
        residence_s=residence,
        residence_over_window=residence / window.length_s,
        tolerance=tolerance,
    )


def _in_flight(
    start: npt.NDArray[np.float64], end: npt.NDArray[np.float64], at: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """How many intervals contain each moment."""
    begun = np.searchsorted(np.sort(start), at, side="right")
    over = np.searchsorted(np.sort(end), at, side="right")
    return (begun - over).astype(np.float64)


def _prefix(gates: Gates, before: Counters | None, after: Counters | None, expected: float) -> None:
    if (
        before is None
        or after is None
        or None
        in (
            before.prefix_queries,
            before.prefix_hits,
            after.prefix_queries,
            after.prefix_hits,
        )
    ):
        gates._check("prefix_hits", None)
        return
    assert after.prefix_queries is not None and before.prefix_queries is not None
    assert after.prefix_hits is not None and before.prefix_hits is not None
    asked = after.prefix_queries - before.prefix_queries
    share = (after.prefix_hits - before.prefix_hits) / asked if asked > 0 else 0.0
    if share < 0.9 * expected - PREFIX_TOLERANCE:
        gates.flags.append("prefix_evicted")
    gates._check(
        "prefix_hits",
        share <= expected + PREFIX_TOLERANCE,
        share=share,
        expected=expected,
        queried_tokens=asked,
    )


def _config(gates: Gates, asked: Mapping[str, Any] | None, effective: Mapping[str, Any] | None) -> None:
    if not asked or effective is None:
        gates._check("config", None)
        return
    different = {
        key: {"asked": wanted, "effective": effective.get(key)}
        for key, wanted in asked.items()
        if not _same(wanted, effective.get(key))
    }
    # A value that the server does not report is not a difference, but it is said.
    silent = sorted(key for key, pair in different.items() if pair["effective"] is None and pair["asked"] is not None)
    wrong = {key: pair for key, pair in different.items() if key not in silent}
    gates._check("config", not wrong, wrong=wrong, not_reported=silent)


def _same(wanted: Any, got: Any) -> bool:
    if isinstance(wanted, dict) and isinstance(got, dict):
        return all(_same(value, got.get(key)) for key, value in wanted.items())
    if isinstance(wanted, int | float) and isinstance(got, int | float) and not isinstance(wanted, bool):
        return math.isclose(float(wanted), float(got), rel_tol=1e-9)
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
        return list(wanted) == list(got)
    return bool(wanted == got)


def saturation(frame: pd.DataFrame, rate: float | None = None) -> tuple[bool, dict[str, float | int]]:
    """Whether the queue grew for as long as the load ran, because the server is slower than the load.

    At a load of rho > 1 a first-in first-out queue makes TTFT grow by rho - 1 seconds a second of the load,
    whatever the filling at the start does. So: over requests in order of arrival, TTFT (or E2EL, for servers
    that admit everything and slow down) rises by at least `GROWTH` s a second, in rank order (Spearman's rho
    at least 0.6; 0.8 below 50 requests), and the last third takes at least twice as long as the first.
    Requests that were given up count with the time until then.

    A burst near the end looks just so. What tells them apart is how fast the server is when it has most to do: only
    one that then completes less than `KEEPS_UP` of the offered rate is saturated. That is `rate` where the load
    names one, and no more than what the arrivals came to. Not judged below 30 requests.
    """
    due = frame["scheduled_s"].to_numpy(dtype=np.float64)
    order = np.argsort(due, kind="stable")
    due = due[order]
    ended = frame["finished_s"].to_numpy(dtype=np.float64)[order]
    first = frame["first_token_s"].to_numpy(dtype=np.float64)[order]
    ok = (frame["status"] == "ok").to_numpy(dtype=bool)[order]
    numbers: dict[str, float | int] = {"n": len(due)}
    if len(due) < LEAST_REQUESTS or float(np.ptp(due)) <= 0.0:
        return False, numbers
    grew = False
    third = len(due) // 3
    needed = 0.6 if len(due) >= 50 else 0.8
    for name, until in (("ttft", np.where(np.isnan(first), ended, first)), ("e2el", ended)):
        waited = until - due
        known = ~np.isnan(waited)
        if known.sum() < 20:
            continue
        order_by_rank = float(spearmanr(due[known], waited[known]).statistic)
        slope = float(np.polyfit(due[known], waited[known], 1)[0])
        early, late = float(np.nanmedian(waited[:third])), float(np.nanmedian(waited[-third:]))
        numbers |= {
            f"{name}_slope": slope,
            f"{name}_rank": order_by_rank,
            f"{name}_early_s": early,
            f"{name}_late_s": late,
        }
        grew |= order_by_rank >= needed and slope >= GROWTH and late >= 2.0 * early
    known = ~np.isnan(ended)
    offered = (len(due) - 1) / float(np.ptp(due))
    offered = offered if rate is None else min(offered, rate)
    served = _rate_under_load(due[known], ended[known], ok[known])
    numbers |= {"offered_rate": offered, "rate_under_load": served}
    return grew and served < KEEPS_UP * offered, numbers


def _rate_under_load(due: npt.NDArray[np.float64], ended: npt.NDArray[np.float64], ok: npt.NDArray[np.bool_]) -> float:
    """Answers a second while at least half as many requests are in flight as there ever are."""
    if len(due) == 0:
        return 0.0
    at = np.concatenate([due, ended])
    order = np.argsort(at, kind="stable")
    at = at[order]
    level = np.cumsum(np.concatenate([np.ones(len(due)), -np.ones(len(ended))])[order])
    answered = np.concatenate([np.zeros(len(due), dtype=bool), ok])[order]
    loaded = level[:-1] >= level.max() / 2.0  # from each event to the next
    span = float(np.diff(at)[loaded].sum())
    return float(answered[1:][loaded].sum()) / span if span > 0 else 0.0
