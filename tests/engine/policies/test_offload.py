"""The whole cache on the host: what `full` attends to, and every byte of it over the link in every step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from driver import Driver

from kvstudy.engine import attention
from kvstudy.engine.config import Budget, EngineConfig
from kvstudy.engine.core import Engine
from kvstudy.engine.link import Link
from kvstudy.engine.request import SamplingParams

PROMPTS = [list(range(3, 3 + n)) for n in (1, 21, 40)]


@pytest.mark.parametrize("use_kernels", [True, False])
def test_it_attends_to_what_full_does(llama_dir: Path, use_kernels: bool) -> None:
    made = []
    for policy in ("full", "offload"):
        engine = Engine(
            EngineConfig(
                model_dir=llama_dir,
                dtype="float32",
                policy=policy,
                kv_memory_bytes=1 << 22,
                host_kv_memory_bytes=1 << 22,
                max_prefill_tokens=16,
                use_kernels=use_kernels,
            )
        )
        params = [SamplingParams(max_tokens=n, ignore_eos=True, return_logits=True) for n in (25, 9, 14)]
        made.append(engine.generate(PROMPTS, params))
        assert engine.device_pool.reserved_bytes == engine.host_pool.reserved_bytes == 0
        assert engine.host_pool.live_entries == 0
    attention.use_kernels(True)
    for full, offload in zip(*made, strict=True):
        assert full.output == offload.output
        assert torch.equal(torch.stack(full.logits), torch.stack(offload.logits))


def test_every_step_moves_everything_and_holds_what_it_reserved() -> None:
    link = Link()
    driver = Driver("offload", {}, Budget(), layers=3, link=link)
    entry = driver.host.entry_bytes
    rows = [driver.open(n, 5) for n in (30, 7)]
    for tokens in rows:
        driver.prefill(tokens, 20)
    # Of the longer prompt the second chunk looks back at 20 entries.
    assert link.moved_bytes == {"d2h": 3 * 37 * entry, "h2d": 3 * 20 * entry}
    for step in range(4):
        link.reset()
        driver.step(rows, [])
        assert link.moved_bytes == {"d2h": 3 * 2 * entry, "h2d": 3 * (37 + 2 * step) * entry}
    need = [driver.policy.reserve(n, 5) for n in (30, 7)]
    device, host = driver.held()
    assert device <= sum(n.device_bytes for n in need) and host == sum(n.host_bytes for n in need)
    for tokens in rows:
        driver.policy.close(tokens.request)
    assert driver.held() == (0, 0)
