"""A Hugging Face OPT folder in the format of the authors' forks: one NumPy file a tensor, under FlexGen's names.

    kvstudy convert --model models/NAME --out models/NAME.flexgen --card models/NAME.flexgen.json

The forks would download and convert by themselves, from the newest revision, as pickles; this converts the pinned model
that every other framework serves. float16 stays; what else there is becomes float32, exactly, and the fork rounds it to
its own float16 as it loads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvstudy.grid.store import staged, write_json

#: Name of the model inside the folder; the forks look for `<path>/<name>-np/`.
NAME = "opt"


class Unconvertible(ValueError):
    """The forks have no such architecture; the message says what differs."""


def check(config: dict[str, Any]) -> None:
    """Raise `Unconvertible` where a model's config is not the OPT that the forks compute."""
    if config.get("model_type") != "opt":
        raise Unconvertible(f"the forks have OPT models only, not {config.get('model_type')}")
    hidden = config["hidden_size"]
    wanted = {
        "do_layer_norm_before": True,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
        "_remove_final_layer_norm": False,
    }
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise Unconvertible(f"the forks' OPT has {key} {value}, this model {config[key]}")


def fork_name(name: str) -> str:
    """A tensor's name in the forks."""
    return name.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")


def convert(model_dir: Path, out: Path) -> int:
    """Write `out`/opt-np/; returns how many tensors it holds. Whole or absent."""
    import torch
    from safetensors import safe_open

    check(json.loads((model_dir / "config.json").read_text(encoding="utf-8")))
    shutil.rmtree(out, ignore_errors=True)
    count = 0
    with staged(out) as folder:
        (folder / f"{NAME}-np").mkdir()
        for path in sorted(model_dir.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  not a dict
                    tensor = file.get_tensor(name)
                    array = (tensor if tensor.dtype == torch.float16 else tensor.float()).numpy()
                    with (folder / f"{NAME}-np" / fork_name(name)).open("wb") as target:
                        np.save(target, array)
                    count += 1
    return count


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit code 2 with one line where the model cannot be converted."""
    parser = argparse.ArgumentParser(prog="kvstudy convert", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="prepared model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--card", type=Path, required=True, help="written when the folder is whole")
    options = parser.parse_args(argv)
    if not (options.model / "config.json").is_file():
        print(f"kvstudy convert: no model in {options.model}: config.json is missing", file=sys.stderr)
        return 2
    try:
        count = convert(options.model, options.out)
    except Unconvertible as error:
        print(f"kvstudy convert: unsupported: {error}", file=sys.stderr)
        return 2
    write_json(options.card, {"model": options.model.name, "tensors": count, "format": "FlexGen, one .npy a tensor"})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
