"""A generation loop without a fork: token j of a prompt is its last id plus j, a step takes as long as it is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstudy.frameworks.upstream.batch_server.batching import Refused, Totals


class StandIn:
    def __init__(self, step_s: float = 0.0, refuse_over: int = 1000) -> None:
        self.totals = Totals()
        self.step_s = step_s
        self.refuse_over = refuse_over
        self.batches: list[list[int]] = []  # prompt lengths
        self.steps: list[int] = []  # of each batch

    def check(self, prompt: Sequence[int], max_tokens: int, top_p: float = 1.0) -> None:
        if len(prompt) + max_tokens > self.refuse_over:
            raise Refused(f"more than {self.refuse_over} tokens")

    def kv_bytes(self, prompt: int, gen_len: int) -> int:
        return prompt + gen_len

    def live_bytes(self) -> dict[str, int]:
        return {"device": 7, "host": 0}

    def weight_bytes(self) -> int:
        return 3

    def allocated_peak(self) -> int | None:
        return None

    def reset_peaks(self) -> None:
        pass

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        gen_len: int,
        temperature: float,
        on_tokens: Callable[[Sequence[int]], bool],
    ) -> None:
        self.batches.append([len(prompt) for prompt in prompts])
        self.steps.append(0)
        for step in range(gen_len):
            time.sleep(self.step_s)
            self.steps[-1] += 1
            if on_tokens([prompt[-1] + step + 1 for prompt in prompts]):
                return
