"""Samples a server's memory at a fixed interval, in a process of its own so that the client is not disturbed.

Run as `python -m kvstudy.measure.memory` with a `Watch` as JSON on standard input; a line of JSON a sample on
standard output: `{"t": monotonic seconds, "rows": [[kind, tier, bytes], ...], "running": n, "waiting": n}`.
It ends with its parent. Imports nothing heavy: it must start in a fraction of a second and cost a few
milliseconds a sample.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil

from kvstudy.frameworks import http
from kvstudy.frameworks.base import Watch

INTERVAL_S = 0.5


class Sampler:
    """A running sampler. `stop` gives the samples; `resident` is the last total, for a memory limit's watchdog."""

    def __init__(self, watch: Watch, *, interval_s: float = INTERVAL_S, cores: Sequence[int] = ()) -> None:
        self._samples: list[dict[str, Any]] = []
        self.resident = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstudy.measure.memory", str(interval_s), ",".join(map(str, cores))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the visit, which ends it in order
            env={**os.environ, "PYTHONPATH": os.pathsep.join(item for item in sys.path if item)},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(watch.as_json()) + "\n")
        self._process.stdin.flush()
        self._first = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        # Starting an interpreter takes the client's core for a moment: not during the load.
        self._first.wait(10.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                sample = json.loads(line)
                self._samples.append(sample)
                self._first.set()
                for kind, _, size in sample["rows"]:
                    if kind == "process":
                        self.resident = size

    def stop(self) -> list[dict[str, Any]]:
        """End it and answer all samples, in order of time."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5.0)
        return self._samples


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants, those that live."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def resident_bytes(processes: Sequence[psutil.Process]) -> int:
    """Resident bytes of a process tree; shared pages of a forked family count once a process (an upper bound)."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def _gpu_bytes(pids: set[int]) -> int | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        used = 0
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid in pids:
                    used += process.usedGpuMemory or 0
        return used
    except pynvml.NVMLError:
        return None


def take(watch: dict[str, Any], base: dict[int, float]) -> dict[str, Any]:
    """One sample. `base` holds the first value of each counter; it is filled on the first call."""
    names = {gauge["metric"] for gauge in watch["gauges"]} | {watch["running"], watch["waiting"]}
    now = time.monotonic()
    rows: list[tuple[str, str, int]] = []
    sample: dict[str, Any] = {"t": now, "rows": rows}
    try:
        text = http.request(watch["metrics_url"], timeout=2.0)
        samples = http.parse_metrics(text, frozenset(name for name in names if name))
    except (OSError, ValueError):
        samples = []
    else:
        rows += [(kind, tier, int(size)) for kind, tier, size in watch["constants"]]
    for position, gauge in enumerate(watch["gauges"]):
        value = http.total(samples, gauge["metric"], **gauge["labels"])
        if value is None:
            continue
        if gauge["since_start"]:
            value -= base.setdefault(position, value)
        rows.append((gauge["kind"], gauge["tier"], round(value * gauge["factor"])))
    for word in ("running", "waiting"):
        if watch[word]:
            sample[word] = http.total(samples, watch[word])
    processes = family(watch["pid"])
    if processes:
        rows.append(("process", "host", resident_bytes(processes)))
        if watch["gpu_process"]:
            used = _gpu_bytes({process.pid for process in processes})
            if used is not None:
                rows.append(("process", "device", used))
    return sample


def main() -> int:
    """Sample until standard input closes or the parent is gone."""
    interval = float(sys.argv[1]) if len(sys.argv) > 1 else INTERVAL_S
    if len(sys.argv) > 2 and sys.argv[2]:
        os.sched_setaffinity(0, {int(core) for core in sys.argv[2].split(",")})
    with contextlib.suppress(OSError):
        os.nice(5)  # the client, on the same cores, goes first
    watch = json.loads(sys.stdin.readline())
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    parent = os.getppid()
    base: dict[int, float] = {}
    due = time.monotonic()
    while not ended.is_set() and os.getppid() == parent:
        print(json.dumps(take(watch, base)), flush=True)
        due = max(due + interval, time.monotonic())
        ended.wait(max(0.0, due - time.monotonic()))
    with contextlib.suppress(OSError):
        print(json.dumps(take(watch, base)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
