"""Other tools' files: the same stream has one TPOT, whatever each tool calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from kvstudy.grid.records import REQUEST_COLUMNS
from kvstudy.measure.importers import ImportFault, main, metrics_of, read

# TTFT 50 ms, then a chunk of 4 tokens every 20 ms, 16 tokens: TPOT 4 ms, ICL 20 ms.


def test_vllm(tmp_path: Path) -> None:
    path = tmp_path / "vllm.json"
    data = {
        "start_times": [100.0, 101.0], "ttfts": [0.05, 0.0], "itls": [[0.02] * 3, []], "input_lens": [10, 10],
        "output_lens": [16, 0], "errors": ["", "Service Unavailable"], "queue_times": [0.5, 0.25],
    }  # fmt: skip
    path.write_text(json.dumps(data))
    frame = read(path, "vllm")
    found = metrics_of(frame)
    assert frame["status"].tolist() == ["ok", "error"] and frame["scheduled_s"].tolist() == [0.0, 1.25]
    assert frame["sent_s"].tolist() == [0.5, 1.5] and found["ttft.p50"].value is None
    assert found["queue.client.mean"].value == pytest.approx(0.375)
    assert found["icl.p50"].value == pytest.approx(0.020)  # vLLM's "ITL"
    assert found["tpot.mean"].value == pytest.approx(0.004)
    assert found["itl.p50"].value is None
    assert found["ttft.p99"].infinite  # its failure counts
    path.write_text(json.dumps({key: value for key, value in data.items() if key != "ttfts"}))
    with pytest.raises(ImportFault, match="does not read as a result of vllm"):
        read(path, "vllm")


def test_aiperf(tmp_path: Path) -> None:
    def record(start: int, error: object = None) -> dict[str, object]:
        metrics = {
            "input_sequence_length": {"value": 10, "unit": "tokens"},
            "output_sequence_length": {"value": 16, "unit": "tokens"},
            "time_to_first_token": {"value": 50.0, "unit": "ms"},
            "request_latency": {"value": 110.0, "unit": "ms"},
            "inter_chunk_latency": {"value": [20.0, 20.0, 20.0], "unit": "ms"},
            "inter_token_latency": {"value": 4.14, "unit": "ms"},
        }
        about = {"request_start_ns": start, "request_end_ns": start + 110_000_000, "benchmark_phase": "profiling"}
        return {"metadata": about, "metrics": {} if error else metrics, "error": error}

    path = tmp_path / "profile_export.jsonl"
    rows = [record(10**18), record(10**18 + 10**9, {"code": 500, "message": "broken"})]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    frame = read(path, "aiperf")
    found = metrics_of(frame)
    assert found["tpot.mean"].value == pytest.approx(0.004, rel=1e-3)
    assert found["icl.mean"].value == pytest.approx(0.020, rel=1e-3)
    assert frame["error"][1] == "aiperf: broken"


def test_guidellm(tmp_path: Path) -> None:
    times = {
        "targeted_start": 99.9, "request_start": 100.0, "first_token_iteration": 100.05,
        "last_token_iteration": 100.11, "request_end": 100.12,
    }  # fmt: skip
    good = {"info": {"timings": times}, "prompt_tokens": 10, "output_tokens": 16, "time_per_output_token_ms": 7.04}
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps({"benchmarks": [{"requests": {"successful": [good], "errored": [], "incomplete": []}}]}))
    found = metrics_of(read(path, "guidellm"))
    assert found["tpot.mean"].value == pytest.approx(0.004)
    assert found["ttft.mean"].value == pytest.approx(0.150)  # from when it was due
    assert found["queue.client.mean"].value == pytest.approx(0.1)


def test_the_command_names_every_metric_and_writes_our_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "vllm.json", tmp_path / "requests.parquet"
    rows = {"start_times": [1.0, 2.0], "ttfts": [0.05] * 2, "itls": [[0.02] * 3] * 2, "input_lens": [9] * 2}
    path.write_text(json.dumps({**rows, "output_lens": [16] * 2}))
    assert main(["vllm", str(path), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 requests, 2 ok" in said and "icl.p50                        0.02*" in said and "vllm: itl" in said
    assert list(pd.read_parquet(out).columns) == list(REQUEST_COLUMNS)
    assert main(["aiperf", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("{}")
    with pytest.raises(ImportFault, match="no importer"):
        read(path, "wrk")
    with pytest.raises(ImportFault, match="no per-request records"):
        path.write_text('{"benchmarks": []}')
        read(path, "guidellm")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("ttfts", [0.1, -0.5], "record 2: ttfts is -0.5"),
        ("start_times", [float("nan"), 1.0], "record 1: start_times is NaN"),
        ("itls", [[0.1], [float("inf")]], "record 2: itls is Infinity"),
        ("output_lens", [-3, 1], "record 1: output_lens is -3"),
        ("input_lens", [1, "x"], 'record 2: input_lens is "x"'),
        ("ttfts", [0.1], "ttfts has 1 records"),
        ("ttfts", None, "no list 'ttfts'"),
    ],
)
def test_a_wrong_number_of_vllm_is_named(tmp_path: Path, field: str, value: object, says: str) -> None:
    path = tmp_path / "vllm.json"
    rows = {"start_times": [1.0, 2.0], "ttfts": [0.05] * 2, "itls": [[0.02]] * 2, "input_lens": [9] * 2}
    path.write_text(json.dumps({**rows, "output_lens": [2] * 2, field: value}))
    with pytest.raises(ImportFault, match=says):
        read(path, "vllm")


def test_a_wrong_number_of_the_others_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def refused(tool: str, text: str) -> str:
        path.write_text(text)
        with pytest.raises(ImportFault) as caught:
            read(path, tool)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
        return str(caught.value)

    about = {"request_start_ns": 20, "request_end_ns": 10}
    assert "line 1: request_end_ns lies" in refused("aiperf", json.dumps({"metadata": about}))
    good = {"metadata": {"request_start_ns": 10, "request_end_ns": 20}, "metrics": {}}
    said = refused("aiperf", json.dumps(good))
    assert "line 1: no metric 'request_latency'" in said and "save-detailed" not in said
    good["metrics"] = {"request_latency": {"value": -1.0, "unit": "ms"}}
    assert "line 1: request_latency: value is -1.0" in refused("aiperf", json.dumps(good))
    item = {"info": {"timings": {"request_start": 5.0, "first_token_iteration": 4.0}}}
    text = json.dumps({"benchmarks": [{"requests": {"successful": [item]}}]})
    assert "benchmark 1, successful request 1: first_token_iteration lies 1 s before" in refused("guidellm", text)
    for tool in ("vllm", "aiperf", "guidellm"):
        for nonsense in ("[" * 100_000, "1" * 5000, "[]", "null", '{"start_times": 3}', "\x00"):
            assert f"result of {tool}" in refused(tool, nonsense)
