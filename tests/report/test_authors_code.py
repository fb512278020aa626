"""The section on the authors' code: what is compared, what is not timed, what has no control."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from kvstudy.analysis.table import usable
from kvstudy.report import implementations

RECORD = {
    "framework": "h2o",
    "upstream": "h2o-upstream_m_b0.4_kv16",
    "native": "h2o_m_b0.4_kv16",
    "commit": "ac75c2a8a9e76832b2a4139b9363373b56336bfb",
    "budget": 0.4,
    "debug": True,
    "prompts": 4,
    "prompt_tokens": 96,
    "output_tokens": 24,
    "tokens": 96,
    "tokens_equal": 95,
    "sets": 1472,
    "sets_equal": 1470,
    "logit_difference": 0.25,
    "kv_bytes": {"upstream": {"device": 1 << 20, "host": 1 << 20}, "native": {"device": 3 << 20, "host": 0}},
    "seconds": None,
}


def test_nothing_compared_is_no_section(tmp_path: Path) -> None:
    assert implementations.section(tmp_path) is None


def test_a_comparison_is_a_row_and_debugging_is_said(tmp_path: Path) -> None:
    timed = RECORD | {
        "debug": False,
        "logit_difference": 2e-6,
        "seconds": {"upstream": {"prefill": 1.0, "decode": 2.0}, "native": {"prefill": 0.5, "decode": 0.75}},
    }
    alone = {"upstream": "flexgen_m", "framework": "flexgen", "debug": True, "reason": "no control"}
    printed = [{"framework": "infinigen", "prefill_s": 12.5, "decode_s": 51.5}]
    (tmp_path / implementations.FILE).write_text(json.dumps({"pairs": [RECORD, timed, alone], "printed": printed}))
    found = implementations.section(tmp_path)
    assert found is not None and all(len(row) == len(found["columns"]) for row in found["rows"])
    first, second = found["rows"]
    assert first[:6] == ["H2O", "ac75c2a8", "0.4", "4 × 96 + 24", "95 of 96", "1470 of 1472"]
    assert first[6:] == ["0.25", "2.00 / 3.00", "–"]
    assert second[6:] == ["< 0.0001", "2.00 / 3.00", "3.00 / 1.25"]
    assert "flexgen_m: no control." in found["notes"]
    assert any("debug switch" in note for note in found["notes"])
    assert any("prefill 12.5 s, decode 51.5 s" in note for note in found["notes"])


def test_a_debugging_run_is_in_no_figure() -> None:
    table = pd.DataFrame(
        {"outcome": ["ok"] * 3, "verdict": ["VALID"] * 3, "source": ["measured", "debug", None]}, dtype="string"
    )
    assert usable(table).tolist() == [True, False, True]
