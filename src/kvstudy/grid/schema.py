"""The typed cell: everything that can change a measured number, and nothing else.

Every model forbids unknown keys, so a misspelt option is an error that names the choices and never a
silently ignored one. A cell's identity is the hash of its canonical JSON without `NOT_IDENTITY`: titles
and patience are for people and do not enter it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

#: Fields that cannot change a measured number.
NOT_IDENTITY = frozenset({"title", "bring_up_s", "cluster"})


class Strict(BaseModel):
    """A frozen record that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# --- lengths -------------------------------------------------------------------------------------


class FixedLength(Strict):
    """Every request has `tokens` tokens."""

    kind: Literal["fixed"] = "fixed"
    tokens: PositiveInt


class UniformLength(Strict):
    """Lengths uniform over the integers low..high, both included."""

    kind: Literal["uniform"] = "uniform"
    low: PositiveInt
    high: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> UniformLength:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class LognormalLength(Strict):
    """exp(N(ln median, sigma)), rounded, clipped to low..high (the shape of most chat traces)."""

    kind: Literal["lognormal"] = "lognormal"
    median: PositiveFloat
    sigma: PositiveFloat
    low: PositiveInt = 1
    high: PositiveInt


class NormalLength(Strict):
    """N(mean, sd), rounded, clipped to low..high."""

    kind: Literal["normal"] = "normal"
    mean: PositiveFloat
    sd: PositiveFloat
    low: PositiveInt = 1
    high: PositiveInt


class TraceLength(Strict):
    """Lengths of the load's own trace, row by row, cut to `high` (needs `load: trace`)."""

    kind: Literal["trace"] = "trace"
    high: PositiveInt


class EmpiricalLength(Strict):
    """Lengths of the rows of a recorded trace, drawn with replacement and cut to `high`, under any load.

    Prompt and output of the same file are taken from the same row, so that they go together as they did.
    """

    kind: Literal["empirical"] = "empirical"
    path: str
    format: Literal["azure", "mooncake", "burstgpt"]
    sha256: str | None = None
    high: PositiveInt


Length = Annotated[
    FixedLength | UniformLength | LognormalLength | NormalLength | TraceLength | EmpiricalLength,
    Field(discriminator="kind"),
]


# --- the axes ------------------------------------------------------------------------------------


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


class TextSource(Strict):
    """Where prompts come from.

    `pydoc` is English text that every Python has: a stand-in, and every caption says so.
    """

    kind: Literal["pydoc", "hub", "jsonl"] = "pydoc"
    hub_id: str | None = None
    revision: str | None = None
    subset: str | None = None
    split: str = "train"
    path: str | None = None
    field: str = "text"

    @model_validator(mode="after")
    def _source_is_complete(self) -> TextSource:
        needs = {"pydoc": (), "hub": ("hub_id", "revision"), "jsonl": ("path",)}[self.kind]
        missing = [key for key in needs if getattr(self, key) is None]
        if missing:
            raise ValueError(f"text kind '{self.kind}' needs {', '.join(missing)}")
        return self


class SharedPrefix(Strict):
    """What prompts have in common from their start.

    `common`: the first `share` of each prompt is one of `groups` prefixes. `sessions`: `active` conversations take
    turns; each of a session's `turns` prompts repeats all earlier ones (drawn text stands for the answers) and adds the
    drawn length.
    """

    kind: Literal["common", "sessions"] = "common"
    share: float = Field(default=0.0, ge=0.0, le=0.9)
    groups: PositiveInt = 1
    turns: PositiveInt = 4
    active: PositiveInt = 4


def mean_tokens(length: Length) -> float:
    """Mean of a length in tokens, clipping aside.

    Raises
    ------
    ValueError
        It is a trace's, which only the trace knows.
    """
    if isinstance(length, FixedLength):
        return float(length.tokens)
    if isinstance(length, UniformLength):
        return (length.low + length.high) / 2.0
    if isinstance(length, NormalLength):
        return length.mean
    if isinstance(length, LognormalLength):
        return length.median * math.exp(length.sigma**2 / 2.0)
    raise ValueError("load.token_rate needs lengths whose mean is known; a trace's are not")


class Workload(Strict):
    """What is asked: text, lengths, and the share of long requests (the paper's "mix")."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    title: str = Field(default="")
    text: TextSource = TextSource()
    prompt: Length
    long_prompt: Length | None = None
    long_share: float = Field(default=0.0, ge=0.0, le=1.0)
    output: Length
    long_output: Length | None = None
    shared_prefix: SharedPrefix = SharedPrefix()
    api: Literal["completions", "chat"] = "completions"
    ignore_eos: bool = True
    temperature: float = Field(default=0.0, ge=0.0)

    def tokens_a_request(self) -> float:
        """Prompt and output tokens of a request in the mean, long ones included (sessions: of a first turn)."""
        short = mean_tokens(self.prompt) + mean_tokens(self.output)
        if self.long_prompt is None:
            return short
        long = mean_tokens(self.long_prompt) + mean_tokens(self.long_output or self.output)
        return (1.0 - self.long_share) * short + self.long_share * long

    @model_validator(mode="after")
    def _mix_is_defined(self) -> Workload:
        if self.long_share > 0 and self.long_prompt is None:
            raise ValueError("long_share above 0 needs long_prompt")
        if self.api == "chat" and (self.shared_prefix.share > 0 or self.shared_prefix.kind == "sessions"):
            raise ValueError("shared_prefix needs api=completions: a chat template would come between")
        return self


class Slo(Strict):
    """A service level: bounds in seconds that a good request meets, all of them."""

    ttft_s: PositiveFloat | None = None
    tpot_s: PositiveFloat | None = None
    e2el_s: PositiveFloat | None = None

    @model_validator(mode="after")
    def _bounds_something(self) -> Slo:
        if self.ttft_s is None and self.tpot_s is None and self.e2el_s is None:
            raise ValueError("a service level bounds at least one of ttft_s, tpot_s, e2el_s")
        return self

    def bounds(self) -> dict[str, float]:
        """Those that are set, by the metric they bound."""
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}
        return {name: bound for name, bound in values.items() if bound is not None}


class _Timed(Strict):
    slo: Slo | None = None  # what goodput counts by; None: no goodput
    warmup_requests: int = Field(default=4, ge=0)
    duration_s: PositiveFloat
    timeout_s: PositiveFloat = 120.0
    drain_s: PositiveFloat = 60.0


class _Rated(_Timed):
    """Has a mean rate, in requests a second or set by the grid from `token_rate`.

    That is in tokens a second, prompt and output, by the mean of the workload's lengths: workloads of different lengths
    are compared at equal work.
    """

    rate: PositiveFloat
    token_rate: PositiveFloat | None = None


class PoissonLoad(_Rated):
    """Open loop: exponential gaps at `rate` requests a second, drawn ahead at unit rate and divided."""

    name: Literal["poisson"] = "poisson"


class GammaLoad(_Rated):
    """Open loop: gamma gaps with mean 1/`rate` and squared coefficient of variation `burstiness`.

    1 is Poisson, above 1 comes in bursts. (vLLM's `--burstiness` is the shape, 1 over this.) The mean rate does
    not depend on it, so that burstiness is not load in disguise.
    """

    name: Literal["gamma"] = "gamma"
    burstiness: PositiveFloat


class ConstantLoad(_Rated):
    """Open loop: equal gaps of 1/`rate`."""

    name: Literal["constant"] = "constant"


class RampLoad(_Timed):
    """Open loop: Poisson whose rate goes linearly from `rate` to `end_rate` over `duration_s`."""

    name: Literal["ramp"] = "ramp"
    rate: PositiveFloat
    end_rate: PositiveFloat


class BurstLoad(_Timed):
    """All `requests` at once, at time 0 (the rate is infinite); `duration_s` bounds how long they are waited for."""

    name: Literal["burst"] = "burst"
    requests: PositiveInt


class TraceLoad(_Timed):
    """Open loop: the arrivals of a recorded trace, `start_s` to `start_s + duration_s x speed` of it.

    `speed` above 1 replays faster. `format` names the columns: `azure` (TIMESTAMP, ContextTokens, GeneratedTokens),
    `mooncake` (timestamp in ms, input_length, output_length, hash_ids), `burstgpt` (Timestamp in s, Request tokens,
    Response tokens). Pinned by the file's hash where it is given.
    """

    name: Literal["trace"] = "trace"
    path: str
    format: Literal["azure", "mooncake", "burstgpt"]
    sha256: str | None = None
    start_s: float = Field(default=0.0, ge=0.0)
    speed: PositiveFloat = 1.0


class KneeLoad(_Timed):
    """Finds the highest Poisson rate between `low` and `high` at which a share `goal` of requests meets `slo`.

    Every probe offers its rate for `duration_s`; at most `probes` of them, until the bracket is within `precision`.
    """

    name: Literal["knee"] = "knee"
    slo: Slo  # not optional: it is what the search is for
    low: PositiveFloat
    high: PositiveFloat
    goal: float = Field(default=0.9, gt=0.0, lt=1.0)
    precision: PositiveFloat = 0.05
    probes: PositiveInt = 12

    @model_validator(mode="after")
    def _ordered(self) -> KneeLoad:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class ClosedLoad(_Timed):
    """Closed loop: `concurrency` requests in flight for `duration_s`."""

    name: Literal["closed"] = "closed"
    concurrency: PositiveInt


Load = Annotated[
    PoissonLoad | GammaLoad | ConstantLoad | RampLoad | BurstLoad | TraceLoad | ClosedLoad | KneeLoad,
    Field(discriminator="name"),
]


def load_label(load: Load) -> str:
    """The part of a load that reads in a cell's name: r2, r2-b4, c8."""
    if isinstance(load, ClosedLoad):
        return f"c{load.concurrency}"
    if isinstance(load, GammaLoad):
        return f"r{number(load.rate)}-b{number(load.burstiness)}"
    if isinstance(load, RampLoad):
        return f"r{number(load.rate)}-{number(load.end_rate)}"
    if isinstance(load, BurstLoad):
        return f"n{load.requests}"
    if isinstance(load, KneeLoad):
        return f"{number(load.low)}-{number(load.high)}"
    if isinstance(load, TraceLoad):
        return f"x{number(load.speed)}"
    return f"r{number(load.rate)}" if load.token_rate is None else f"t{number(load.token_rate)}"


def length_label(length: Length) -> str:
    """The part of a length that reads in a cell's name: 256, 128-384, m512 (median or mean), t3072 (a trace's)."""
    if isinstance(length, FixedLength):
        return number(length.tokens)
    if isinstance(length, UniformLength):
        return f"{length.low}-{length.high}"
    if isinstance(length, TraceLength | EmpiricalLength):
        return f"{length.kind[0]}{length.high}"
    return f"m{number(length.median if isinstance(length, LognormalLength) else length.mean)}"


def workload_label(workload: Workload) -> str:
    """The part of a workload that reads in a cell's name: mix-p128-384-o64-192-l0.1, chat-p512-o64-s0.5."""
    parts = [workload.name, f"p{length_label(workload.prompt)}", f"o{length_label(workload.output)}"]
    if workload.long_prompt is not None:
        parts.append(f"l{number(workload.long_share)}")
    prefix = workload.shared_prefix
    if prefix.kind == "sessions":
        parts.append(f"turns{prefix.turns}x{prefix.active}")
    elif prefix.share > 0:
        parts.append(f"s{number(prefix.share)}" + (f"x{prefix.groups}" if prefix.groups > 1 else ""))
    return "-".join(parts)


class Cluster(Strict):
    """What a job asks of a cluster beside its devices. Nothing here changes what is measured."""

    partition: str | None = None
    gpu_model: str | None = None  # as SLURM's gres names it
    cpus_per_gpu: PositiveInt = 4
    spare_memory_mib: PositiveInt = 4096  # client, Python, the framework's own code
    spare_minutes: PositiveInt = 10  # imports, drawing the workload, a restart of the server


class Hardware(Strict):
    """The machine as the study wants it used. `server_cores` and `client_cores` are disjoint CPU ids, empty: any.

    With `gpus`, a deployment holds `model.gpus` of them for as long as it is up.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    title: str = Field(default="")
    device: Literal["cpu", "cuda"]
    gpus: int = Field(default=0, ge=0)
    server_cores: tuple[int, ...]
    client_cores: tuple[int, ...]
    memory_limit_gib: PositiveFloat | None = None
    link_gbps: PositiveFloat | None = None
    cluster: Cluster = Cluster()

    @model_validator(mode="after")
    def _cuda_has_gpus(self) -> Hardware:
        if self.device == "cuda" and not self.gpus:
            raise ValueError("device 'cuda' needs gpus, the number that the machine has")
        return self


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


# --- frameworks ----------------------------------------------------------------------------------


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
    pins: dict[str, str] = {}
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
    pins: dict[str, str] = {}
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

    `alpha` is in logits, `partial_ratio` the share of a head's columns that speculation reads, `pool_capacity` the
    share of entries that the host pool holds. The budget caps what is fetched. See docs/fidelity.md.
    """

    name: Literal["infinigen"] = "infinigen"
    title: str = Field(default="InfiniGen (ours)")
    rule: Literal["request", "speed", "paper"] = "request"
    alpha: float | None = Field(default=None, ge=0.0)  # None: the authors' 4 for OPT, 5 for models with RoPE
    partial_ratio: float | None = Field(default=None, gt=0.0, le=1.0)
    pool_capacity: float = Field(default=1.0, gt=0.0, le=1.0)
    pool_rule: Literal["fifo", "lru", "counter"] = "counter"
    host_kv_memory_mib: PositiveFloat = 4096.0

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
    pins: dict[str, str] = {}
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


# --- cell, deployment, visit ---------------------------------------------------------------------


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """First 10 hex digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:10]


def identity(value: Any) -> Any:
    """A dumped record without the fields that cannot change a measured number."""
    if isinstance(value, dict):
        return {
            key: identity(inner) if isinstance(inner, dict | list) else inner
            for key, inner in value.items()
            if key not in NOT_IDENTITY
        }
    if isinstance(value, list):
        return [identity(inner) for inner in value]
    return value


def content_hash(record: BaseModel) -> str:
    """The hash that names a record: equal for records that measure the same."""
    return digest(identity(record.model_dump(mode="json")))


def number(value: float) -> str:
    """A number as it reads in a folder's name: 0.5, 2, 12.25."""
    return f"{value:g}"


class Deployment(Strict):
    """What is brought up: a framework with a model on hardware under a KV budget and memory."""

    framework: Framework
    model: Model
    hardware: Hardware
    budget: Budget = Budget()
    kv_memory_mib: PositiveFloat
    sweep: Literal["deployment", "cell"] = "deployment"
    harness_version: int

    @property
    def slug(self) -> str:
        """Readable part of its name."""
        share = f"{self.budget.tokens}t" if self.budget.of == "tokens" else number(self.budget.share)
        parts = [self.framework.label, self.model.name, f"b{share}", f"kv{number(self.kv_memory_mib)}"]
        return "_".join(parts)

    @cached_property
    def id(self) -> str:
        """Readable name and content hash; the same deployment has the same id in every study."""
        return f"{self.slug}-{content_hash(self)}"

    @property
    def devices(self) -> int:
        """GPUs that it holds while it is up; 0: it has a machine without GPUs to itself."""
        return self.model.gpus if self.hardware.gpus else 0

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy that works out its own names: pydantic's would keep the original's."""
        copy = super().model_copy(update=update, deep=deep)
        for name in ("id", "cell_id", "deployment"):
            copy.__dict__.pop(name, None)
        return copy


class Cell(Deployment):
    """A deployment under a load with a seed: one row of the study."""

    workload: Workload
    load: Load
    seed: int = Field(ge=0)

    @model_validator(mode="after")
    def _trace_lengths_have_a_trace(self) -> Cell:
        lengths = (self.workload.prompt, self.workload.output, self.workload.long_prompt, self.workload.long_output)
        if any(isinstance(length, TraceLength) for length in lengths) and not isinstance(self.load, TraceLoad):
            raise ValueError(f"workload '{self.workload.name}' takes its lengths from a trace: it needs load=trace")
        return self

    @cached_property
    def deployment(self) -> Deployment:
        """The part of the cell that is brought up."""
        return Deployment(**{name: getattr(self, name) for name in Deployment.model_fields})

    @property
    def cell_slug(self) -> str:
        """Readable part of the cell's name."""
        return f"{self.slug}_{workload_label(self.workload)}_{self.load.name}-{load_label(self.load)}_s{self.seed}"

    @cached_property
    def cell_id(self) -> str:
        """Readable name and hash of the resolved config: the cell's folder in the store."""
        return f"{self.cell_slug}-{content_hash(self)}"


# --- quality -------------------------------------------------------------------------------------


class Perplexity(Strict):
    """Real text after contexts of it, teacher-forced under the policy: negative log-likelihood, and distance from full.

    Each of `items` places in the text gives `context` tokens, which are prefilled and compressed, and `continuation`
    tokens, which are decoded one by one. `held_out` names text that is no workload's.
    """

    contexts: tuple[PositiveInt, ...]
    items: PositiveInt
    continuation: Annotated[int, Field(ge=2)]


class Greedy(Strict):
    """Answers to questions about a text, greedy and until they end: where they leave full's, how long they are."""

    contexts: tuple[PositiveInt, ...]
    items: PositiveInt
    output: Annotated[int, Field(ge=2)]


class Retention(Strict):
    """A fact told once and asked for later, `context` tokens of conversation in all.

    `filler`: what lies between, `text` in one message or `turns` of a chat. `asked`: `prompt`, the question ends the
    prompt and is prefilled with it, as a stateless server serves a conversation; `session`, the cache was compressed
    before the question came, which is decoded, as a server that keeps a session's cache does it. `depths` are where the
    fact lies: 0 at the start, 1 at the end.
    """

    contexts: tuple[PositiveInt, ...]
    depths: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...]
    items: PositiveInt
    output: Annotated[int, Field(ge=2)] = 16
    filler: Literal["text", "turns"] = "turns"
    asked: Literal["prompt", "session"] = "prompt"


class Tasks(Strict):
    """EleutherAI's `lm-eval` (the extra `quality`) against the served deployment, continuations under the policy.

    `include_path`: a folder of task files of your own, relative to the checkout.
    """

    names: tuple[str, ...]
    limit: PositiveInt | None = None
    fewshot: int = Field(default=0, ge=0)
    include_path: str | None = None
    version: str


class Quality(Strict):
    """What a deployment's answers are measured by. Parts that are null are left out; `none` has none."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    title: str = Field(default="")
    text: TextSource = TextSource()
    perplexity: Perplexity | None = None
    greedy: Greedy | None = None
    retention: Retention | None = None
    tasks: Tasks | None = None
    spot_checks: int = Field(default=1, ge=0)

    @property
    def is_empty(self) -> bool:
        """Whether it asks nothing."""
        return not (self.perplexity or self.greedy or self.retention or self.tasks)


class QualityCell(Deployment):
    """A deployment's quality: what is asked, and the seed that items are drawn by."""

    quality: Quality
    seed: int = Field(ge=0)

    @property
    def deployment(self) -> Deployment:
        """The part of the cell that is brought up: the same key as that of the cells that measure its speed."""
        return Deployment(**{name: getattr(self, name) for name in Deployment.model_fields})

    @property
    def cell_slug(self) -> str:
        """Readable part of the cell's name."""
        return f"{self.slug}_q-{self.quality.name}_s{self.seed}"

    @property
    def cell_id(self) -> str:
        """Readable name and hash of the resolved config: the cell's folder in the store."""
        return f"{self.cell_slug}-{content_hash(self)}"

    @property
    def items_key(self) -> str:
        """What the items and their prefill depend on: cells that share it are scored in one go, on the same items."""
        parts = {"model": self.model, "hardware": self.hardware, "quality": self.quality}
        dumped = {name: identity(part.model_dump(mode="json")) for name, part in parts.items()}
        own = self.framework.environment is None
        how = ("block_size", "max_prefill_tokens", "prefill") if own else ()
        chunk = [getattr(self.framework, name, None) for name in how]
        return digest([dumped, self.seed, chunk, self.harness_version, "" if own else self.cell_id])


class QualityVisit(Strict):
    """Cells that are scored together."""

    id: str
    study: str
    cells: tuple[QualityCell, ...]


CELL_ID = re.compile(r"^[a-z0-9][a-z0-9._-]*-[0-9a-f]{10}$")


class Visit(Strict):
    """One bring-up: a deployment and the cells it serves, in the order in which they are served."""

    id: str
    study: str
    deployment: Deployment
    cells: tuple[Cell, ...]
    priority: int = 0
    gpus: int = 0
