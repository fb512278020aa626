"""lm-eval itself, its own client and its own scoring, against our server on a task of eight questions."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM

from kvstudy.engine.api import create_app
from kvstudy.engine.core import Engine
from kvstudy.engine.request import SamplingParams
from kvstudy.engine.runner import Runner
from kvstudy.grid.schema import Tasks
from kvstudy.quality import tasks
from kvstudy.quality.score import Row


@pytest.fixture
def url(engine_of: Callable[..., Engine], tokenizer: Any) -> Iterator[str]:
    engine = engine_of(
        tokenizer, policy="full", other_policies={"h2o": {}}, budget={"share": 0.3}, served_model_name="tiny"
    )
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    runner = Runner(engine, loop)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, runner), log_level="error", lifespan="off"))
    runner.start()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve([listener])), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
    runner.stop()


class Asking:
    """lm-eval's client, that asks for one of the policies that the server has."""

    def __init__(self, lm: Any, policy: str) -> None:
        whole = lm._create_payload
        lm._create_payload = lambda *args, **more: whole(*args, **more) | {"kvstudy_policy": policy}


def test_lm_eval_scores_continuations_under_each_policy(
    url: str,
    colours: Tasks,
    llama_dir: Path,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine_of: Callable[..., Engine],
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    found: dict[str, list[Any]] = {}
    for policy in ("full", "h2o"):
        lm = tasks.completions_model(url, "tiny", tmp_path / "tokenizer", 2048)
        Asking(lm, policy)
        found[policy] = tasks.evaluate(lm, colours, Path("/"), 0)["kvstudy_colours"]
    assert len(found["full"]) == len(found["h2o"]) == 8
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
    with_h2o = engine_of(policy="h2o", budget={"share": 0.3})
    for full, h2o in zip(found["full"], found["h2o"], strict=True):
        scores = {}
        for choice, own, compressed in zip(
            full["doc"]["choices"], full["filtered_resps"], h2o["filtered_resps"], strict=True
        ):
            context = tokenizer(full["doc"]["question"])["input_ids"]
            said = tokenizer(choice)["input_ids"]
            with torch.inference_mode():
                logp = model(torch.tensor([context + said])).logits[0].log_softmax(-1)
            exact = sum(float(logp[len(context) + at - 1, token]) for at, token in enumerate(said))
            assert float(own[0]) == pytest.approx(exact, abs=1e-2)
            # Under the policy: the context but its last token is compressed, then all that follows is decoded.
            forced = (context[-1], *said)
            params = SamplingParams(max_tokens=len(forced), forced_tokens=forced, logprobs=1)
            [request] = with_h2o.generate([context[:-1]], params)
            assert float(compressed[0]) == pytest.approx(sum(p for p, _ in request.logprobs[1:]), abs=1e-2)
            scores[choice] = exact
        assert full["acc"] == float(max(scores, key=scores.__getitem__) == full["doc"]["choices"][full["doc"]["label"]])
    rows: list[Row] = list(
        tasks.rows_of({"kvstudy_colours": found["h2o"]}, {"kvstudy_colours": found["full"]}, tasks.base_row(0.3, 0.3))
    )
    assert {row["measure"] for row in rows} == {"accuracy:kvstudy_colours", "accuracy_corrected:kvstudy_colours"}
    assert len(rows) == 16
