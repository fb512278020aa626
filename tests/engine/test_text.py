"""Incremental text: whole characters, nothing lost, stop strings cut out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvstudy.engine.text import Detokenizer


@pytest.fixture(scope="module")
def tokenizer(llama_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(llama_dir)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_no_character_is_split_or_lost(text: str, tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, list(b"prompt"))
    parts = [detokenizer.add(byte) for byte in text.encode()]
    parts.append(detokenizer.flush())
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts) or "\ufffd" in text


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.add(byte) for byte in "é".encode()[:1]] == [""]
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one two three", ("two",), "one "),
        ("aab aac", ("aac",), "aab "),
        ("abcabd!", ("abd", "!"), "abc"),
        ("nothing here", ("xyz",), "nothing here"),
        ("ends in sto", ("stop",), "ends in sto"),
    ],
)
def test_stop_strings_are_never_shown(text: str, stops: tuple[str, ...], shown: str, tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, [], stops)
    out = ""
    for byte in text.encode():
        out += detokenizer.add(byte)
        if detokenizer.stopped:
            break
    out += detokenizer.flush()
    assert out == shown
