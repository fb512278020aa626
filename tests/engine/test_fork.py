"""A fork of a prompt that was read once gives what the policy's own prefill gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tiny import random_prompt

from kvstudy.engine.config import Budget
from kvstudy.engine.core import Engine
from kvstudy.engine.fork import Branches
from kvstudy.engine.request import Request, SamplingParams
from kvstudy.engine.scheduler import RequestTooLarge
from kvstudy.engine.skew import calibrate, write_skew

Make = Callable[..., Engine]
FORCED = tuple(random_prompt(12, seed=3))
PARAMS = SamplingParams(max_tokens=12, forced_tokens=FORCED, return_logits=True)


@pytest.fixture(scope="module")
def wanted(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, dict[str, Any], Budget]]:
    skew = tmp_path_factory.mktemp("skew") / "skew.st"
    write_skew(calibrate(llama_dir, random_prompt(64)), skew)
    every: dict[str, tuple[str, dict[str, Any], Budget]] = {"full": ("full", {}, Budget())}
    for share in (1.0, 0.5, 0.1):
        for name in ("streaming", "h2o", "random"):
            every[f"{name} {share}"] = (name, {}, Budget(share=share))
        every[f"infinigen {share}"] = ("infinigen", {"skew": skew}, Budget(share=share))
    every["h2o flexgen"] = ("h2o", {"rule": "flexgen"}, Budget(share=0.3))
    every["h2o masked"] = ("h2o", {"rule": "masked"}, Budget(share=0.3))
    every["h2o grows"] = ("h2o", {}, Budget(share=0.4, of="current"))
    every["infinigen paper"] = ("infinigen", {"skew": skew, "rule": "paper", "pool_capacity": 0.6}, Budget(share=0.3))
    return every


def forks(branches: Branches, prompts: list[list[int]], params: SamplingParams) -> dict[str, list[Request]]:
    found: dict[str, list[Request]] = {label: [] for label in branches.labels}
    for prompt in prompts:
        with branches.read(prompt) as read:
            for label in branches.labels:
                found[label].append(branches.fork(read, label, params))
    while branches.engine.has_work():
        branches.engine.step()
    return found


def test_forks_equal_each_policys_own_prefill(engine_of: Make, wanted: dict[str, Any]) -> None:
    prompts = [random_prompt(45, seed=1), random_prompt(70, seed=2)]
    room = {"kv_memory_bytes": 1 << 25, "host_kv_memory_bytes": 1 << 25, "max_prefill_tokens": 32}
    engine = engine_of(**room)
    found = forks(Branches(engine, wanted), prompts, PARAMS)
    for label, (name, options, budget) in wanted.items():
        own = engine_of(policy=name, policy_options=options, budget=budget.model_dump(), **room)
        for fork, request in zip(found[label], own.generate(prompts, PARAMS), strict=True):
            assert fork.output == request.output == list(FORCED)
            off = (torch.stack(fork.logits) - torch.stack(request.logits)).abs().max()
            assert off < 1e-4, (label, off)
            assert (fork.attended_entries, fork.full_entries) == (request.attended_entries, request.full_entries)
    for pool in (engine.device_pool, engine.host_pool):
        assert pool.used_blocks == pool.live_entries == pool.aux_bytes == pool.reserved_bytes == 0


def test_a_fork_ends_by_itself_and_frees_what_it_held(engine_of: Make) -> None:
    """One output token is the prompt's own: the fork is over before it has decoded."""
    engine = engine_of()
    branches = Branches(engine, {"a": ("full", {}, Budget()), "b": ("streaming", {}, Budget(share=0.5))})
    greedy = SamplingParams(max_tokens=1, ignore_eos=True)
    found = forks(branches, [random_prompt(40)], greedy)
    [own] = engine_of().generate([random_prompt(40)], greedy)
    assert found["a"][0].output == found["b"][0].output == own.output
    assert engine.device_pool.reserved_bytes == engine.device_pool.used_blocks == 0


def test_what_cannot_be_forked_is_said(engine_of: Make, wanted: dict[str, Any]) -> None:
    skew = wanted["infinigen 0.5"][1]["skew"]
    engine = engine_of(host_kv_memory_bytes=1 << 22)
    branches = Branches(engine, {"s": ("infinigen", {"skew": skew, "rule": "speed"}, Budget(share=0.5))})
    with branches.read(random_prompt(30)) as read, pytest.raises(NotImplementedError, match="first request decide"):
        branches.fork(read, "s", PARAMS)
    small = Branches(engine_of(kv_memory_bytes=3 * 6 * 16 * 256), {"full": ("full", {}, Budget())})
    with small.read(random_prompt(60)) as read, pytest.raises(RequestTooLarge, match="does not fit"):
        small.fork(read, "full", PARAMS)
    assert small.engine.device_pool.reserved_bytes == 0
