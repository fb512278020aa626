"""How fast our engine decodes and computes prompts: `python benchmarks/engine.py [--json]`.

A model of SmolLM2-135M's shape with random weights, bfloat16, policy `full`, on one core and on two. For decode,
`value` is the median step in ms and `ratio` the share of it that the bytes alone need (weights once and every KV entry
once, at the rate at which this machine streams memory on the same cores): 1.0 is the machine's limit. KV of random
numbers is put in place instead of being computed. For prompts, `value` is tokens a second in chunks of 512.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.common import Row, main

DECODE = [(1, 256), (8, 256), (32, 256), (1, 2048), (8, 2048), (8, 4096)]
PREFILL = [512, 4096]
STEPS = 20
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def rows() -> list[Row]:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the server has it
    available = sorted(os.sched_getaffinity(0))
    found = []
    for count in (1, 2):
        if count <= len(available):
            os.environ["OMP_NUM_THREADS"] = str(count)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                found += fresh.submit(measure, available[:count]).result()
    return found


def measure(cores: Sequence[int]) -> list[Row]:
    """All rows on these cores, in a process of their own."""
    from kvstudy.engine.config import EngineConfig
    from kvstudy.engine.core import Engine

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        config = EngineConfig(
            model_dir=Path(folder),
            random_weights=True,
            kv_memory_bytes=1 << 30,
            cores=list(cores),
            max_prefill_tokens=512,
        )
        engine = Engine(config)
    engine.device_pool.kv.normal_()
    bandwidth = stream_bytes_per_second(engine.device_pool.kv)
    label = f"{len(cores)} core" + "s" * (len(cores) > 1)
    found = [Row(f"memory read, {label}", bandwidth / 1e9, "GB/s")]
    for batch, context in DECODE:
        step = decode_step(engine, batch, context)
        kv = batch * context * engine.device_pool.entry_bytes * engine.model.geometry.layers
        limit = (engine.model.weight_bytes + kv) / bandwidth
        found.append(Row(f"decode {batch} x {context}, {label}", step * 1e3, "ms/step", limit / step))
    for length in PREFILL:
        found.append(Row(f"prefill {length}, {label}", prefill_rate(engine, length), "tok/s"))
    return found


def stream_bytes_per_second(kv: object) -> float:
    import torch

    assert isinstance(kv, torch.Tensor)
    words = kv.view(torch.int32).flatten()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        words.max()
        times.append(time.perf_counter() - begin)
    return words.numel() * 4 / min(times)


def decode_step(engine: object, batch: int, context: int) -> float:
    """Median seconds of a decode step of `batch` requests that have `context` entries each."""
    from kvstudy.engine.core import Engine
    from kvstudy.engine.request import SamplingParams

    assert isinstance(engine, Engine)
    scheduler = engine.scheduler
    params = SamplingParams(max_tokens=STEPS + 3, ignore_eos=True)
    requests = [engine.submit([1] * context, params) for _ in range(batch)]
    while scheduler.waiting:
        assert scheduler._admit() is not None, "the pool is too small for this row"
    for request in requests:
        request.computed = context  # as if the prompt had been computed; its KV is what lies in the pool
        request.output.append(1)
        scheduler.prompt_done(request)
    times = []
    while engine.has_work():
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def prefill_rate(engine: object, length: int) -> float:
    """Prompt tokens a second of one request, median of three."""
    import torch

    from kvstudy.engine.core import Engine
    from kvstudy.engine.request import SamplingParams

    assert isinstance(engine, Engine)
    times = []
    for seed in range(3):
        prompt = torch.randint(0, 49152, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        begin = time.perf_counter()
        engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
        times.append(time.perf_counter() - begin)
    return length / statistics.median(times)


if __name__ == "__main__":
    main(__doc__ or "", rows)
