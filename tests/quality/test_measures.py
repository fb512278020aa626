"""Measures of items whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from kvstudy.grid.records import ITEM_COLUMNS
from kvstudy.quality.measures import chance_corrected, summarise


def items(measure: str, values: list[float], reference: list[float], depths: list[float] | None = None) -> pd.DataFrame:
    n = len(values)
    frame = pd.DataFrame(
        {
            "measure": measure,
            "context": 256,
            "depth": depths or [math.nan] * n,
            "item": [i % (n // (len(set(depths)) if depths else 1)) for i in range(n)],
            "value": values,
            "reference": reference,
            "weight": 1.0,
            "kept": 0.25,
            "attended": 0.2,
            "kv_device_bytes": 100.0,
            "kv_host_bytes": 20.0,
        }
    )
    return frame.astype(ITEM_COLUMNS)


def row(frame: pd.DataFrame, measure: str, depth: float = math.nan) -> pd.Series:
    at = frame["depth"].isna() if math.isnan(depth) else frame["depth"] == depth
    (found,) = [r for _, r in frame[(frame["measure"] == measure) & at].iterrows()]
    return found


def test_a_difference_is_paired_item_by_item() -> None:
    """Items that differ by 3 nats and a policy that costs 0.1 of each: the interval is that of the cost."""
    random = np.random.default_rng(0)
    full = random.normal(3.0, 1.0, 30)
    worse = full + random.normal(0.1, 0.01, 30)
    found = summarise(items("nll", worse.tolist(), full.tolist()))
    nll, perplexity = row(found, "nll"), row(found, "perplexity")
    assert nll["diff"] == pytest.approx(0.1, abs=0.01)
    assert nll["diff_low"] > 0.09 and nll["diff_high"] < 0.11 and nll["high"] - nll["low"] > 0.5
    assert perplexity["value"] == pytest.approx(math.exp(worse.mean()))
    assert perplexity["diff"] == pytest.approx(math.exp(worse.mean()) - math.exp(full.mean()))
    assert perplexity["diff_low"] < perplexity["diff"] < perplexity["diff_high"]
    assert (nll["n"], nll["kv_bytes"], nll["kept_share"]) == (30, 120.0, 0.25)


def test_retention_by_depth_and_over_all_of_them() -> None:
    found = summarise(items("retention", [1, 1, 0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0], [0.0] * 4 + [1.0] * 4))
    start, end, both = row(found, "retention", 0.0), row(found, "retention", 1.0), row(found, "retention")
    assert (start["value"], start["diff"], start["n"]) == (0.5, -0.5, 4)
    assert (end["value"], end["diff"]) == (0.25, -0.25)
    assert (both["value"], both["n"]) == (0.375, 8)
    assert 0.0 < start["low"] < 0.5 < start["high"] < 1.0
    assert 0.0 < both["low"] < 0.375 < both["high"] < 1.0
    assert -1.0 < both["diff_low"] < both["diff"] == -0.375 < both["diff_high"] < 0.5


def test_what_is_itself_a_comparison_has_no_reference() -> None:
    found = row(summarise(items("length_drift", [1.0, 2.0], [math.nan] * 2)), "length_drift")
    assert found["value"] == 1.5 and pd.isna(found["diff"])


def test_chance() -> None:
    assert chance_corrected(0.25, 4) == 0 and chance_corrected(1.0, 2) == 1 and chance_corrected(0.75, 2) == 0.5
