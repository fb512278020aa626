"""Where KV memory is short: the table and the sentence say who stops admitting, waits, is preempted, is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fabricate import Spec

from kvstudy.report import findings, tables
from kvstudy.report.data import StudyData

Study = Callable[[list[Spec]], StudyData]


def spec(framework: str, mib: float, running: int, outcome: str = "ok", **counts: int) -> Spec:
    how = {"outcome": outcome, "counts": counts, "running": running, "duration_s": 10}
    return Spec(framework, None, concurrency=8, kv_memory_mib=mib, **how)  # type: ignore[arg-type]


@pytest.fixture
def shrinking(study: Study) -> StudyData:
    """Two engines in less and less memory: one queues and then refuses, the other preempts."""
    return study(
        [
            spec("full", 96.0, 8, queued=5, queued_for_memory=0, preemptions=0),
            spec("full", 24.0, 3, queued_for_memory=30, preemptions=0),
            spec("full", 4.0, 0, "unsupported", offered=40, error=40, queued_for_memory=0, preemptions=0),
            spec("vllm", 96.0, 8, preemptions=0),
            spec("vllm", 24.0, 5, preemptions=12),
            spec("vllm", 4.0, 7, preemptions=0),
        ]
    )


def test_a_row_says_what_became_of_requests(shrinking: StudyData) -> None:
    made = tables.TABLES["admission"](shrinking)
    names = [column.label for column in made.columns]
    found = {(row[0], row[1]): dict(zip(names, row, strict=True)) for row in made.rows}
    kinds = {key: row["So it"] for key, row in found.items()}
    assert kinds == {
        ("vLLM", "96"): "admits all",
        ("vLLM", "24"): "preempts",
        ("vLLM", "4"): "queues",  # fewer in the batch than in flight
        ("full (ours)", "96"): "admits all",  # those that waited, waited a turn
        ("full (ours)", "24"): "queues",
        ("full (ours)", "4"): "refuses",
    }
    assert [key[1] for key in found] == ["96", "24", "4"] * 2  # from ample to small
    assert found["full (ours)", "4"]["Refused"] == "100" and found["full (ours)", "4"]["Running"] == "0"
    assert found["vLLM", "24"]["Queued"] == "–"  # it does not count them
    assert made.heads == ["chat-small · 8 requests in flight"] * 6 and all(made.cells)


def test_a_sentence_says_where_each_stops_admitting(shrinking: StudyData) -> None:
    said = [finding.text for finding in findings.headlines(shrinking)]
    assert (
        "By KV memory in MiB (chat-small, 8 requests in flight): vLLM admits all at 96, preempts at 24, queues at 4; "
        "full (ours) admits all at 96, queues at 24, refuses at 4."
    ) in said


def test_one_memory_is_no_course(study: Study) -> None:
    data = study([spec("full", 96.0, 8)])
    assert tables.TABLES["admission"](data).empty
    assert not [finding for finding in findings.headlines(data) if "By KV memory" in finding.text]
