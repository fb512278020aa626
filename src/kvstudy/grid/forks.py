"""What the authors' forks cannot serve: known when the plan is made, refused with the reason, never wrongly run.

Read in their code at the pinned commits (docs/forks.md names the places): OPT only, with as many KV heads as attention
heads and a feed-forward layer of four times the width; float16 written into it; padding that takes part in decode
steps, hence no padding; positions that end where the model's table does.
"""

from __future__ import annotations

import re
from typing import Any

from kvstudy.grid.schema import Cell, FlexGen, H2OUpstream, InfiniGenUpstream, Model, QualityCell

#: Facebook's OPT models whose architecture the forks have. 350m has another one.
OPT = re.compile(r"^facebook/opt-(125m|1\.3b|2\.7b|6\.7b|13b|30b|66b)$")


def unsupported(cell: Cell | QualityCell) -> str | None:
    """Why a fork cannot serve a cell, in one line; None where it can, or where the cell is not a fork's."""
    framework = cell.framework
    if not isinstance(framework, FlexGen | H2OUpstream | InfiniGenUpstream):
        return None
    if isinstance(cell, QualityCell):
        return "quality is scored on our engine, which follows the forks' rules (docs/fidelity.md)"
    reason = _model(cell.model) or _dtype(cell) or _workload(cell) or _budget(cell)
    return f"unsupported by the authors' {framework.title.split(' ')[0]} fork: {reason}" if reason else None


def _model(model: Model) -> str | None:
    if model.gpus > 1:
        return f"it runs on one GPU, model {model.name} asks for {model.gpus}"
    if model.source == "hub" and not OPT.match(model.hub_id or ""):
        return f"it has OPT models only, not {model.hub_id}"
    if model.source == "package":
        return f"it has OPT models only, not {model.package}"
    shape = model.shape
    if shape is None:
        return None  # a folder: the conversion looks into it
    if shape.architecture != "opt":
        return f"it has OPT models only, not {shape.architecture}"
    if shape.num_key_value_heads != shape.num_attention_heads:
        return "it has no grouped-query attention (num_key_value_heads differs from num_attention_heads)"
    if shape.intermediate_size != 4 * shape.hidden_size:
        return f"its feed-forward layer has 4 x hidden_size columns, the model's {shape.intermediate_size}"
    return None


def _dtype(cell: Cell) -> str | None:
    wanted = "float16" if cell.hardware.device == "cuda" else "float32"
    if cell.model.dtype == wanted:
        return None
    why = "float16 is written into it" if wanted == "float16" else "its debug switch device=cpu computes in float32"
    return f"{why}, model.dtype is {cell.model.dtype}"


def _workload(cell: Cell) -> str | None:
    work, framework = cell.workload, cell.framework
    if work.api == "chat" and cell.model.source != "folder":
        return "OPT has no chat template"
    shortest = min(_shortest(length) for length in (work.prompt, work.long_prompt) if length is not None)
    share = cell.budget.share
    if (
        isinstance(framework, H2OUpstream)
        and cell.budget.of == "prompt"
        and share < 1
        and int(shortest * share / 2) < 2
    ):
        return f"it keeps at least 2 heavy hitters, a prompt of {shortest} tokens at budget {share:g} leaves fewer"
    return None


def _shortest(length: Any) -> int:
    if length.kind == "fixed":
        return int(length.tokens)
    return int(getattr(length, "low", 1))


def _budget(cell: Cell) -> str | None:
    of = cell.budget.of
    if of == "current":
        return "its budget is fixed when the prompt ends, budget.of=current grows"
    if of == "tokens" and not isinstance(cell.framework, InfiniGenUpstream):
        return "its budget is a share of the prompt, budget.of=tokens is not"
    return None
