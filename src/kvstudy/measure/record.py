"""What is written of a cell: its summary, from what was offered and seen of it, and its folder, whole or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

import kvstudy
from kvstudy.frameworks.base import Counters, Server
from kvstudy.grid import store
from kvstudy.grid.records import MEMORY_COLUMNS, Metric, Outcome, Source, Summary, Verdict
from kvstudy.grid.schema import H2O, BurstLoad, Cell, ClosedLoad, Load, Visit
from kvstudy.grid.secrets import redact
from kvstudy.grid.store import Layout
from kvstudy.load import client
from kvstudy.load.flights import typed_frame
from kvstudy.measure import capacity, fingerprint, gates, metrics
from kvstudy.measure.interrupts import signals_held
from kvstudy.measure.narration import say, take_said
from kvstudy.measure.requests import write_requests


@dataclass(frozen=True)
class Offered:
    """A load that was offered, and what was seen of it."""

    load: Load
    result: client.Result
    planned: int | None  # drawn arrivals; None in a closed loop
    before: Counters
    after: Counters
    effective: dict[str, Any]
    samples: list[dict[str, Any]]  # the memory sampler's, times from the cell's zero under t_s
    broken: list[str]  # why the visit itself ended the server (memory limit)
    client_cpu_s: float
    expected_hits: float


class Recorder:
    """Writes the cells of a visit into the store. `freeze` is the list of packages of the framework's environment."""

    def __init__(self, visit: Visit, layout: Layout, model_dir: Path, freeze: Path | None) -> None:
        self.visit = visit
        self.layout = layout
        self.model_dir = model_dir
        self.freeze = freeze
        self.hardware = fingerprint.stable()
        self.fingerprint = fingerprint.fingerprint(self.hardware)
        self.gpu_ids: tuple[str, ...] = ()  # as leased, once they are

    def loaded(
        self,
        cell: Cell,
        offered: Offered,
        outcome: Outcome,
        cause: str | None,
        server: Server,
        *,
        timings: Mapping[str, float],
        log_from: tuple[int, int],
        workload_dir: Path,
        extra: Mapping[str, Metric],
        found_capacity: capacity.Capacity | None,
    ) -> Outcome:
        """A cell whose load was offered: its window, gates, metrics and memory. Returns its outcome."""
        result, load = offered.result, offered.load
        frame = result.frame
        closed = isinstance(load, ClosedLoad)
        span = load.duration_s if result.aborted is None else min(load.duration_s, max(result.load_s, 1e-3))
        growing, _ = gates.saturation(frame, gates.offered_rate(load))
        window, found = metrics.find_window(
            frame, span, burst=isinstance(load, BurstLoad), saturated=growing and not closed
        )
        # What was offered to a server that had died counts: it was drawn, and the server owes it.
        owed = (frame["scheduled_s"] < window.end_s) | (result.aborted is not None)
        frame["in_window"] = (frame["scheduled_s"] >= window.start_s) & owed
        judged = gates.judge(
            cell,
            frame,
            window,
            planned=offered.planned,
            aborted=result.aborted is not None,
            exhausted=result.exhausted,
            steady=bool(found["steady"]),
            samples=offered.samples,
            before=offered.before,
            after=offered.after,
            asked=server.asked(),
            effective={key: value for key, value in offered.effective.items() if key != "raw"},
            expected_hits=offered.expected_hits,
        )
        judged.checks["window"] = found
        judged.checks["client"] = {"cpu_s": offered.client_cpu_s, "retried": result.retried}
        judged.checks["concurrency"] = concurrency = _concurrency(offered)
        counted = ("queued", "queued_for_memory", "preemptions")
        waited = {name: int(n) for name in counted if (n := concurrency[name]) is not None}
        judged.checks["queue.server"] = _histogram_mean(offered.before, offered.after)
        if found_capacity is not None:
            probes = [asdict(item) | {"share": item.share} for item in found_capacity.probes]
            judged.checks["capacity"] = {"probes": probes}
            if found_capacity.censored:
                judged.flags.append("capacity_above_range")
        memory = memory_frame(offered.samples)
        summary = Summary(
            cell=cell.cell_id,
            deployment=cell.deployment.id,
            outcome=outcome,
            cause=cause,
            verdict=judged.verdict,
            flags=judged.flags,
            metrics={**metrics.compute(frame, window, closed=closed, slo=load.slo), **extra},
            memory=memory_summary(memory, offered.after),
            budget=budget_summary(cell, offered.before, offered.after),
            counts=dict(metrics.summarise(frame)) | waited,
            window={"start_s": window.start_s, "end_s": window.end_s},
            visit={
                "bring_up_s": timings.get("bring_up_s"),
                "warm_up_s": timings.get("warm_up_s"),
                "load_s": result.load_s,
                "drain_s": result.drain_s,
            },
            checks=judged.checks,
            source=source_of(cell),
            fingerprint=self.fingerprint,
        )
        provenance = self._provenance(cell, offered.effective, workload_dir)
        # How it came up belongs to each of its cells, other cells' loads do not.
        up, start = log_from
        log = server.log_text()[:up] + server.log_text(start)
        self._store(cell, frame, memory, summary, provenance, log)
        verdict = summary.verdict.status + (
            f" ({', '.join(summary.verdict.reasons)})" if summary.verdict.reasons else ""
        )
        counts = summary.counts
        say(
            f"  {outcome}{f' ({cause})' if cause else ''}, {verdict}"
            f"{', ' + ', '.join(summary.flags) if summary.flags else ''}: {counts['ok']}/{counts['offered']} ok, "
            f"{_short(summary.metrics.get('throughput.output'))} tokens/s, "
            f"TTFT p50 {_short(summary.metrics.get('ttft.p50'))} s, "
            f"TPOT p50 {_short(summary.metrics.get('tpot.p50'))} s"
            + " (debug: a fork without its GPU, these are no speeds)"
            * (summary.source == "debug")
        )
        return outcome

    def without_load(self, cell: Cell, outcome: Outcome, cause: str, server: Server) -> Outcome:
        """A cell whose load was never offered, because the deployment does not come up or keeps dying."""
        summary = Summary(
            cell=cell.cell_id,
            deployment=cell.deployment.id,
            outcome=outcome,
            cause=cause,
            verdict=Verdict(status="VALID"),
            counts={
                "offered": 0,
                "sent": 0,
                "ok": 0,
                "error": 0,
                "timeout": 0,
                "censored": 0,
                "in_window": 0,
            },
            source=source_of(cell),
            fingerprint=self.fingerprint,
            budget={"share": cell.budget.share, "attended": None, "kept": None},
        )
        provenance = self._provenance(cell, {}, None)
        frame = typed_frame([])
        with signals_held():
            self._store(cell, frame, memory_frame([]), summary, provenance, server.log_text())
        say(f"  {cell.cell_slug}: {outcome} ({cause})")
        return outcome

    def _store(
        self,
        cell: Cell,
        frame: pd.DataFrame,
        memory: pd.DataFrame,
        summary: Summary,
        provenance: Mapping[str, Any],
        log: str,
    ) -> None:
        folder = self.layout.cell(cell.cell_id)
        told_in_log = f"--- client ---\n{take_said()}\n--- server ---\n{log}"
        try:
            with store.staged(folder) as staging:
                text = yaml.safe_dump(cell.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
                (staging / store.CONFIG).write_text(text, encoding="utf-8")
                write_requests(frame, staging / store.REQUESTS)
                memory.to_parquet(staging / store.MEMORY, index=False)
                store.write_json(staging / store.SUMMARY, summary.model_dump(mode="json"))
                told = json.dumps(dict(provenance), indent=1, ensure_ascii=False, allow_nan=False)
                store.write_text(staging / store.PROVENANCE, redact(told) + "\n")
                (staging / store.LOG).write_text(redact(told_in_log), encoding="utf-8")
        except FileExistsError:
            say(f"  {cell.cell_slug} was measured by someone else meanwhile: theirs is kept")

    def _provenance(self, cell: Cell, effective: Mapping[str, Any], workload_dir: Path | None) -> dict[str, Any]:
        framework: dict[str, Any] = {"name": cell.framework.name, "pins": dict(cell.framework.pins)}
        if self.freeze is not None and self.freeze.is_file():
            framework["freeze"] = self.freeze.read_text(encoding="utf-8").splitlines()
        card = self.model_dir / "model.json"
        return {
            "schema_version": 1,
            "time": fingerprint.now(),
            "kvstudy": kvstudy.__version__,
            **fingerprint.commit(),
            "command": fingerprint.command(),
            "seed": cell.seed,
            "hardware": self.hardware,
            "fingerprint": self.fingerprint,
            "conditions": fingerprint.volatile(),
            "gpu_ids": list(self.gpu_ids),
            "server_cores": list(cell.hardware.server_cores),
            "client_cores": list(cell.hardware.client_cores),
            "framework": framework,
            "effective_config": dict(effective),
            "model": json.loads(card.read_text(encoding="utf-8")) if card.is_file() else None,
            "workload": workload_dir.name if workload_dir else None,
            "visit": {"id": self.visit.id, "study": self.visit.study, "position": self.visit.cells.index(cell) + 1},
            "python": sys.version.split()[0],
            "packages": fingerprint.packages(),
        }


def memory_frame(samples: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """`memory.parquet`: long, a row a kind, tier and moment."""
    rows = [(float(item["t_s"]), kind, tier, int(size)) for item in samples for kind, tier, size in item["rows"]]
    frame = pd.DataFrame(rows, columns=list(MEMORY_COLUMNS))
    for name, dtype in MEMORY_COLUMNS.items():
        frame[name] = frame[name].astype(dtype)  # type: ignore[call-overload]
    return frame


def memory_summary(memory: pd.DataFrame, after: Counters) -> dict[str, int | None]:
    """Peaks (and the mean of live KV) in bytes, as `kind.tier`; the server's own peak where it keeps one."""
    found: dict[str, int | None] = {}
    loaded = memory[memory["t_s"] >= 0]
    for (kind, tier), rows in loaded.groupby(["kind", "tier"]):
        sizes = rows["bytes"]
        if kind in ("weights", "kv_reserved", "workspace_peak"):
            found[f"{kind}.{tier}"] = int(sizes.max())
        elif kind in ("moved_h2d", "moved_d2h"):
            found[f"{kind}.{tier}"] = int(sizes.iloc[-1])
        else:
            found[f"{kind}_peak.{tier}"] = int(sizes.max())
            if kind == "kv_live":
                found[f"kv_live_mean.{tier}"] = int(sizes.mean())
    for tier, peak in (("device", after.kv_live_peak_device), ("host", after.kv_live_peak_host)):
        if peak is not None:
            found[f"kv_live_peak.{tier}"] = int(peak)
    return found


def budget_summary(cell: Cell, before: Counters, after: Counters) -> dict[str, float | None]:
    """Nominal share, and the shares measured: attended and kept entries over those of the full cache."""

    def difference(name: str) -> float | None:
        first, last = getattr(before, name), getattr(after, name)
        return None if first is None or last is None else float(last - first)

    full = difference("full_entries")
    attended, kept = difference("attended_entries"), difference("kept_entries")
    return {
        "share": cell.budget.share,
        "attended": attended / full if attended is not None and full else None,
        "kept": kept / full if kept is not None and full else None,
    }


def source_of(cell: Cell) -> Source:
    """`simulated` where a policy only masks, `debug` for a fork without its GPU, `emulated` where moves are paced."""
    if isinstance(cell.framework, H2O) and cell.framework.rule == "masked":
        return "simulated"
    if cell.framework.implementation == "upstream" and cell.hardware.device == "cpu":
        return "debug"
    return "emulated" if cell.hardware.device == "cpu" and cell.hardware.link_gbps is not None else "measured"


def _concurrency(offered: Offered) -> dict[str, float | None]:
    """Most requests admitted and waiting at once, how many had to wait, and preemptions, of one load.

    The server's own peak where it keeps one; else the largest of the samples, which may miss a higher one between them.
    """

    def peak(word: str, own: float | None) -> float | None:
        sampled = [float(item[word]) for item in offered.samples if item.get(word) is not None]
        return own if own is not None else max(sampled, default=None)

    def counted(name: str) -> float | None:
        before, after = getattr(offered.before, name), getattr(offered.after, name)
        return None if before is None or after is None else float(after - before)

    return {
        "running_peak": peak("running", offered.after.running_peak),
        "waiting_peak": peak("waiting", offered.after.waiting_peak),
        "queued": counted("queued"),
        "queued_for_memory": counted("queued_for_memory"),
        "preemptions": counted("preemptions"),
    }


def _histogram_mean(before: Counters, after: Counters) -> dict[str, float | None]:
    """The server's queue time where it only keeps a sum: a mean, never a number per request."""
    if None in (before.queue_s, before.queue_n, after.queue_s, after.queue_n):
        return {"mean_s": None, "n": None}
    assert after.queue_s is not None and before.queue_s is not None
    assert after.queue_n is not None and before.queue_n is not None
    n = after.queue_n - before.queue_n
    return {"mean_s": (after.queue_s - before.queue_s) / n if n else None, "n": n}


def _short(metric: Metric | None) -> str:
    if metric is None or (metric.value is None and not metric.infinite):
        return "NA"
    return "inf" if metric.infinite else f"{metric.value:.3g}"
