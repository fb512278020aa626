"""The streaming policy against attention with its mask written out, token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_tiny import plain, random_prompt

from kvstudy.engine.core import Engine
from kvstudy.engine.request import SamplingParams

Make = Callable[..., Engine]


def kept(prompt: int, tokens: int, share: float, of: str, sinks: int) -> list[set[int]]:
    """Which tokens each decode step may attend to: the rule, kept as sets."""

    def limit(now: int) -> int:
        base = {"prompt": prompt, "current": now, "tokens": None}[of]
        return min(now, max(1, int(share) if base is None else int(share * base + 1e-9)))

    n = limit(prompt)
    if n < prompt:
        sinks = min(sinks, n - 1)
        held = [*range(sinks), *range(prompt - n + sinks, prompt)]
    else:
        held = list(range(prompt))
    steps = []
    for now in range(prompt + 1, tokens + 1):
        held.append(now - 1)
        if len(held) > limit(now):
            held.pop(min(sinks, limit(now) - 1))
        steps.append(set(held))
    return steps


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize(
    ("of", "share"), [("prompt", 0.3), ("current", 0.4), ("tokens", 24), ("tokens", 5), ("prompt", 0.01)]
)
def test_streaming_equals_the_mask_written_out(
    of: str, share: float, sinks: int, llama_dir: Path, engine_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, forced = random_prompt(21), tuple(random_prompt(16, seed=3))
    engine = engine_of(
        policy="streaming", policy_options={"sinks": sinks}, budget={"share": share, "of": of}, max_prefill_tokens=8
    )
    params = SamplingParams(max_tokens=16, forced_tokens=forced, return_logits=True)
    [done] = engine.generate([prompt], params)
    ids = torch.tensor([[*prompt, *forced[:-1]]])
    total = ids.shape[1]
    mask = torch.ones(total, total).tril().bool()
    for row, held in enumerate(kept(21, total, share, of, sinks), start=21):
        mask[row] = torch.tensor([token in held for token in range(total)])
    added = torch.zeros(1, 1, total, total).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        expected = plain(llama_dir)(ids, attention_mask=added).logits[0, 20:]
    assert (torch.stack(done.logits) - expected).abs().max() < 1e-3
    assert done.attended_entries == sum(len(held) for held in kept(21, total, share, of, sinks))


def test_budget_one_is_the_full_cache(engine_of: Make) -> None:
    prompts = [random_prompt(n) for n in (1, 20, 33)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    off = engine_of(policy="streaming", budget={"share": 1.0}).generate(prompts, params)
    full = engine_of().generate(prompts, params)
    assert [r.output for r in off] == [r.output for r in full]
    assert all(r.attended_entries == r.full_entries for r in off)


def test_what_is_dropped_is_freed_and_admits_others(engine_of: Make) -> None:
    entry, layers = 2 * 2 * 16 * 4, 3
    engine = engine_of(policy="streaming", budget={"share": 0.25}, kv_memory_bytes=layers * 5 * 16 * entry)
    engine.submit(random_prompt(64), SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    assert engine.device_pool.live_bytes == 16 * layers * entry
    assert engine.device_pool.reserved_bytes == 16 * layers * entry
    engine.submit(random_prompt(64), SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    assert len(engine.scheduler.running) == 2
    assert engine.device_pool.live_bytes == 2 * 16 * layers * entry
