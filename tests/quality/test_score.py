"""Scores against plain transformers, and what must be equal among deployments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvstudy.engine.config import Budget
from kvstudy.engine.core import Engine
from kvstudy.grid.schema import Perplexity, Retention, TextSource
from kvstudy.load.text import Text, read_text
from kvstudy.quality import score
from kvstudy.quality.items import Drawer
from kvstudy.quality.score import REFERENCE, Row, Scorer, divergence

Make = Callable[..., Engine]
SPEC = Perplexity(contexts=(80,), items=3, continuation=12)


@pytest.fixture
def scorer(engine_of: Make, tokenizer: Any) -> Scorer:
    engine = engine_of(tokenizer, kv_memory_bytes=1 << 25, max_num_seqs=999)
    wanted = {
        "h2o 1": ("h2o", {}, Budget()),
        "h2o 0.5": ("h2o", {}, Budget(share=0.5)),
        "random 0.1": ("random", {}, Budget(share=0.1)),
    }
    return Scorer(engine, wanted)


@pytest.fixture
def drawer(tokenizer: Any) -> Drawer:
    text = read_text(TextSource())
    return Drawer(tokenizer, Text(text.documents[:3], "", ""), 0)


def of(rows: list[Row], measure: str, field: str = "value") -> np.ndarray:
    return np.array([row[field] for row in rows if row["measure"] == measure])


def test_perplexity_and_divergence(scorer: Scorer, drawer: Drawer, llama_dir: Path) -> None:
    items = drawer.perplexity(SPEC, 80)
    rows = scorer.perplexity(items, 80)
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        logp = model(torch.tensor([item.prompt + item.forced for item in items])).logits.log_softmax(-1)
    expected = [
        -np.mean([float(logp[i, 80 + at - 1, item.forced[at]]) for at in range(1, 12)]) for i, item in enumerate(items)
    ]
    for label in (REFERENCE, "h2o 1"):
        assert of(rows[label], "nll") == pytest.approx(expected, abs=1e-4)
        assert of(rows[label], "kl") == pytest.approx(0.0, abs=1e-6)
        assert (of(rows[label], "top1") == 1).all()
    for label in ("h2o 0.5", "random 0.1"):
        assert of(rows[label], "nll", "reference") == pytest.approx(expected, abs=1e-4)
        assert (of(rows[label], "kl") > 1e-3).all()
    assert of(rows["random 0.1"], "kl").mean() > of(rows["h2o 0.5"], "kl").mean()
    first = rows["h2o 0.5"][0]
    assert first["kept"] == pytest.approx(0.5, abs=0.06) and first["attended"] == pytest.approx(0.5, abs=0.06)
    assert first["kv_device_bytes"] < 0.75 * rows[REFERENCE][0]["kv_device_bytes"]
    assert rows[REFERENCE][0]["kv_device_bytes"] == 80 * 3 * 2 * 2 * 16 * 4


def test_batches_do_not_change_a_score(scorer: Scorer, drawer: Drawer, monkeypatch: pytest.MonkeyPatch) -> None:
    items = drawer.perplexity(SPEC, 80)
    together = scorer.perplexity(items, 80)
    monkeypatch.setattr(score, "BATCH_BYTES", 1)
    alone = scorer.perplexity(items, 80)
    for label in together:
        assert of(alone[label], "nll") == pytest.approx(of(together[label], "nll"), abs=1e-4)


def test_a_session_is_asked_under_the_compressed_cache(scorer: Scorer, drawer: Drawer) -> None:
    spec = Retention.model_validate({"contexts": [500], "depths": [0.0], "items": 2, "asked": "session"})
    items = drawer.retention(spec, 500)
    runs = scorer.said(items, 6)
    for run in runs["h2o 0.5"]:
        assert run.request.output[: len(run.item.forced)] == list(run.item.forced)
        assert run.request.prompt_tokens == len(run.item.prompt)
    rows = scorer.retention(items, 500, 6)
    assert {row["measure"] for row in rows["h2o 1"]} == {"retention", "retention_strict"}
    assert (of(rows["h2o 1"], "retention") == of(rows["h2o 1"], "retention", "reference")).all()


@pytest.mark.parametrize(
    ("mine", "full", "agreed", "drift"),
    [([1, 2, 3], [1, 2, 3], 3, 0), ([1, 9, 3, 4], [1, 2, 3], 1, 1), ([1, 2], [1, 2, 3], 2, -1), ([7], [1, 2], 0, -1)],
)
def test_divergence_of_answers(mine: list[int], full: list[int], agreed: int, drift: int) -> None:
    first, length = divergence({}, mine, full)
    assert (first["value"], first["reference"], length["value"]) == (agreed, len(full), drift)
