"""Planted rows of the tidy table, for tests that need exact numbers rather than plausible ones."""

from __future__ import annotations

from typing import Any

from kvstudy.analysis.table import AXES, KEYS, RESULTS

GIB = 2**30
FRAMEWORKS = {"vllm": 1.0, "full": 1.0, "h2o": 0.3, "infinigen": 0.3}


def cell(framework: str, rate: float, **other: Any) -> dict[str, Any]:
    """A planted cell: an ordinary result, but for what the test says."""
    row: dict[str, Any] = dict.fromkeys((*KEYS, *AXES, *RESULTS))
    row |= {"framework": framework, "implementation": "native", "rule": "", "scheduler": "continuous"}
    row |= {"variant": "", "shared_share": 0.0}
    row |= {"model": "m", "parameters": 1e8, "workload": "w", "load": "poisson", "rate": rate}
    row |= {"prompt_tokens": 100.0, "output_tokens": 50.0, "long_share": 0.0, "kv_memory_mib": 64.0}
    row |= {"hardware": "cpu", "device": "cpu", "seed": 0, "budget_share": FRAMEWORKS[framework]}
    row |= {"outcome": "ok", "verdict": "VALID", "source": "measured", "concurrency": float("nan")}
    row |= {"saturated": False, "fingerprint": "f", "budget_of": "prompt", "weights": "pretrained"}
    row |= {"memory.weights.device": GIB, "memory.kv_reserved.device": GIB, "memory.kv_live_peak.device": GIB / 2}
    for name, value in (("throughput.output", 100.0), ("e2el.p50", 1.0), ("tpot.p50", 0.02), ("ttft.p50", 0.1)):
        row |= metric(name, value)
        row |= metric(name.replace(".p50", ".mean"), value)
    row |= other
    axes = ("kv_memory_mib", "parameters", "prompt_tokens", "variant", "load", "burstiness")
    row["point"] = f"{framework}-{row['budget_share']}-{rate}-" + "-".join(str(row[axis]) for axis in axes)
    row["cell"] = f"{row['point']}-{row['seed']}"
    row["deployment"], row["workload_key"] = framework, row["workload"]
    return row


def metric(name: str, value: float, spread: float = 0.02) -> dict[str, Any]:
    """A metric with an interval of `spread` either side."""
    ends = {f"{name}.low": value * (1 - spread), f"{name}.high": value * (1 + spread)}
    return {name: value, **ends, f"{name}.n": 100.0, f"{name}.starred": False, f"{name}.infinite": False}
