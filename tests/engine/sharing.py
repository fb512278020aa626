"""Run by torchrun, one process a shard: `sharing.py CONFIG...` prints what each engine generates, from rank 0.

A program of its own because processes that share a model must be born together; `test_parallel` compares what it prints
with one process.
"""

from __future__ import annotations

import json
import sys

import torch
from engine_tiny import random_prompt
from transformers.utils import logging

from kvstudy.engine.config import EngineConfig
from kvstudy.engine.core import Engine, follow
from kvstudy.engine.request import SamplingParams

LENGTHS = (40, 9, 23, 61)


def generate(engine: Engine) -> list[list[int]]:
    """Four requests, one of them aborted half-way and one that draws its tokens."""
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    drawn = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, seed=3)
    prompts = [random_prompt(n, seed=n) for n in LENGTHS]
    requests = [engine.submit(p, drawn if i == 2 else params) for i, p in enumerate(prompts)]
    while engine.has_work():
        engine.step()
        if len(requests[1].output) == 5:
            engine.abort(requests[1])
    return [request.output for request in requests]


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    found = []
    for config in sys.argv[1:]:
        engine = Engine(EngineConfig.model_validate_json(config))
        if engine.group is not None and not engine.group.leads:
            follow(engine)
            continue
        outputs = generate(engine)
        engine.stop()
        pools = (engine.device_pool.peak_live_bytes, engine.host_pool.peak_live_bytes, engine.device_pool.live_bytes)
        found.append({"outputs": outputs, "pools": pools, "weights": engine.model.weight_bytes})
    if found:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
