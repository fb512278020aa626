"""vLLM and our full cache answer the same requests alike: continuations by echo, and lm-eval's questions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from kvstudy.engine.config import EngineConfig
from kvstudy.engine.core import Engine
from kvstudy.frameworks.launch import environment_folder, make_server, model_folder
from kvstudy.frameworks.lease import lease
from kvstudy.grid.plan import make_plan
from kvstudy.grid.schema import Perplexity, Tasks, TextSource
from kvstudy.grid.store import Layout
from kvstudy.load.text import read_text
from kvstudy.quality import tasks
from kvstudy.quality.items import Drawer
from kvstudy.quality.run import TOLERANCE
from kvstudy.quality.score import REFERENCE, Scorer
from kvstudy.quality.served import Endpoint

SPEC = Perplexity(contexts=(256,), items=8, continuation=33)


@pytest.mark.long
def test_vllm_and_the_full_cache_agree_within_the_noise_of_bfloat16(
    checkout: Path, tmp_path: Path, colours: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs vLLM's environment and the model of study=quick, as a run of it leaves them.

    The noise is what our own engine in bfloat16 is off itself in float32, on the same tokens. Two engines that round
    differently but no worse are at most twice as far from each other.
    """
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    layout = Layout(checkout / "results")
    asked = ["study=quick", "framework=full,vllm", "budget.share=1.0", "load.rate=1", "quality=none"]
    deployments = {cell.framework.name: cell.deployment for cell in make_plan(checkout / "conf", asked).cells}
    environment = environment_folder(deployments["vllm"], layout)
    if environment is None or not environment.is_dir() or not list(layout.root.glob("models/smollm2-*/model.json")):
        pytest.skip("no vLLM environment in results/")
    model = model_folder(deployments["full"], layout)
    tokenizer = AutoTokenizer.from_pretrained(model)
    items = Drawer(tokenizer, read_text(TextSource()), 0).perplexity(SPEC, 256)
    exact = Engine(EngineConfig(model_dir=model, dtype="float32", kv_memory_bytes=1 << 29), tokenizer)
    scores = {"float32": np.array([run.logp for run in Scorer(exact, {}).forced(items)[REFERENCE]])}
    choices = {}
    for name, deployment in deployments.items():
        with lease(0) as held:
            server = make_server(deployment, model, environment_folder(deployment, layout), tmp_path, held)
            try:
                server.bring_up(deployment.framework.bring_up_s)
                scored = Endpoint(server.url, server.model_name).score_all(items)
                lm = tasks.completions_model(server.url, server.model_name, model, 512)
                answers = tasks.evaluate(lm, colours, Path("/"), 0)["kvstudy_colours"]
            finally:
                server.stop()
        scores[name] = np.array([one.logprobs for one in scored])
        choices[name] = np.array([[float(choice[0]) for choice in one["filtered_resps"]] for one in answers])
    noise = float(np.abs(scores["full"] - scores["float32"]).mean())
    apart = float(np.abs(scores["full"] - scores["vllm"]).mean())
    asked_apart = float(np.abs(choices["full"] - choices["vllm"]).mean())
    print(f"noise {noise:.5f}, vLLM and full {apart:.5f} by echo, {asked_apart:.5f} by lm-eval (nats)")
    assert scores["vllm"].shape == (8, 32) and choices["vllm"].shape == (8, 4)
    assert 0 < apart <= min(2 * noise, TOLERANCE)
    # A choice is a token or two.
    assert asked_apart <= 4 * noise
    assert (choices["full"].argmax(axis=1) == choices["vllm"].argmax(axis=1)).all()
