"""Replicates: what the interval is, what is pooled and what never is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fabricate import Spec, fabricate
from scipy import stats

from kvstudy.analysis.plan import read_plan
from kvstudy.analysis.replicates import OVER_SEEDS, WITHIN_CELL, points
from kvstudy.analysis.table import build


def made(root: Path, specs: list[Spec]) -> pd.DataFrame:
    return build(read_plan(fabricate(root, "s", specs)), root)


def one(frame: pd.DataFrame, metric: str) -> pd.Series:
    found = frame[frame["metric"] == metric]
    assert len(found) == 1
    return found.iloc[0]


def test_three_seeds_give_a_t_interval(tmp_path: Path) -> None:
    table = made(tmp_path, [Spec(rate=2.0, seed=seed) for seed in range(3)])
    row = one(points(table), "tpot.p50")
    values = table["tpot.p50"].to_numpy()
    low, high = stats.t.interval(0.95, 2, loc=values.mean(), scale=values.std(ddof=1) / np.sqrt(3))
    assert row["interval"] == OVER_SEEDS and row["seeds"] == 3
    assert (row["value"], row["low"], row["high"]) == pytest.approx((values.mean(), low, high))
    assert row["n"] == table["tpot.p50.n"].sum() and len(row["cells"].split()) == 3


def test_two_seeds_give_the_hull_of_their_intervals(tmp_path: Path) -> None:
    table = made(tmp_path, [Spec(rate=2.0, seed=seed) for seed in range(2)])
    row = one(points(table), "ttft.p50")
    assert row["interval"] == WITHIN_CELL
    assert row["low"] == table["ttft.p50.low"].min() and row["high"] == table["ttft.p50.high"].max()


def test_failed_and_gated_cells_are_counted_and_not_averaged(tmp_path: Path) -> None:
    specs = [Spec(seed=0), Spec(seed=1, outcome="oom"), Spec(seed=2, reasons=("client_bound",))]
    table = made(tmp_path, specs)
    row = one(points(table), "ttft.p50")
    assert (row["ok"], row["failed"], row["gated"]) == (1, 1, 1) and row["state"] == "ok"
    assert row["value"] == table["ttft.p50"][0] and row["cells"] == table["cell"][0]


def test_a_point_without_a_usable_seed_says_why(tmp_path: Path) -> None:
    frame = points(made(tmp_path, [Spec(rate=1.0), Spec(rate=2.0, outcome="oom"), Spec(rate=3.0, reasons=("x",))]))
    by_rate = frame[frame["metric"] == "ttft.p50"].set_index("rate")
    assert list(by_rate["state"]) == ["ok", "failed", "gated"]
    assert by_rate["failure"][2.0] == "oom" and by_rate["failure"][3.0] == "x"
    assert pd.isna(by_rate["value"][2.0]) and by_rate["cells"][2.0] == ""


def test_infinite_percentile_is_not_averaged_away(tmp_path: Path) -> None:
    table = made(tmp_path, [Spec(rate=2.0, seed=seed) for seed in range(3)])
    table.loc[1, "ttft.p50.infinite"] = True
    table.loc[1, "ttft.p50"] = np.nan
    row = one(points(table), "ttft.p50")
    assert row["infinite"] and pd.isna(row["value"]) and row["interval"] == "none"
