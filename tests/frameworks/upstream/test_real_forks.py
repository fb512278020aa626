"""The authors' code itself under the debug switch: tokens, logits and choices are those of `tests/fidelity/data`.

Needs the forks: `kvstudy environment h2o --flavour cpu ...` and so on, and KVSTUDY_FORKS naming the folder that holds
the environments (results/environments). Skipped without. What the fixtures hold was computed by the same commits.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvstudy.frameworks.upstream.launcher import HERE, fork_environment, pinned_commit
from kvstudy.models.flexgen import convert

FORKS = os.environ.get("KVSTUDY_FORKS")
DATA = Path(__file__).parents[2] / "fidelity" / "data"

pytestmark = pytest.mark.skipif(FORKS is None, reason="KVSTUDY_FORKS names no folder of built fork environments")


def environment(name: str) -> Path:
    (folder,) = (path for path in Path(str(FORKS)).glob(f"{name}-cpu-*") if path.is_dir())
    return folder.absolute()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixtures' model as a folder, and converted beside it. Its tokenizer is never asked for ids."""
    folder = tmp_path_factory.mktemp("opt")
    source = DATA / "infinigen_opt"
    (folder / "model.safetensors").write_bytes((source / "model_fp16.safetensors").read_bytes())
    (folder / "config.json").write_text((source / "config.json").read_text())
    convert(folder, folder / "converted")
    return folder


def run(
    name: str, model: Path, arguments: list[str], asked: dict[str, Any], calibration: list[int], **more: Any
) -> Any:
    """One traced batch, as `kvstudy compare-implementations` runs it, but with ids for InfiniGen's warm-up."""
    shape = json.loads((model / "config.json").read_text())
    config = {
        "fork": name,
        "arguments": ["--path", str(model / "converted"), "--overlap", "false", *arguments],
        "model": {
            "name": "opt",
            "layers": shape["num_hidden_layers"],
            "heads": shape["num_attention_heads"],
            "hidden_size": shape["hidden_size"],
            "vocab_size": shape["vocab_size"],
            "max_positions": shape["max_position_embeddings"],
            "pad_token_id": -1,  # random ids: none of them pads
        },
        "device": "cpu",
        "prefill": "batched",
        "budget": {"share": 1000, "of": "tokens"},
        "offload_dir": str(model / "offload"),
        "kv_memory_bytes": 1 << 30,
        **more,
    }
    (model / "config-run.json").write_text(json.dumps({"config": config, "asked": asked, "ids": calibration}))
    code = (
        "import json, sys, torch; torch.set_num_threads(1); from pathlib import Path\n"
        "from batch_server.__main__ import _one_batch; from batch_server.loop import ForkLoop\n"
        "given = json.load(open(sys.argv[1]))\n"
        "_one_batch(ForkLoop(given['config'], lambda text: given['ids']), given['asked'], Path(sys.argv[2]))\n"
        "import os; os._exit(0)"
    )
    python = environment(name) / "bin" / "python"
    out = model / "out.npz"
    done = subprocess.run(
        [str(python), "-c", code, str(model / "config-run.json"), str(out)],
        env=fork_environment(()),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(out) as arrays:
        return dict(arrays)


def cases(folder: str) -> list[tuple[str, dict[str, Any]]]:
    meta = json.loads((DATA / folder / "meta.json").read_text())
    return [(prefill, case) for case in meta["cases"] for prefill in ("batched", "sequential")]


@pytest.mark.parametrize(
    ("prefill", "case"), cases("flexgen_h2o"), ids=lambda v: v["tag"] if isinstance(v, dict) else v
)
def test_h2o_is_the_authors(model: Path, prefill: str, case: dict[str, Any]) -> None:
    expected = load_file(DATA / "flexgen_h2o" / "expected.safetensors")
    tag, prompts = case["tag"], expected["prompt_ids"]
    knobs = ["--hh-ratio", str(case["hh_ratio"]), "--hh-all", "--percent", *["100", "0", "100", "0", "100", "0"]]
    got = run("h2o", model, knobs, {"prompts": prompts.tolist(), "max_tokens": 25}, [], prefill=prefill)
    assert (got["tokens"] == expected[f"out_ids_{tag}"][:, prompts.shape[1] :]).all()
    assert np.abs(got["logits"] - expected[f"logits_{tag}"]).max() < 1e-4
    # The last step's choice is made but not carried out.
    assert (got["evicted"] == expected[f"evict_slot_{tag}"][: len(got["evicted"])]).all()
    kept = got["kept"]
    assert kept.shape[2] == 2 * case["hh_k"] - 1 and len(got["evicted"]) == 23 and len(kept) == 24
    assert all(len(set(kept[-1, layer, :, head])) == kept.shape[2] for layer in range(5) for head in range(8))


@pytest.mark.parametrize(
    ("prefill", "case"), cases("flexgen_infinigen"), ids=lambda v: v["tag"] if isinstance(v, dict) else v
)
def test_infinigen_is_the_authors(model: Path, prefill: str, case: dict[str, Any]) -> None:
    expected = load_file(DATA / "flexgen_infinigen" / "expected.safetensors")
    tag, prompts = case["tag"], expected["prompt_ids"]
    knobs = [
        *("--alpha", str(case["alpha"]), "--partial-weight-ratio", str(case["partial_weight_ratio"])),
        *("--max-num-kv", str(case["max_num_kv"]), "--percent", *["100", "0", "0", "100", "100", "0"]),
        *("--warmup-input-path", os.devnull),
    ]
    asked = {"prompts": prompts.tolist(), "max_tokens": 25}
    got = run("infinigen", model, knobs, asked, expected["calib_ids"][0].tolist(), prefill=prefill)
    assert (got["tokens"] == expected[f"out_ids_{tag}"][:, prompts.shape[1] :]).all()
    assert np.abs(got["logits"] - expected[f"logits_{tag}"]).max() < 1e-4
    want = expected[f"prefetch_{tag}"][:, :, : got["fetched"].shape[2]]
    assert (np.sort(got["fetched"], axis=2) == np.sort(want, axis=2)).all()


def test_flexgen_and_h2o_at_full_budget_answer_alike(model: Path) -> None:
    expected = load_file(DATA / "flexgen_h2o" / "expected.safetensors")
    asked = {"prompts": expected["prompt_ids"].tolist(), "max_tokens": 25}
    ways = [
        run("flexgen", model, ["--percent", *["100", "0", "100", "0", "100", "0"]], asked, []),
        run("flexgen", model, ["--percent", *["100", "0", "0", "100", "100", "0"]], asked, []),
        run("h2o", model, ["--percent", *["100", "0", "100", "0", "100", "0"], "--hh-ratio", "1"], asked, []),
    ]
    assert all((way["tokens"] == ways[0]["tokens"]).all() for way in ways)
    assert all(np.abs(way["logits"] - ways[0]["logits"]).max() < 1e-5 for way in ways)
    assert ways[0]["kv_bytes"][0] > 0 and ways[0]["kv_bytes"][1] == 0 and ways[1]["kv_bytes"][1] > 0


@pytest.mark.parametrize("name", ["h2o", "infinigen", "flexgen"])
def test_the_environment_holds_the_pinned_commit(name: str) -> None:
    head = environment(name) / "fork" / ".git" / "HEAD"
    assert head.read_text().strip() == pinned_commit(name)
    freeze = environment(name).with_name(environment(name).name + ".txt").read_text()
    assert pinned_commit(name) in freeze and HERE.name == "upstream"
