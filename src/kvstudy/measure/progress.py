"""How far a study is: cells done, running, failed and left, and when the rest will be done by the pace so far.

Reads the plan as it was last made and what visits left behind; writes nothing, so it can be asked while Snakemake runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvstudy.grid.store import LOG, SUMMARY, Layout, read_summary
from kvstudy.measure import state

#: Seconds a cell takes for each second of its load, bring-up shared out, until the study's own pace is known.
PACE = 1.6
#: Cells whose pace is looked at; more say no more, and a cell of ten thousand must not read all the others.
ENOUGH = 40
#: Failed cells that are listed; a fault of the installation fails all of a framework's.
LISTED = 20


@dataclass(frozen=True)
class Planned:
    """What progress needs of a plan: seconds of load by cell, and the cells of each visit, measuring or scoring."""

    cells: dict[str, float]
    visits: dict[str, tuple[str, ...]]
    quality: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass
class Scored:
    """Quality cells of a study by what became of them. A visit scores its cells together."""

    done: list[str] = field(default_factory=list)
    running: dict[str, state.State] = field(default_factory=dict)  # by cell
    failed: dict[str, state.State] = field(default_factory=dict)


@dataclass
class Progress:
    """Cells of a study by what became of them, and seconds until the rest is done."""

    planned: Planned
    done: list[str]
    quality: Scored
    running: list[state.State] = field(default_factory=list)
    failed: dict[str, state.State] = field(default_factory=dict)  # by cell: its visit ended without it
    left_s: float = 0.0

    @property
    def left(self) -> list[str]:
        """Cells that wait for their turn."""
        apart = {*self.done, *self.failed, *(item.cell for item in self.running)}
        return [cell for cell in self.planned.cells if cell not in apart]


def read_planned(path: Path) -> Planned | None:
    """The plan in a file; None where there is none."""
    try:
        return _planned(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged counts as none: grid makes it anew
        return None


@lru_cache(maxsize=4)
def _planned(path: Path, _: int) -> Planned:
    raw = json.loads(path.read_text(encoding="utf-8"))
    return Planned(
        cells={cell["id"]: _load_s(cell["config"]["load"]) for cell in raw["cells"]},
        visits={visit["id"]: tuple(visit["cells"]) for visit in raw["visits"]},
        quality={visit["id"]: tuple(visit["cells"]) for visit in raw.get("quality_visits", [])},
    )


def _load_s(load: dict[str, Any]) -> float:
    return float(load["duration_s"]) * float(load.get("probes", 1))


def read_progress(study: str, layout: Layout) -> Progress | None:
    """How far a study is; None where it has no plan."""
    planned = read_planned(layout.plan(study))
    if planned is None:
        return None
    try:
        # One listing for ten thousand questions. A folder is renamed into place, so that it is there means it is whole.
        stored = set(os.listdir(layout.root / "store"))
    except FileNotFoundError:
        stored = set()
    scored = Scored([cell for cells in planned.quality.values() for cell in cells if cell in stored])
    found = Progress(planned, [cell for cell in planned.cells if cell in stored], scored)
    visits = planned.visits | planned.quality
    for path in sorted(layout.state(study, "x").parent.glob("*.json")):
        seen = state.read(path)
        if seen is None or seen.visit not in visits:
            continue
        missing = dict.fromkeys((cell for cell in visits[seen.visit] if cell not in stored), seen)
        scores = seen.visit in planned.quality
        if seen.doing == "running" and seen.alive():
            if scores:
                scored.running |= missing
            elif missing:
                found.running.append(seen)
        elif seen.doing != "interrupted":
            (scored if scores else found).failed.update(missing)
    found.left_s = _seconds_left(found, layout)
    return found


def _seconds_left(found: Progress, layout: Layout) -> float:
    planned = found.planned
    sharing = {cell: len(members) for members in planned.visits.values() for cell in members}
    sample = random.Random(0).sample(found.done, min(ENOUGH, len(found.done)))
    took = [(_seconds(layout.cell(cell), sharing.get(cell, 1)), planned.cells[cell]) for cell in sample]
    known = [(seconds, load) for seconds, load in took if seconds is not None]
    pace = sum(seconds for seconds, _ in known) / sum(load for _, load in known) if known else PACE
    apart = {*found.done, *found.failed}
    rest = pace * sum(load for cell, load in planned.cells.items() if cell not in apart)
    return rest / max(1, len(found.running))


def of_study(study: str, layout: Layout) -> str:
    """`study quick: 5 of 16 cells done, about 8 min left`; empty where the plan cannot be read."""
    found = read_progress(study, layout)
    if found is None:
        return ""
    return f"study {study}: {len(found.done)} of {len(found.planned.cells)} cells done, about {span(found.left_s)} left"


def _seconds(cell_dir: Path, sharing: int) -> float | None:
    """Wall time that a cell cost: its load and drain, and its part of the bring-up."""
    try:
        visit = read_summary(cell_dir)["visit"]
    except (OSError, ValueError, KeyError):
        return None
    own = (visit.get("load_s") or 0.0) + (visit.get("drain_s") or 0.0)
    shared = (visit.get("bring_up_s") or 0.0) + (visit.get("warm_up_s") or 0.0)
    return float(own + shared / sharing)


def span(seconds: float) -> str:
    """A time as a person says it."""
    if seconds < 90:
        return f"{max(5, round(seconds / 5) * 5):.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


# --- kvstudy status ------------------------------------------------------------------------------

_OUTCOME = re.compile(rb'"outcome": *"(\w+)"')


def outcome_of(cell_dir: Path) -> str:
    """Outcome of a stored cell from the head of its summary, without reading all of it."""
    try:
        with (cell_dir / SUMMARY).open("rb") as handle:
            found = _OUTCOME.search(handle.read(2000))
    except OSError:
        return "unreadable"
    return found[1].decode() if found else "unreadable"


def report(study: str, layout: Layout, found: Progress, now: float) -> list[str]:
    """What `kvstudy status` prints."""
    outcomes = {cell: outcome_of(layout.cell(cell)) for cell in found.done}
    bad = {cell: outcome for cell, outcome in outcomes.items() if outcome != "ok"}
    total = len(found.planned.cells)
    head = (
        f"study {study}: {total} cells: {len(found.done)} done, {len(found.running)} running, "
        f"{len(found.failed)} failed, {len(found.left)} left"
    )
    if found.running:
        end = time.strftime("%a %H:%M", time.localtime(now + found.left_s))
        head += f"; expected end {end}, in about {span(found.left_s)}"
    elif found.left:
        head += f"; nothing runs, the rest takes about {span(found.left_s)}"
    lines = [head]
    for item in found.running:
        lines.append(f"  running  {item.cell or f'{item.visit} (coming up)'}, {_where(item, now)}")
    if bad:
        counted = ", ".join(f"{count} {name}" for name, count in sorted(Counter(bad.values()).items()))
        lines.append(f"  of those done, {len(bad)} ended badly, which is a result: {counted}")
        for cell in list(bad)[:LISTED]:
            cause = read_summary(layout.cell(cell)).get("cause") or "no cause given"
            lines.append(f"    {cell}\n      {bad[cell]}: {cause}\n      log: {layout.cell(cell) / LOG}")
        lines += _more(len(bad))
    lines += _failed(found.failed)
    if found.planned.quality:
        scored = found.quality
        total = sum(map(len, found.planned.quality.values()))
        left = total - len(scored.done) - len(scored.running) - len(scored.failed)
        lines.append(
            f"  quality: {total} cells: {len(scored.done)} scored, {len(scored.running)} running, "
            f"{len(scored.failed)} failed, {left} left"
        )
        for item in {seen.visit: seen for seen in scored.running.values()}.values():
            lines.append(f"  scoring  {item.visit}: {item.cell or 'getting ready'}, {_where(item, now)}")
        lines += _failed(scored.failed)
    return lines


def _where(item: state.State, now: float) -> str:
    return f"for {span(now - item.since)} on {item.host}, process {item.pid}"


def _failed(failed: dict[str, state.State]) -> list[str]:
    """Cells without a result, each with its cause and log."""
    if not failed:
        return []
    lines = [f"  {len(failed)} failed and have no result; run snakemake again when the cause is gone"]
    for cell, seen in list(failed.items())[:LISTED]:
        cause = seen.cause or f"ended without a word: killed, or the machine went down{_last_line(seen.log)}"
        lines.append(f"    {cell}\n      {cause}\n      log: {seen.log or 'none was kept'}")
    return lines + _more(len(failed))


def _last_line(log: str | None) -> str:
    try:
        lines = Path(log or "").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f"; its log ends: {lines[-1].strip()[:200]}" if lines else ""


def _more(count: int) -> list[str]:
    return [f"    and {count - LISTED} more"] if count > LISTED else []


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: `kvstudy status study=NAME`. Exit code 1: something failed; 2: there is no such plan."""
    parser = argparse.ArgumentParser(
        prog="kvstudy status", description="What of a study is done, running, failed and left, and when it will end."
    )
    parser.add_argument("study", metavar="study=NAME", nargs="?", default="study=quick")
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: ./results")
    options = parser.parse_args(argv)
    name = options.study.removeprefix("study=")
    layout = Layout(options.results)
    found = read_progress(name, layout) if re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name) else None
    if found is None:
        plans = sorted(path.parent.name for path in (options.results / "plan").glob("*/plan.json"))
        damaged = f"{layout.plan(name)} is damaged: `kvstudy grid study={name}` makes it anew"
        known = f"plans here: {', '.join(plans)}" if plans else f"no plan in {options.results}: run snakemake first"
        known = damaged if name in plans else known
        print(f"kvstudy status: no plan of a study '{name}'; {known}", file=sys.stderr)
        return 2
    print("\n".join(report(name, layout, found, time.time())))
    return 1 if found.failed or found.quality.failed else 0
