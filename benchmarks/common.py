"""What every benchmark shares: rows, the machine, and `--json`.

A benchmark answers `--json` with one object, `{"machine": {...}, "rows": [{"name", "value", "unit", "ratio", "target",
"met", "beside"}, ...]}`, and otherwise prints a table. Exit code 1 when a target was not met.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn


@dataclass(frozen=True)
class Row:
    """One number. `ratio` is to what it is compared with, `target` what one of both should reach, if anything.

    `beside` holds the absolute values and limits that belong to it, units in their names.
    """

    name: str
    value: float | None
    unit: str
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None
    beside: dict[str, float] = field(default_factory=dict)


def machine() -> dict[str, Any]:
    """The machine that the rows were measured on."""
    from kvstudy.measure import fingerprint

    stable = fingerprint.stable()
    return {**stable, "fingerprint": fingerprint.fingerprint(stable), "conditions": fingerprint.volatile()}


def main(description: str, rows: Callable[[], Sequence[Row]]) -> NoReturn:
    """Command line of a benchmark."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    emit(rows(), options.json)


def line(row: Row) -> str:
    """A row as text; a second line has what stands beside it."""
    value = "NA" if row.value is None else f"{row.value:.4g}"
    ratio = "" if row.ratio is None else f"  x{row.ratio:.3g}"
    target = "" if row.met is None else f"  target {row.target:.4g}: {'met' if row.met else 'NOT MET'}"
    beside = "; ".join(f"{name} {number:.4g}" for name, number in row.beside.items())
    return f"{row.name:55} {value:>10} {row.unit}{ratio}{target}" + (f"\n    {beside}" if beside else "")


def emit(found: Sequence[Row], as_json: bool) -> NoReturn:
    """Print rows and exit: 1 when a target was not met."""
    if as_json:
        print(json.dumps({"machine": machine(), "rows": [asdict(row) for row in found]}, indent=1))
    else:
        for row in found:
            print(line(row))
    raise SystemExit(0 if all(row.met is not False for row in found) else 1)
