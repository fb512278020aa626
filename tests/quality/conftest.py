"""The engine's tiny models, here too."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

_spec = importlib.util.spec_from_file_location("engine_conftest", Path(__file__).parents[1] / "engine" / "conftest.py")
assert _spec and _spec.loader
_engine = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_engine)
llama_dir, engine_of = _engine.llama_dir, _engine.engine_of


@pytest.fixture(scope="session")
def tokenizer(llama_dir: Path) -> Any:
    """The tiny tokenizer, with a chat template that knows when an answer is to come."""
    made = AutoTokenizer.from_pretrained(llama_dir)
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    made.chat_template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    return made
