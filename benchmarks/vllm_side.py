"""vLLM as a side of `engine.py`, run by its own environment's interpreter: needs nothing but vLLM.

The offline engine, stepped by hand: without a server and a client its step is the fastest that vLLM has here. With
`VLLM_ENABLE_V1_MULTIPROCESSING=0` all of it is one process; with 1 it is the three of a server.
"""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.sides import answer_calls


class Vllm:
    """The calls."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.running: dict[str, list[str]] = {}
        self.number = 0

    def start(self, model: str, eager: bool, kv_bytes: int, max_tokens: int) -> str:
        """Load a model folder; answers vLLM's version."""
        import vllm

        self.engine = vllm.LLM(
            model,
            dtype="bfloat16",
            enforce_eager=eager,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=kv_bytes,
            max_model_len=8192,
            max_num_seqs=64,
            max_num_batched_tokens=max_tokens,
            block_size=32,
            skip_tokenizer_init=True,
        ).llm_engine
        return str(vllm.__version__)

    def _add(self, length: int, tokens: int) -> str:
        from vllm import SamplingParams

        self.number += 1
        name, draw = str(self.number), random.Random(self.number)
        prompt = {"prompt_token_ids": [draw.randrange(100, 40000) for _ in range(length)]}
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        self.engine.add_request(name, prompt, params)
        return name

    def begin(self, batch: int, context: int, steps: int) -> None:
        """Have `batch` requests past prompts of `context` tokens, with `steps` tokens to go."""
        waiting = {self._add(context, steps + 8) for _ in range(batch)}
        self.running[""] = list(waiting)
        while waiting:
            waiting -= {output.request_id for output in self.engine.step() if len(output.outputs[0].token_ids) > 1}

    def decode(self, steps: int) -> list[float]:
        """Seconds of each of so many steps."""
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - begin)
        return times

    def end(self) -> None:
        """Drop what runs."""
        self.engine.abort_request(self.running.pop(""))
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def prefill(self, length: int) -> list[float]:
        """Seconds to the first token of a prompt."""
        self._add(length, 1)
        begin = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return [time.perf_counter() - begin]


if __name__ == "__main__":
    vllm = Vllm()
    answer_calls({name: getattr(vllm, name) for name in ("start", "begin", "decode", "end", "prefill")})
