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
import itertools
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


#: What file each tool writes that has its requests one by one.
_HINTS = {
    "vllm": "it is written by vllm bench serve --save-result --save-detailed",
    "aiperf": "it is AIPerf's profile_export.jsonl",
    "guidellm": "it is GuideLLM's benchmarks.json",
}


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
    except OSError as error:
        raise ImportFault(f"{path} cannot be read: {error.strerror or error}") from error
    except ImportFault as error:
        raise ImportFault(f"{path} does not read as a result of {tool}: {error}; {_HINTS[tool]}") from None
    except UnicodeDecodeError:
        raise ImportFault(f"{path} does not read as a result of {tool}: it is not text; {_HINTS[tool]}") from None
    except (ValueError, RecursionError):
        raise ImportFault(f"{path} does not read as a result of {tool}: it is not JSON; {_HINTS[tool]}") from None
    if not rows:
        raise ImportFault(f"{path} holds no per-request records; {_HINTS[tool]}")
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


#: More than any file means, so that sums stay finite: seconds (or nanoseconds since 1970), and tokens.
_MOST, _MOST_TOKENS = 1e20, 10**9


def _number(where: str, record: Any, name: str, most: float = _MOST) -> float:
    """A field of a record that is a number from 0 to `most`. Raises ImportFault with the record and the field."""
    if not isinstance(record, dict):
        raise ImportFault(f"{where} is not an object")
    if name not in record:
        raise ImportFault(f"{where}: no field '{name}'")
    return _checked(f"{where}: {name}", record[name], most)


def _checked(what: str, value: Any, most: float = _MOST) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ImportFault(f"{what} is {json.dumps(value)[:40]}, not a number from 0 to {most:g}")
    return float(value)


def _optional(where: str, record: Any, name: str, most: float = _MOST) -> float | None:
    known = isinstance(record, dict) and record.get(name) is not None
    return _number(where, record, name, most) if known else None


def _tokens(where: str, record: Any, name: str) -> int | None:
    found = _optional(where, record, name, _MOST_TOKENS)
    return None if found is None else int(found)


def _part(where: str, record: Any, name: str, kind: type) -> Any:
    found = record.get(name) if isinstance(record, dict) else None
    if not isinstance(found, kind):
        raise ImportFault(f"{where}: no {'object' if kind is dict else 'list'} '{name}'")
    return found


def _in_order(where: str, **times: float | None) -> None:
    """Raise ImportFault where a moment that is known lies before the one ahead of it."""
    known = [(name, time) for name, time in times.items() if time is not None and not math.isnan(time)]
    for (before, first), (after, second) in itertools.pairwise(known):
        if second < first:
            raise ImportFault(f"{where}: {after} lies {first - second:g} s before {before}")


def _vllm(text: str) -> list[dict[str, Any]]:
    data = json.loads(text)
    rows = []
    columns = {name: _part("the file", data, name, list) for name in _VLLM_COLUMNS}
    for name in ("errors", "queue_times"):
        if data.get(name):
            columns[name] = _part("the file", data, name, list)
    count = len(columns["start_times"])
    for name, column in columns.items():
        if len(column) != count:
            raise ImportFault(f"{name} has {len(column)} records, start_times has {count}")
    for number in range(count):
        where, record = f"record {number + 1}", {name: column[number] for name, column in columns.items()}
        start, waited = _number(where, record, "start_times"), _optional(where, record, "queue_times") or 0.0
        prompt, output = (int(_number(where, record, name, _MOST_TOKENS)) for name in ("input_lens", "output_lens"))
        row = _row(
            scheduled_s=start - waited,
            sent_s=start,
            prompt_tokens_asked=prompt,
            prompt_tokens=prompt,
            output_tokens_asked=output,
        )
        if error := record.get("errors"):
            row |= {"status": "error", "error": f"vllm: {error}"[:300], "finished_s": start}
        else:
            times = [start + _number(where, record, "ttfts")]
            for gap in _part(where, record, "itls", list):
                times.append(times[-1] + _checked(f"{where}: itls", gap))
            row |= {"first_token_s": times[0], "last_token_s": times[-1], "finished_s": times[-1], "chunk_s": times}
            row["output_tokens"] = output
        rows.append(row)
    return rows


_VLLM_COLUMNS = ("start_times", "ttfts", "itls", "input_lens", "output_lens")


def _aiperf(text: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise ImportFault(f"{where} is not JSON") from None
        about = _part(where, record, "metadata", dict)
        if about.get("benchmark_phase", "profiling") != "profiling":
            continue
        metrics = _part(where, record, "metrics", dict) if record.get("metrics") else {}

        def seconds(name: str, where: str = where, metrics: dict[str, Any] = metrics) -> float | None:
            if name not in metrics:
                return None
            return _number(f"{where}: {name}", metrics[name], "value") * _scale(metrics[name].get("unit"))

        def tokens(name: str, where: str = where, metrics: dict[str, Any] = metrics) -> int | None:
            return _tokens(f"{where}: {name}", metrics.get(name), "value")

        sent, end = (_number(where, about, name) / 1e9 for name in ("request_start_ns", "request_end_ns"))
        due = (_optional(where, about, "credit_issued_ns") or about["request_start_ns"]) / 1e9
        _in_order(where, request_start_ns=sent, request_end_ns=end)
        prompt = tokens("input_sequence_length")
        prompt = tokens("error_isl") if prompt is None else prompt
        row = _row(
            scheduled_s=due,
            sent_s=sent,
            finished_s=end,
            prompt_tokens_asked=prompt or 0,
            prompt_tokens=prompt,
        )
        if error := record.get("error"):
            said = error.get("message", "") if isinstance(error, dict) else error
            row |= {"status": "error", "error": f"aiperf: {said}"[:300]}
            if about.get("was_cancelled"):
                row["status"] = "censored"
        else:
            answered, latency = tokens("output_sequence_length"), seconds("request_latency")
            if latency is None:
                raise ImportFault(f"{where}: no metric 'request_latency'")
            ttft = seconds("time_to_first_token")
            _in_order(where, time_to_first_token=ttft, request_latency=latency)
            first = _NAN if ttft is None else sent + ttft
            row |= {"first_token_s": first, "last_token_s": sent + latency}
            row |= {"output_tokens": answered, "output_tokens_asked": answered or 0}
            chunks = metrics.get("inter_chunk_latency")
            chunks = chunks if isinstance(chunks, dict) else {}
            gaps = chunks.get("value")
            if isinstance(gaps, list) and ttft is not None:
                scale = _scale(chunks.get("unit"))
                row["chunk_s"] = [first]
                for gap in gaps:
                    row["chunk_s"].append(row["chunk_s"][-1] + _checked(f"{where}: inter_chunk_latency", gap) * scale)
        rows.append(row)
    return rows


def _scale(unit: Any) -> float:
    return {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}.get(str(unit), 1.0)


def _guidellm(text: str) -> list[dict[str, Any]]:
    rows = []
    for which, benchmark in enumerate(_part("the file", json.loads(text), "benchmarks", list), 1):
        requests = _part(f"benchmark {which}", benchmark, "requests", dict)
        for kind, status in (("successful", "ok"), ("errored", "error"), ("incomplete", "censored")):
            items = _part(f"benchmark {which}", requests, kind, list) if requests.get(kind) else ()
            for number, item in enumerate(items, 1):
                where = f"benchmark {which}, {kind} request {number}"
                info = _part(where, item, "info", dict)
                times = _part(where, info, "timings", dict)
                known = {name: _optional(where, times, name) for name in _GUIDELLM_TIMES}
                sent = known["request_start"] or known["resolve_start"]
                if sent is None:
                    continue  # never sent: not a request of the server's
                first, last = known["first_token_iteration"], known["last_token_iteration"]
                end = known["request_end"] or known["resolve_end"]
                _in_order(where, request_start=sent, first_token_iteration=first, last_token_iteration=last)
                _in_order(where, request_start=sent, request_end=end)
                prompt, tokens = _tokens(where, item, "prompt_tokens"), _tokens(where, item, "output_tokens")
                rows.append(
                    _row(
                        scheduled_s=known["targeted_start"] or sent,
                        sent_s=sent,
                        first_token_s=_NAN if first is None else first,
                        last_token_s=_NAN if last is None else last,
                        finished_s=end or sent,
                        prompt_tokens_asked=prompt or 0,
                        prompt_tokens=prompt,
                        output_tokens_asked=tokens or 0,
                        output_tokens=tokens,
                        status=status,
                        error=None if status == "ok" else f"guidellm: {info.get('error') or kind}"[:300],
                    )
                )
    return rows


_GUIDELLM_TIMES = (
    "targeted_start",
    "request_start",
    "resolve_start",
    "first_token_iteration",
    "last_token_iteration",
    "request_end",
    "resolve_end",
)


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
