"""The engine's tiny models, here too."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from kvstudy.grid.schema import Tasks

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


@pytest.fixture(scope="session")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    """A task of eight questions, with the absolute path of its data, as lm-eval wants it."""
    here = Path(__file__).parent / "tasks"
    made = tmp_path_factory.mktemp("tasks")
    task = yaml.safe_load((here / "colours.yaml").read_text())
    task["dataset_kwargs"]["data_files"]["test"] = str(here / "colours.jsonl")
    (made / "colours.yaml").write_text(yaml.safe_dump(task))
    return Tasks(names=("kvstudy_colours",), version="0.4.13", include_path=str(made))
