"""Every definition on scripted streams, those of reference/measuring.md included; NA is never 0."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvstudy.grid.schema import Slo
from kvstudy.load.flights import typed_frame
from kvstudy.measure.metrics import (
    REGISTRY,
    Window,
    compute,
    find_window,
    goodput,
    per_request,
    split,
    token_gaps,
)

WINDOW = Window(0.0, 10.0)


def row(index: int, scheduled: float, chunks: list[tuple[float, int]] | None, **other: Any) -> dict[str, Any]:
    """A request due at `scheduled`, sent 1 ms later, with (time after it was due, tokens) a chunk."""
    times = [scheduled + t for t, _ in chunks or []]
    tokens = [k for _, k in chunks or []]
    return {
        "index": index,
        "length_class": "short",
        "scheduled_s": scheduled,
        "sent_s": scheduled + 0.001,
        "first_token_s": times[0] if times else math.nan,
        "last_token_s": times[-1] if times else math.nan,
        "finished_s": times[-1] if times else scheduled + 0.002,
        "chunk_s": times,
        "chunk_tokens": tokens,
        "prompt_tokens_asked": 10,
        "prompt_tokens": 10,
        "output_tokens_asked": max(2, sum(tokens)),
        "output_tokens": sum(tokens),
        "server_queue_s": math.nan,
        "status": "ok",
        "error": None,
        "in_window": True,
    } | other


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    return typed_frame(list(rows))


SIXTEEN = [(0.05, 4), (0.07, 4), (0.09, 4), (0.11, 4)]


def test_the_sixteen_token_stream_of_six_answers() -> None:
    found = compute(frame(row(0, 0.0, SIXTEEN)), WINDOW)
    assert found["ttft.p50"].value == pytest.approx(0.050)
    assert found["tpot.p50"].value == pytest.approx(0.060 / 15)
    assert found["icl.p50"].value == pytest.approx(0.020)
    assert found["icl.mean"].value == pytest.approx(0.020)
    assert found["itl.mean"].value == pytest.approx(0.060 / 15)
    assert found["itl.mean"].n == 15 and found["icl.mean"].n == 3
    assert found["e2el.p50"].value == pytest.approx(0.110)
    assert found["queue.client.p50"].value == pytest.approx(0.001)
    assert found["throughput.output"].value == pytest.approx(1.6)


def test_a_chunk_of_k_tokens_is_k_tokens_at_that_time() -> None:
    assert token_gaps([1.0, 2.0], [2, 3]).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_zero_and_one_token_are_na_and_not_zero() -> None:
    data = frame(row(0, 0.0, []), row(1, 1.0, [(0.1, 1)]))
    values = per_request(data)
    assert math.isnan(values["ttft"][0]) and math.isnan(values["e2el"][0])
    assert values["ttft"][1] == pytest.approx(0.1)
    assert values["tpot"].isna().all()
    found = compute(data, WINDOW)
    assert found["tpot.p50"].value is None and found["tpot.p50"].n == 0
    assert found["itl.mean"].value is None and found["icl.mean"].value is None
    assert found["ttft.p50"].n == 1
    assert found["queue.server.p50"].value is None


def test_failures_are_infinite_in_percentiles_and_absent_from_means() -> None:
    rows = [row(i, i * 0.1, [(0.1, 1), (0.2, 1)]) for i in range(20)]
    for i in range(8):
        rows[i] |= {"status": "error", "error": "http 503: x", "chunk_s": [], "chunk_tokens": [],
                    "first_token_s": math.nan, "last_token_s": math.nan}  # fmt: skip
    found = compute(frame(*rows), WINDOW)
    assert found["ttft.p50"].value == pytest.approx(0.1) and not found["ttft.p50"].infinite
    assert found["ttft.p90"].infinite and found["ttft.p90"].value is None
    assert found["ttft.mean"].value == pytest.approx(0.1) and found["ttft.mean"].n == 12
    assert found["failures"].value == pytest.approx(0.4)
    assert found["e2el.p50"].n == 20


def test_censored_requests_keep_a_first_token_that_was_seen() -> None:
    data = frame(
        row(0, 0.0, [(0.3, 1), (0.5, 1)], status="censored"),
        row(1, 0.0, [], status="censored"),
    )
    values = per_request(data)
    assert values["ttft"].tolist() == [0.3, math.inf]
    assert values["e2el"].tolist() == [math.inf, math.inf]
    assert compute(data, WINDOW)["throughput.output"].value == pytest.approx(0.2)


def test_unknown_chunk_counts_are_not_invented() -> None:
    data = frame(row(0, 0.0, SIXTEEN, chunk_tokens=None))
    found = compute(data, WINDOW)
    assert found["itl.mean"].value is None
    assert found["icl.mean"].value == pytest.approx(0.02)
    assert found["tpot.p50"].value == pytest.approx(0.004)
    assert found["throughput.output"].value == pytest.approx(1.6)


def test_goodput_halves_when_half_fail() -> None:
    rows = [row(i, 0.1 * i, [(0.1, 1), (0.2, 1)]) for i in range(40)]
    slo = Slo(ttft_s=0.2, tpot_s=0.2)
    assert goodput(frame(*rows), slo).value == 1.0
    for i in range(0, 40, 2):
        rows[i] |= {"status": "error", "error": "http 503: x"}
    half = goodput(frame(*rows), slo)
    assert half.value == 0.5 and half.n == 40
    assert half.low is not None and half.high is not None and half.low < 0.5 < half.high
    assert goodput(frame(*rows), Slo(ttft_s=0.05)).value == 0.0
    assert goodput(frame(), Slo(ttft_s=1.0)).value is None
    # One token: TPOT is undefined, and an undefined latency breaks no bound.
    assert goodput(frame(row(0, 0.0, [(0.1, 1)])), slo).value == 1.0


def test_rates_and_windows() -> None:
    rows = [row(i, 0.1 * i, [(0.1, 5)]) for i in range(100)]
    found = compute(frame(*rows), Window(2.0, 8.0))
    assert found["rate.offered"].value == pytest.approx(10.0, rel=0.02)
    assert found["rate.achieved"].value == pytest.approx(10.0, rel=0.02)
    assert found["throughput.output"].value == pytest.approx(50.0, rel=0.02)
    assert found["throughput.requests"].value == pytest.approx(10.0, rel=0.02)
    assert "rate.offered" not in compute(frame(*rows), WINDOW, closed=True)


def test_a_slow_start_is_cut_and_does_not_move_the_percentiles() -> None:
    random = np.random.default_rng(0)
    rows = []
    for i in range(200):
        slow = 3.0 * (1 - i / 20) if i < 20 else 0.0
        rows.append(row(i, 0.05 * i, [(0.1 + slow, 1), (0.2 + slow + 0.02 * random.random(), 1)]))
    data = frame(*rows)
    window, how = find_window(data, 10.0)
    assert how["steady"] and 0.7 <= window.start_s <= 2.0
    data["in_window"] = data["scheduled_s"] >= window.start_s
    assert compute(data, window)["ttft.p90"].value == pytest.approx(0.1, abs=0.05)
    assert find_window(data, 10.0, saturated=True)[0] == Window(0.0, 10.0)
    assert find_window(data.head(30), 10.0)[1]["cut_requests"] == 0


def test_classes_have_metrics_of_their_own() -> None:
    rows = [
        row(i, 0.1 * i, [(0.1 if i % 2 else 0.5, 1)], length_class="long" if i % 2 == 0 else "short") for i in range(10)
    ]
    found = compute(frame(*rows), WINDOW)
    assert found["ttft.long.p50"].value == pytest.approx(0.5)
    assert found["ttft.short.p50"].value == pytest.approx(0.1)
    assert split("ttft.long.p50") == ("ttft", "long", "p50")
    assert split("queue.client.p99") == ("queue.client", None, "p99")
    assert split("throughput.output") == ("throughput.output", None, None)
    with pytest.raises(KeyError):
        split("nonsense.p50")


def test_small_samples_are_starred() -> None:
    rows = [row(i, 0.01 * i, [(0.1, 1)]) for i in range(50)]
    found = compute(frame(*rows), WINDOW)
    assert not found["ttft.p50"].starred and found["ttft.p90"].starred and found["ttft.p99"].starred


def test_gaps_of_requests_that_share_a_pace_are_worth_less() -> None:
    def width(paces: np.ndarray) -> float:
        rows = [row(i, 0.1 * i, [(0.1 + k * pace, 1) for k in range(5)]) for i, pace in enumerate(paces)]
        found = compute(frame(*rows), WINDOW)["itl.mean"]
        assert found.low is not None and found.high is not None
        return found.high - found.low

    stretches = np.repeat([0.01, 0.03, 0.01, 0.03], 15)
    assert width(stretches) > 1.5 * width(np.random.default_rng(0).permutation(stretches))


def test_every_metric_has_a_definition() -> None:
    found = compute(frame(row(0, 0.0, SIXTEEN)), WINDOW, slo=Slo(ttft_s=1.0))
    assert {split(name)[0] for name in found} == set(REGISTRY) - {"capacity"}
    assert all(item.formula and item.unit and item.start for item in REGISTRY.values())


def test_an_empty_cell_is_all_na() -> None:
    found = compute(frame(), WINDOW)
    assert all(metric.value in (None, 0.0) for metric in found.values())
    assert found["ttft.p50"].value is None
