"""What an engine is configured by: one typed, closed model, read from JSON and served back at `GET /config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

GIB = 1 << 30
PrefillVariant = Literal["blocked", "full_matrix", "chunked_lossy"]


class Budget(BaseModel):
    """The share b of KV entries that a decode step may attend to, with its base named.

    `prompt`: b times the prompt's length, fixed when the prompt ends. `current`: b times the entries there
    are now, so it grows with the output. `tokens`: `share` is an absolute number of entries.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(default=1.0, gt=0)
    of: Literal["prompt", "current", "tokens"] = "prompt"

    @property
    def is_full(self) -> bool:
        """Whether the budget switches every policy off (b = 1)."""
        return self.of != "tokens" and self.share >= 1.0

    def entries(self, prompt_tokens: int, current_tokens: int | None = None) -> int:
        """The number of entries kept, at least 1, with this prompt (and this many tokens by now)."""
        if self.of == "tokens":
            return max(1, int(self.share))
        base = prompt_tokens if self.of == "prompt" or current_tokens is None else current_tokens
        return max(1, min(base, int(self.share * base + 1e-9)))


class EngineConfig(BaseModel):
    """One deployment of the engine. Sizes are bytes or tokens, as the name says; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_dir: Path
    served_model_name: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    seed: int = 0
    random_weights: bool = False
    """Take shapes from `model_dir/config.json` and draw the weights from `seed` (the size axis of a study).
    """

    policy: str = "full"
    policy_options: dict[str, Any] = Field(default_factory=dict)
    """Checked by the policy's own `Options`; see `kvstudy.engine.policies`."""
    other_policies: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """More policies, name -> options, that a request may ask for by the extension field `kvstudy_policy`."""
    budget: Budget = Budget()

    kv_memory_bytes: int = Field(GIB, gt=0)
    host_kv_memory_bytes: int = Field(0, ge=0)
    block_size: int = Field(16, ge=1, le=256)

    scheduler: Literal["continuous", "static"] = "continuous"
    max_num_seqs: int = Field(64, ge=1)
    max_prefill_tokens: int = Field(512, ge=1)
    """Prompt tokens computed in one step, over all requests: the chunk."""
    prefill: PrefillVariant = "blocked"
    """How a prompt's attention is computed; only `blocked` is for serving, see `kvstudy.engine.attending`."""
    max_model_len: int | None = Field(None, ge=2)
    """Prompt and output together; None takes the model's own limit."""
    max_queue: int = Field(4096, ge=1)
    """Requests waiting beyond this are answered 429."""

    tensor_parallel: int = Field(1, ge=1)
    """Processes that share the model, each with its part of the heads, started by torchrun; `kv_memory_bytes` and
    `host_kv_memory_bytes` are all of theirs together.
    """
    cores: list[int] | None = None
    """CPU ids to pin to; the number of threads is their number. None leaves the process as it is."""
    link_gbps: float | None = Field(None, gt=0)
    """Rate in GB/s (10^9 bytes) to which moves between tiers are paced; None does not pace."""
    use_kernels: bool = True
    """Use the compiled CPU kernels where they can be built; False takes plain torch."""

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    api_key: str | None = None

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model_dir.name

    @classmethod
    def read(cls, path: Path) -> EngineConfig:
        """Read a JSON file; raises `pydantic.ValidationError` that names the unknown or wrong keys."""
        return cls.model_validate_json(path.read_text())
