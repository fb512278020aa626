"""What ends a visit without a cell: the installation, or the cluster that ran it."""

from __future__ import annotations


class Fault(Exception):
    """The installation is at fault: one line, exit code 2, no cell. `detail` is what the server printed."""

    def __init__(self, line: str, detail: str = "") -> None:
        super().__init__(line)
        self.detail = detail


class Allotted(Fault):
    """The cluster ended the server: it was given too little, which is no result, and a retry asks for more."""
