"""The section on the authors' forks beside our engine, from what `kvstudy compare-implementations` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstudy.report import words

#: File in the study's folder; absent where nobody compared.
FILE = "implementations.json"

COLUMNS = (
    *("", "commit", "budget", "prompts", "tokens equal", "entries equal"),
    *("largest Δ logit", "KV (MiB)", "time (s)"),
)


def section(study_dir: Path) -> dict[str, Any] | None:
    """What the template prints: columns, rows, notes; None where nothing was compared."""
    path = study_dir / FILE
    if not path.is_file():
        return None
    written = json.loads(path.read_text(encoding="utf-8"))
    done = [record for record in written["pairs"] if "reason" not in record]
    notes = [f"{record['upstream']}: {record['reason']}." for record in written["pairs"] if "reason" in record]
    if any(record["debug"] for record in done):
        notes.append(
            "Run without a GPU, under the debug switch of the batch server: the authors' code, in float32, for "
            "correctness only. Nothing is timed."
        )
    notes += [_printed(record) for record in written.get("printed", [])]
    return {
        "columns": [
            "",
            "commit",
            "budget",
            "prompts",
            "tokens equal",
            "entries equal",
            "largest Δ logit",
            "KV (MiB)",
            "time (s)",
        ],
        "rows": [_row(record) for record in done],
        "notes": notes,
    }


def _row(record: Mapping[str, Any]) -> list[str]:
    sets = f"{record['sets_equal']} of {record['sets']}" if record["sets"] else "–"
    both = {side: sum(sizes.values()) / words.MIB for side, sizes in record["kv_bytes"].items()}
    timed = record["seconds"]
    spent = None if timed is None else [words.number(sum(timed[side].values())) for side in ("upstream", "native")]
    return [
        words.framework(record["framework"]),
        record["commit"][:8],
        words.plain(record["budget"]),
        f"{record['prompts']} × {record['prompt_tokens']} + {record['output_tokens']}",
        f"{record['tokens_equal']} of {record['tokens']}",
        sets,
        words.number(record["logit_difference"], 2) if record["logit_difference"] >= 1e-4 else "< 0.0001",
        f"{words.number(both['upstream'])} / {words.number(both['native'])}",
        "–" if spent is None else " / ".join(spent),
    ]


def _printed(record: Mapping[str, Any]) -> str:
    """What the authors' own program said of itself."""
    name = words.framework(record["framework"])
    return (
        f"{name}, the authors' own program run by hand: prefill {words.number(record['prefill_s'])} s, "
        f"decode {words.number(record['decode_s'])} s, as it printed."
    )
