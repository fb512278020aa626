"""Attribution: planted factors are found, pairing is by request, intervals are reproducible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fabricate import Spec, fabricate
from scipy import signal

from kvstudy.analysis import attribution
from kvstudy.analysis.plan import read_plan
from kvstudy.analysis.table import build
from kvstudy.grid.store import REQUESTS, Layout


def ar1(random: np.random.Generator, n: int, rho: float) -> np.ndarray:
    noise = random.standard_normal(n)
    noise[1:] *= np.sqrt(1 - rho**2)
    return signal.lfilter([1.0], [1.0, -rho], noise)


def study(root: Path, specs: list[Spec]) -> pd.DataFrame:
    return build(read_plan(fabricate(root, "s", specs)), root)


def plant(root: Path, table: pd.DataFrame, framework: str, factor: float) -> None:
    """Make every time between tokens of a framework `factor` times that of `full`."""
    layout = Layout(root)
    for _, group in table.groupby("seed"):
        by = group.set_index("framework")["cell"]
        base = pd.read_parquet(layout.cell(by["full"]) / REQUESTS)
        base["last_token_s"] = base["first_token_s"] + factor * (base["last_token_s"] - base["first_token_s"])
        base.to_parquet(layout.cell(by[framework]) / REQUESTS, index=False)


def test_planted_factor_is_found(tmp_path: Path) -> None:
    specs = [
        Spec(name, 2.0, seed=seed, budget=budget) for seed in range(3) for name, budget in (("full", 1.0), ("h2o", 0.3))
    ]
    table = study(tmp_path, specs)
    plant(tmp_path, table, "h2o", 0.8)
    out = attribution.attribute(table, tmp_path).set_index("metric")
    assert set(out["part"]) == {"policy"}
    assert out.loc["tpot", "ratio"] == pytest.approx(0.8)
    assert out.loc["ttft", "ratio"] == pytest.approx(1.0)
    assert out.loc["tpot", "interval"] == "t over seeds" and out.loc["tpot", "seeds"] == 3


def test_parts_multiply(tmp_path: Path) -> None:
    table = study(tmp_path, [Spec("vllm", 2.0), Spec("full", 2.0), Spec("h2o", 2.0, budget=0.3)])
    out = attribution.attribute(table, tmp_path)
    tpot = out[out["metric"] == "tpot"].set_index("part")["ratio"]
    assert tpot["engine"] * tpot["policy"] == pytest.approx(tpot["total"])


def test_only_equal_settings_are_paired(tmp_path: Path) -> None:
    specs = [Spec("full", 2.0, kv_memory_mib=64), Spec("h2o", 2.0, budget=0.3, kv_memory_mib=32)]
    specs += [Spec("vllm", 2.0, seed=1), Spec("vllm", 2.0, outcome="oom")]
    assert attribution.attribute(study(tmp_path, specs), tmp_path).empty


def test_failed_requests_are_counted_as_lost(tmp_path: Path) -> None:
    table = study(tmp_path, [Spec("full", 2.0), Spec("h2o", 2.0, budget=0.3)])
    path = Layout(tmp_path).cell(str(table["cell"][1])) / REQUESTS
    requests = pd.read_parquet(path)
    inside = requests.index[requests["in_window"]][:3]
    requests.loc[inside, "status"] = "timeout"
    requests.to_parquet(path, index=False)
    out = attribution.attribute(table, tmp_path).set_index("metric")
    assert out.loc["tpot", "lost"] == 3


@pytest.mark.parametrize("rho", [0.4, 0.8])
def test_intervals_of_paired_ratios_cover(rho: float) -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(600):
        series = [ar1(generator, 120, rho) for _ in range(2)]
        low, high, p = attribution.dependent_interval(series)
        hits += low <= 0.0 <= high
        assert (p < 0.05) == (not low <= 0.0 <= high)
    assert 0.93 - 0.018 <= hits / 600 <= 0.97 + 0.014, hits / 600


def test_ratios_of_a_metric_are_a_family(tmp_path: Path) -> None:
    specs = [Spec("full", 2.0)] + [Spec("h2o", 2.0, budget=budget) for budget in (0.2, 0.4, 0.6)]
    out = attribution.attribute(study(tmp_path, specs), tmp_path)
    tpot = out[out["metric"] == "tpot"]
    assert len(tpot) == 3 and (tpot["p_holm"] >= tpot["p"]).all()
    assert tpot["p_holm"].min() == pytest.approx(min(1.0, 3 * tpot["p"].min()))
