"""Which weights are served."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from kvstudy.grid.schema.base import Strict


class Shape(Strict):
    """Shape of a model with random weights (the size axis on machines without a model hub)."""

    architecture: Literal["llama", "opt"]
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = True


class Model(Strict):
    """Which weights are served, pinned so that the same name always means the same numbers."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    title: str = Field(default="")
    source: Literal["hub", "package", "random", "folder"]
    hub_id: str | None = None
    revision: str | None = None
    package: str | None = None
    package_version: str | None = None
    gguf: str | None = None
    path: str | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    shape: Shape | None = None
    seed: int = 0
    tokenizer: Literal["own", "smollm2", "tiny"] = "own"
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    gpus: PositiveInt = 1
    parameters: PositiveInt | None = None
    max_model_len: PositiveInt

    @property
    def weights(self) -> Literal["pretrained", "random"]:
        """Random weights never appear in a quality figure."""
        return "random" if self.source == "random" else "pretrained"

    @model_validator(mode="after")
    def _source_is_complete(self) -> Model:
        needs = {
            "hub": ("hub_id", "revision"),
            "package": ("package", "package_version", "gguf"),
            "random": ("shape",),
            "folder": ("path",),
        }[self.source]
        missing = [key for key in needs if getattr(self, key) is None]
        if missing:
            raise ValueError(f"source '{self.source}' needs {', '.join(missing)}")
        return self
