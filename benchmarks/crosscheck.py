"""The same load from our client and from `vllm bench serve`, side by side.

`python benchmarks/crosscheck.py --vllm-python PY --tokenizer FOLDER`

Without `--url` a scripted server answers (100 ms to the first token, a token every 10 ms), so what differs is
the clients. Both send prompts of the same length at the same mean rate; prompts and arrivals are each tool's
own. vLLM's detailed result file is read by our importer, so every number is computed by one registry, and its
own headline is printed beside it where the definition agrees. Target: medians within 2 %. TTFT and E2EL count
from the send on both sides here, because vLLM does not record when a request was due.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import Row, emit
from kvstudy.grid.schema import PoissonLoad, TextSource
from kvstudy.load.arrivals import schedule, unit_arrivals
from kvstudy.load.client import Plan, Request, completion_body, run
from kvstudy.load.mock import Script, running
from kvstudy.load.text import read_text
from kvstudy.measure.importers import metrics_of, read

TOLERANCE = 0.02
#: `vllm bench serve`, without its console script: that of the CPU wheel asks for a package named `vllm` and
#: fails.
BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
PAIRS = {
    "ttft.p50": "median_ttft_ms",
    "tpot.p50": "median_tpot_ms",
    "icl.p50": "median_itl_ms",
    "e2el.p50": "median_e2el_ms",
}


@contextlib.contextmanager
def target(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
    else:
        with running(Script(first_s=0.1, gap_s=0.01)) as mock:
            yield mock.url


def prompts(count: int, length: int, tokenizer: str) -> list[list[int]]:
    """Passages of the Python documentation, `length` tokens each."""
    text = "\n\n".join(read_text(TextSource()).documents)
    ids = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    starts = np.random.default_rng(0).choice(len(ids) - length, count, replace=False)
    return [ids[start : start + length] for start in starts]


def ours(url: str, model: str, passages: list[list[int]], tokens: int, rate: float) -> dict[str, float]:
    """Medians in seconds."""
    count = len(passages)
    load = PoissonLoad(rate=rate, duration_s=10 * count / rate)
    times = schedule(load, unit_arrivals(load, 1, 16 * count + 64))[:count]
    requests = [
        Request(index, "short", len(ids), tokens, completion_body(model, ids, tokens))
        for index, ids in enumerate(passages)
    ]
    frame = run(Plan(requests, float(times[-1]) + 0.1, 120, 120, times=times), url).frame
    frame["scheduled_s"] = frame["sent_s"]
    found = metrics_of(frame)
    return {name: found[name].value or float("nan") for name in PAIRS}


def theirs(python: str, url: str, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Medians in seconds: (by our registry, their own headline)."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            *(python, "-c", BENCH_SERVE, "--backend", "openai", "--base-url", url),
            *("--model", options.model, "--served-model-name", options.model, "--tokenizer", options.tokenizer),
            *("--dataset-name", "random", "--random-input-len", str(options.length)),
            *("--random-output-len", str(options.tokens), "--num-prompts", str(options.requests)),
            *("--request-rate", str(options.rate), "--seed", "1", "--ignore-eos", "--temperature", "0"),
            *("--disable-tqdm", "--save-result", "--save-detailed", "--percentile-metrics", "ttft,tpot,itl,e2el"),
            *("--result-dir", folder, "--result-filename", result.name),
        ]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=1800)
        if done.returncode or not result.exists():
            raise SystemExit(f"vllm bench serve failed: {(done.stderr or done.stdout).strip()[-2000:]}")
        found = metrics_of(read(result, "vllm"))
        headline = json.loads(result.read_text())
    return (
        {name: found[name].value or float("nan") for name in PAIRS},
        {name: headline[key] / 1000.0 for name, key in PAIRS.items() if key in headline},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--vllm-python", default=sys.executable, help="python of an environment that has vllm")
    parser.add_argument("--url", help="an OpenAI-compatible server; a scripted one by default")
    parser.add_argument("--model", default="mock")
    parser.add_argument("--tokenizer", required=True, help="folder with the model's tokenizer")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    passages = prompts(options.requests, options.length, options.tokenizer)
    with target(options.url) as url:
        mine = ours(url, options.model, passages, options.tokens, options.rate)
        imported, headline = theirs(options.vllm_python, url, options)
    rows = []
    for name in PAIRS:
        ratio = mine[name] / imported[name]
        rows.append(Row(f"{name}: kvstudy", mine[name], "s", ratio, imported[name], abs(ratio - 1) <= TOLERANCE))
        rows.append(Row(f"{name}: vllm bench serve, by our registry", imported[name], "s"))
        rows.append(Row(f"{name}: vllm bench serve's own {PAIRS[name]}", headline.get(name), "s"))
    emit(rows, options.json)


if __name__ == "__main__":
    main()
