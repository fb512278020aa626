"""Results of other load generators as our table of requests, so that one registry computes every metric.

`kvstudy import TOOL FILE` reads the per-request records of `vllm bench serve --save-result --save-detailed`
(JSON), AIPerf (`profile_export.jsonl`) and GuideLLM (`benchmarks.json`). Their aggregates are not read: the
same name means different things in each (GuideLLM's "time per output token" includes the first token, vLLM's
"ITL" is a gap between chunks). What a tool does not record is NA here:

* none but GuideLLM (its `targeted_start`) says when a request was due by the schedule. `scheduled_s` is what comes
  nearest: when vLLM released it to its own queue (`queue_times`; older releases do not say), when AIPerf issued its
  credit, else the send. Latencies then start later than ours would;
* vLLM and AIPerf give the gaps between chunks (our ICL) and no token counts of them; GuideLLM neither.

Tried on files of vLLM 0.32.0 (completions and chat), AIPerf 0.13.0 (completions, chat, with and without
`--per-chunk-usage`) and GuideLLM 0.8.1 (constant and Poisson), made against `kvstudy mock`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvstudy.load.flights import typed_frame
from kvstudy.measure.metrics import REGISTRY, Window, compute, split
from kvstudy.measure.requests import write_requests

_NAN = math.nan


class ImportFault(Exception):
    """The file is not what it was said to be; one line."""


def read(path: Path, tool: str) -> pd.DataFrame:
    """Requests of a result file in the columns of `requests.parquet`; `tool` is vllm, aiperf or guidellm.

    Raises
    ------
    ImportFault
        It cannot be read, or holds no per-request records.
    """
    if tool not in _READERS:
        raise ImportFault(f"no importer for '{tool}' (there are: {', '.join(_READERS)})")
    try:
        rows = _READERS[tool](path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImportFault(f"{path} does not read as a result of {tool}: {error!r}") from error
    if not rows:
        raise ImportFault(f"{path} holds no per-request records (vllm: --save-detailed)")
    # Zero is the first request that was due; absolute clocks differ between tools.
    start = min(row["scheduled_s"] for row in rows)
    rows.sort(key=lambda row: row["scheduled_s"])
    for index, row in enumerate(rows):
        row["index"] = index
        for name in ("scheduled_s", "sent_s", "first_token_s", "last_token_s", "finished_s"):
            row[name] -= start
        row["chunk_s"] = [item - start for item in row["chunk_s"]]
    return typed_frame(rows)


def metrics_of(frame: pd.DataFrame) -> dict[str, Any]:
    """Our metrics of an imported table, over the time in which it sent; a dict of id to `records.Metric`."""
    return dict(compute(frame, Window(0.0, float(frame["scheduled_s"].max()) + 1e-9)))


def _row(**known: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "length_class": "short",
        "first_token_s": _NAN,
        "last_token_s": _NAN,
        "chunk_s": [],
        "chunk_tokens": None,
        "prompt_tokens_asked": 0,
        "prompt_tokens": None,
        "output_tokens_asked": 0,
        "output_tokens": None,
        "server_queue_s": _NAN,
        "status": "ok",
        "error": None,
        "in_window": True,
    } | known


def _vllm(text: str) -> list[dict[str, Any]]:
    data = json.loads(text)
    rows = []
    count = len(data["ttfts"])
    errors = data.get("errors") or [""] * count
    queued = data.get("queue_times") or [0.0] * count
    columns = ("start_times", "ttfts", "itls", "input_lens", "output_lens")
    for start, ttft, gaps, prompt, output, error, waited in zip(
        *(data[name] for name in columns), errors, queued, strict=True
    ):
        row = _row(
            scheduled_s=float(start - waited),
            sent_s=float(start),
            prompt_tokens_asked=int(prompt),
            prompt_tokens=int(prompt),
            output_tokens_asked=int(output),
        )
        if error:
            row |= {"status": "error", "error": f"vllm: {error}"[:300], "finished_s": float(start)}
        else:
            times = [start + ttft]
            for gap in gaps:
                times.append(times[-1] + gap)
            row |= {"first_token_s": times[0], "last_token_s": times[-1], "finished_s": times[-1], "chunk_s": times}
            row["output_tokens"] = int(output)
        rows.append(row)
    return rows


def _aiperf(text: str) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        if not line.strip():
            continue
        record = json.loads(line)
        about = record["metadata"]
        if about.get("benchmark_phase", "profiling") != "profiling":
            continue
        values = {
            name: item["value"] * _scale(item["unit"])
            for name, item in (record.get("metrics") or {}).items()
            if isinstance(item.get("value"), int | float)
        }
        sent = about["request_start_ns"] / 1e9
        due = (about.get("credit_issued_ns") or about["request_start_ns"]) / 1e9
        prompt = values.get("input_sequence_length", values.get("error_isl"))
        row = _row(
            scheduled_s=due,
            sent_s=sent,
            finished_s=about["request_end_ns"] / 1e9,
            prompt_tokens_asked=int(prompt or 0),
            prompt_tokens=None if prompt is None else int(prompt),
        )
        if record.get("error"):
            row |= {"status": "error", "error": f"aiperf: {record['error'].get('message', '')}"[:300]}
            if about.get("was_cancelled"):
                row["status"] = "censored"
        else:
            tokens = values.get("output_sequence_length")
            last = sent + values["request_latency"]
            first = sent + values["time_to_first_token"] if "time_to_first_token" in values else _NAN
            row |= {"first_token_s": first, "last_token_s": last}
            row["output_tokens"] = None if tokens is None else int(tokens)
            row["output_tokens_asked"] = int(tokens or 0)
            gaps = (record["metrics"].get("inter_chunk_latency") or {}).get("value")
            if isinstance(gaps, list) and not math.isnan(first):
                scale = _scale(record["metrics"]["inter_chunk_latency"]["unit"])
                row["chunk_s"] = [first]
                for gap in gaps:
                    row["chunk_s"].append(row["chunk_s"][-1] + gap * scale)
        rows.append(row)
    return rows


def _scale(unit: str) -> float:
    return {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}.get(unit, 1.0)


def _guidellm(text: str) -> list[dict[str, Any]]:
    rows = []
    for benchmark in json.loads(text)["benchmarks"]:
        for kind, status in (("successful", "ok"), ("errored", "error"), ("incomplete", "censored")):
            for item in benchmark["requests"].get(kind) or ():
                times = item["info"]["timings"]
                sent = times.get("request_start") or times.get("resolve_start")
                if sent is None:
                    continue  # never sent: not a request of the server's
                first, last = times.get("first_token_iteration"), times.get("last_token_iteration")
                tokens = item.get("output_tokens")
                rows.append(
                    _row(
                        scheduled_s=times.get("targeted_start") or sent,
                        sent_s=sent,
                        first_token_s=_NAN if first is None else first,
                        last_token_s=_NAN if last is None else last,
                        finished_s=times.get("request_end") or times.get("resolve_end") or sent,
                        prompt_tokens_asked=item.get("prompt_tokens") or 0,
                        prompt_tokens=item.get("prompt_tokens"),
                        output_tokens_asked=tokens or 0,
                        output_tokens=tokens,
                        status=status,
                        error=None if status == "ok" else f"guidellm: {item['info'].get('error') or kind}"[:300],
                    )
                )
    return rows


_READERS: dict[str, Callable[[str], list[dict[str, Any]]]] = {
    "vllm": _vllm,
    "aiperf": _aiperf,
    "guidellm": _guidellm,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line where the file cannot be read."""
    parser = argparse.ArgumentParser(prog="kvstudy import", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tool", choices=sorted(_READERS), help="which tool wrote the file")
    parser.add_argument("file", type=Path, help="its result with per-request records")
    parser.add_argument("--out", type=Path, help="also write the requests there, as requests.parquet has them")
    options = parser.parse_args(argv)
    try:
        frame = read(options.file, options.tool)
        if options.out is not None:
            write_requests(frame, options.out)
    except (ImportFault, OSError) as error:
        print(f"kvstudy import: {error}", file=sys.stderr)
        return 2
    found = metrics_of(frame)
    print(f"{len(frame)} requests, {int((frame['status'] == 'ok').sum())} ok")
    for name, metric in found.items():
        if metric.n == 0:
            continue
        definition = REGISTRY[split(name)[0]]
        value = "inf" if metric.infinite else "NA" if metric.value is None else f"{metric.value:.6g}"
        theirs = getattr(definition, options.tool) or "not reported"
        print(f"{name:22} {value:>12}{'*' if metric.starred else ' '} {metric.unit:10} {options.tool}: {theirs}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
