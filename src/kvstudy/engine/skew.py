"""The offline step of InfiniGen: the skewing matrices of a model, from one calibration text.

    python -m kvstudy.engine.skew --model DIR --out FILE [--tokens 2048]

For each layer and KV head the right singular vectors of the queries of the text (after bias and RoPE; of all query
heads of the group one after another) make the matrix A by which queries and keys are turned before speculation;
InfiniGen (OSDI 2024, arXiv 2406.19707), section 4.2. A belongs to a model's weights and to nothing else, so one file
serves every run of that model. Without `--text` the text is Python's own help on its language, which is everywhere the
same for one version.

The file holds `skew` float32 [layers, kv_heads, head_dim, head_dim], and in its metadata what it was made from. A file
that is there already and was made from the same weights and text is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvstudy.engine.policies.infinigen_rules import skew_matrix

FORMAT = "kvstudy-skew-1"


class SkewMissing(FileNotFoundError):
    """There is no usable skew file; the message says how to make it."""


def how_to(model_dir: Path | str) -> str:
    """The command that makes the file."""
    return f"python -m kvstudy.engine.skew --model {model_dir or 'DIR'} --out FILE"


def load_skew(
    source: Path | Literal["none"] | None, model_dir: str, layers: int, kv_heads: int, head_dim: int
) -> Tensor:
    """The matrices of a model, float32 [layers, kv_heads, head_dim, head_dim]; identities for "none".

    Raises `SkewMissing` where no file is named or it is not there, `ValueError` where it was made for another shape.
    """
    if str(source) == "none":
        return torch.eye(head_dim).expand(layers, kv_heads, -1, -1).contiguous()
    if source is None:
        raise SkewMissing(
            f"infinigen needs a skew file: make it with `{how_to(model_dir)}` and name it in the policy option `skew`"
        )
    path = Path(source)
    if not path.is_file():
        raise SkewMissing(f"no skew file {path}: make it with `{how_to(model_dir).replace('FILE', str(path))}`")
    with safe_open(path, framework="pt") as file:
        if (file.metadata() or {}).get("format") != FORMAT:
            raise ValueError(f"{path} is not a skew file (format {FORMAT})")
        skew: Tensor = file.get_tensor("skew")
    want = (layers, kv_heads, head_dim, head_dim)
    if tuple(skew.shape) != want:
        raise ValueError(f"{path} was made for a model of shape {tuple(skew.shape)}, this one needs {want}")
    return skew


def skew_from_queries(queries: Sequence[Tensor], kv_heads: int) -> Tensor:
    """Queries of each layer [heads, n, head_dim] -> float32 [layers, kv_heads, head_dim, head_dim]."""
    each = []
    for q in queries:
        heads, tokens, dim = q.shape
        each.append(skew_matrix(q.reshape(kv_heads, heads // kv_heads * tokens, dim)))
    return torch.stack(each)


def calibrate(model_dir: Path, ids: Sequence[int], dtype: str = "float32") -> Tensor:
    """Run `ids` through the model and skew every layer: float32 [layers, kv_heads, head_dim, head_dim]."""
    from kvstudy.engine.config import EngineConfig
    from kvstudy.engine.model import Model

    model = Model(EngineConfig.model_validate({"model_dir": model_dir, "dtype": dtype}))
    geometry = model.geometry
    queries: list[Tensor] = []

    class Collect:
        wants_input = False

        def attention_input(self, layer: int, hidden: Tensor) -> None:
            pass

        def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer in model.layers.full:
                queries.append(q.transpose(0, 1).float())
            return model.attend_alone(layer, q, k, v)

    ids = list(ids)[: geometry.max_positions]
    tokens = torch.tensor(ids)
    model.forward(tokens, torch.arange(len(ids)), Collect(), tokens.new_tensor([len(ids) - 1]))
    return skew_from_queries(queries, geometry.kv_heads)


def calibration_text() -> str:
    """Python's own help texts, as one."""
    from pydoc_data.topics import topics

    return "\n".join(text for _, text in sorted(topics.items()))


def fingerprint(model_dir: Path, ids: Sequence[int]) -> str:
    """Names what a file is made from: the model's config and weights (names, sizes, first and last MiB) and ids."""
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in sorted([*model_dir.glob("*.safetensors"), *model_dir.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read(1 << 20))
    digest.update(json.dumps([int(i) for i in ids]).encode())
    return digest.hexdigest()


def write_skew(skew: Tensor, out: Path, made_from: str = "", tokens: int = 0) -> None:
    """Write a file that `load_skew` reads, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=out.parent, suffix=".part")
    os.close(handle)
    metadata = {"format": FORMAT, "made_from": made_from, "tokens": str(tokens)}
    save_file({"skew": skew.contiguous()}, name, metadata=metadata)
    os.chmod(name, 0o644)
    os.replace(name, out)


def made_from(path: Path) -> str | None:
    """The fingerprint in a file's metadata; None where there is no such file."""
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("made_from")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvstudy.engine.skew", description="Make InfiniGen's skewing matrices of a model."
    )
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json, weights and tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="file to write (.safetensors)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the text to use (default %(default)s)")
    parser.add_argument("--text", type=Path, help="calibration text; default: Python's help texts")
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        print(f"skew: no model in {args.model}: config.json is missing", file=sys.stderr)
        return 2
    from transformers import AutoTokenizer

    text = args.text.read_text() if args.text else calibration_text()
    # Texts are much longer than the tokens asked for: do not tokenise all of it.
    ids = AutoTokenizer.from_pretrained(args.model)(text[: args.tokens * 16])["input_ids"][: args.tokens]
    mark = fingerprint(args.model, ids)
    if made_from(args.out) == mark:
        print(f"{args.out}: up to date")
        return 0
    write_skew(calibrate(args.model, ids), args.out, mark, len(ids))
    print(f"{args.out}: skewed with {len(ids)} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
