"""Sliding-window layers and attention sinks: GPT-OSS and Qwen2 of a few kilobytes, against transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tiny import plain, random_prompt
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvstudy.engine.config import Budget
from kvstudy.engine.core import Engine
from kvstudy.engine.fork import Branches
from kvstudy.engine.request import SamplingParams
from kvstudy.engine.skew import calibrate
from kvstudy.engine.windows import windowed

Make = Callable[..., Engine]
WINDOW = 12
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": None,
}
ENTRY = 2 * 2 * 16 * 4
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("streaming", {"sinks": 2}),
    ("h2o", {}),
    ("h2o", {"rule": "masked"}),
    ("infinigen", {"skew": "none"}),
    ("random", {}),
]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, every second one of full attention; sinks large enough to matter."""
    torch.manual_seed(3)
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    config = GptOssConfig(
        **SHAPE, num_hidden_layers=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope
    )
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, mean=1.0)
    folder = tmp_path_factory.mktemp("models") / "tiny-gpt-oss"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of full attention, then two that slide, without sinks."""
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen2"
    Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, num_hidden_layers=4, use_sliding_window=True, max_window_layers=2)
    ).save_pretrained(folder)
    return folder


def expected(folder: Path, prompt: list[int], output: list[int]) -> torch.Tensor:
    """transformers' logits for each output token: eager attention, no cache, all at once."""
    with torch.inference_mode():
        logits = plain(folder)(torch.tensor([[*prompt, *output[:-1]]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].float()


@pytest.mark.parametrize("chunk", [5, 12, 512])
@pytest.mark.parametrize(("policy", "options"), POLICIES)
def test_gpt_oss_with_the_whole_cache_is_transformers(
    policy: str, options: dict[str, Any], chunk: int, gpt_oss: Path, engine_of: Make
) -> None:
    budget = {"share": 400, "of": "tokens"} if options.get("rule") == "masked" else {"share": 1.0}
    engine = engine_of(
        model_dir=gpt_oss, max_prefill_tokens=chunk, policy=policy, policy_options=options, budget=budget
    )
    prompts = [random_prompt(n, seed=n) for n in (50, 3, 27)]
    params = SamplingParams(max_tokens=20, ignore_eos=True, return_logits=True)
    for request in engine.generate(prompts, params):
        want = expected(gpt_oss, request.prompt, request.output)
        assert (torch.stack(request.logits) - want).abs().max() < 2e-3 * want.std()
    assert (engine.device_pool.live_bytes, engine.device_pool.reserved_bytes) == (0, 0)


@pytest.mark.parametrize(("policy", "options"), POLICIES[1:])
def test_policies_act_on_full_attention_layers_only(
    policy: str, options: dict[str, Any], gpt_oss: Path, engine_of: Make
) -> None:
    engine = engine_of(
        model_dir=gpt_oss,
        policy=policy,
        policy_options=options,
        budget={"share": 10, "of": "tokens"},
        host_kv_memory_bytes=1 << 20,
        max_prefill_tokens=16,
    )
    assert engine.model.layers.full == [1, 3, 5, 7]
    request = engine.submit(random_prompt(40), SamplingParams(max_tokens=12, ignore_eos=True))
    while len(request.output) < 4:
        engine.step()
    assert engine.windows is not None
    rings = request.window_kv
    assert rings.lengths.tolist() == [WINDOW] * 4
    held = engine.device_pool.live_bytes - WINDOW * 4 * ENTRY
    # Three decode steps: H2O keeps 9 between steps and the new one; InfiniGen two whole layers; masked all.
    entries = {"streaming": 4 * 10, "h2o": 4 * 10, "infinigen": 2 * 43, "random": 4 * 10}[policy]
    assert held == (4 * 43 if options.get("rule") == "masked" else entries) * ENTRY
    counted = engine.policies[policy].counted
    assert counted.attended.shape == (4, 2)
    assert (counted.attended[-1] <= 3 * 10).all() and (counted.full == 41 + 42 + 43).all()
    # A mate in the batch changes nothing.
    alone = engine.generate([random_prompt(40)], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    while not request.is_finished:
        engine.step()
    assert request.output == alone.output
    assert (engine.device_pool.live_bytes, engine.device_pool.reserved_bytes) == (0, 0)


def test_a_smaller_budget_is_seen_in_the_logits(gpt_oss: Path, engine_of: Make) -> None:
    forced = tuple(random_prompt(8, seed=9))
    params = SamplingParams(max_tokens=8, forced_tokens=forced, return_logits=True)
    seen = []
    for share in (1.0, 0.2):
        engine = engine_of(model_dir=gpt_oss, policy="h2o", budget={"share": share})
        seen.append(torch.stack(engine.generate([random_prompt(60)], params)[0].logits))
    assert torch.equal(seen[0][0], seen[1][0])  # the prompt is read whole
    assert (seen[0][1:] - seen[1][1:]).abs().max() > 0.01


def test_a_fork_takes_the_windows_along(gpt_oss: Path, engine_of: Make) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    served = engine_of(model_dir=gpt_oss, policy="h2o", budget={"share": 0.3}).generate([random_prompt(30)], params)[0]
    engine = engine_of(model_dir=gpt_oss)
    branches = Branches(engine, {"h2o": ("h2o", {}, Budget(share=0.3))})
    with branches.read(random_prompt(30)) as read:
        forked = branches.fork(read, "h2o", params)
        while engine.has_work():
            engine.step()
    assert forked.output == served.output
    assert (engine.device_pool.live_bytes, engine.device_pool.reserved_bytes) == (0, 0)


def test_windows_without_sinks_are_transformers(qwen2: Path, engine_of: Make) -> None:
    engine = engine_of(model_dir=qwen2, max_prefill_tokens=7)
    assert engine.model.layers.full == [0, 1]
    params = SamplingParams(max_tokens=30, ignore_eos=True, return_logits=True)
    for request in engine.generate([random_prompt(n, seed=n) for n in (40, 2)], params):
        want = expected(qwen2, request.prompt, request.output)
        assert (torch.stack(request.logits) - want).abs().max() < 1e-3 * want.std()


def test_what_leaves_a_policy_nothing_to_do_is_refused(tmp_path: Path, engine_of: Make) -> None:
    MistralForCausalLM(MistralConfig(**SHAPE, num_hidden_layers=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="every layer of this model has a sliding window"):
        engine_of(model_dir=tmp_path)


def test_admission_counts_the_rings(gpt_oss: Path, engine_of: Make) -> None:
    block = 16 * ENTRY
    engine = engine_of(model_dir=gpt_oss, kv_memory_bytes=2 * (4 * 3 + 4) * block)
    for n in range(3):
        engine.submit(random_prompt(30, n), SamplingParams(max_tokens=8, ignore_eos=True))
    while engine.has_work():
        engine.step()
        pool = engine.device_pool
        assert pool.used_blocks * pool.block_bytes <= pool.reserved_bytes
    assert engine.scheduler.peak_running == 2


def test_the_skew_is_of_the_full_attention_layers(gpt_oss: Path) -> None:
    skew = calibrate(gpt_oss, random_prompt(64))
    assert skew.shape == (4, 2, 16, 16)
    assert torch.allclose(skew @ skew.mT, torch.eye(16).expand_as(skew), atol=1e-4)


@pytest.mark.parametrize(("chunk", "earlier", "window"), [(1, 0, 4), (9, 0, 4), (9, 3, 4), (5, 7, 8), (40, 3, 8)])
def test_windowed_is_masked_attention(chunk: int, earlier: int, window: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(chunk, 4, 8)
    k, v = torch.randn(2, 2, earlier + chunk, 8)
    sinks, out = torch.randn(4), torch.empty_like(q)
    windowed(q, k, v, window, 0.5, out, sinks)
    scores = q.transpose(0, 1) @ k.repeat_interleave(2, 0).mT * 0.5
    for i in range(chunk):
        seen = slice(max(0, earlier + i - window + 1), earlier + i + 1)
        p = torch.cat((scores[:, i, seen], sinks[:, None]), 1).softmax(-1)[:, :-1]
        want = (p[:, None] @ v.repeat_interleave(2, 0)[:, seen])[:, 0]
        assert torch.allclose(out[i], want, atol=1e-5)
