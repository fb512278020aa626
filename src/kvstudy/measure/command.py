"""`kvstudy measure --visit VISIT.json --results DIR --marker FILE`: one visit as a job of the workflow.

The marker is written last and says what became of each cell; the journal says meanwhile what the visit is doing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from kvstudy.frameworks.base import Unavailable
from kvstudy.frameworks.launch import read_visit
from kvstudy.grid import store
from kvstudy.grid.secrets import redact
from kvstudy.grid.store import Layout, cannot_write
from kvstudy.measure import state as states
from kvstudy.measure.faults import Allotted, Fault
from kvstudy.measure.interrupts import interruptible
from kvstudy.measure.narration import Tee, say
from kvstudy.measure.visit import measure_visit


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
        sys.stderr = Tee(options.log)
    interruptible()
    try:
        visit = read_visit(options.visit)
        path = Layout(options.results).state(visit.study, visit.id)
        if (cause := states.not_again(path, options.attempt)) is not None:
            say(f"kvstudy measure: not tried again, since that would change nothing: {cause}")
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
        states.note(journal, "stopped" if isinstance(error, Allotted) else "failed", str(error))
        if isinstance(error, Fault) and error.detail and options.log is not None:
            with contextlib.suppress(OSError), options.log.open("a", encoding="utf-8") as log:
                log.write(redact(f"--- server ---\n{error.detail}"))
        return 2
    except KeyboardInterrupt:
        say("kvstudy measure: interrupted; the server is stopped, finished cells stay, run again to go on")
        states.note(journal, "interrupted", "interrupted")
        return 130
    except OSError as error:
        cause = cannot_write(error, options.results)
        say(f"kvstudy measure: {cause}; finished cells stay")
        states.note(journal, "stopped", cause)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
