"""Who serves: vLLM, the policies of our engine, the authors' forks, each with its options; and the KV budget."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from kvstudy.grid.schema.base import Strict, number


class Budget(Strict):
    """Share of KV entries a decode step may attend to; sparsity is 1 - share (DESIGN, "Words")."""

    share: float = Field(default=1.0, gt=0.0, le=1.0)
    of: Literal["prompt", "current", "tokens"] = "prompt"
    tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _tokens_when_absolute(self) -> Budget:
        if (self.of == "tokens") != (self.tokens is not None):
            raise ValueError("budget.tokens is set exactly when budget.of is 'tokens'")
        return self


#: Options of vLLM that import what they name, or what a model folder brings along.
RUNS_CODE = (
    "--trust-remote-code",
    "--middleware",
    "--logits-processors",
    "--worker-cls",
    "--worker-extension-cls",
    "--scheduler-cls",
    "--tool-parser-plugin",
    "--reasoning-parser-plugin",
    "--io-processor-plugin",
    "--config",
)


class Vllm(Strict):
    """The released vLLM, pinned; paged KV, the full cache.

    `kv_cache_dtype: fp8` stores entries of one byte, so that the same KV memory holds twice as many.
    `offload_mib` is vLLM's native host offloading: finished blocks go to that much host memory and come back when
    a prompt begins with them (so it implies prefix caching).
    """

    name: Literal["vllm"] = "vllm"
    title: str = Field(default="vLLM")
    implementation: Literal["released"] = "released"
    pins: dict[str, str] = Field(default_factory=dict)
    enforce_eager: bool | None = None  # None: eager on a CPU, where compiling takes minutes; graphs on CUDA
    prefix_caching: bool = False
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    offload_mib: PositiveFloat | None = None
    max_num_seqs: PositiveInt = 64
    max_num_batched_tokens: PositiveInt = 512
    block_size: PositiveInt = 32
    bring_up_s: PositiveFloat = Field(default=300.0)
    extra_args: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _offloading_finds_blocks_by_prefix(self) -> Vllm:
        if self.offload_mib is not None and not self.prefix_caching:
            raise ValueError("offload_mib needs prefix_caching: offloaded blocks are found again by their prefix")
        return self

    @property
    def label(self) -> str:
        """Its name with the options that make it another thing to compare, as it reads in a folder's name."""
        marks = {"prefix": self.prefix_caching, "fp8": self.kv_cache_dtype == "fp8", "offload": self.offload_mib}
        return "-".join([self.name, *(mark for mark, on in marks.items() if on)])

    @field_validator("extra_args")
    @classmethod
    def _are_data(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for argument in arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name.startswith(RUNS_CODE):
                raise ValueError(f"{name} runs code that a configuration or a model names: it is refused")
            if name.startswith(("--api-key", "--hf-token")):
                raise ValueError(f"{name} would write a secret into the cell: set it in the environment")
        return arguments

    @property
    def environment(self) -> str | None:
        """Name of the folder of `envs/` whose pins it runs in; None is the project's own."""
        return "vllm"

    @property
    def skewed(self) -> bool:
        """Whether it needs the model's skewing matrices: only InfiniGen does."""
        return False

    @property
    def converted(self) -> bool:
        """Whether it needs the model in the format of the authors' forks: only they do."""
        return False


class _Native(Strict):
    name: str
    implementation: Literal["native"] = "native"
    pins: dict[str, str] = Field(default_factory=dict)
    scheduler: Literal["continuous", "static"] = "continuous"
    max_num_seqs: PositiveInt = 64
    max_prefill_tokens: PositiveInt = 512
    #: Only `blocked` is for serving. The others exist to test the paper's claims C11 to C13: `full_matrix` writes the
    #: prompt's whole matrix of scores out, `chunked_lossy` loses attention across chunks of `max_prefill_tokens`.
    prefill: Literal["blocked", "full_matrix", "chunked_lossy"] = "blocked"
    block_size: PositiveInt = 32
    bring_up_s: PositiveFloat = Field(default=300.0)

    @property
    def label(self) -> str:
        """Its name as it reads in a folder's name, with the rules that are not those it is served with: h2o-flexgen."""
        fields = type(self).model_fields
        said = [name for name in ("rule", "prefill", "scheduler") if name in fields]
        other = [str(getattr(self, name)) for name in said if getattr(self, name) != fields[name].default]
        return "-".join([self.name, *(text.replace("_", "-") for text in other)])

    @property
    def environment(self) -> str | None:
        """Native frameworks run in the project's own environment."""
        return None

    @property
    def converted(self) -> bool:
        """Whether it needs the model in the format of the authors' forks."""
        return False

    @property
    def skewed(self) -> bool:
        """Whether it needs the model's skewing matrices, an offline step of its own."""
        return False

    def policy_options(self) -> dict[str, Any]:
        """Options handed to the policy's module, by its own names."""
        return {}


class Full(_Native):
    """Our engine with the whole cache: the control that separates policy from engine."""

    name: Literal["full"] = "full"
    title: str = Field(default="full cache (ours)")


class Offload(_Native):
    """The whole cache on the host tier, moved in every step (FlexGen, arXiv 2303.06865): InfiniGen's control."""

    name: Literal["offload"] = "offload"
    title: str = Field(default="full cache on the host (ours)")
    host_kv_memory_mib: PositiveFloat = 4096.0


class Streaming(_Native):
    """Attention sinks and a recent window (StreamingLLM, arXiv 2309.17453)."""

    name: Literal["streaming"] = "streaming"
    title: str = Field(default="StreamingLLM (ours)")
    sinks: PositiveInt = 4

    def policy_options(self) -> dict[str, Any]:
        """The number of sink tokens kept at the start."""
        return {"sinks": self.sinks}


class Random(_Native):
    """Random eviction, seeded: the floor that a policy's choice of entries has to beat at the same budget."""

    name: Literal["random"] = "random"
    title: str = Field(default="random eviction (ours)")
    seed: int = Field(default=0, ge=0)

    def policy_options(self) -> dict[str, Any]:
        """The seed of the lots."""
        return {"seed": self.seed}


class H2O(_Native):
    """Heavy hitters and a recent window, everything else evicted (H2O, arXiv 2306.14048).

    `rule` says whose reading: the authors' Llama code (`realdrop`), their FlexGen code (`flexgen`), their masking
    simulation (`masked`: frees nothing, `source: simulated`) or the paper's text. The budget is split between heavy and
    recent entries by `heavy_fraction`. See docs/fidelity.md.
    """

    name: Literal["h2o"] = "h2o"
    title: str = Field(default="H2O (ours)")
    rule: Literal["realdrop", "flexgen", "masked", "paper"] = "realdrop"
    heavy_fraction: float = Field(default=0.5, ge=0.0, le=1.0)

    def policy_options(self) -> dict[str, Any]:
        """The rule and how the budget is split."""
        return {"rule": self.rule, "heavy_fraction": self.heavy_fraction}


class InfiniGen(_Native):
    """The cache on the host tier, what a step needs fetched ahead by speculation (InfiniGen, arXiv 2406.19707).

    `alpha` is in logits (`none`: no threshold, a step fetches its whole budget), `partial_ratio` the share of a head's
    columns that speculation reads, `pool_capacity` the share of entries that the host pool holds. The budget caps what
    is fetched. See docs/fidelity.md.
    """

    name: Literal["infinigen"] = "infinigen"
    title: str = Field(default="InfiniGen (ours)")
    rule: Literal["request", "speed", "paper"] = "request"
    # None: the authors' 4 for OPT, 5 for models with RoPE
    alpha: Annotated[float, Field(ge=0.0)] | Literal["none"] | None = None
    partial_ratio: float | None = Field(default=None, gt=0.0, le=1.0)
    pool_capacity: float = Field(default=1.0, gt=0.0, le=1.0)
    pool_rule: Literal["fifo", "lru", "counter"] = "counter"
    host_kv_memory_mib: PositiveFloat = 4096.0
    # Raised when what it selects or takes changes, as `harness_version` is for everyone: its cells alone are measured
    # again. 2: with grouped heads each query head's scores count from its own greatest. 3: faster speculation, in C.
    revision: Literal[3] = 3

    @property
    def label(self) -> str:
        """As other native frameworks', with an alpha that is not the authors': infinigen-alpha-none."""
        asked = number(self.alpha) if isinstance(self.alpha, float) else self.alpha
        return super().label + (f"-alpha-{asked}" if asked is not None else "")

    @property
    def skewed(self) -> bool:
        """Whether it needs the model's skewing matrices, an offline step of its own."""
        return True

    def policy_options(self) -> dict[str, Any]:
        """Everything but where the skew lies, which the launcher knows."""
        names = ("rule", "alpha", "partial_ratio", "pool_capacity", "pool_rule")
        return {name: getattr(self, name) for name in names}


class _Upstream(Strict):
    """An author's fork in its own environment, behind a *batch server*: FCFS batches of prompts of one length.

    `max_batch` requests at most are decoded together, to the longest output among them; a batch that is not full starts
    once its oldest request has waited `max_wait_s`. `prefill: sequential` computes a layer's attention one prompt at a
    time. `weights: dummy` lets the fork fill its weights with ones (speed only). See docs/forks.md.
    """

    name: str
    implementation: Literal["upstream"] = "upstream"
    pins: dict[str, str] = Field(default_factory=dict)
    serving: Literal["batch server"] = "batch server"
    max_batch: PositiveInt = 8
    max_wait_s: float = Field(default=0.5, ge=0.0)
    prefill: Literal["batched", "sequential"] = "batched"
    weights: Literal["converted", "dummy"] = "converted"
    bring_up_s: PositiveFloat = Field(default=600.0)

    @property
    def label(self) -> str:
        """Its name as it reads in a folder's name."""
        return f"{self.name}-upstream" if self.name in ("h2o", "infinigen") else self.name

    @property
    def skewed(self) -> bool:
        """The forks skew by themselves, at their warm-up."""
        return False

    @property
    def converted(self) -> bool:
        """Whether it needs the model in the forks' own format."""
        return self.weights == "converted"


class FlexGen(_Upstream):
    """The engine that both forks grew from, with the whole cache (FlexGen, arXiv 2303.06865): their control.

    `kv_home` says where the cache lies: on the device as in H2O's runs, or on the host as in InfiniGen's.
    """

    name: Literal["flexgen"] = "flexgen"
    title: str = Field(default="FlexGen (authors', batch server)")
    kv_home: Literal["device", "host"] = "device"
    host_kv_memory_mib: PositiveFloat = 4096.0

    @property
    def environment(self) -> str | None:
        """FlexLLMGen's own."""
        return "flexgen"


class H2OUpstream(_Upstream):
    """H2O as its authors serve it: their FlexGen with `--hh-all`. Half of the budget is heavy hitters, half recent."""

    name: Literal["h2o"] = "h2o"
    title: str = Field(default="H2O (authors' fork, batch server)")
    rule: Literal["flexgen"] = "flexgen"

    @property
    def environment(self) -> str | None:
        """The H2O fork's own."""
        return "h2o"


class InfiniGenUpstream(_Upstream):
    """InfiniGen as its authors measure its speed: the cache on the host, one fetch count for a batch's heads."""

    name: Literal["infinigen"] = "infinigen"
    title: str = Field(default="InfiniGen (authors' fork, batch server)")
    rule: Literal["speed"] = "speed"
    alpha: PositiveInt = 4
    partial_ratio: float = Field(default=0.2, gt=0.0, le=1.0)
    host_kv_memory_mib: PositiveFloat = 4096.0

    @property
    def environment(self) -> str | None:
        """The InfiniGen fork's own."""
        return "infinigen"


Upstream = FlexGen | H2OUpstream | InfiniGenUpstream


Framework = Annotated[
    Vllm
    | Full
    | Offload
    | Streaming
    | Random
    | Annotated[H2O | H2OUpstream, Field(discriminator="implementation")]
    | Annotated[InfiniGen | InfiniGenUpstream, Field(discriminator="implementation")]
    | FlexGen,
    Field(discriminator="name"),
]
