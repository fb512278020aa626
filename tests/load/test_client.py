"""The client against a scripted server: what it sends, when, and what it makes of every kind of answer."""

from __future__ import annotations

import os
import socket
import time

import numpy as np
import pandas as pd
import pytest

from kvstudy.grid.records import REQUEST_COLUMNS
from kvstudy.load.client import Plan, Result, chat_body, completion_body, run
from kvstudy.load.flights import Request
from kvstudy.load.mock import Script, running


def requests(count: int, tokens: int = 8, *, chat: bool = False) -> list[Request]:
    def body(index: int) -> bytes:
        if chat:
            return chat_body("mock", f"prompt number {index}", tokens)
        return completion_body("mock", list(range(16)), tokens)

    return [Request(i, "short", 16, tokens, body(i)) for i in range(count)]


def offer(
    script: Script, count: int = 20, *, tokens: int = 8, rate: float = 100.0, timeout: float = 5.0, drain: float = 5.0,
    chat: bool = False, concurrency: int | None = None, duration: float | None = None,
) -> Result:  # fmt: skip
    with running(script) as mock:
        plan = Plan(
            requests(count, tokens, chat=chat),
            duration_s=duration or count / rate,
            timeout_s=timeout,
            drain_s=drain,
            times=None if concurrency else np.arange(count) / rate,
            concurrency=concurrency,
        )
        return run(plan, mock.url, path="/v1/chat/completions" if chat else "/v1/completions")


def test_a_frame_has_the_columns_and_every_request() -> None:
    frame = offer(Script(first_s=0.01, gap_s=0.002), 30).frame
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {
        name: ("string" if dtype == "string" else dtype) for name, dtype in REQUEST_COLUMNS.items()
    }
    assert frame["index"].tolist() == list(range(30))
    assert (frame["status"] == "ok").all() and frame["error"].isna().all()
    assert (frame["output_tokens"] == 8).all() and (frame["prompt_tokens"] == 16).all()
    assert all(sum(tokens) == 8 for tokens in frame["chunk_tokens"])
    lag = frame["sent_s"] - frame["scheduled_s"]
    assert (lag >= 0).all() and lag.median() < 0.01
    ttft = frame["first_token_s"] - frame["scheduled_s"]
    assert ttft.min() >= 0.008 and ttft.median() < 0.03
    assert (frame["finished_s"] >= frame["last_token_s"]).all()


def test_chunks_of_several_tokens_are_counted_from_usage() -> None:
    frame = offer(Script(tokens_per_chunk=4, gap_s=0.02), 5, tokens=16).frame
    assert frame["chunk_tokens"].tolist() == [[4, 4, 4, 4]] * 5
    tpot = (frame["last_token_s"] - frame["first_token_s"]) / 15
    # Four gaps of 20 ms over fifteen tokens; counted a token a chunk it would be 20 ms. A busy machine adds some.
    assert 0.0039 < tpot.median() < 0.01


def test_role_only_and_empty_chunks_are_not_tokens() -> None:
    frame = offer(Script(role_first=True, first_s=0.05, empty_every=1, gap_s=0.005), 5, chat=True).frame
    assert (frame["status"] == "ok").all()
    assert ((frame["first_token_s"] - frame["sent_s"]) >= 0.048).all()
    assert frame["chunk_tokens"].tolist() == [[1] * 8] * 5
    # Without usage in the chunks only non-empty text counts.
    frame = offer(Script(role_first=True, first_s=0.05, empty_every=1, usage="final"), 5, chat=True).frame
    assert ((frame["first_token_s"] - frame["sent_s"]) >= 0.048).all()
    assert frame["chunk_tokens"].tolist() == [[1] * 8] * 5


def test_no_usage_means_na_and_not_a_guess() -> None:
    frame = offer(Script(usage="none", tokens_per_chunk=4), 3).frame
    assert (frame["status"] == "ok").all()
    assert frame["output_tokens"].isna().all() and frame["prompt_tokens"].isna().all()
    assert all(item is None for item in frame["chunk_tokens"])
    # A total that does not match the chunks leaves their counts unknown too.
    frame = offer(Script(usage="final", tokens_per_chunk=4), 3).frame
    assert (frame["output_tokens"] == 8).all()
    assert all(item is None for item in frame["chunk_tokens"])


def test_zero_and_one_token() -> None:
    frame = offer(Script(max_output=0), 3).frame
    assert (frame["status"] == "ok").all() and (frame["output_tokens"] == 0).all()
    assert frame["first_token_s"].isna().all()
    frame = offer(Script(max_output=1), 3).frame
    assert (frame["first_token_s"] == frame["last_token_s"]).all()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(error_share=0.5), "http 503: by script"),
        (Script(break_share=0.5), "error in stream: by script"),
        (Script(cut_share=0.5), "stream cut"),
    ],
    ids=["503", "mid-stream", "cut"],
)
def test_errors_have_a_class_and_half_still_succeed(script: Script, error: str) -> None:
    frame = offer(script, 20).frame
    assert (frame["status"] == "ok").sum() == 10
    failed = frame[frame["status"] == "error"]
    assert len(failed) == 10 and failed["error"].str.startswith(error).all()


def test_timeouts_and_censored_are_told_apart() -> None:
    frame = offer(Script(hang_share=0.25), 8, timeout=0.4, drain=5).frame
    assert (frame["status"] == "timeout").sum() == 2
    began = time.monotonic()
    frame = offer(Script(hang_share=0.25), 8, timeout=30, drain=0.5).frame
    assert (frame["status"] == "censored").sum() == 2
    assert time.monotonic() - began < 5


def test_a_refusing_server_is_refused_and_not_fast() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    plan = Plan(requests(5), 0.1, 1.0, 1.0, times=np.arange(5) / 100)
    frame = run(plan, f"http://127.0.0.1:{port}").frame
    assert frame["error"].str.startswith("refused").all()
    # A closed loop does not burn through its prompts meanwhile.
    frame = run(Plan(requests(100), 0.5, 1.0, 1.0, concurrency=2), f"http://127.0.0.1:{port}").frame
    assert len(frame) <= 14


def test_a_server_that_dies_ends_the_load_with_every_request_accounted_for() -> None:
    with running(Script(die_after=5, first_s=0.02)) as mock:
        plan = Plan(requests(50), 5.0, 10.0, 10.0, times=np.arange(50) / 10)
        result = run(plan, mock.url, abort=lambda: None if mock.process.poll() is None else "it is gone")
    assert result.aborted == "it is gone"
    assert len(result.frame) == 50 and result.load_s < 3
    errors = result.frame["error"].dropna().str.split(":").str[0].value_counts()
    assert errors["not sent"] > 20
    assert result.frame["sent_s"].isna().sum() == errors["not sent"]


def test_an_open_loop_never_waits_for_answers() -> None:
    frame = offer(Script(first_s=1.0), 40, rate=200.0).frame
    assert (frame["sent_s"] - frame["scheduled_s"]).max() < 0.1
    assert (frame["status"] == "ok").all()


def test_a_closed_loop_keeps_n_in_flight() -> None:
    result = offer(Script(first_s=0.05), 1000, concurrency=4, duration=1.0, tokens=1)
    frame = result.frame
    assert 50 <= len(frame) <= 84 and not result.exhausted
    moments = np.linspace(0.1, 0.9, 50)
    inside = [int(((frame["sent_s"] <= t) & (frame["finished_s"] > t)).sum()) for t in moments]
    assert max(inside) == 4 and np.median(inside) == 4
    assert offer(Script(), 10, concurrency=2, duration=2.0).exhausted


def test_connections_that_the_server_closes_are_not_failures() -> None:
    result = offer(Script(keep_alive=False, first_s=0.001), 60, rate=300.0)
    assert (result.frame["status"] == "ok").all()


def test_the_rate_is_kept_with_work_in_the_client() -> None:
    result = offer(Script(), 600, tokens=1, rate=300.0)
    sent = result.frame["sent_s"]
    assert (len(sent) - 1) / (sent.iloc[-1] - sent.iloc[0]) == pytest.approx(300.0, rel=0.01)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="client and server need a core each")
def test_one_process_reaches_thousands_a_second() -> None:
    # A floor far below what benchmarks/client.py measures, so that a busy machine does not fail it.
    result = offer(Script(), 2000, tokens=1, rate=1500.0, timeout=20, drain=20)
    assert (result.frame["status"] == "ok").all()
    assert result.frame["sent_s"].max() < 2000 / 1500 + 1.0


def test_plans_are_checked() -> None:
    with pytest.raises(ValueError, match="either times"):
        Plan(requests(1), 1, 1, 1)
    with pytest.raises(ValueError, match="ascending"):
        Plan(requests(2), 1, 1, 1, times=np.array([1.0, 0.5]))
    with pytest.raises(ValueError, match="plain http"):
        run(Plan(requests(1), 1, 1, 1, times=np.zeros(1)), "https://example.org")


def test_the_frame_survives_parquet(tmp_path: object) -> None:
    frame = offer(Script(usage="none"), 3).frame
    assert isinstance(frame, pd.DataFrame)
