"""One visit: bring a deployment up, warm it up, serve its cells in a seeded random order, take it down.

`kvstudy measure --visit VISIT.json --results DIR --marker FILE` (or `python -m kvstudy.measure.visit`). Cells
that are whole are skipped; each finished cell is written whole before the next begins, so Ctrl-C, a full disk
or a dead server lose nothing. The marker is written last and says what became of each cell.

What goes wrong is told apart. A *fault of the installation* (no model, no server binary, port in use) is one
line on standard error and exit code 2, and no cell. A *result* (out of memory, a server that dies or hangs
under load) is a cell with that outcome, and the visit goes on with a fresh server, `MAX_RESTARTS` times at
most. Everything has a bound: a visit always ends by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError

import numpy as np
import numpy.typing as npt
import pandas as pd
import psutil
import yaml

from kvstudy.frameworks import http
from kvstudy.frameworks.base import Counters, OutOfMemory, Server, Unavailable
from kvstudy.frameworks.launch import environment_folder, make_server, model_folder, read_visit
from kvstudy.frameworks.lease import Lease, lease
from kvstudy.grid import store
from kvstudy.grid.records import MEMORY_COLUMNS, Metric, Outcome, Source, Summary, Verdict
from kvstudy.grid.schema import H2O, BurstLoad, Cell, ClosedLoad, KneeLoad, Load, PoissonLoad, Visit, Vllm, digest
from kvstudy.grid.secrets import redact
from kvstudy.grid.store import Layout, cannot_write
from kvstudy.load import client, workload
from kvstudy.load.arrivals import ArrivalError, schedule
from kvstudy.load.text import TextError
from kvstudy.measure import capacity, fingerprint, gates, metrics, progress
from kvstudy.measure import state as states
from kvstudy.measure.memory import Sampler
from kvstudy.measure.requests import write_requests

MAX_RESTARTS = 3
#: Bound on requests that warm the server up, each.
WARM_UP_S = 120.0


class Fault(Exception):
    """The installation is at fault: one line, exit code 2, no cell. `detail` is what the server printed."""

    def __init__(self, line: str, detail: str = "") -> None:
        super().__init__(line)
        self.detail = detail


class Allotted(Fault):
    """The cluster ended the server: it was given too little, which is no result, and a retry asks for more."""


class BroughtUp(Server, Protocol):
    """A server that this module starts."""

    bring_up_s: float

    def bring_up(self, bound_s: float, waiting: Callable[[float], None] | None = None) -> None:
        """Start it and wait until it is healthy."""


#: Makes the server of a visit in a work folder under a lease; tests pass their own.
MakeServer = Callable[[Path, Lease], BroughtUp]


@dataclass
class Outcomes:
    """What became of a visit's cells, for the marker."""

    cells: dict[str, str] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)

    def done(self, cell: Cell) -> bool:
        """Whether the cell needs nothing more."""
        return cell.cell_id in self.cells


_SAID: list[str] = []


def say(line: str) -> None:
    """A line for whoever watches, and for the log of the cell at hand."""
    line = redact(line)
    _SAID.append(f"{fingerprint.now()} {line}")
    print(line, file=sys.stderr, flush=True)


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


class _Died(Exception):
    """The server died in the middle of a search."""


class _Hangs(Exception):
    """The server lives and does not answer."""


#: How long a server may take to say that it is well, once a load is over.
HEALTH_S = 15.0
#: How long a process may take to end once it no longer listens.
DYING_S = 5.0


# --- a visit -------------------------------------------------------------------------------------


class Measuring:
    """The work of one visit. `run` returns what became of each cell."""

    def __init__(
        self,
        visit: Visit,
        layout: Layout,
        model_dir: Path,
        make: MakeServer,
        *,
        freeze: Path | None = None,
        order_seed: str = "",
        journal: states.Journal | None = None,
    ) -> None:
        self.visit = visit
        self.layout = layout
        self.model_dir = model_dir
        self.make = make
        self.freeze = freeze
        self.outcomes = Outcomes()
        self.hardware = fingerprint.stable()
        self.fingerprint = fingerprint.fingerprint(self.hardware)
        self._order_seed = order_seed or visit.id
        self._total = len(visit.cells)
        self._restarts = 0
        self._gpu_ids: tuple[str, ...] = ()
        self._journal = journal

    def run(self) -> Outcomes:
        """Serve every cell that is not whole.

        Raises
        ------
        Fault
            The installation is at fault; cells measured before that stay.
        """
        todo = self._missing(self.visit.cells)
        if not todo:
            say(f"nothing to measure: all {self._total} cells are there")
            return self.outcomes
        # The order must not favour a rate, and must not change when the visit is taken up again.
        order = {
            cell.cell_id: position
            for position, cell in enumerate(
                random.Random(digest(self._order_seed)).sample(self.visit.cells, len(self.visit.cells))
            )
        }
        todo.sort(key=lambda cell: order[cell.cell_id])
        workloads = {cell.cell_id: self._workload(cell) for cell in todo}
        hardware = self.visit.deployment.hardware
        _pin(hardware.client_cores)
        with (
            tempfile.TemporaryDirectory(prefix="kvstudy-visit-") as work,
            lease(self.visit.deployment.devices, say=say) as held,
        ):
            self._gpu_ids = held.gpu_ids
            # Whoever held the lease until now may have measured some of them.
            todo = self._missing(todo)
            for folder in ("store", "workloads"):
                store.sweep(self.layout.root / folder)
            while todo:
                todo = self._bring_up_and_serve(todo, workloads, Path(work), held)
        return self.outcomes

    def _missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those of the cells that are not in the store; notes what became of the others."""
        missing = []
        for cell in cells:
            folder = self.layout.cell(cell.cell_id)
            if not store.is_whole(folder):
                missing.append(cell)
                continue
            try:
                self.outcomes.cells[cell.cell_id] = str(store.read_summary(folder)["outcome"])
            except (ValueError, KeyError) as error:
                raise Fault(
                    f"{folder / store.SUMMARY} is damaged ({error}): move the folder away and run again; "
                    "only this cell is measured anew"
                ) from None
        return missing

    def _workload(self, cell: Cell) -> Path:
        try:
            return workload.prepare(cell, self.model_dir, self.layout)
        except (workload.WorkloadError, TextError, ArrivalError) as error:
            raise Fault(str(error)) from error

    def _bring_up_and_serve(
        self, todo: list[Cell], workloads: Mapping[str, Path], work: Path, held: Lease
    ) -> list[Cell]:
        """One life of the server: cells until it dies or all are served. Returns those that remain."""
        deployment = self.visit.deployment
        server = self.make(work, held)
        say(f"bringing up {deployment.slug}")
        try:
            try:
                server.bring_up(deployment.framework.bring_up_s, _Ticker("bringing up"))
            except OutOfMemory as error:
                self._blame_the_cluster(server)
                for cell in todo:
                    self._write_without_load(cell, "oom", str(error), server)
                return []
            except Unavailable as error:
                raise Fault(str(error), server.log_text()) from error
            say(f"up after {server.bring_up_s:.1f} s")
            timings = {"bring_up_s": server.bring_up_s}
            up = log_start = server.log_size()
            warm_up_s = self._warm_up(todo[0], workloads[todo[0].cell_id], server)
            timings["warm_up_s"] = warm_up_s
            self.outcomes.timings |= timings
            remaining = list(todo)
            while remaining:
                reason = server.failure()
                if reason is not None:
                    # Died between loads: nobody's result; the same cell is tried on a fresh server.
                    self._restart_or_give_up(remaining, server, reason)
                    return remaining
                cell = remaining[0]
                try:
                    alive = self._serve(cell, workloads[cell.cell_id], server, timings, (up, log_start))
                except _Hangs as error:
                    self._restart_or_give_up(remaining, server, f"it hangs: {error}", hangs=True)
                    return remaining
                del remaining[0]
                log_start = server.log_size()
                if remaining and not (alive and _is_well(server)):
                    reason = server.failure()
                    hangs = reason is None
                    self._restart_or_give_up(remaining, server, reason or "it no longer answers", hangs=hangs)
                    return remaining
            return []
        finally:
            begun = time.monotonic()
            with _signals_held():
                server.stop()
            took = time.monotonic() - begun
            self.outcomes.timings["teardown_s"] = took
            say(f"taken down after {took:.1f} s")

    def _blame_the_cluster(self, server: BroughtUp) -> None:
        """In a SLURM job SIGKILL comes from the limit of the job's memory, which is not the deployment's."""
        if os.environ.get("SLURM_JOB_ID") and server.killed():
            raise Allotted(
                "the server was killed (SIGKILL) in a SLURM job, most likely for want of the job's memory: retries ask "
                "for more, so does hardware.cluster.spare_memory_mib",
                server.log_text(),
            )

    def _restart_or_give_up(
        self, remaining: list[Cell], server: BroughtUp, reason: str, *, hangs: bool = False
    ) -> None:
        self._restarts += 1
        if self._restarts <= MAX_RESTARTS:
            say(f"the server is gone ({reason}): bringing it up again for {len(remaining)} more cell(s)")
            return
        outcome: Outcome = "timeout" if hangs else "oom" if server.death() == "oom" else "crashed"
        for cell in remaining:
            self._write_without_load(
                cell, outcome, f"not tried: the server was lost {self._restarts} times ({reason})", server
            )
        remaining.clear()

    # --- one cell --------------------------------------------------------------------------------

    def _warm_up(self, cell: Cell, folder: Path, server: BroughtUp) -> float:
        """Serve the cell's warm-up prompts, which no cell uses, a few at a time. Failures are the load's to find."""
        count = max(item.load.warmup_requests for item in self.visit.cells)
        if count == 0:
            return 0.0
        begun = time.monotonic()
        drawn = _drawn(folder, warmup=True)
        requests = build_requests(cell, drawn, min(count, len(drawn)), server.model_name)
        plan = client.Plan(
            requests,
            duration_s=WARM_UP_S,
            timeout_s=WARM_UP_S,
            drain_s=WARM_UP_S,
            concurrency=min(4, len(requests)),
        )
        with _signals_held() as held:
            result = client.run(
                plan, server.url, path=path_of(cell), abort=lambda: "interrupted" if held else server.failure()
            )
        took = time.monotonic() - begun
        failed = int((result.frame["status"] != "ok").sum())
        say(f"warmed up in {took:.1f} s" + (f", {failed} of {len(requests)} warm-up requests failed" if failed else ""))
        return took

    def _serve(
        self, cell: Cell, folder: Path, server: BroughtUp, timings: Mapping[str, float], log_from: tuple[int, int]
    ) -> bool:
        """Offer a cell's load and write its folder. Returns whether the server still lives."""
        done = len(self.outcomes.cells) + 1
        if self._journal is not None:
            self._journal.running(cell.cell_id)
        far = progress.of_study(self.visit.study, self.layout)
        say(f"measuring {cell.cell_slug} ({done}/{self._total} of this visit)" + (f"; {far}" if far else ""))
        drawn = _drawn(folder)
        extra: dict[str, Metric] = {}
        if isinstance(cell.load, KneeLoad):
            offered, extra, found = self._search(cell, cell.load, drawn, server)
        else:
            offered, found = self._offer(cell, cell.load, drawn, server), None
        if offered.broken:
            server.stop()
        alive = server.failure() is None
        if not alive and not offered.broken:
            self._blame_the_cluster(server)
        outcome, cause = self._outcome(offered.result, server, offered.broken)
        with _signals_held():
            self._write(
                cell,
                offered,
                outcome,
                cause,
                server,
                timings=timings,
                log_from=log_from,
                workload_dir=folder,
                extra=extra,
                found_capacity=found,
            )
        return alive

    def _search(
        self, cell: Cell, load: KneeLoad, drawn: workload.Drawn, server: BroughtUp
    ) -> tuple[Offered, dict[str, Metric], capacity.Capacity]:
        """Find the capacity. The cell holds the requests of the best probe that passed, else of the first."""
        kept: dict[float, Offered] = {}

        def probe(rate: float) -> capacity.Probe:
            at = PoissonLoad(rate=rate, **load.model_dump(include=set(PoissonLoad.model_fields) - {"name", "rate"}))
            planned = len(schedule(at, drawn.unit))
            bound = client.Bound(int((1.0 - load.goal) * planned), load.slo.ttft_s, load.slo.e2el_s)
            offered = self._offer(cell, at, drawn, server, bound)
            kept[rate] = offered
            frame = offered.result.frame
            share = metrics.goodput(frame, load.slo)
            found = capacity.Probe(
                rate,
                offered=len(frame),
                good=round((share.value or 0.0) * share.n),
                stopped_early=offered.result.aborted is not None,
            )
            say(
                f"  {rate:.3g} requests/s: {found.good}/{found.offered} met the SLO"
                + " (broken off)" * found.stopped_early
            )
            if server.failure() is not None:
                raise _Died
            _wait_until_idle(server)
            return found

        try:
            found = capacity.find(
                probe, low=load.low, high=load.high, goal=load.goal, precision=load.precision, most=load.probes
            )
        except _Died:
            found = capacity.Capacity(None, None, None, ())
            return kept[list(kept)[-1]], {}, found
        passed = [item.rate for item in found.probes if item.passes(load.goal)]
        value = Metric(
            value=found.rate,
            unit=metrics.REGISTRY["capacity"].unit,
            n=sum(item.offered for item in found.probes),
            low=found.low,
            high=found.high,
        )
        return kept[max(passed) if passed else load.low], {"capacity": value}, found

    def _offer(
        self, cell: Cell, load: Load, drawn: workload.Drawn, server: BroughtUp, bound: client.Bound | None = None
    ) -> Offered:
        """Offer one load, sampling memory meanwhile."""
        times: npt.NDArray[np.float64] | None = None
        if isinstance(load, ClosedLoad):
            planned = None
            requests = build_requests(cell, drawn, len(drawn), server.model_name)
        else:
            times = schedule(load, drawn.unit)
            planned = len(times)
            if planned == 0:
                raise Fault(f"{cell.cell_slug}: no request is due within load.duration_s={load.duration_s:g}: raise it")
            requests = build_requests(cell, drawn, planned, server.model_name)
        plan = client.Plan(
            requests,
            load.duration_s,
            load.timeout_s,
            load.drain_s,
            times=times,
            concurrency=load.concurrency if isinstance(load, ClosedLoad) else None,
        )
        effective: dict[str, Any] = {}
        try:
            server.reset()
            effective = server.effective_config()
            before = server.counters()
        except (OSError, ValueError, KeyError) as error:
            if _why_it_ended(server, error) is None:
                if not isinstance(error, HTTPError) and isinstance(error, OSError):
                    raise _Hangs(str(error)) from error
                raise Fault(f"the server is up but does not answer what it must: {error}") from error
            before = Counters()
        limit = server.watch().limit_bytes
        sampler = Sampler(server.watch(), cores=cell.hardware.client_cores)
        broken: list[str] = []

        def abort() -> str | None:
            reason = server.failure()
            if reason is None and limit is not None and sampler.resident > limit:
                reason = f"out of memory: {sampler.resident / 2**30:.2f} GiB resident, limit {limit / 2**30:g} GiB"
                broken.append(reason)
            return "interrupted" if held else reason

        cpu = time.process_time()
        try:
            with _signals_held() as held:
                result = client.run(
                    plan, server.url, path=path_of(cell), abort=abort, progress=_Reporter(cell.cell_slug), bound=bound
                )
        finally:
            samples = sampler.stop()
        cpu = time.process_time() - cpu
        after = before
        with contextlib.suppress(OSError, ValueError, KeyError):
            after = server.counters()
        for item in samples:
            item["t_s"] = item["t"] - result.zero
        return Offered(
            load,
            result,
            planned,
            before,
            after,
            effective,
            samples,
            broken,
            cpu,
            expected_hits(cell, drawn, len(requests)),
        )

    def _outcome(self, result: client.Result, server: BroughtUp, broken: Sequence[str]) -> tuple[Outcome, str | None]:
        frame = result.frame
        if broken:
            return "oom", broken[0]
        reason = server.failure()
        if reason is not None:
            return ("oom" if server.death() == "oom" else "crashed"), reason
        ok = frame["status"] == "ok"
        if len(frame) and not ok.any():
            errors = frame["error"].dropna()
            first = str(errors.iloc[0]) if len(errors) else "no request was answered"
            if frame["status"].isin(["timeout", "censored"]).any():
                return "timeout", first
            if errors.str.startswith("http 4").all():
                return "unsupported", first
            return "crashed", first
        return "ok", None

    # --- writing ---------------------------------------------------------------------------------

    def _write(
        self,
        cell: Cell,
        offered: Offered,
        outcome: Outcome,
        cause: str | None,
        server: BroughtUp,
        *,
        timings: Mapping[str, float],
        log_from: tuple[int, int],
        workload_dir: Path,
        extra: Mapping[str, Metric],
        found_capacity: capacity.Capacity | None,
    ) -> None:
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
        waited = {name: int(n) for name in ("queued", "preemptions") if (n := concurrency[name]) is not None}
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
        provenance = self._provenance(cell, offered.effective, workload_dir, self.visit.cells.index(cell) + 1)
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

    def _write_without_load(self, cell: Cell, outcome: Outcome, cause: str, server: BroughtUp) -> None:
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
        provenance = self._provenance(cell, {}, None, self.visit.cells.index(cell) + 1)
        frame = client.typed_frame([])
        with _signals_held():
            self._store(cell, frame, memory_frame([]), summary, provenance, server.log_text())
        say(f"  {cell.cell_slug}: {outcome} ({cause})")

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
        try:
            with store.staged(folder) as staging:
                text = yaml.safe_dump(cell.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
                (staging / store.CONFIG).write_text(text, encoding="utf-8")
                write_requests(frame, staging / store.REQUESTS)
                memory.to_parquet(staging / store.MEMORY, index=False)
                store.write_json(staging / store.SUMMARY, summary.model_dump(mode="json"))
                told = json.dumps(dict(provenance), indent=1, ensure_ascii=False, allow_nan=False)
                store.write_text(staging / store.PROVENANCE, redact(told) + "\n")
                said = "\n".join(_SAID)
                text = f"--- client ---\n{said}\n--- server ---\n{log}"
                (staging / store.LOG).write_text(redact(text), encoding="utf-8")
        except FileExistsError:
            say(f"  {cell.cell_slug} was measured by someone else meanwhile: theirs is kept")
        _SAID.clear()
        self.outcomes.cells[cell.cell_id] = summary.outcome

    def _provenance(
        self, cell: Cell, effective: Mapping[str, Any], workload_dir: Path | None, position: int
    ) -> dict[str, Any]:
        import kvstudy

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
            "gpu_ids": list(self._gpu_ids),
            "server_cores": list(cell.hardware.server_cores),
            "client_cores": list(cell.hardware.client_cores),
            "framework": framework,
            "effective_config": dict(effective),
            "model": json.loads(card.read_text(encoding="utf-8")) if card.is_file() else None,
            "workload": workload_dir.name if workload_dir else None,
            "visit": {"id": self.visit.id, "study": self.visit.study, "position": position},
            "python": sys.version.split()[0],
            "packages": fingerprint.packages(),
        }


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
        "preemptions": counted("preemptions"),
    }


def _drawn(folder: Path, *, warmup: bool = False) -> workload.Drawn:
    try:
        return workload.load_requests(folder, warmup=warmup)
    except (OSError, ValueError, KeyError) as error:
        raise Fault(
            f"the workload {folder} is damaged ({' '.join(str(error).split())[:120]}): delete it and run again; "
            "it is drawn anew, the same"
        ) from None


def _why_it_ended(server: BroughtUp, error: Exception) -> str | None:
    """Why the server died, if it did: one that refuses connections is dying, and its process ends a moment later."""
    refused = isinstance(getattr(error, "reason", error), ConnectionError)
    until = time.monotonic() + (DYING_S if refused else 0.0)
    while (reason := server.failure()) is None and time.monotonic() < until:
        time.sleep(0.05)
    return reason


def _is_well(server: BroughtUp) -> bool:
    """Whether the server says so within `HEALTH_S`: one that hangs must not cost the next cell its load."""
    until = time.monotonic() + HEALTH_S
    while server.failure() is None:
        if http.is_healthy(server.url, timeout=max(0.1, until - time.monotonic())):
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return False


def _wait_until_idle(server: BroughtUp, bound_s: float = 30.0) -> None:
    """Wait until requests that were given up have left the server, so that they are not the next probe's load."""
    watch = server.watch()
    names = [name for name in (watch.running, watch.waiting) if name]
    until = time.monotonic() + bound_s
    while time.monotonic() < until:
        try:
            rows = http.parse_metrics(http.request(watch.metrics_url, timeout=5.0), frozenset(names))
        except (OSError, ValueError):
            return
        if sum(value for _, _, value in rows) == 0:
            return
        time.sleep(0.2)


def expected_hits(cell: Cell, drawn: workload.Drawn, count: int) -> float:
    """Share of prompt tokens that a prefix cache should answer: none unless the deployment has one."""
    framework = cell.framework
    if not isinstance(framework, Vllm) or not framework.prefix_caching:
        return 0.0
    return workload.expected_hit_share(drawn, count, framework.block_size)


# --- parts ---------------------------------------------------------------------------------------


def path_of(cell: Cell) -> str:
    """The endpoint a workload goes to."""
    return "/v1/chat/completions" if cell.workload.api == "chat" else "/v1/completions"


def build_requests(cell: Cell, drawn: workload.Drawn, count: int, model_name: str) -> list[client.Request]:
    """The first `count` drawn requests, as the bytes that will be sent."""
    spec = cell.workload
    requests = []
    for index in range(count):
        tokens = int(drawn.output_tokens[index])
        if drawn.texts is not None:
            body = client.chat_body(
                model_name,
                drawn.texts[index],
                tokens,
                temperature=spec.temperature,
                ignore_eos=spec.ignore_eos,
            )
        else:
            body = client.completion_body(
                model_name,
                drawn.prompts[index],
                tokens,
                temperature=spec.temperature,
                ignore_eos=spec.ignore_eos,
            )
        requests.append(client.Request(index, drawn.length_class[index], int(drawn.prompt_tokens[index]), tokens, body))
    return requests


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


def _pin(cores: Sequence[int]) -> None:
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            raise Fault(
                f"hardware.client_cores names cores {list(cores)}, of which this machine lacks some "
                f"(it has {os.cpu_count()}): correct conf/hardware"
            ) from error


class _Ticker:
    """Says every ten seconds how long something has taken."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = 0.0

    def __call__(self, elapsed: float) -> None:
        if elapsed - self._said >= 10.0:
            self._said = elapsed
            say(f"  {self._what}: {elapsed:.0f} s")


class _Reporter:
    """A line of progress: in place on a terminal, else one below the other."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, state: client.Progress) -> None:
        left = max(0.0, state.duration_s - state.elapsed_s)
        planned = f"/{state.planned}" if state.planned is not None else ""
        say(
            f"  {state.elapsed_s:.0f} s, {f'{left:.0f} s left' if left else 'draining'}: sent {state.sent}{planned}, "
            f"done {state.done}, failed {state.failed}, in flight {state.in_flight}"
        )


@contextlib.contextmanager
def _signals_held() -> Iterator[list[int]]:
    """Hold SIGINT and SIGTERM back while something must not be left half done; they come when the block ends.

    Yields those that have come. An event loop's own code may swallow an exception that a handler raises in it, so a
    load runs in such a block too and asks.
    """
    held: list[int] = []
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda signum, _: held.append(signum))
    except ValueError:  # not the main thread: whoever runs us there handles signals
        pass
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            os.kill(os.getpid(), held[0])


class _Tee:
    """Standard error, and the same into a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._stderr = sys.stderr

    def write(self, text: str) -> int:
        """To both; a full disk under the log must not stop a measurement."""
        self._stderr.write(text)
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Both."""
        self._stderr.flush()
        with contextlib.suppress(OSError):
            self._file.flush()

    def isatty(self) -> bool:
        """A log is no terminal."""
        return False


# --- command line --------------------------------------------------------------------------------


def measure_visit(
    visit: Visit,
    results: Path,
    *,
    freeze: Path | None = None,
    make: MakeServer | None = None,
    model_dir: Path | None = None,
    journal: states.Journal | None = None,
) -> Outcomes:
    """Measure a visit into `results`. Raises `Fault`; see `Measuring`."""
    layout = Layout(results)
    deployment = visit.deployment
    try:
        folder = model_dir or model_folder(deployment, layout)
        if make is None:
            named = freeze.with_suffix("") if freeze is not None and freeze.suffix == ".txt" else None
            environment = named if named is not None and named.is_dir() else environment_folder(deployment, layout)
            if freeze is None and environment is not None:
                freeze = environment.with_name(f"{environment.name}.txt")

            def make(work: Path, held: Lease) -> BroughtUp:
                return make_server(deployment, folder, environment, work, held)

        return Measuring(visit, layout, folder, make, freeze=freeze, journal=journal).run()
    except Unavailable as error:
        raise Fault(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: every cell has a folder; 2: one line says what the installation lacks; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="kvstudy measure", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--visit", type=Path, required=True, help="the visit, as the plan wrote it")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--marker", type=Path, required=True, help="written last: what became of each cell")
    parser.add_argument("--freeze", "--env-freeze", type=Path, help="freeze file of the framework's environment")
    parser.add_argument("--cell", help="only this cell of the visit")
    parser.add_argument("--log", type=Path, help="also write the progress there")
    parser.add_argument(
        "--attempt", type=int, default=1, help="a retry ends at once where the last try ended in a fault"
    )
    options = parser.parse_args(arguments)
    begun = psutil.Process().create_time()
    journal: states.Journal | None = None
    if options.log is not None:
        sys.stderr = _Tee(options.log)

    def interrupted(signum: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(signum).name)

    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: shells start background jobs with it ignored
        signal.signal(number, interrupted)
    try:
        visit = read_visit(options.visit)
        path = Layout(options.results).state(visit.study, visit.id)
        before = states.read(path)
        if options.attempt > 1 and before is not None and before.doing == "failed":
            say(f"kvstudy measure: not tried again, since that would change nothing: {before.cause}")
            return 2
        journal = states.Journal(path, visit.id, options.log)
        journal.running()
        if options.cell is not None:
            cells = tuple(cell for cell in visit.cells if cell.cell_id == options.cell)
            if not cells:
                raise Fault(f"visit {visit.id} has no cell {options.cell}")
            visit = visit.model_copy(update={"cells": cells})
        outcomes = measure_visit(visit, options.results, freeze=options.freeze, journal=journal)
        outcomes.timings["job_s"] = time.time() - begun  # the visit, and Python's start
        store.sweep(options.marker.parent)
        store.write_json(
            options.marker,
            {
                "visit": visit.id,
                "study": visit.study,
                "timings": outcomes.timings,
                "cells": [{"cell": name, "outcome": outcome} for name, outcome in outcomes.cells.items()],
            },
        )
        journal.done()
    except (Fault, Unavailable) as error:
        say(f"kvstudy measure: {' '.join(str(error).split())}")
        _note(journal, "stopped" if isinstance(error, Allotted) else "failed", str(error))
        if isinstance(error, Fault) and error.detail and options.log is not None:
            with contextlib.suppress(OSError), options.log.open("a", encoding="utf-8") as log:
                log.write(redact(f"--- server ---\n{error.detail}"))
        return 2
    except KeyboardInterrupt:
        say("kvstudy measure: interrupted; the server is stopped, finished cells stay, run again to go on")
        _note(journal, "interrupted", "interrupted")
        return 130
    except OSError as error:
        cause = cannot_write(error, options.results)
        say(f"kvstudy measure: {cause}; finished cells stay")
        _note(journal, "stopped", cause)
        return 2
    return 0


def _note(journal: states.Journal | None, doing: states.Doing, cause: str) -> None:
    """Leave word of an end; a full disk must not hide what ended the visit."""
    if journal is not None:
        with contextlib.suppress(OSError):
            journal.ended(doing, cause)


if __name__ == "__main__":
    raise SystemExit(main())
