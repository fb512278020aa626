"""One visit: bring a deployment up, warm it up, serve its cells in a seeded random order, take it down.

Cells that are whole are skipped; each finished cell is written whole (`record`) before the next begins, so Ctrl-C, a
full disk or a dead server lose nothing.

What goes wrong is told apart. A *fault of the installation* (no model, no server binary, port in use) is one
line on standard error and exit code 2, and no cell. A *result* (out of memory, a server that dies or hangs
under load) is a cell with that outcome, and the visit goes on with a fresh server, `MAX_RESTARTS` times at
most. Everything has a bound: a visit always ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError

import numpy as np
import numpy.typing as npt

from kvstudy.frameworks import http
from kvstudy.frameworks.base import Counters, OutOfMemory, Server, Unavailable
from kvstudy.frameworks.launch import environment_folder, make_server, model_folder
from kvstudy.frameworks.lease import Lease, lease
from kvstudy.grid import store
from kvstudy.grid.records import Metric, Outcome
from kvstudy.grid.schema import Cell, ClosedLoad, KneeLoad, Load, PoissonLoad, Visit, digest
from kvstudy.grid.store import Layout
from kvstudy.load import client, workload
from kvstudy.load.arrivals import ArrivalError, schedule
from kvstudy.load.text import TextError
from kvstudy.measure import capacity, metrics, progress
from kvstudy.measure import state as states
from kvstudy.measure.faults import Allotted, Fault
from kvstudy.measure.interrupts import signals_held
from kvstudy.measure.memory import Sampler
from kvstudy.measure.narration import Reporter, Ticker, say
from kvstudy.measure.offering import build_requests, expected_hits, path_of, read_drawn
from kvstudy.measure.record import Offered, Recorder

MAX_RESTARTS = 3
#: Bound on requests that warm the server up, each.
WARM_UP_S = 120.0


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


class _Died(Exception):
    """The server died in the middle of a search."""


class _Hangs(Exception):
    """The server lives and does not answer."""


#: How long a server may take to say that it is well, once a load is over.
HEALTH_S = 15.0
#: How long a process may take to end once it no longer listens.
DYING_S = 5.0


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
        self.outcomes = Outcomes()
        self._recorder = Recorder(visit, layout, model_dir, freeze)
        self._order_seed = order_seed or visit.id
        self._total = len(visit.cells)
        self._restarts = 0
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
            self._recorder.gpu_ids = held.gpu_ids
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
                server.bring_up(deployment.framework.bring_up_s, Ticker("bringing up"))
            except OutOfMemory as error:
                self._blame_the_cluster(server)
                for cell in todo:
                    self._not_served(cell, "oom", str(error), server)
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
            with signals_held():
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
            self._not_served(cell, outcome, f"not tried: the server was lost {self._restarts} times ({reason})", server)
        remaining.clear()

    def _not_served(self, cell: Cell, outcome: Outcome, cause: str, server: BroughtUp) -> None:
        self.outcomes.cells[cell.cell_id] = self._recorder.without_load(cell, outcome, cause, server)

    # --- one cell --------------------------------------------------------------------------------

    def _warm_up(self, cell: Cell, folder: Path, server: BroughtUp) -> float:
        """Serve the cell's warm-up prompts, which no cell uses, a few at a time. Failures are the load's to find."""
        count = max(item.load.warmup_requests for item in self.visit.cells)
        if count == 0:
            return 0.0
        begun = time.monotonic()
        drawn = read_drawn(folder, warmup=True)
        requests = build_requests(cell, drawn, min(count, len(drawn)), server.model_name)
        plan = client.Plan(
            requests,
            duration_s=WARM_UP_S,
            timeout_s=WARM_UP_S,
            drain_s=WARM_UP_S,
            concurrency=min(4, len(requests)),
        )
        with signals_held() as held:
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
        drawn = read_drawn(folder)
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
        with signals_held():
            self.outcomes.cells[cell.cell_id] = self._recorder.loaded(
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
            with signals_held() as held:
                result = client.run(
                    plan, server.url, path=path_of(cell), abort=abort, progress=Reporter(cell.cell_slug), bound=bound
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


def _pin(cores: Sequence[int]) -> None:
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            raise Fault(
                f"hardware.client_cores names cores {list(cores)}, of which this machine lacks some "
                f"(it has {os.cpu_count()}): correct conf/hardware"
            ) from error


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
