"""`echo` through the server: a continuation's probabilities are those of decoding it under the policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_tiny import plain, random_prompt
from transformers import AutoTokenizer

from kvstudy.engine.api import create_app
from kvstudy.engine.core import Engine
from kvstudy.engine.echo import Echo
from kvstudy.engine.request import SamplingParams
from kvstudy.engine.runner import Runner

Make = Callable[..., Engine]
IDS = random_prompt(40)


@pytest.fixture
async def client(engine_of: Make, llama_dir: Path) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer = AutoTokenizer.from_pretrained(llama_dir)
    engine = engine_of(
        tokenizer,
        policy="h2o",
        budget={"share": 0.25},
        other_policies={"full": {}},
        max_prefill_tokens=16,
        served_model_name="tiny",
    )
    runner = Runner(engine, asyncio.get_running_loop())
    runner.start()
    transport = httpx.ASGITransport(create_app(engine, runner))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as opened:
        yield opened
    runner.stop()


async def ask(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json={"prompt": IDS, "echo": True, "logprobs": 1} | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def exact(llama_dir: Path) -> list[float]:
    """Log probabilities of all tokens but the first, with exact attention."""
    with torch.inference_mode():
        logp = plain(llama_dir)(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return [float(logp[at, token]) for at, token in enumerate(IDS[1:])]


async def test_with_the_whole_cache_every_boundary_gives_exact_scores(
    client: httpx.AsyncClient, llama_dir: Path
) -> None:
    for context in (None, 1, 17, 40):
        found = await ask(client, kvstudy_policy="full", kvstudy_context_tokens=context, max_tokens=0)
        own = found["choices"][0]["logprobs"]
        assert own["token_logprobs"][0] is None and own["top_logprobs"][0] is None
        assert own["token_logprobs"][1:] == pytest.approx(exact(llama_dir), abs=1e-3)
        assert all(
            max(top.values()) >= p for top, p in zip(own["top_logprobs"][1:], own["token_logprobs"][1:], strict=False)
        )
        assert found["usage"] == {"prompt_tokens": 40, "completion_tokens": 0, "total_tokens": 40}
        assert found["kvstudy"]["context_tokens"] == (context or 20)


async def test_a_continuation_is_scored_under_the_compressed_cache(
    client: httpx.AsyncClient, engine_of: Make, llama_dir: Path
) -> None:
    context = 28
    found = await ask(client, kvstudy_context_tokens=context, max_tokens=3, temperature=0)
    own = found["choices"][0]["logprobs"]["token_logprobs"]
    engine = engine_of(policy="h2o", budget={"share": 0.25}, max_prefill_tokens=16)
    params = SamplingParams(max_tokens=15, forced_tokens=tuple(IDS[context:]), logprobs=1)
    [request] = engine.generate([IDS[:context]], params)
    assert own[context:] == pytest.approx([p for p, _ in request.logprobs], abs=1e-5)
    full = exact(llama_dir)
    # The context, and the token that its last one predicts, are prefill's; the others are not.
    assert own[1 : context + 1] == pytest.approx(full[:context], abs=1e-3)
    assert max(abs(a - b) for a, b in zip(own[context + 1 : 40], full[context:], strict=True)) > 0.1
    assert found["usage"] == {"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43}
    assert len(own) == 43


async def test_tokens_and_offsets_are_those_of_the_text(client: httpx.AsyncClient) -> None:
    text = "A cat sat on the mat, and so did the dog."
    found = await ask(client, prompt=text, max_tokens=2, kvstudy_policy="full", temperature=0, ignore_eos=True)
    choice = found["choices"][0]
    own = choice["logprobs"]
    assert choice["text"].startswith(text)
    for token, at in zip(own["tokens"][: len(text)], own["text_offset"], strict=False):
        assert text[at : at + len(token)] == token
    assert len(own["tokens"]) == len(own["text_offset"]) == len(own["token_logprobs"]) == len(text) + 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"kvstudy_context_tokens": 41}, "between 1 and the prompt's 40"),
        ({"kvstudy_context_tokens": 0}, "greater than or equal to 1"),
        ({"echo": False, "max_tokens": 0}, "needs echo"),
        ({"echo": False, "kvstudy_context_tokens": 3}, "needs echo"),
        ({"stream": True}, "neither stream"),
        ({"stop": "x"}, "nor stop"),
    ],
)
async def test_what_makes_no_sense_is_refused_in_one_line(
    client: httpx.AsyncClient, body: dict[str, Any], says: str
) -> None:
    answer = await client.post("/v1/completions", json={"prompt": IDS, "echo": True, "logprobs": 1} | body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_the_guess_decodes_the_last_half_and_not_more_than_64() -> None:
    assert [Echo.of(range(n), "", None).context for n in (1, 2, 3, 100, 128, 1000)] == [1, 1, 2, 50, 64, 936]
