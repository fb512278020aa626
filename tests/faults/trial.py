"""Visits that are killed: each runs in a fork of a process that has everything imported, so that fifty cost a minute.

Run as a program this file is that process: a line of JSON in is a visit to run, a line out how it ended. The visit is
`kvstudy measure` itself, on the mock; only what would be killed in a moment is taken from the trial.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import yaml

from kvstudy.grid import store
from kvstudy.grid.schema import Cell

MARK = "KVSTUDY_TEST_TRIAL"


@dataclass
class Ended:
    """How a visit ended: exit code (negative: signal), what it said, and how many writes it made."""

    code: int
    said: str
    writes: int


class Zygote:
    """The process that forks visits."""

    def __init__(self, folder: Path) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def run(self, results: Path, **options: Any) -> Ended:
        """A visit of two cells into `results`.

        `after_s` kills it that long after its start, `at` (with `how`: before, in, after) at that write; `load` changes
        the load, `scripts` the mocks one after another; `limits` are (resource, bytes); `env` is added to the
        environment, `run` is run first.
        """
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"results": str(results), **options}) + "\n")
        self.process.stdin.flush()
        return Ended(**json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(10)


def family(results: Path) -> list[psutil.Process]:
    """Processes that a trial has started and that live."""
    wanted = f"{MARK}={results}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            text = Path(f"/proc/{process.pid}/environ").read_bytes()
            if wanted in text.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def assert_nothing_leaked(results: Path, bound_s: float = 8.0) -> None:
    """No process (hence no port) and no lease outlives a visit."""
    until = time.monotonic() + bound_s
    while (left := family(results)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left, [process.cmdline() for process in left]
    lock = results.parent / f"kvstudy-{os.getuid()}" / "machine.lock"
    if lock.exists():
        with lock.open("r+") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


#: What lies in a cell whose quality was scored.
QUALITY_FILES = {store.CONFIG, store.ITEMS, store.MEASURES, store.SUMMARY, store.PROVENANCE}


def whole_cells(results: Path) -> dict[str, bytes]:
    """Measured cells in the store with the bytes of their summaries; fails if one, or a scored one, is not whole."""
    found = {}
    for folder in (results / "store").glob("[!.]*"):
        names = {path.name for path in folder.iterdir()}
        if "_q-" in folder.name:
            assert names == QUALITY_FILES and store.read_summary(folder)["cell"] == folder.name, folder
            continue
        assert names == set(store.CELL_FILES), folder
        pq.read_table(folder / store.REQUESTS)
        pq.read_table(folder / store.MEMORY)
        json.loads((folder / store.PROVENANCE).read_text())
        Cell.model_validate(yaml.safe_load((folder / store.CONFIG).read_text()))
        found[folder.name] = (folder / store.SUMMARY).read_bytes()
        assert json.loads(found[folder.name])["cell"] == folder.name
    return found


def assert_complete(results: Path) -> None:
    """Every cell of the visit is there, the marker says so, and nothing half is left anywhere."""
    marker = json.loads((results / "s" / "visits" / "v.json").read_text())
    assert sorted(entry["cell"] for entry in marker["cells"]) == sorted(whole_cells(results))
    assert len(marker["cells"]) == 2
    assert not list(results.rglob("*.half"))


# --- the process that forks ----------------------------------------------------------------------


def _hook(at: int, how: str) -> list[int]:
    """Kill this process at its `at`-th write (1-based; 0: never); answers the counter."""
    import tempfile

    import pandas as pd

    from kvstudy.measure import record

    seen = [0]

    def die(path: Any = None) -> None:
        if path is not None and Path(path).is_file():
            os.truncate(path, Path(path).stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrap(owner: Any, name: str, written: Callable[[tuple[Any, ...]], Any] | None = None) -> None:
        real = getattr(owner, name)

        def hooked(*arguments: Any, **options: Any) -> Any:
            seen[0] += 1
            mine = seen[0] == at
            if mine and how == "before":
                die()
            answer = real(*arguments, **options)
            if mine and how == "in":
                die(written(arguments) if written else None)
            if mine:
                die()
            return answer

        setattr(owner, name, hooked)

    for name in ("rename", "replace"):
        wrap(os, name)
    wrap(tempfile, "mkdtemp")
    wrap(tempfile, "mkstemp", None)
    wrap(Path, "write_text", lambda arguments: arguments[0])
    wrap(record, "write_requests", lambda arguments: arguments[1])
    wrap(pd.DataFrame, "to_parquet", lambda arguments: arguments[1])
    return seen


def _visit(asked: dict[str, Any], model: Path, counter: Path) -> int:
    import resource

    from test_visit import Script, cell, maker, visit_of

    from kvstudy.grid.schema import PoissonLoad
    from kvstudy.measure import command
    from kvstudy.measure import visit as measuring

    results = Path(asked["results"])
    os.environ.update(asked.get("env", {}))
    os.environ[MARK] = str(results)
    os.environ["XDG_RUNTIME_DIR"] = str(results.parent)
    short = {"rate": 40, "duration_s": 0.3, "timeout_s": 1.0, "drain_s": 1.0, "warmup_requests": 1}
    load = PoissonLoad(**short | asked.get("load", {}))
    planned = visit_of(cell(load), cell(load, seed=1))
    path = results / "plan" / "s" / "visits" / "v.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(planned.model_dump_json())
    scripts = [Script(**item) for item in asked.get("scripts", [{"first_s": 0.005}])]
    make = maker(model, *scripts)
    measuring.model_folder = lambda *_: model  # type: ignore[assignment]
    measuring.make_server = lambda d, m, e, work, held: make(work, held)  # type: ignore[assignment]
    for name, size in asked.get("limits", []):
        resource.setrlimit(getattr(resource, name), (size, size))
    for statement in asked.get("run", []):
        exec(statement, {"measuring": measuring})
    seen = _hook(asked.get("at", 0), asked.get("how", "before"))
    marker = results / "s" / "visits" / "v.json"
    code = command.main(["--visit", str(path), "--results", str(results), "--marker", str(marker)])
    counter.write_text(str(seen[0]))
    return code


def main(folder: Path) -> None:
    """Fork a visit for each line of standard input."""
    import test_visit

    model = folder / "model"
    model.mkdir()
    test_visit.make_model(model)
    counter = folder / "writes"
    for line in sys.stdin:
        asked = json.loads(line)
        counter.unlink(missing_ok=True)
        sys.stdout.flush()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(write, 1)
            os.dup2(write, 2)
            os.close(0)
            os.open(os.devnull, os.O_RDONLY)
            code = 1
            try:
                code = _visit(asked, model, counter)
            except BaseException:
                import traceback

                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        os.close(write)
        if asked.get("after_s") is not None:
            time.sleep(asked["after_s"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with open(read, encoding="utf-8") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        writes = int(counter.read_text()) if counter.is_file() else 0
        print(json.dumps({"code": os.waitstatus_to_exitcode(status), "said": said, "writes": writes}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
