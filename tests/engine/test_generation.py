"""`full` gives what plain transformers gives, however the prompt is cut and whoever shares the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_tiny import plain, random_prompt

from kvstudy.engine.core import Engine
from kvstudy.engine.request import SamplingParams

STEPS = 12
Make = Callable[..., Engine]


def reference(folder: Path, prompt: list[int], steps: int = STEPS) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the logits each was chosen from, by recomputing everything for every token."""
    ids, rows = list(prompt), []
    with torch.inference_mode():
        for _ in range(steps):
            rows.append(plain(folder)(torch.tensor([ids])).logits[0, -1])
            ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_full_equals_transformers(
    family: str, chunk: int, kernels: bool, request: pytest.FixtureRequest, engine_of: Make
) -> None:
    folder = request.getfixturevalue(f"{family}_dir")
    prompt = random_prompt(37)
    tokens, logits = reference(folder, prompt)
    engine = engine_of(model_dir=folder, max_prefill_tokens=chunk, use_kernels=kernels)
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True, return_logits=True)
    [done] = engine.generate([prompt], params)
    assert done.output == tokens
    assert (torch.stack(done.logits) - logits).abs().max() < 1e-3
    assert done.finish_reason == "length"


@pytest.mark.parametrize("policy", ["full", "streaming"])
def test_output_is_the_same_alone_and_in_a_batch(policy: str, engine_of: Make) -> None:
    engine = engine_of(policy=policy, budget={"share": 0.5}, max_prefill_tokens=20)
    prompts = [random_prompt(n, seed=n) for n in (1, 3, 17, 40, 64)]
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    alone = [engine.generate([prompt], params)[0].output for prompt in prompts]
    together = [r.output for r in engine.generate(prompts, params)]
    assert together == alone


def test_bfloat16_kernels_agree_with_plain_torch_but_for_near_ties(llama_dir: Path, engine_of: Make) -> None:
    prompt = random_prompt(30)
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True, return_logits=True)
    fast, slow = (
        engine_of(dtype="bfloat16", use_kernels=use).generate([prompt, prompt[:9]], params) for use in (True, False)
    )
    for mine, theirs in zip(fast, slow, strict=True):
        for step, (a, b) in enumerate(zip(mine.logits, theirs.logits, strict=True)):
            assert (a - b).abs().max() < 0.05 * b.abs().max()
            if mine.output[step] != theirs.output[step]:
                top = b.topk(2).values
                assert top[0] - top[1] < 0.05 * b.abs().max()
                break


def test_forced_tokens_are_the_output_and_logits_are_kept(llama_dir: Path, engine_of: Make) -> None:
    prompt, forced = random_prompt(20), tuple(random_prompt(10, seed=5))
    params = SamplingParams(max_tokens=10, forced_tokens=forced, return_logits=True)
    [done] = engine_of().generate([prompt], params)
    with torch.inference_mode():
        whole = plain(llama_dir)(torch.tensor([[*prompt, *forced[:-1]]])).logits[0, 19:]
    assert done.output == list(forced)
    assert (torch.stack(done.logits) - whole).abs().max() < 1e-3


def test_eos_ends_a_generation_unless_ignored(engine_of: Make) -> None:
    engine = engine_of()
    prompt = random_prompt(8)
    free = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0].output
    engine.model.eos_ids = frozenset({free[3]})
    [ended] = engine.generate([prompt], SamplingParams(max_tokens=8))
    assert ended.output == free[: free.index(free[3]) + 1]
    assert ended.finish_reason == "stop"
    assert engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0].output == free


def test_sampling_is_repeatable_by_seed_and_independent_of_the_batch(engine_of: Make) -> None:
    engine = engine_of()
    prompts = [random_prompt(n) for n in (5, 9, 13)]
    params = [SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=s, ignore_eos=True) for s in (1, 2, 3)]
    together = [r.output for r in engine.generate(prompts, params)]
    alone = [engine.generate([p], s)[0].output for p, s in zip(prompts, params, strict=True)]
    other = engine.generate([prompts[0]], SamplingParams(max_tokens=8, temperature=1.0, seed=9, ignore_eos=True))
    assert together == alone
    assert other[0].output != together[0]


def test_tiny_top_p_is_greedy(engine_of: Make) -> None:
    engine = engine_of()
    greedy, nucleus = engine.generate(
        [random_prompt(6)] * 2,
        [
            SamplingParams(max_tokens=6, ignore_eos=True),
            SamplingParams(max_tokens=6, temperature=1.0, top_p=1e-6, ignore_eos=True),
        ],
    )
    assert greedy.output == nucleus.output


def test_logprobs_are_those_of_the_logits(engine_of: Make) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=3, return_logits=True)
    [done] = engine_of().generate([random_prompt(6)], params)
    for token, logits, (own, best) in zip(done.output, done.logits, done.logprobs, strict=True):
        logp = logits.log_softmax(-1)
        assert own == pytest.approx(float(logp[token]))
        assert [t for t, _ in best] == logp.topk(3).indices.tolist()


def test_random_weights_follow_the_seed(llama_dir: Path, engine_of: Make) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, return_logits=True)
    logits = [
        engine_of(random_weights=True, seed=seed).generate([random_prompt(5)], params)[0].logits[0]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], SamplingParams(), "empty"),
        ([1, 2, 9999], SamplingParams(), "outside"),
        ([1] * 500, SamplingParams(max_tokens=16000), "maximum context length is 16384"),
        ([1] * 5, SamplingParams(stop=("x",)), "tokenizer"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    prompt: list[int], params: SamplingParams, says: str, engine_of: Make
) -> None:
    with pytest.raises(ValueError, match=says):
        engine_of().submit(prompt, params)
