"""What the workflow itself costs: `python -m benchmarks.workflow --cells 10000 --json`.

Composing a study, Snakemake's dry run with a job a cell, the analysis of as many stored cells, tracking them, and how
each grows over two decades, from a hundredth of that. With t = a + c n^p at three sizes ten times apart, a start that
costs the same at each, the exponent is p = log10((t3 - t2) / (t2 - t1)): 1 is linear. It is of CPU time, which others
on the machine disturb less; targets are of wall time. Stored cells are copies of ten whose requests are drawn here and
whose numbers come from the code that measures; nothing here says how fast an engine is.

`--overhead RESULTS --study NAME` instead reads a finished study: how much of its wall time was not spent in visits,
and where it went.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Row, emit

ROOT = Path(__file__).resolve().parents[1]
#: Deployments of study=quick: vllm and full once, H2O and InfiniGen at four budgets.
DEPLOYMENTS = 10
BUDGETS = (1.0, 0.5, 0.3, 0.2)
RATES = (0.5, 1.0, 1.5, 2.0, 2.5)
MIB = 1 << 20
#: A cost that grows with this exponent at most is called linear: timings of seconds repeat to a tenth.
LINEAR = 1.15
#: Seconds between two decades below which an exponent is of the clock's noise.
TELLING_S = 0.5
#: Stages, in order, with the seconds that 10,000 cells may take.
STAGES: dict[str, float | None] = {
    "compose": 10.0,
    "plan again": None,
    "dry run": 60.0,
    "analyse": 30.0,
    "track": None,
    "track again": None,
    "status": None,
}


@dataclass(frozen=True)
class Ran:
    """What a command took: wall time, CPU time of it and its children, its largest resident memory."""

    seconds: float
    cpu_s: float
    peak_mib: float
    output: str


def overrides(cells: int, *more: str) -> list[str]:
    """study=quick blown up to about `cells` cells."""
    seeds = max(1, round(cells / (DEPLOYMENTS * len(RATES))))
    values = {"load.rate": RATES, "budget.share": BUDGETS}
    axes = [f"{key}={','.join(map(str, of))}" for key, of in values.items()]
    return ["study=quick", *axes, f"seed=range(0,{seeds})", *more]


def run(*command: str) -> Ran:
    """Run a command in the checkout; its wall time and its largest resident memory, children's apart."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryFile() as out:
        begun = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read().decode(errors="replace")
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:6])} ... failed:\n{text[-2000:]}")
    return Ran(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text)


def kvstudy(*arguments: str) -> Ran:
    """One stage of the workflow."""
    return run(sys.executable, "-m", "kvstudy.cli", *arguments)


# --- a store to analyse --------------------------------------------------------------------------


def requests(rng: np.random.Generator) -> Any:
    """Thirty requests with their chunks, as a load of 24 s at about one a second would leave them."""
    from kvstudy.load.flights import typed_frame

    rows = []
    for index, scheduled in enumerate(np.sort(rng.uniform(0.0, 24.0, 30))):
        first = scheduled + rng.uniform(0.1, 0.9)
        tokens = int(rng.integers(16, 64))
        chunks = first + 0.02 * np.arange(tokens) * rng.uniform(0.9, 1.3)
        rows.append(
            {
                "index": index,
                "length_class": "short",
                "scheduled_s": scheduled,
                "sent_s": scheduled + 0.0005,
                "first_token_s": first,
                "last_token_s": chunks[-1],
                "finished_s": chunks[-1] + 0.0005,
                "chunk_s": chunks.tolist(),
                "chunk_tokens": [1] * tokens,
                "prompt_tokens_asked": 200,
                "prompt_tokens": 200,
                "output_tokens_asked": tokens,
                "output_tokens": tokens,
                "server_queue_s": 0.01,
                "status": "ok",
                "error": None,
                "in_window": scheduled >= 2.0,
            }
        )
    return typed_frame(rows)


def fill(results: Path, study: str) -> int:
    """Store every cell of the study's plan; returns how many."""
    from kvstudy.frameworks.base import Counters
    from kvstudy.grid import store
    from kvstudy.grid.records import Summary, Verdict
    from kvstudy.measure import metrics
    from kvstudy.measure.record import memory_frame, memory_summary
    from kvstudy.measure.requests import write_requests

    layout = store.Layout(results)
    rng = np.random.default_rng(0)
    kinds = [("weights", "device"), ("kv_reserved", "device"), ("kv_live", "device"), ("process", "host")]
    templates = []
    for number in range(DEPLOYMENTS):
        folder = results / "templates" / str(number)
        folder.mkdir(parents=True)
        frame = requests(rng)
        window = metrics.Window(2.0, 24.0)
        write_requests(frame, folder / store.REQUESTS)
        samples = [
            {"t_s": t, "rows": [(kind, tier, int(rng.integers(1, 900)) * MIB) for kind, tier in kinds]}
            for t in np.arange(0.0, 26.0, 0.2)
        ]
        memory = memory_frame(samples)
        memory.to_parquet(folder / store.MEMORY, index=False)
        provenance = {"time": "2026-01-02T03:04:05Z", "hardware": {"cpu": "made up", "cores": 2, "gpus": []}}
        store.write_json(folder / store.PROVENANCE, provenance)
        (folder / store.LOG).write_text("made up by benchmarks/workflow.py\n" * 200)
        summary = Summary(
            cell="",
            deployment="",
            outcome="ok",
            verdict=Verdict(status="VALID"),
            metrics=metrics.compute(frame, window, closed=False),
            memory=memory_summary(memory, Counters()),
            budget={"share": 1.0, "attended": 1.0, "kept": 1.0},
            counts=dict(metrics.summarise(frame)),
            window={"start_s": 2.0, "end_s": 24.0},
            visit={"bring_up_s": 4.0, "warm_up_s": 1.5, "load_s": 24.0, "drain_s": 2.0},
            checks={"concurrency": {"running_peak": 7.0}},
            fingerprint="made-up",
        )
        templates.append((folder, summary.model_dump(mode="json")))
    plan = json.loads(layout.plan(study).read_text())
    for number, cell in enumerate(plan["cells"]):
        source, summary = templates[number % DEPLOYMENTS]
        target = layout.cell(cell["id"])
        target.mkdir(parents=True)
        for name in (store.REQUESTS, store.MEMORY, store.PROVENANCE, store.LOG):
            os.link(source / name, target / name)
        (target / store.CONFIG).write_text(json.dumps(cell["config"]))  # JSON is YAML
        factor = 1.0 + 0.02 * rng.standard_normal()
        jittered = {
            name: metric | {"value": metric["value"] * factor if metric["value"] is not None else None}
            for name, metric in summary["metrics"].items()
        }
        own = summary | {"cell": cell["id"], "deployment": cell["deployment"], "metrics": jittered}
        (target / store.SUMMARY).write_text(json.dumps(own, indent=1))
    return len(plan["cells"])


# --- the numbers ---------------------------------------------------------------------------------


def costs(cells: int, work: Path, stages: Sequence[str]) -> tuple[int, dict[str, Ran]]:
    """Each stage at one size. The study is composed twice: anew, and as every later start of Snakemake finds it."""
    results, alone = work / f"results-{cells}", work / f"alone-{cells}"
    asked = [*overrides(cells), "--results", str(results)]
    single = json.dumps([*overrides(cells)[1:], "sweep=cell"])
    config = ["--config", f"results={alone}", "study=quick", f"overrides={single}"]
    commands = {
        "compose": lambda: kvstudy("grid", "--json", *asked),
        "plan again": lambda: kvstudy("grid", "--json", *asked),
        "dry run": lambda: run(
            *(sys.executable, "-m", "snakemake", "--cores", "2", "--dry-run", "--quiet", "all", *config)
        ),
        "analyse": lambda: kvstudy("analyse", *asked),
        "track": lambda: kvstudy("track", *asked),
        "track again": lambda: kvstudy("track", *asked),
        "status": lambda: kvstudy("status", "study=quick", "--results", str(results)),
    }
    found = {"compose": commands["compose"]()}
    count = fill(results, "quick")
    found |= {name: commands[name]() for name in stages if name != "compose"}
    return count, found


def scale(cells: int, stages: Sequence[str]) -> list[Row]:
    """Rows at `cells`, a tenth and a hundredth of them, and each stage's growth between."""
    if cells % (100 * DEPLOYMENTS * len(RATES)):  # a hundredth has whole seeds
        raise SystemExit(f"--cells takes multiples of {100 * DEPLOYMENTS * len(RATES):,}, not {cells:,}")
    with tempfile.TemporaryDirectory(prefix="kvstudy-bench-") as folder:
        sizes = [costs(asked, Path(folder), stages) for asked in (cells // 100, cells // 10, cells)]
    counts = [count for count, _ in sizes]
    most = counts[-1]
    rows = []
    for name, ran in sizes[-1][1].items():
        target = STAGES[name]
        spent = [found[name].cpu_s for _, found in sizes]
        met = None if target is None else ran.seconds <= target * max(1.0, most / 10_000)
        beside = {f"cpu_s_{count}_cells": at for count, at in zip(counts, spent, strict=True)}
        rows.append(Row(f"{name}, {most} cells", ran.seconds, "s", target=target, met=met, beside=beside))
        rows.append(growth(name, spent))
    largest = sizes[-1][1]
    if "analyse" in largest:
        peak = largest["analyse"].peak_mib
        rows.append(Row(f"analyse, {most} cells: peak memory", peak, "MiB", target=2000.0, met=peak < 2000.0))
    if "dry run" in largest:
        rows.append(Row(f"dry run, {most} cells: peak memory", largest["dry run"].peak_mib, "MiB"))
    if "track" in largest:
        (some, before), (many, after) = sizes[1:]
        rate = (many - some) / (after["track"].seconds - before["track"].seconds)
        rows.append(Row(f"track, {some} to {many} cells", rate, "runs/s", target=40.0, met=rate >= 40.0))
    return rows


def growth(name: str, seconds: Sequence[float]) -> Row:
    """The exponent of a stage's CPU time, as above; without a verdict where a decade adds too little to tell."""
    first, second = seconds[1] - seconds[0], seconds[2] - seconds[1]
    telling = first > 0 and second > TELLING_S
    exponent = math.log10(second / first) if telling else None
    met = exponent <= LINEAR if exponent is not None and first > TELLING_S else None
    return Row(f"{name}: grows as cells to the power of", exponent, "", target=LINEAR, met=met)


# --- a finished study ----------------------------------------------------------------------------


def overhead(results: Path, study: str) -> list[Row]:
    """The wall time of a study from Snakemake's start to its last cell, split.

    Visits are their own accounts (bring-up, warm-up, windows, drains, teardown: markers and summaries); when they began
    and ended is in their cells' logs and provenance, to the second. Snakemake's start is the name of its log file; what
    it prepared (environments, models) before the first visit is no part of the overhead and is a row of its own.
    """
    from kvstudy.grid.store import LOG, PROVENANCE, Layout, read_summary

    layout = Layout(results)
    parts = dict.fromkeys(("bring-up", "warm-up", "windows", "drains", "teardown"), 0.0)
    spans: list[tuple[float, float]] = []
    for marker in sorted((layout.study(study) / "visits").glob("*.json")):
        visit = json.loads(marker.read_text())
        for part, name in (("bring-up", "bring_up_s"), ("warm-up", "warm_up_s"), ("teardown", "teardown_s")):
            parts[part] += visit["timings"].get(name, 0.0)
        stamps: list[float] = []
        for entry in visit["cells"]:
            folder = layout.cell(entry["cell"])
            took = read_summary(folder)["visit"]
            parts["windows"] += took.get("load_s") or 0.0
            parts["drains"] += took.get("drain_s") or 0.0
            stamps += [_utc(text) for text in re.findall(r"^(20\S+Z) ", (folder / LOG).read_text(), re.M)]
            stamps.append(_utc(json.loads((folder / PROVENANCE).read_text())["time"]))
        spans.append((min(stamps), max(stamps) + visit["timings"].get("teardown_s", 0.0)))
    if not spans:
        raise SystemExit(f"no finished visit of study {study} in {results}: measure it first")
    spans.sort()
    first, last = spans[0][0], max(end for _, end in spans)
    started, prepared = _snakemake(results, first)
    begun = max(prepared or started, started)
    visits, wall = sum(parts.values()), last - begun
    share = (wall - visits) / wall
    between = sum(max(0.0, after[0] - before[1]) for before, after in itertools.pairwise(spans))
    rows = [Row(f"visits: {name}", value, "s", ratio=value / wall) for name, value in parts.items()]
    rows += [
        Row("before the first visit: environments, models", begun - started, "s"),
        Row("before the first visit: Snakemake and the plan", first - begun, "s", ratio=(first - begun) / wall),
        Row(f"between {len(spans)} visits", between, "s", ratio=between / wall),
        Row("wall up to the last cell", wall, "s"),
        Row("orchestration overhead", share, "of wall", target=0.05, met=share <= 0.05),
    ]
    return rows


def _utc(text: str) -> float:
    return datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC).timestamp()


def _snakemake(results: Path, first: float) -> tuple[float, float | None]:
    """When the Snakemake run that made the first visit started, and when it had prepared what visits need."""
    started, of_run = first, None
    for log in sorted((results.parent / ".snakemake" / "log").glob("*.snakemake.log")):
        at = datetime.datetime.strptime(log.name.split(".")[0], "%Y-%m-%dT%H%M%S").timestamp()
        if at <= first:
            started, of_run = at, log
    if of_run is None:
        return started, None
    prepared = None
    when = None
    for line in of_run.read_text(errors="replace").splitlines():
        stamp = re.match(r"\[(\w{3} \w{3} +\d+ [\d:]+ \d{4})\]", line)
        if stamp:
            when = datetime.datetime.strptime(stamp[1], "%a %b %d %H:%M:%S %Y").timestamp()
        if re.search(r"Finished jobid: \d+ \(Rule: (environment|model|skew)\)", line) and when is not None:
            prepared = min(when, first)
    return started, prepared


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES), help="only these")
    parser.add_argument("--overhead", type=Path, metavar="RESULTS", help="split the wall time of a finished study")
    parser.add_argument("--study", default="quick")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args(argv)
    found = overhead(options.overhead, options.study) if options.overhead else scale(options.cells, options.stages)
    emit(found, options.json)


if __name__ == "__main__":
    main()
