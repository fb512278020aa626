"""Engines in processes of their own, on cores of their own choosing, asked by one JSON line a call.

What a call is timed against runs in another process that is stopped meanwhile (SIGSTOP to its whole session), so that
no thread that polls for work takes time from the one that is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Side:
    """A process that answers calls: `python -m module`, started in the repository's root, stopped between calls."""

    def __init__(self, python: str, module: str, cores: Sequence[int], env: Mapping[str, str | None]) -> None:
        whole = {**os.environ, **{name: value for name, value in env.items() if value is not None}}
        for name, value in env.items():
            if value is None:
                whole.pop(name, None)
        self.name = module
        self._process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("BENCHMARK_VERBOSE") else subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=whole,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )

    def __call__(self, call: str, **arguments: Any) -> Any:
        """Its answer; raises `RuntimeError` with what it said where the call failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} died at {call!r}; BENCHMARK_VERBOSE=1 shows what it wrote")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}, {call!r}: {answer['error']}")
        self._signal(signal.SIGSTOP)
        return answer["result"]

    def _signal(self, which: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, which)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()


def answer_calls(calls: Mapping[str, Callable[..., Any]]) -> None:
    """The other end: read calls from standard input until it closes. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            said = {"result": calls[asked.pop("call")](**asked)}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(said) + "\n")
        answers.flush()


def interleaved(timed: Mapping[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """Each one's median a round, all of them in every round, in an order that turns with the rounds."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    names = list(timed)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(statistics.median(timed[name]()))
    return found


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the ratios of paired rounds."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
