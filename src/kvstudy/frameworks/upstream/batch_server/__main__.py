"""`python -m batch_server --config FILE`: a fork behind a URL; with `--batch IN --out OUT`, one traced batch.

Exit codes: 0 stopped, 1 the generation loop failed, 2 one line says what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop, or run one batch; returns the exit code."""
    parser = argparse.ArgumentParser(prog="batch_server", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="JSON, as kvstudy writes it")
    parser.add_argument("--batch", type=Path, help='JSON: {"prompts": [[ids]], "max_tokens": n}')
    parser.add_argument("--out", type=Path, help="where the batch's arrays go (.npz)")
    options = parser.parse_args(argv)
    config = json.loads(options.config.read_text(encoding="utf-8"))
    if config["cores"]:
        os.environ["OMP_NUM_THREADS"] = str(len(config["cores"]))
    from .loop import ForkLoop

    if config["device"] == "cpu":
        print("batch server: device=cpu is a debug switch: correctness only, no speed", file=sys.stderr, flush=True)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config["model_dir"])
    # As our own offline step cuts it: texts are much longer than the tokens asked for.
    loop = ForkLoop(config, lambda text: list(tokenizer(text[: 16 * 2048])["input_ids"]))
    if options.batch is not None:
        _one_batch(loop, json.loads(options.batch.read_text(encoding="utf-8")), options.out)
        return 0
    from .serving import BatchServer

    effective = {**config, "commit": commit_of(Path(config["fork_dir"]))}
    server = BatchServer(effective, loop, tokenizer, os.environ.pop("KVSTUDY_API_KEY", None))
    try:
        http = server.listen(config["host"], config["port"])
    except OSError as error:
        print(f"batch server: cannot listen on {config['host']}:{config['port']}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"batch server ready on http://{config['host']}:{config['port']}", flush=True)
    http.serve_forever()
    return 0


def commit_of(folder: Path) -> str | None:
    """The commit that a detached checkout stands at; None where it does not say."""
    head = folder / ".git" / "HEAD"
    text = head.read_text().strip() if head.is_file() else ""
    return text if len(text) == 40 else None


def _one_batch(loop: Any, asked: dict[str, Any], out: Path) -> None:
    """Once as it is, for tokens, time and memory; once traced."""
    import numpy as np

    from .tracing import Trace

    prompts, gen_len = asked["prompts"], asked["max_tokens"]
    for prompt in prompts:
        loop.check(prompt, gen_len)
    steps: list[list[int]] = []
    times: list[float] = []
    peak = [0, 0]

    def on_tokens(tokens: Sequence[int]) -> bool:
        times.append(time.perf_counter() - begun)
        steps.append([int(token) for token in tokens])
        live = loop.live_bytes()
        peak[:] = [max(before, live[tier]) for before, tier in zip(peak, ("device", "host"))]  # noqa: B905
        return False

    begun = time.perf_counter()
    loop.run(prompts, gen_len, 0.0, on_tokens)
    trace = Trace(loop)
    loop.run(prompts, gen_len, 0.0, lambda tokens: False)
    tokens = np.array(steps, dtype=np.int64).T
    np.savez(str(out), tokens=tokens, times=np.array(times), kv_bytes=np.array(peak), **trace.arrays())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # copy threads of the fork would keep the process alive
