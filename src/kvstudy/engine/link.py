"""The link between the host tier and the device tier: counts bytes, and paces moves to a stated rate.

On a machine whose device is its host, a move is a memory copy; with `gbps` set, `wait` sleeps until the
stated link would have delivered. Transfers of one direction queue behind one another, the two directions are
independent (full duplex, as PCIe is). Times measured over a paced link are *emulated*, and are to be labelled
so.
"""

from __future__ import annotations

import time
from typing import Literal

Direction = Literal["h2d", "d2h"]


class Link:
    """Byte counters and the clock of a paced link."""

    def __init__(self, gbps: float | None = None) -> None:
        self.gbps = gbps
        self.moved_bytes: dict[Direction, int] = {"h2d": 0, "d2h": 0}
        self._busy_until: dict[Direction, float] = {"h2d": 0.0, "d2h": 0.0}

    def start(self, nbytes: int, direction: Direction) -> float:
        """Count a move that begins now; returns when it is delivered, on the clock of `time.perf_counter`.

        0.0 on a link that is not paced.
        """
        self.moved_bytes[direction] += nbytes
        if self.gbps is None:
            return 0.0
        begin = max(time.perf_counter(), self._busy_until[direction])
        self._busy_until[direction] = begin + nbytes / (self.gbps * 1e9)
        return self._busy_until[direction]

    def wait(self, due: float) -> None:
        """Sleep until `due`, as `start` returned it. Spins over the last 100 us, which `sleep` cannot hit."""
        while (left := due - time.perf_counter()) > 0:
            if left > 2e-4:
                time.sleep(left - 1e-4)

    def reset(self) -> None:
        """Begin the byte counters anew."""
        self.moved_bytes = {"h2d": 0, "d2h": 0}
