"""Gates: each fires on what it is for, and sound cells pass them all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvstudy.frameworks.base import Counters
from kvstudy.grid.schema import Cell, FixedLength, Full, GammaLoad, Hardware, Model, PoissonLoad, Workload
from kvstudy.load.flights import typed_frame
from kvstudy.measure.gates import Gates, judge, saturation
from kvstudy.measure.metrics import Window

CELL = Cell(
    framework=Full(),
    model=Model(name="m", source="folder", path="x", dtype="float32", max_model_len=1024),
    hardware=Hardware(name="cpu", device="cpu", server_cores=(0,), client_cores=(0,)),
    kv_memory_mib=4,
    harness_version=1,
    workload=Workload(name="w", prompt=FixedLength(tokens=10), output=FixedLength(tokens=4)),
    load=PoissonLoad(rate=10, duration_s=20),
    seed=0,
)


def queue(seed: int, rho: float, n: int = 200, lag: float = 0.0002, burstiness: float = 1.0) -> pd.DataFrame:
    """About `n` requests of a server with deterministic service over 20 s."""
    random = np.random.default_rng(seed)
    rate = n / 20
    due = np.cumsum(random.gamma(1 / burstiness, burstiness / rate, n * 3))
    due = due[due < 20]
    free = 0.0
    rows: list[dict[str, Any]] = []
    for i, at in enumerate(due):
        sent = at + lag * random.random()
        begin = max(free, sent)
        free = begin + rho / rate
        rows.append(
            {
                "index": i, "length_class": "short", "scheduled_s": at, "sent_s": sent, "first_token_s": free,
                "last_token_s": free, "finished_s": free, "chunk_s": [free], "chunk_tokens": [4],
                "prompt_tokens_asked": 10, "prompt_tokens": 10, "output_tokens_asked": 4, "output_tokens": 4,
                "server_queue_s": begin - sent, "status": "ok", "error": None, "in_window": True,
            }
        )  # fmt: skip
    return typed_frame(rows)


def samples_of(data: pd.DataFrame, factor: float = 1.0) -> list[dict[str, float]]:
    out = []
    for t in np.arange(0.25, 20, 0.5):
        inside = int(((data["sent_s"] <= t) & (data["finished_s"] > t)).sum())
        out.append({"t_s": float(t), "running": factor * inside, "waiting": 0.0})
    return out


def gates(data: pd.DataFrame, **options: Any) -> Gates:
    options = {"planned": len(data), "samples": samples_of(data)} | options
    return judge(CELL, data, Window(0.0, 20.0), **options)


def alarms(trials: int, burstiness: float) -> float:
    """Share of sound cells (30 to 200 requests, rho 0.3 to 0.7) of which any gate or flag complains."""
    found = 0
    for seed in range(trials):
        n = 30 + 10 * (seed % 18)
        data = queue(seed, (0.3, 0.5, 0.7)[seed % 3], n=n, burstiness=burstiness)
        cell = CELL.model_copy(update={"load": GammaLoad(rate=n / 20, burstiness=burstiness, duration_s=20)})
        judged = judge(
            cell, data, Window(0.0, 20.0), planned=len(data), samples=samples_of(data),
            before=Counters(prefix_queries=0, prefix_hits=0), after=Counters(prefix_queries=9e3, prefix_hits=0),
            asked={"a": 1, "b": [1, 2]}, effective={"a": 1.0, "b": [1, 2]},
        )  # fmt: skip
        found += bool(judged.reasons or judged.flags)
    return found / trials


def test_sound_cells_pass() -> None:
    assert alarms(300, 1.0) <= 0.01


@pytest.mark.long
@pytest.mark.parametrize("burstiness", [1.0, 4.0])
def test_fewer_than_one_sound_cell_in_a_hundred_is_complained_of(burstiness: float) -> None:
    assert alarms(3000, burstiness) < 0.01


def test_a_late_client_is_marked() -> None:
    found = gates(queue(0, 0.3, lag=0.2))
    assert "client_bound" in found.reasons and found.verdict.status == "INVALID"
    assert found.checks["client_bound"]["p99_s"] > 0.1


def test_what_was_not_sent_is_missed() -> None:
    data = queue(0, 0.3)
    data.loc[3, "sent_s"] = math.nan
    assert "not_as_drawn" in gates(data).reasons
    assert "not_as_drawn" not in gates(data, aborted=True).reasons
    data = queue(0, 0.3)
    data["sent_s"] = data["scheduled_s"] * 1.1  # 10 % slower than drawn
    assert "not_as_drawn" in gates(data).reasons


def test_realised_lengths() -> None:
    data = queue(0, 0.3)
    data["output_tokens"] = 3
    assert "output_lengths" in gates(data).reasons
    data = queue(0, 0.3)
    data["prompt_tokens"] = 11
    assert "prompt_lengths" in gates(data).reasons
    data = queue(0, 0.3)
    data["output_tokens"] = pd.NA
    found = gates(data)
    assert "no_usage" in found.reasons and "output_lengths" not in found.reasons


def test_littles_law_against_the_servers_own_count() -> None:
    data = queue(1, 0.9)
    assert "littles_law" not in gates(data).reasons
    assert "littles_law" in gates(data, samples=samples_of(data, 2.0)).reasons
    assert gates(data, samples=[]).checks["littles_law"]["passed"] is None


def test_prefix_hits_and_config() -> None:
    before = Counters(prefix_queries=0, prefix_hits=0)
    after = Counters(prefix_queries=1000, prefix_hits=100)
    assert "prefix_hits" in gates(queue(0, 0.3), before=before, after=after).reasons
    assert "prefix_hits" not in gates(queue(0, 0.3), before=before, after=after, expected_hits=0.1).reasons
    found = gates(queue(0, 0.3), asked={"block_size": 16, "quiet": 1}, effective={"block_size": 32})
    assert "config" in found.reasons
    assert found.checks["config"]["wrong"] == {"block_size": {"asked": 16, "effective": 32}}
    assert found.checks["config"]["not_reported"] == ["quiet"]


@pytest.mark.parametrize("n", [60, 200])
def test_saturation_is_found_and_not_invented(n: int) -> None:
    def share(rho: float) -> float:
        return float(np.mean([saturation(queue(seed, rho, n=n))[0] for seed in range(60)]))

    assert share(0.5) == 0.0
    assert share(0.7) <= 0.02
    assert share(1.5) >= 0.85
    assert share(2.0) >= 0.98
    assert "saturated" in gates(queue(0, 2.0)).flags
    assert gates(queue(0, 2.0)).verdict.status == "VALID"


def test_prefixes_that_were_not_kept_are_a_flag() -> None:
    before, after = Counters(prefix_queries=0, prefix_hits=0), Counters(prefix_queries=1000, prefix_hits=300)
    found = gates(queue(0, 0.3), before=before, after=after, expected_hits=0.5)
    assert "prefix_evicted" in found.flags and found.verdict.status == "VALID"
    assert gates(queue(0, 0.3), before=before, after=after, expected_hits=0.3).flags == []


def test_failures_are_a_flag() -> None:
    data = queue(0, 0.3)
    data.loc[0, "status"] = "error"
    assert gates(data).flags == ["failures"]
