"""What a server may do to a measurement: die, hang, be killed; and what may be done to what a measurement reads."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trial import Zygote, assert_complete, assert_nothing_leaked, family, whole_cells


def outcomes(results: Path) -> list[str]:
    return sorted(json.loads(text)["outcome"] for text in whole_cells(results).values())


def causes(results: Path) -> str:
    return "; ".join(str(json.loads(text)["cause"]) for text in whole_cells(results).values())


def during(results: Path, act: Callable[[int], None]) -> threading.Thread:
    """Do something to the server once a load has been offered to it for a moment."""

    def wait() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for process in family(results):
                if "kvstudy.load.mock" in process.cmdline() and "keeper.py" not in " ".join(process.cmdline()):
                    time.sleep(0.5)
                    act(process.pid)
                    return
            time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_server_killed_under_load_is_crashed_and_the_rest_is_measured(zygote: Zygote, results: Path) -> None:
    killer = during(results, lambda pid: os.kill(pid, signal.SIGKILL))
    ended = zygote.run(results, load={"rate": 20, "duration_s": 2.0})
    killer.join()
    assert ended.code == 0 and outcomes(results) == ["crashed", "ok"], ended.said
    assert "killed by SIGKILL" in causes(results) and "bringing it up again" in ended.said
    assert_complete(results)
    assert_nothing_leaked(results)


#: What a hanging server is given, cut down from a quarter of a minute each.
IMPATIENT = "from kvstudy.frameworks import base; measuring.HEALTH_S = base.ANSWER_S = base.STOP_S = 0.7"


def test_a_server_that_stops_answering_costs_its_cell_and_no_other(zygote: Zygote, results: Path) -> None:
    stopper = during(results, lambda pid: os.kill(pid, signal.SIGSTOP))
    begun = time.monotonic()
    ended = zygote.run(results, load={"rate": 20, "duration_s": 2.0}, run=[IMPATIENT])
    stopper.join()
    assert time.monotonic() - begun < 30
    assert ended.code == 0 and "it no longer answers" in ended.said, ended.said
    assert len(outcomes(results)) == 2 and "ok" in outcomes(results)
    assert_complete(results)
    assert_nothing_leaked(results)


def test_one_that_hangs_before_each_load_ends_in_bounded_time(zygote: Zygote, results: Path) -> None:
    """A server that answers /health and nothing else is given up, and the cells say why."""
    script = {"first_s": 0.005, "hang_path": "/reset"}
    ended = zygote.run(results, scripts=[script], run=[IMPATIENT, "measuring.MAX_RESTARTS = 1"])
    assert ended.code == 0 and outcomes(results) == ["timeout", "timeout"], ended.said
    assert "it hangs" in causes(results) and ended.said.count("bringing up ") == 2
    assert_complete(results)


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("plan/s/visits/v.json", "is not a visit"),
        ("workloads/*/requests.parquet", "is damaged"),
        pytest.param("workloads/*/warmup.parquet", "is damaged", marks=pytest.mark.long),
        ("store/*/summary.json", "is damaged"),
    ],
)
def test_a_damaged_file_is_one_line_that_says_what_to_do(zygote: Zygote, results: Path, what: str, says: str) -> None:
    assert zygote.run(results).code == 0
    kept = whole_cells(results)
    path = sorted(results.glob(what))[0]
    if what.startswith("workloads"):  # read for a cell that is missing
        for name in kept:
            (results / "store" / name).rename(results.parent / name)
        kept = {}
    damage(path)
    ended = zygote.run(results)
    assert ended.code == 2 and says in ended.said and str(path.parent) in ended.said, ended.said
    assert [line for line in ended.said.splitlines() if "kvstudy measure:" in line] and "Traceback" not in ended.said
    # Doing what it says helps, and costs no finished cell.
    (path if path.name == "v.json" else path.parent).rename(results.parent / "away")
    ended = zygote.run(results)
    assert ended.code == 0, ended.said
    assert_complete(results)
    now = whole_cells(results)
    assert {name: now[name] for name in kept if name != path.parent.name} == {
        name: text for name, text in kept.items() if name != path.parent.name
    }


@pytest.mark.parametrize(
    "which",
    ["requests.parquet", *(pytest.param(x, marks=pytest.mark.long) for x in ("config.yaml", "provenance.json"))],
)
def test_a_write_that_finds_no_room(zygote: Zygote, results: Path, which: str) -> None:
    first = results.parent / "first" / "results"
    assert zygote.run(first).code == 0
    room = min(path.stat().st_size for path in first.glob(f"store/*/{which}")) - 100
    (first / "workloads").rename(_made(results) / "workloads")
    ended = zygote.run(results, limits=[["RLIMIT_FSIZE", room]])
    assert ended.code == 2 and "make room and run again" in ended.said and "Traceback" not in ended.said, ended.said
    whole_cells(results)
    assert not list(results.rglob("*.half"))
    assert_nothing_leaked(results)
    assert zygote.run(results).code == 0
    assert_complete(results)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_the_clock_may_be_set_while_a_load_runs(zygote: Zygote, results: Path) -> None:
    """Latencies, windows and bounds are of the monotonic clock; the wall clock only stamps provenance."""
    jump = (
        "import time, datetime; real = time.time; t0 = time.monotonic();"
        "time.time = lambda: real() + (-86400.0 if int(20 * (time.monotonic() - t0)) % 2 else 7200.0)"
    )
    load: dict[str, Any] = {"rate": 20, "duration_s": 1.0}
    ended = zygote.run(results, run=[jump], load=load, scripts=[{"first_s": 0.05, "gap_s": 0.005}])
    assert ended.code == 0 and "Traceback" not in ended.said, ended.said
    for text in whole_cells(results).values():
        summary = json.loads(text)
        assert summary["outcome"] == "ok" and summary["verdict"]["status"] == "VALID"
        assert 0.05 <= summary["metrics"]["ttft.p50"]["value"] < 0.5
        assert 0 < summary["visit"]["load_s"] + summary["visit"]["drain_s"] < 10
    assert_complete(results)
