"""The engine's counters as Prometheus text. Names are part of the interface; `measure` reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from kvstudy.engine.core import Engine

Sample = tuple[dict[str, str], float]


def render(engine: Engine, open_requests: int) -> str:
    """All metrics, one family after another. `open_requests` are those taken from clients and not ended.

    A request that came while a step runs is not the scheduler's yet, and waits all the same.
    """
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> None:
        lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} {kind}")
        for labels, value in samples:
            inside = ",".join(f'{key}="{label}"' for key, label in labels.items())
            lines.append(f"{name}{{{inside}}} {value}" if inside else f"{name} {value}")

    def one(value: float) -> list[Sample]:
        return [({}, value)]

    pools = (engine.device_pool, engine.host_pool)
    counters, scheduler = engine.counters, engine.scheduler
    # Processes that share a model hold as much each: bytes are those of all.
    processes = engine.config.tensor_parallel

    def tiers(attribute: str) -> list[Sample]:
        return [({"tier": pool.tier}, processes * getattr(pool, attribute)) for pool in pools]

    family("kvstudy_weights_bytes", "gauge", "Model weights.", one(processes * engine.model.weight_bytes))
    family("kvstudy_kv_reserved_bytes", "gauge", "KV pool, as allocated.", tiers("usable_bytes"))
    family("kvstudy_kv_promised_bytes", "gauge", "Promised to running requests.", tiers("reserved_bytes"))
    family("kvstudy_kv_live_bytes", "gauge", "KV entries in use x bytes an entry.", tiers("live_bytes"))
    family("kvstudy_kv_live_peak_bytes", "gauge", "Highest kv_live_bytes since /reset.", tiers("peak_live_bytes"))
    family("kvstudy_kv_aux_bytes", "gauge", "What policies hold beside entries.", tiers("aux_bytes"))
    family("kvstudy_kv_aux_peak_bytes", "gauge", "Highest kv_aux_bytes since /reset.", tiers("peak_aux_bytes"))
    family(
        "kvstudy_workspace_peak_bytes",
        "gauge",
        "Largest step's activations, by shape.",
        one(processes * counters.workspace_peak_bytes),
    )
    if engine.model.device.type == "cuda":
        # As torch's allocator has it, weights and pools included; NVML, which `measure` asks, sees its caches too.
        held, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        family("kvstudy_allocated_bytes", "gauge", "Tensors on the device.", one(processes * held))
        family("kvstudy_allocated_peak_bytes", "gauge", "Most of them since /reset.", one(processes * most))
    family("kvstudy_process_resident_bytes", "gauge", "RSS of this process.", one(resident_bytes()))
    family(
        "kvstudy_moved_bytes_total",
        "counter",
        "Bytes moved between the tiers.",
        [({"direction": direction}, processes * n) for direction, n in engine.link.moved_bytes.items()],
    )
    family("kvstudy_requests_running", "gauge", "Admitted requests.", one(len(scheduler.running)))
    family("kvstudy_requests_waiting", "gauge", "Queued requests.", one(max(0, open_requests - len(scheduler.running))))
    family("kvstudy_requests_running_peak", "gauge", "Most admitted since /reset.", one(scheduler.peak_running))
    family("kvstudy_requests_waiting_peak", "gauge", "Most queued since /reset.", one(scheduler.peak_waiting))
    family(
        "kvstudy_requests_queued_total",
        "counter",
        "Requests that a step left waiting, by what was short.",
        [({"short_of": what}, n) for what, n in scheduler.queued.items()],
    )
    family(
        "kvstudy_requests_finished_total",
        "counter",
        "Ended requests, by reason.",
        [({"reason": reason}, n) for reason, n in sorted(counters.finished.items())],
    )
    family("kvstudy_preemptions_total", "counter", "Always 0: admission reserves all a request needs.", one(0))
    family("kvstudy_prompt_tokens_total", "counter", "Prompt tokens computed.", one(counters.prompt_tokens))
    family("kvstudy_generation_tokens_total", "counter", "Output tokens.", one(counters.generation_tokens))
    family("kvstudy_steps_total", "counter", "Engine steps.", one(counters.steps))
    family("kvstudy_step_seconds_total", "counter", "Time in engine steps.", one(counters.step_seconds))

    def entries(kind: str) -> list[Sample]:
        """A KV head's entries, a layer: summed over layers, averaged over KV heads."""
        heads = engine.model.geometry.kv_heads
        return [({"policy": n}, int(getattr(p.counted, kind).sum()) / heads) for n, p in engine.policies.items()]

    family(
        "kvstudy_attended_entries_total",
        "counter",
        "Entries that decode steps attended to.",
        entries("attended"),
    )
    family(
        "kvstudy_full_entries_total",
        "counter",
        "Entries that the full cache would have had.",
        entries("full"),
    )
    family("kvstudy_kept_entries_total", "counter", "Entries held, summed over decode steps.", entries("kept"))
    for name, policy in engine.policies.items():
        for key, value in policy.report().items():
            family(f"kvstudy_{name}_{key}", "gauge", f"Reported by policy {name}.", one(value))
    return "\n".join(lines) + "\n"


def attended_shares(engine: Engine) -> dict[str, Any]:
    """The measured budget of each policy, attended / full by layer and KV head; None before any decode step."""
    shares = {}
    for name, policy in engine.policies.items():
        counted = policy.counted
        shares[name] = (counted.attended / counted.full).tolist() if counted.full.all() else None
    return shares


def resident_bytes() -> int:
    """Resident set size of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
