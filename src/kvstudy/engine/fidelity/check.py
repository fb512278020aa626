"""Find the cases of a folder, by what its files hold, and run them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers.utils import logging

from kvstudy.engine.fidelity import h2o, infinigen, served
from kvstudy.engine.fidelity.plain import PlainModel
from kvstudy.engine.fidelity.report import Case


def check(folder: Path) -> Iterator[Case]:
    """Every case of every `expected.safetensors` at or below `folder`."""
    logging.disable_progress_bar()
    for expected in sorted(folder.rglob("expected.safetensors")):
        yield from _check_one(expected.parent, folder)


def _check_one(where: Path, root: Path) -> Iterator[Case]:
    meta = json.loads((where / "meta.json").read_text())
    expected = load_file(where / "expected.safetensors")
    name = where.relative_to(root).as_posix() if where != root else where.resolve().name
    has = {key.split("_")[0] for key in expected}
    if "eval_ids" in expected:
        source = where if (where / "setup.safetensors").is_file() else where.parent
        setup = load_file(source / "setup.safetensors")
        dtype = torch.float16 if meta["precision"] == "fp16" else torch.float32
        # Their offline steps ran in float16; both precisions share them.
        yield from infinigen.setup_cases(name, PlainModel.load(source, torch.float16), setup, meta)
        yield from infinigen.accuracy_cases(name, PlainModel.load(source, dtype), setup, meta, expected)
    elif "input_ids" in expected:
        model = PlainModel.load(where)
        yield from h2o.masked_cases(name, model, meta, expected)
        yield from h2o.lm_eval_cases(name, model, meta, expected)
        yield from served.masked_cases(name, where, meta, expected)
        yield from served.realdrop_cases(name, where, meta, expected)
    elif "prompt_ids" in expected and has & {"evict", "prefetch"}:
        source = _model_of(where, meta)
        cases = served.flexgen_h2o_cases if "evict" in has else served.speed_cases
        yield from cases(name, source, meta, expected)
    else:
        raise ValueError(f"{where}: none of the known layouts: {sorted(expected)}")


def _model_of(where: Path, meta: dict[str, object]) -> Path:
    """The folder of the model that meta names as `PATH/model_fp16.safetensors + config.json (...)`."""
    if (where / "config.json").is_file():
        return where
    source = where / Path(str(meta["model"]).split()[0]).parent
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"{where}: its model is in {source}, which has no config.json")
    return source
