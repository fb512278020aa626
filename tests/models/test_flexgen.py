"""OPT folders in the forks' format: their names, exact values, and refusals with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvstudy.models import flexgen

CONFIG = {"model_type": "opt", "hidden_size": 4, "ffn_dim": 16, "word_embed_proj_dim": 4, "do_layer_norm_before": True}


def folder(tmp_path: Path, dtype: torch.dtype, **config: object) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    tensors = {
        "model.decoder.embed_tokens.weight": torch.linspace(-1, 1, 12, dtype=dtype).reshape(3, 4),
        "model.decoder.final_layer_norm.bias": torch.tensor([0.1, 0.2], dtype=dtype),
        "model.decoder.layers.0.self_attn_layer_norm.weight": torch.ones(4, dtype=dtype),
    }
    save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(CONFIG | config))
    return model


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float16, np.float16), (torch.bfloat16, np.float32), (torch.float32, np.float32)]
)
def test_values_are_exact_and_names_the_forks(tmp_path: Path, dtype: torch.dtype, stored: type) -> None:
    model, out, card = folder(tmp_path, dtype), tmp_path / "out", tmp_path / "card.json"
    assert flexgen.main(["--model", str(model), "--out", str(out), "--card", str(card)]) == 0
    names = sorted(path.name for path in (out / "opt-np").iterdir())
    assert names == [
        "decoder.embed_tokens.weight",
        "decoder.layer_norm.bias",
        "decoder.layers.0.self_attn_layer_norm.weight",
    ]
    array = np.load(out / "opt-np" / "decoder.embed_tokens.weight")
    assert array.dtype == stored
    assert (array == torch.linspace(-1, 1, 12, dtype=dtype).float().numpy().reshape(3, 4)).all()
    assert json.loads(card.read_text())["tensors"] == 3


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama"}, "OPT models only, not llama"),
        ({"do_layer_norm_before": False}, "do_layer_norm_before True"),
        ({"word_embed_proj_dim": 2}, "word_embed_proj_dim 4"),
        ({"ffn_dim": 8}, "ffn_dim 16"),
        ({"activation_function": "gelu"}, "activation_function relu"),
    ],
)
def test_other_architectures_are_refused(
    tmp_path: Path, config: dict[str, object], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out, card = folder(tmp_path, torch.float16, **config), tmp_path / "out", tmp_path / "card.json"
    assert flexgen.main(["--model", str(model), "--out", str(out), "--card", str(card)]) == 2
    said = capsys.readouterr().err
    assert reason in said and said.startswith("kvstudy convert: unsupported: ") and said.count("\n") == 1
    assert not out.exists() and not card.exists()


def test_a_missing_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flexgen.main(["--model", str(tmp_path), "--out", str(tmp_path / "o"), "--card", str(tmp_path / "c")]) == 2
    assert "config.json is missing" in capsys.readouterr().err
