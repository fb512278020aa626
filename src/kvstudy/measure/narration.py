"""What a visit says while it works: to whoever watches, into its log, and into the log of the cell at hand."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from kvstudy.grid.secrets import redact
from kvstudy.load import client
from kvstudy.measure import fingerprint

_SAID: list[str] = []


def say(line: str) -> None:
    """A line for whoever watches, and for the log of the cell at hand."""
    line = redact(line)
    _SAID.append(f"{fingerprint.now()} {line}")
    print(line, file=sys.stderr, flush=True)


def take_said() -> str:
    """The lines said since the last cell was written, a time before each; what comes next is the next cell's."""
    said = "\n".join(_SAID)
    _SAID.clear()
    return said


class Ticker:
    """Says every ten seconds how long something has taken."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = 0.0

    def __call__(self, elapsed: float) -> None:
        """Told the seconds so far, as often as one likes."""
        if elapsed - self._said >= 10.0:
            self._said = elapsed
            say(f"  {self._what}: {elapsed:.0f} s")


class Reporter:
    """A line of progress: in place on a terminal, else one below the other."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, state: client.Progress) -> None:
        """Told how far the load is."""
        left = max(0.0, state.duration_s - state.elapsed_s)
        planned = f"/{state.planned}" if state.planned is not None else ""
        say(
            f"  {state.elapsed_s:.0f} s, {f'{left:.0f} s left' if left else 'draining'}: sent {state.sent}{planned}, "
            f"done {state.done}, failed {state.failed}, in flight {state.in_flight}"
        )


class Tee:
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
