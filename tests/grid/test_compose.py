"""Overrides and composition: what a user may say, and the one line that answers what they may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstudy.grid.compose import ConfigError, combinations, options, parse_overrides, read_study, to_cell
from kvstudy.grid.plan import make_plan, overrides_from_snakemake


@pytest.fixture(scope="module")
def conf(checkout: Path) -> Path:
    return checkout / "conf"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("study=quik", "did you mean 'quick'"),
        ("model=llama-3.1-8", "did you mean 'llama-3.1-8b'"),
        ("framework=vlm", "choices: "),
        ("load.rat=3", "did you mean 'load.rate'"),
        ("lod.rate=3", "unknown key 'lod.rate'"),
        ("sede=1", "unknown key 'sede'"),
        ("+load.rate=3", "refused"),
        ("++seed=3", "refused"),
        ("~seed", "refused"),
        ("load.rate=abc", "valid number"),
        ("load.rate=-1", "greater than 0"),
        ("budget.share=0", "greater than 0"),
        ("budget.share=1.5", "less than or equal to 1"),
        ("budget.of=tokens", "budget.tokens"),
        ("kv_memory_mib=0", "greater than 0"),
        ("workload.long_share=2", "less than or equal to 1"),
        ("framework.enforce_eager=perhaps", "boolean"),
        ("sweep=sometimes", "'deployment' or 'cell'"),
        ("load.rate=", "number"),
        ("study.name=../x", "study.name"),
        ("study.name=store", "folders of results"),
        ("load.rate", "is not an override"),
        ("load.duration_s=1e-9", "greater than or equal to 0.1"),
        ("load.warmup_requests=1000000000000", "load.warmup_requests is 1e+12"),
        ("load.timeout_s=1e300", "load.timeout_s is 1e+300"),
        ("seed=range(0,100000000)", "more than 10,000 values"),
        ("hardware.server_cores=[-1]", "greater than or equal to 0"),
        ("load.rate=0.001", "a window needs at least one"),
        ("budget.share=1e-9", "leaves no entry of a prompt"),
        ("quality.perplexity.contexts=[]", "quality.perplexity.contexts: Tuple should have at least 1 item"),
        ("quality.perplexity.contexts=[100000]", "quality.perplexity.contexts: 100000 tokens"),
        ("quality.perplexity.items=1000000000", "less than or equal to 100000"),
    ],
)
def test_a_fault_is_one_line_that_names_the_choices(conf: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(conf, ["study=quick", override])
    message = str(caught.value)
    assert says in message
    assert "\n" not in message


def test_what_there_is_no_sense_in_asking_is_one_line(conf: Path) -> None:
    with pytest.raises(ConfigError, match="quality=quick has nothing to score"):
        make_plan(conf, ["study=quick", "quality.perplexity=null", "quality.retention=null"])
    with pytest.raises(ConfigError, match=r"load.requests is 1e\+18, at most 5,000,000 requests"):
        make_plan(conf, ["study=quick", "load=burst", "load.requests=1000000000000000000"])


def test_a_key_must_belong_to_a_chosen_option(conf: Path) -> None:
    with pytest.raises(ConfigError, match="key of none of framework full"):
        make_plan(conf, ["study=quick", "framework=full", "framework.sinks=2"])
    plan = make_plan(conf, ["study=quick", "framework=full,streaming", "framework.sinks=2"])
    assert {c.framework.sinks for c in plan.cells if c.framework.name == "streaming"} == {2}


def test_an_axis_of_the_study_that_does_not_apply_is_dropped(conf: Path) -> None:
    plan = make_plan(conf, ["study=quick", "load=closed", "framework=vllm"])
    assert [cell.load.name for cell in plan.cells] == ["closed"]


def test_a_sweep_replaces_the_axis(conf: Path) -> None:
    plan = make_plan(conf, ["study=quick", "framework=full", "load.rate=1,2,4"])
    assert sorted(cell.load.rate for cell in plan.cells) == [1.0, 2.0, 4.0]


def test_spelling_does_not_change_identity(conf: Path) -> None:
    one = make_plan(conf, ["study=quick", "framework=full", "load.rate=1"])
    other = make_plan(conf, ["study=quick", "framework=full", "load.rate=1.0"])
    assert [c.cell_id for c in one.cells] == [c.cell_id for c in other.cells]


def test_parse_overrides_reads_hydras_grammar(conf: Path) -> None:
    study, values = parse_overrides(
        ["study=tiny", "workload.prompt={kind: fixed, tokens: 12}", "seed=range(0,3)"],
        conf,
    )
    assert study == "tiny"
    assert values["workload.prompt"] == [{"kind": "fixed", "tokens": 12}]
    assert values["seed"] == [0, 1, 2]


def test_snakemake_config_becomes_overrides() -> None:
    config = {
        "study": "quick",
        "framework": "vllm,full",
        "overrides": ["load.rate=1"],
        "results": "elsewhere",
    }
    assert overrides_from_snakemake(config) == ["study=quick", "framework=vllm,full", "load.rate=1"]
    assert overrides_from_snakemake({"overrides": "a.b=1 c.d=2"}) == ["a.b=1", "c.d=2"]


def test_every_shipped_study_composes_fast_and_slow_alike(conf: Path) -> None:
    """Merging options composed once equals composing each combination in full."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    for name in options(conf, "study"):
        study = read_study(conf, [f"study={name}"])
        chosen = {group: next(iter(study.options[group])) for group in study.options}
        with initialize_config_dir(str(conf), version_base="1.3"):
            picked = [f"{group}={option}" for group, option in chosen.items() if option]
            slow = OmegaConf.to_container(compose("config", overrides=[f"study={name}", *picked]), resolve=True)
        fast = {group: study.options[group][option] for group, option in chosen.items()}
        assert fast == {group: slow[group] for group in fast}, name


@pytest.mark.parametrize("group", ["framework", "model", "workload", "load", "hardware"])
def test_every_option_is_valid(conf: Path, group: str) -> None:
    base = {"framework": "full", "model": "tiny-llama", "load": "poisson"}
    for option in options(conf, group):
        needs = {"load": "trace"} if (group, option) == ("workload", "trace") else {}
        overrides = [f"{key}={value}" for key, value in (base | {group: option} | needs).items()]
        study = read_study(conf, ["study=tiny", *overrides])
        cells = [to_cell(config, {}) for config in combinations(study)]
        assert cells, option
        assert getattr(cells[0], group).name
