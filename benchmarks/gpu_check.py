"""Whether the engine is right and fast on a GPU: `PYTHONPATH=src:. python benchmarks/gpu_check.py [--json FILE]`.

Needs torch, transformers and numpy, nothing else of this project's environment, and ends within eight minutes: what has
no time left is skipped, and said to be. First every policy on the GPU against plain torch on the CPU, in float32, with
random weights: each output token is forced, and the logits that it would have been chosen from are compared. Then the
rows of `engine.py` that need no vLLM, with random weights of a Llama of about a billion parameters in bfloat16
(`--device cpu`: a small one, to see that this program works).

A policy chooses entries by scores, and where two scores are closer than rounding the devices may choose differently; so
a row is met when the logits of 97 tokens in 100 are within 1e-2 of their spread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

try:
    import pydantic  # noqa: F401
except ImportError:
    from benchmarks import plain_pydantic

    sys.modules["pydantic"] = plain_pydantic

from benchmarks.common import Row
from kvstudy.engine import policies
from kvstudy.engine.config import Budget, EngineConfig
from kvstudy.engine.core import Engine
from kvstudy.engine.request import SamplingParams

LIMIT_S = 480.0
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "offload": ("offload", {}),
    "streaming": ("streaming", {}),
    "random": ("random", {}),
    "h2o realdrop": ("h2o", {"rule": "realdrop"}),
    "h2o flexgen": ("h2o", {"rule": "flexgen"}),
    "h2o paper": ("h2o", {"rule": "paper"}),
    "h2o masked": ("h2o", {"rule": "masked"}),
    "infinigen": ("infinigen", {"skew": "none", "alpha": 2.0}),
    "infinigen, limited pool": ("infinigen", {"skew": "none", "alpha": 2.0, "pool_capacity": 0.6}),
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, **SMALL},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        **SMALL,
    },
}
LARGE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 40000,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "pad_token_id": None,
}


class Check:
    """A device, a clock, and rows."""

    def __init__(self, device: str, limit_s: float) -> None:
        self.device = device
        self.end = time.monotonic() + limit_s
        self.small = device == "cpu"
        self.folder = Path(tempfile.mkdtemp(prefix="kvstudy-gpu-check-"))

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.end - time.monotonic()

    def engine(self, shape: dict[str, Any], device: str, **options: Any) -> Engine:
        """An engine with random weights of a shape: drawn on the CPU, so that every device has the same."""
        (self.folder / "config.json").write_text(json.dumps(shape))
        defaults: dict[str, Any] = {
            "model_dir": self.folder,
            "random_weights": True,
            "device": device,
            "dtype": "bfloat16",
            "block_size": 32,
        }
        return Engine(EngineConfig(**(defaults | options)))

    # -- right? ------------------------------------------------------------------------------------------------

    def correctness(self) -> Iterator[Row]:
        """Every policy, GPU against CPU."""
        for model, shape in MODELS.items():
            for label, (policy, options) in POLICIES.items():
                if policy in policies.names():
                    yield self.same(f"{model}, {label}: logits as on the CPU", shape, policy, options)

    def same(self, name: str, shape: dict[str, Any], policy: str, options: dict[str, Any]) -> Row:
        """Three requests that join one another, the same on both."""
        logits = []
        for device, kernels in ((self.device, True), ("cpu", False)):
            engine = self.engine(
                shape,
                device,
                dtype="float32",
                policy=policy,
                policy_options=options,
                budget=Budget(share=0.3),
                kv_memory_bytes=1 << 26,
                host_kv_memory_bytes=1 << 26,
                max_prefill_tokens=96,
                use_kernels=kernels,
            )
            draw = torch.Generator().manual_seed(5)
            forced = [tuple(torch.randint(0, 1024, (16,), generator=draw).tolist()) for _ in range(3)]
            requests = []
            for length, tokens in zip((230, 41, 128), forced, strict=True):
                prompt = torch.randint(0, 1024, (length,), generator=draw).tolist()
                requests.append(
                    engine.submit(prompt, SamplingParams(max_tokens=16, forced_tokens=tokens, return_logits=True))
                )
                engine.step()
            run(engine)
            logits.append(torch.stack([row for request in requests for row in request.logits]))
        off = (logits[0] - logits[1]).abs().amax(-1) / logits[1].std(-1)
        alike = float((off < 1e-2).float().mean())
        return Row(name, alike, "of tokens", float(off.median()), 0.97, alike >= 0.97)

    # -- fast? -------------------------------------------------------------------------------------------------

    def speed(self) -> Iterator[Row]:
        """Decoding, prompts, memory."""
        shape = {**LARGE, "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512} if self.small else LARGE
        contexts = [64, 256] if self.small else [256, 4096]
        engine = self.engine(
            shape,
            self.device,
            other_policies=self.others(),
            budget=Budget(share=0.2),
            kv_memory_bytes=(1 << 28) if self.small else (16 << 30),
            host_kv_memory_bytes=(1 << 28) if self.small else (8 << 30),
            max_num_seqs=64,
            max_prefill_tokens=4096,
        )
        kv = engine.device_pool.kv
        rate = self.read_rate(kv)
        yield Row("memory read", rate / 1e9, "GB/s")
        short, long = contexts
        token = engine.device_pool.entry_bytes * engine.model.geometry.layers
        floor = self.decode(engine, 8, 16)
        yield Row("decode full 8 x 16 (t0)", floor.seconds * 1e3, "ms/step")
        for batch, context in ((1, short), (8, short), (32, short), (8, long)):
            found = self.decode(engine, batch, context)
            limit = (engine.model.weight_bytes + batch * context * token) / rate
            yield Row(f"decode full {batch} x {context}", found.seconds * 1e3, "ms/step", limit / found.seconds)
        whole = found
        sparse = self.decode(engine, 8, long, "h2o")
        share = sparse.held / whole.held
        yield Row(f"decode h2o 0.2, 8 x {long}", sparse.seconds * 1e3, "ms/step", whole.seconds / sparse.seconds)
        most = share / 0.7 * max(whole.seconds - floor.seconds, 0.0)
        extra = sparse.seconds - floor.seconds
        yield Row("h2o 0.2: t(b) - t0", extra * 1e3, "ms", extra / most if most else None, most * 1e3, extra <= most)
        kept = 8 * int(0.2 * long) * token
        off = sparse.held / kept
        yield Row(f"KV held, h2o 0.2, 8 x {long}", sparse.held, "bytes", off, 1.0, abs(off - 1) < 0.01)
        guessed = self.decode(engine, 8, long, "infinigen")
        yield Row(
            f"decode infinigen 0.2, 8 x {long}", guessed.seconds * 1e3, "ms/step", whole.seconds / guessed.seconds
        )
        if "offload" in policies.names():
            moved = self.decode(engine, 8, long, "offload")
            faster = moved.seconds / guessed.seconds
            yield Row(f"decode offload, 8 x {long}", moved.seconds * 1e3, "ms/step", faster, 1.5, faster >= 1.5)
        for length in (64, 512) if self.small else (512, 4096):
            seconds = [self.prefill(engine, length) for _ in range(3)]
            yield Row(f"prefill {length}", length / statistics.median(seconds), "tok/s")
        yield from self.workspace(engine)

    def others(self) -> dict[str, dict[str, Any]]:
        """Policies beside `full` in the engine whose speed is measured."""
        wanted: dict[str, dict[str, Any]] = {"h2o": {}, "infinigen": {"skew": "none", "alpha": 99.0}, "offload": {}}
        return {name: options for name, options in wanted.items() if name in policies.names()}

    def read_rate(self, kv: torch.Tensor) -> float:
        """Bytes a second at which the device reads the pool."""
        words = kv.view(torch.int32).flatten()
        words = words[: 1 << 28]

        def read() -> None:
            words.max().item()

        return words.numel() * 4 / min(timed(read) for _ in range(5))

    def decode(self, engine: Engine, batch: int, context: int, policy: str = "full") -> Decoded:
        """Median seconds of a decode step of so many requests, their prompts read, and the KV that they hold."""
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        draw = torch.Generator().manual_seed(context)
        requests = [
            engine.submit(torch.randint(0, 1000, (context,), generator=draw).tolist(), params, policy)
            for _ in range(batch)
        ]
        while any(len(request.output) < 4 for request in requests):
            engine.step()
        held = engine.device_pool.live_bytes
        seconds = []
        while all(not request.is_finished for request in requests):
            seconds.append(timed(engine.step))
        run(engine)
        return Decoded(statistics.median(seconds[:-1]), held)

    def prefill(self, engine: Engine, length: int) -> float:
        """Seconds to the first token of a prompt."""
        prompt = torch.randint(0, 1000, (length,)).tolist()
        return timed(lambda: engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True)))

    def workspace(self, engine: Engine) -> Iterator[Row]:
        """Bytes that a prompt takes beside the pool, as torch's allocator has it: twice for twice the tokens."""
        if self.device != "cuda":
            return
        peaks = {}
        for length in (8192, 16384, 32768):
            if self.left_s < 60:
                yield Row(f"prefill workspace {length}: no time left", None, "bytes")
                return
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            engine.generate([[7] * length], SamplingParams(max_tokens=1, ignore_eos=True), "h2o")
            peaks[length] = torch.cuda.max_memory_allocated() - before
            grows = peaks[length] / peaks[length // 2] if length // 2 in peaks else None
            met = None if grows is None else grows < 2.2
            yield Row(
                f"prefill workspace, h2o, {length}",
                peaks[length],
                "bytes",
                grows,
                2.2 if met is not None else None,
                met,
            )


@dataclass(frozen=True)
class Decoded:
    """A decode row: seconds a step, bytes of KV held."""

    seconds: float
    held: int


def run(engine: Engine) -> None:
    """Step until nothing is left to do."""
    while engine.has_work():
        engine.step()


def timed(function: Callable[[], Any]) -> float:
    """Seconds of a call, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def describe(device: str) -> dict[str, Any]:
    """The machine, without the packages that it may lack."""
    import platform

    import numpy
    import transformers

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "device": device,
    }
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def main() -> int:
    """Exit code 0: everything met; 1: a row was not; 2: no such device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="time that it may take (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there, after each row")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device here (--device cpu tries the program itself)", file=sys.stderr)
        return 2
    machine = describe(options.device)
    print(json.dumps(machine), flush=True)
    check = Check(options.device, options.seconds)
    found: list[Row] = []
    for part in (check.correctness, check.speed):
        for row in part():
            found.append(row)
            say(row)
            if options.json is not None:
                everything = {"machine": machine, "rows": [asdict(item) for item in found]}
                options.json.write_text(json.dumps(everything, indent=1))
            if check.left_s < 20:
                print(f"gpu_check: {options.seconds:g} s are over; the rest of {part.__name__} is skipped", flush=True)
                break
    missed = [row.name for row in found if row.met is False]
    print(f"gpu_check: {len(found)} rows, {len(missed)} not met, {options.seconds - check.left_s:.0f} s", flush=True)
    return 1 if missed else 0


def say(row: Row) -> None:
    """A row as a line."""
    value = "NA" if row.value is None else f"{row.value:.5g}"
    ratio = "" if row.ratio is None else f"  ({row.ratio:.3g})"
    met = "" if row.met is None else f"  target {row.target:.3g}: {'met' if row.met else 'NOT MET'}"
    print(f"{row.name:55} {value:>10} {row.unit}{ratio}{met}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
