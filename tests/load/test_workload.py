"""Workloads: exact lengths, no shared openings, the same for every framework, different for every seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvstudy.grid.schema import (
    Budget,
    Cell,
    EmpiricalLength,
    FixedLength,
    Full,
    Hardware,
    Length,
    LognormalLength,
    Model,
    NormalLength,
    PoissonLoad,
    SharedPrefix,
    Streaming,
    TextSource,
    TraceLength,
    TraceLoad,
    UniformLength,
    Workload,
)
from kvstudy.grid.store import Layout
from kvstudy.load.arrivals import ArrivalError
from kvstudy.load.text import TextError, read_text
from kvstudy.load.workload import (
    OPENING,
    WARMUPS,
    Drawn,
    Passages,
    WorkloadError,
    draw,
    draw_lengths,
    expected_hit_share,
    load_requests,
    prepare,
    workload_id,
)

MODEL = Model(name="tiny", source="folder", path="x", dtype="float32", max_model_len=2048)
HARDWARE = Hardware(name="cpu", device="cpu", server_cores=(0,), client_cores=(0,))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1000, show_progress=False)
    tokenizer.train_from_iterator(read_text(TextSource()).documents[:20], trainer)
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "model.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def source(model_dir: Path) -> Passages:
    return Passages(Tokenizer.from_file(str(model_dir / "tokenizer.json")), read_text(TextSource()))


def cell(*, seed: int = 0, rate: float = 4.0, framework: Full | Streaming | None = None, **options: object) -> Cell:
    settings: dict[str, object] = {
        "prompt": UniformLength(low=20, high=100),
        "long_prompt": FixedLength(tokens=400),
        "long_share": 0.2,
        "output": LognormalLength(median=20, sigma=0.5, low=2, high=80),
    }
    settings |= options
    return Cell(
        framework=framework or Full(),
        model=MODEL,
        hardware=HARDWARE,
        budget=Budget(),
        kv_memory_mib=4,
        harness_version=1,
        workload=Workload(name="w", **settings),  # type: ignore[arg-type]
        load=PoissonLoad(rate=rate, duration_s=10),
        seed=seed,
    )


def openings(drawn: Drawn) -> set[bytes]:
    return {prompt[:OPENING].tobytes() for prompt in drawn.prompts}


def test_prompts_have_the_drawn_lengths_and_no_shared_openings(source: Passages) -> None:
    drawn = draw(cell(), source, 300)
    assert [len(prompt) for prompt in drawn.prompts] == drawn.prompt_tokens.tolist()
    assert len(openings(drawn)) == 300
    long = np.array([name == "long" for name in drawn.length_class])
    assert 30 <= long.sum() <= 90
    assert set(drawn.prompt_tokens[long].tolist()) == {400}
    assert drawn.prompt_tokens[~long].min() >= 20 and drawn.prompt_tokens[~long].max() <= 100


def test_artefacts_of_different_size_agree_on_the_common_part(source: Passages) -> None:
    few, many = draw(cell(), source, 64), draw(cell(), source, 256)
    assert all(np.array_equal(a, b) for a, b in zip(few.prompts, many.prompts, strict=False))
    assert np.array_equal(few.output_tokens, many.output_tokens[:64])
    assert np.array_equal(few.unit, many.unit[:64])


def test_seeds_and_warm_up_never_share_an_opening(source: Passages) -> None:
    sets = [openings(draw(cell(seed=seed), source, 200)) for seed in range(3)]
    sets.append(openings(draw(cell(), source, WARMUPS, warmup=True)))
    assert len(set.union(*sets)) == sum(len(item) for item in sets)


def test_lengths_are_coupled_over_the_mix(source: Passages) -> None:
    # The same request is long in every share above its draw: shares of a mix are compared on common requests.
    none, half = draw(cell(long_share=0.0), source, 100), draw(cell(long_share=0.5), source, 100)
    short = np.array([name == "short" for name in half.length_class])
    assert np.array_equal(none.prompt_tokens[short], half.prompt_tokens[short])


def test_the_artefact_is_the_same_for_every_framework_and_rate_class(model_dir: Path, tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    folder = prepare(cell(), model_dir, layout)
    assert prepare(cell(framework=Streaming()), model_dir, layout) == folder
    assert prepare(cell(seed=1), model_dir, layout) != folder
    again = load_requests(folder)
    assert [len(prompt) for prompt in again.prompts] == again.prompt_tokens.tolist()
    assert again.texts is None
    assert len(load_requests(folder, warmup=True)) == WARMUPS
    assert workload_id(cell(), "a", "t") != workload_id(cell(), "b", "t")
    assert sorted(path.name for path in folder.parent.iterdir()) == sorted(
        [folder.name, prepare(cell(seed=1), model_dir, layout).name]
    )


def test_a_common_prefix_is_the_asked_share_and_nothing_more(source: Passages) -> None:
    base = cell(prompt=FixedLength(tokens=100), long_share=0.0)
    for share in (0.5, 0.9):
        shared = SharedPrefix(share=share, groups=2)
        spec = base.workload.model_copy(update={"shared_prefix": shared})
        drawn = draw(base.model_copy(update={"workload": spec}), source, 40)
        tokens = round(100 * share)
        assert {len(prompt) for prompt in drawn.prompts} == {100}
        assert len({prompt[:tokens].tobytes() for prompt in drawn.prompts}) == 2
        assert len({prompt[tokens : tokens + OPENING].tobytes() for prompt in drawn.prompts}) == 40
        assert sorted(set(drawn.shared.tolist())) == [0, tokens] and (drawn.shared == 0).sum() == 2
        expected = expected_hit_share(drawn, 40, 16)
        assert expected == pytest.approx(38 / 40 * (tokens // 16 * 16) / 100)


def test_sessions_repeat_all_earlier_turns(source: Passages) -> None:
    base = cell(prompt=FixedLength(tokens=30), output=FixedLength(tokens=10), long_share=0.0)
    spec = base.workload.model_copy(update={"shared_prefix": SharedPrefix(kind="sessions", turns=3, active=2)})
    drawn = draw(base.model_copy(update={"workload": spec}), source, 14)
    assert drawn.prompt_tokens.tolist() == [30, 30, 70, 70, 110, 110] * 2 + [30, 30]
    for index in range(2, 6):
        earlier = drawn.prompts[index - 2]
        assert np.array_equal(drawn.prompts[index][: len(earlier)], earlier)
        assert drawn.shared[index] == len(earlier)
    assert drawn.shared[6] == 0
    too_long = spec.model_copy(update={"shared_prefix": SharedPrefix(kind="sessions", turns=90, active=1)})
    with pytest.raises(WorkloadError, match="sessions of 90 turns"):
        draw(base.model_copy(update={"workload": too_long}), source, 90)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        PoissonLoad(rate=float("inf"), duration_s=1)
    with pytest.raises(ValueError, match="needs load=trace"):
        cell(prompt=TraceLength(high=100))
    with pytest.raises(ValueError, match="api=completions"):
        cell(api="chat", shared_prefix=SharedPrefix(share=0.5))


def test_a_short_text_is_recombined_then_refused(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"text": "the quick brown fox jumps over the lazy dog and then runs away again from it"}\n')
    text = read_text(TextSource(kind="jsonl", path=str(path)))
    source = Passages(Tokenizer.from_file(str(model_dir / "tokenizer.json")), text)
    drawn = draw(cell(long_share=0.0), source, 10)
    assert len(openings(drawn)) == 10 and source.recombined > 0
    with pytest.raises(WorkloadError, match="too short for so many different prompts"):
        draw(cell(long_share=0.0), source, 2000)


def test_more_than_the_model_takes_is_refused(source: Passages) -> None:
    with pytest.raises(WorkloadError, match="serves 2048"):
        draw(cell(long_prompt=FixedLength(tokens=2040)), source, 4)


def test_distributions_of_lengths() -> None:
    uniform = np.random.default_rng(0).random(20_000)
    cases: list[tuple[Length, float, int, int]] = [
        (FixedLength(tokens=7), 7, 7, 7),
        (UniformLength(low=10, high=20), 15, 10, 20),
        (LognormalLength(median=100, sigma=1.0, low=1, high=100_000), 100, 1, 100_000),
        (NormalLength(mean=50, sd=10, low=20, high=80), 50, 20, 80),
    ]
    for length, median, low, high in cases:
        values = draw_lengths(length, uniform)
        assert np.median(values) == pytest.approx(median, rel=0.03)
        assert values.min() >= low and values.max() <= high
    with pytest.raises(WorkloadError, match="need load=trace"):
        draw_lengths(TraceLength(high=9), uniform)


def test_lengths_of_a_trace(source: Passages, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,374,44\n2023-11-16 18:15:47.6,20,9\n"
    )
    base = cell()
    traced = base.model_copy(
        update={
            "load": TraceLoad(duration_s=5, path=str(path), format="azure"),
            "workload": Workload(name="t", prompt=TraceLength(high=100), output=TraceLength(high=100)),
        }
    )
    drawn = draw(traced, source, 2)
    assert drawn.prompt_tokens.tolist() == [100, 20]
    assert drawn.output_tokens.tolist() == [44, 9]


def test_lengths_drawn_from_a_trace_under_another_load(source: Passages, tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    rows = [(20, 7), (30, 8), (300, 9)]
    lines = [f"{i},{p},{o}\n" for i, (p, o) in enumerate(rows)]
    path.write_text("Timestamp,Request tokens,Response tokens\n" + "".join(lines))
    drawn_from = EmpiricalLength(path=str(path), format="burstgpt", high=100)
    drawn = draw(cell(prompt=drawn_from, output=drawn_from, long_share=0.0), source, 64)
    pairs = set(zip(drawn.prompt_tokens.tolist(), drawn.output_tokens.tolist(), strict=True))
    assert pairs == {(20, 7), (30, 8), (100, 9)}  # rows stay together, and are cut
    with pytest.raises(ArrivalError, match="cannot read the trace"):
        draw(cell(prompt=drawn_from.model_copy(update={"path": "/none"})), source, 4)


def test_a_mooncake_trace_shares_the_prefixes_it_names(source: Passages, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [(0, 600, [7, 8]), (1000, 1100, [7, 8, 9]), (2000, 512, [9])]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": t, "input_length": n, "output_length": 4, "hash_ids": ids}) for t, n, ids in rows
        )
    )
    traced = cell().model_copy(
        update={
            "load": TraceLoad(duration_s=5, path=str(path), format="mooncake"),
            "workload": Workload(name="t", prompt=TraceLength(high=1200), output=TraceLength(high=100)),
        }
    )
    drawn = draw(traced, source, 3)
    assert [len(prompt) for prompt in drawn.prompts] == [600, 1100, 512]
    assert np.array_equal(drawn.prompts[0], drawn.prompts[1][:600])
    assert np.array_equal(drawn.prompts[2][:76], drawn.prompts[1][1024:])
    assert drawn.shared.tolist() == [0, 1024, 0]


def test_texts_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="cannot read"):
        read_text(TextSource(kind="jsonl", path=str(tmp_path / "none")))
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "a"}\n')
    with pytest.raises(TextError, match="no field 'text'"):
        read_text(TextSource(kind="jsonl", path=str(path)))
    path.write_text('{"conversation": [{"content": "hello", "role": "user"}, {"content": "there"}]}\n')
    assert read_text(TextSource(kind="jsonl", path=str(path), field="conversation")).documents == ("hello\n\nthere",)
