"""Tiny random models with real tokenizer files, float32, and engines over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from kvstudy.engine.config import EngineConfig
from kvstudy.engine.core import Engine

VOCAB = 320
EOS = 257

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def _save_tokenizer(folder: Path) -> None:
    """Bytes as tokens 0..255: any text, and half characters, are easy to write down."""
    vocab = {char: byte for byte, char in enumerate(_byte_characters())}
    vocab |= {"<bos>": 256, "<eos>": EOS}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with grouped heads: 4 query heads over 2 KV heads."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=EOS,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def opt_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=48,
        init_std=0.3,
        bos_token_id=256,
        eos_token_id=EOS,
        pad_token_id=1,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny-opt"
    OPTForCausalLM(config).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


@pytest.fixture
def engine_of(llama_dir: Path) -> Callable[..., Engine]:
    """Makes an engine over the tiny Llama (or `model_dir`), float32, a pool of 4 MiB, unless told otherwise."""

    def make(tokenizer: Any = None, **options: Any) -> Engine:
        defaults: dict[str, Any] = {"model_dir": llama_dir, "dtype": "float32", "kv_memory_bytes": 1 << 22}
        return Engine(EngineConfig.model_validate(defaults | options), tokenizer)

    return make


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer, for long prompts."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=40000,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("models") / "one-layer"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
