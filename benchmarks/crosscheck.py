"""The same load from our client, from `vllm bench serve` and from AIPerf, side by side.

`python -m benchmarks.crosscheck --tokenizer FOLDER --vllm-python PY --aiperf BIN [--url URL --model NAME]`

All three send the same prompts to the same server, at the same constant rate (vLLM: a gamma process of enormous shape),
in the same order, the same number of output tokens asked; the server's core is the first, the clients' the last.
Without `--url` a scripted server answers (100 ms to the first token, a token every 10 ms), so what differs is the
clients alone. The others' per-request records are read by our importers, so that one registry computes every number;
their own headline is printed beside it. A client that is not named is left out.

Definitions, mapped (docs/measuring.md): TTFT and E2EL count from the send here, also ours, because neither of the
others records when a request was due; vLLM's `itl` and AIPerf's `inter_chunk_latency` are our ICL; AIPerf's
`inter_token_latency` is our TPOT where a chunk is a token. Target: the medians lie within 2 % of each other.

A real server does not answer twice at the same speed. With `--rounds N` the clients take turns N times, in another
order each; a client's number is the median of its rounds, and how far the rounds of *one* client lie apart is printed
beside how far the clients do: what is below that is the server's, not theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from benchmarks.common import Row, emit
from kvstudy.grid.schema import TextSource
from kvstudy.load.client import Plan, completion_body, run
from kvstudy.load.flights import Request
from kvstudy.load.mock import Script, running
from kvstudy.load.text import read_text
from kvstudy.measure.importers import metrics_of, read

TOLERANCE = 0.02
#: `vllm bench serve`, without its console script, which asks for a package named `vllm` (the CPU wheel has another
#: name), and without pandas, which our environment of vLLM lacks: its reader of prompts needs it for JSON lines only.
BENCH_SERVE = """
import argparse, json
from vllm.benchmarks.datasets import datasets
from vllm.benchmarks.serve import add_cli_args, main

def load_data(self):
    with open(self.dataset_path) as lines:
        self.data = [json.loads(line) for line in lines]

datasets.CustomDataset.load_data = load_data
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
#: Our metric, and the headline of the others that says the same.
MEDIANS = {
    "ttft.p50": ("median_ttft_ms", "time_to_first_token"),
    "tpot.p50": ("median_tpot_ms", "inter_token_latency"),
    "icl.p50": ("median_itl_ms", "inter_chunk_latency"),
    "e2el.p50": ("median_e2el_ms", "request_latency"),
}
BOUND_S = 1800.0
WARM_UPS = 3


@dataclass(frozen=True)
class Load:
    """What every client is to send: `prompts` as token ids and as the text of the same length, `rate` a second."""

    url: str
    model: str
    tokenizer: str
    ids: list[list[int]]
    texts: list[str]
    tokens: int
    rate: float


@dataclass(frozen=True)
class Found:
    """A client's medians in seconds: by our registry, and as it headlines them itself."""

    registry: dict[str, float]
    headline: dict[str, float]


@contextlib.contextmanager
def target(url: str | None, cores: list[int]) -> Iterator[str]:
    """The server's address; the clients' core is set."""
    os.sched_setaffinity(0, cores[:1])  # the scripted server inherits it
    with contextlib.ExitStack() as stack:
        if url is None:
            url = stack.enter_context(running(Script(first_s=0.1, gap_s=0.01))).url
        os.sched_setaffinity(0, cores[-1:])
        yield url


def prompts(count: int, length: int, folder: str) -> tuple[list[list[int]], list[str]]:
    """Passages of the Python documentation that are `length` tokens, as ids and as text alike."""
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    ids = tokenizer.encode("\n\n".join(read_text(TextSource()).documents), add_special_tokens=False).ids
    passages: list[list[int]] = []
    texts: list[str] = []
    for start in np.random.default_rng(0).permutation(len(ids) - length):
        passage = ids[start : start + length]
        text = tokenizer.decode(passage)
        if tokenizer.encode(text).ids == passage:
            passages.append(passage)
            texts.append(text)
        if len(passages) == count:
            break
    return passages, texts


def registry(frame: pd.DataFrame) -> dict[str, float]:
    """Medians by our registry, clocks from the send."""
    failed = int((frame["status"] != "ok").sum())
    if failed:
        raise SystemExit(f"{failed} of {len(frame)} requests failed: {frame['error'].dropna().iloc[0]}")
    found = metrics_of(frame.assign(scheduled_s=frame["sent_s"]))
    return {name: value if (value := found[name].value) is not None else float("nan") for name in MEDIANS}


def ours(load: Load) -> Found:
    bodies = [completion_body(load.model, ids, load.tokens) for ids in load.ids]
    requests = [Request(i, "short", len(load.ids[i]), load.tokens, body) for i, body in enumerate(bodies)]
    run(Plan(requests[:WARM_UPS], BOUND_S, BOUND_S, BOUND_S, concurrency=1), load.url)
    times = np.arange(len(requests)) / load.rate
    result = run(Plan(requests, float(times[-1]) + 0.1, 120, 120, times=times), load.url)
    return Found(registry(result.frame), {})


def vllm(python: str, load: Load, folder: Path) -> Found:
    data, result = folder / "prompts.jsonl", folder / "result.json"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in load.texts))
    command = [
        *(python, "-c", BENCH_SERVE, "--backend", "openai", "--base-url", load.url),
        *("--model", load.model, "--served-model-name", load.model, "--tokenizer", load.tokenizer),
        *("--dataset-name", "custom", "--dataset-path", str(data), "--disable-shuffle", "--skip-chat-template"),
        *("--custom-output-len", str(load.tokens), "--num-prompts", str(len(load.texts))),
        *("--request-rate", str(load.rate), "--burstiness", "1e9", "--num-warmups", str(WARM_UPS)),
        *("--ignore-eos", "--temperature", "0", "--disable-tqdm", "--save-result", "--save-detailed"),
        *("--percentile-metrics", "ttft,tpot,itl,e2el", "--result-dir", str(folder), "--result-filename", result.name),
    ]
    _run(command, "vllm bench serve", result)
    headline = json.loads(result.read_text())
    frame = read(result, "vllm")
    return Found(registry(frame), {name: headline[theirs] / 1000.0 for name, (theirs, _) in MEDIANS.items()})


def aiperf(program: str, load: Load, folder: Path) -> Found:
    data, out = folder / "texts.jsonl", folder / "aiperf"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in load.texts))
    asked = {"max_tokens": load.tokens, "ignore_eos": True, "temperature": 0}
    command = [
        *(program, "profile", "--model", load.model, "--url", load.url, "--endpoint-type", "completions"),
        *("--streaming", "--tokenizer", load.tokenizer, "--use-server-token-count"),
        *("--input-file", str(data), "--custom-dataset-type", "single_turn"),
        *("--dataset-sampling-strategy", "sequential", "--extra-inputs", json.dumps(asked)),
        *("--request-rate", str(load.rate), "--arrival-pattern", "constant"),
        *("--request-count", str(len(load.texts)), "--warmup-request-count", str(WARM_UPS)),
        *("--output-artifact-dir", str(out), "--export-level", "records", "--ui-type", "none"),
        *("--no-gpu-telemetry", "--no-server-metrics"),
    ]
    _run(command, "aiperf", out / "profile_export.jsonl")
    headline = json.loads((out / "profile_export_aiperf.json").read_text())
    own = {name: headline[theirs]["p50"] / 1000.0 for name, (_, theirs) in MEDIANS.items() if theirs in headline}
    return Found(registry(read(out / "profile_export.jsonl", "aiperf")), own)


def _run(command: list[str], name: str, result: Path) -> None:
    # AIPerf takes a local tokenizer only where HF_HUB_OFFLINE is not set.
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=BOUND_S)
    except OSError as error:
        raise SystemExit(f"{name}: {command[0]}: {error.strerror}") from None
    if done.returncode or not result.exists():
        raise SystemExit(f"{name} failed: {(done.stderr.strip() or done.stdout.strip())[-2000:]}")


def _apart(values: list[float]) -> float:
    return max(values) / min(values) - 1.0


def pooled(rounds: list[Found]) -> Found:
    """The median of a client's rounds, metric by metric."""

    def middle(of: list[dict[str, float]]) -> dict[str, float]:
        return {name: float(np.median([one[name] for one in of])) for name in of[0]}

    return Found(middle([one.registry for one in rounds]), middle([one.headline for one in rounds]))


def rows_of(by_round: dict[str, list[Found]]) -> list[Row]:
    """A metric after the other: every client's median, its own headline, and how far they lie apart."""
    rows = []
    found = {client: pooled(rounds) for client, rounds in by_round.items()}
    for name in MEDIANS:
        mine = found["kvstudy"].registry[name]
        for client, item in found.items():
            rows.append(Row(f"{name}: {client}", item.registry[name], "s", item.registry[name] / mine))
            if name in item.headline:
                rows.append(Row(f"{name}: {client}, its own headline", item.headline[name], "s"))
        if any(len(rounds) > 1 for rounds in by_round.values()):
            own = max(_apart([one.registry[name] for one in rounds]) for rounds in by_round.values())
            rows.append(Row(f"{name}: furthest apart, rounds of one client", own, "share"))
        apart = _apart([item.registry[name] for item in found.values()])
        rows.append(Row(f"{name}: furthest apart, clients", apart, "share", None, TOLERANCE, apart <= TOLERANCE))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--vllm-python", help="python of an environment that has vllm (kvstudy environment vllm)")
    parser.add_argument("--aiperf", help="the program aiperf (kvstudy environment aiperf), DIR/bin/aiperf")
    parser.add_argument("--url", help="an OpenAI-compatible server; a scripted one by default")
    parser.add_argument("--model", default="mock", help="its name for the model")
    parser.add_argument("--tokenizer", required=True, help="folder with the model's tokenizer")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1, help="how often each client takes its turn")
    options = parser.parse_args()
    ids, texts = prompts(options.requests, options.length, options.tokenizer)
    cores = sorted(os.sched_getaffinity(0))
    with target(options.url, cores) as url, tempfile.TemporaryDirectory() as folder:
        load = Load(url, options.model, options.tokenizer, ids, texts, options.tokens, options.rate)
        clients: dict[str, Callable[[Path], Found]] = {"kvstudy": lambda _: ours(load)}
        if options.vllm_python:
            clients["vllm bench serve"] = lambda place: vllm(options.vllm_python, load, place)
        if options.aiperf:
            clients["aiperf"] = lambda place: aiperf(options.aiperf, load, place)
        if len(clients) == 1:
            parser.error("name a client to compare with: --vllm-python, --aiperf")
        found: dict[str, list[Found]] = {name: [] for name in clients}
        order = np.random.default_rng(0)
        for turn in range(options.rounds):
            for name in order.permutation(list(clients)):
                place = Path(folder) / f"{turn}"
                place.mkdir(exist_ok=True)
                found[str(name)].append(clients[str(name)](place))
    emit(rows_of(found), options.json)


if __name__ == "__main__":
    main()
