"""Whether the engine is right and fast on a GPU: `PYTHONPATH=src:. python benchmarks/gpu_check.py [--json [FILE]]`.

Needs torch, transformers and numpy, nothing else of this project's environment, and ends within eight minutes: a step
is not begun where little time is left, and one that does not end is ended with the program. What was not run, or broke,
is in the output like what was not met, and the exit code is 0 only where there is none of the three.

First every policy on the GPU against plain torch on the CPU, in float32, with random weights: each output token is
forced, and the logits that it would have been chosen from are compared. Then the rows of `engine.py` that need no vLLM,
with random weights of a Llama of about a billion parameters in bfloat16 (`--device cpu`: a small one, to see that this
program works; its times mean nothing).

A policy chooses entries by scores, and where two scores are closer than rounding the devices may choose differently; so
a row is met when the logits of 97 tokens in 100 are within 1e-2 of their spread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

try:
    import pydantic  # noqa: F401
except ImportError:
    from benchmarks import plain_pydantic

    sys.modules["pydantic"] = plain_pydantic

from benchmarks.common import Row
from kvstudy.engine.config import Budget, EngineConfig
from kvstudy.engine.core import Engine
from kvstudy.engine.request import Request, SamplingParams

LIMIT_S = 480.0
LEAST_S = 20.0
"""No step is begun with less time than this left."""
Step = Callable[[], Iterator[Row]]
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
    """A device, an engine on it, and what it measured so far."""

    whole: Engine
    """All policies over a large model: the rows of speed."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device = device
        self.small = device == "cpu"
        self.folder = folder
        self.rate = float("nan")
        self.decoded: dict[tuple[str, int, int], Decoded] = {}
        self.peaks: dict[int, int] = {}
        self.short, self.long = (64, 256) if self.small else (256, 4096)

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

    def steps(self) -> Iterator[tuple[str, Step]]:
        """Everything in order, each a name and what yields its rows: right first, then fast."""
        for model, shape in MODELS.items():
            for label, (policy, options) in POLICIES.items():
                name = f"{model}, {label}: logits as on the CPU"
                yield name, partial(self.same, name, shape, policy, options)
        yield "a model of a billion parameters", self.load
        yield "decode full 8 x 16 (t0)", partial(self.decode_row, 8, 16)
        for batch, context in ((1, self.short), (8, self.short), (32, self.short), (8, self.long)):
            yield f"decode full {batch} x {context}", partial(self.decode_row, batch, context)
        for policy in ("h2o", "infinigen", "offload"):
            yield f"decode {policy} 8 x {self.long}", partial(self.policy_row, policy)
        yield "h2o 0.2: time for bytes", self.h2o_rows
        yield "infinigen 0.2 against offload", self.offload_row
        yield "h2o at 512 entries", self.flat
        for length in (64, 512) if self.small else (512, 4096):
            yield f"prefill {length}", partial(self.prefill, length)
        yield "join", self.join
        for length in (512, 1024) if self.small else (8192, 16384, 32768):
            yield f"prefill workspace {length}", partial(self.workspace, length)

    # -- right? ------------------------------------------------------------------------------------------------

    def same(self, name: str, shape: dict[str, Any], policy: str, options: dict[str, Any]) -> Iterator[Row]:
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
        yield Row(name, alike, "of tokens", float(off.median()), 0.97, alike >= 0.97)

    # -- fast? -------------------------------------------------------------------------------------------------

    def load(self) -> Iterator[Row]:
        """The engine of all rows that follow, and the rate at which the device reads its pool."""
        shape = {**LARGE, "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512} if self.small else LARGE
        self.whole = self.engine(
            shape,
            self.device,
            other_policies={"h2o": {}, "infinigen": {"skew": "none", "alpha": 99.0}, "offload": {}},
            budget=Budget(share=0.2),
            kv_memory_bytes=(1 << 28) if self.small else (16 << 30),
            host_kv_memory_bytes=(1 << 28) if self.small else (8 << 30),
            max_num_seqs=64,
            max_prefill_tokens=4096,
        )
        words = self.whole.device_pool.kv.view(torch.int32).flatten()[: 1 << 28]
        self.rate = words.numel() * 4 / min(timed(lambda: words.max().item()) for _ in range(5))
        yield Row("memory read", self.rate / 1e9, "GB/s")

    @property
    def token_bytes(self) -> int:
        """KV of a token, all layers."""
        return self.whole.device_pool.entry_bytes * self.whole.model.geometry.layers

    def decode_row(self, batch: int, context: int) -> Iterator[Row]:
        """The whole cache; the ratio is to the time that reading weights and KV alone takes."""
        found = self.decode(batch, context)
        limit = (self.whole.model.weight_bytes + batch * context * self.token_bytes) / self.rate
        yield Row(f"decode full {batch} x {context}", found.seconds * 1e3, "ms/step", limit / found.seconds)

    def policy_row(self, policy: str) -> Iterator[Row]:
        """A policy at the long context; the ratio is to the whole cache."""
        found, whole = self.decode(8, self.long, policy), self.decoded["full", 8, self.long]
        name = f"decode {policy}{'' if policy == 'offload' else ' 0.2'}, 8 x {self.long}"
        yield Row(name, found.seconds * 1e3, "ms/step", whole.seconds / found.seconds)

    def h2o_rows(self) -> Iterator[Row]:
        """What H2O's bytes save in time, and that it holds as many as its rule says."""
        floor, whole, sparse = (
            self.decoded[of] for of in (("full", 8, 16), ("full", 8, self.long), ("h2o", 8, self.long))
        )
        most = sparse.held / whole.held / 0.7 * max(whole.seconds - floor.seconds, 0.0)
        extra = sparse.seconds - floor.seconds
        yield Row("h2o 0.2: t(b) - t0", extra * 1e3, "ms", extra / most if most else None, most * 1e3, extra <= most)
        off = sparse.held / (8 * int(0.2 * self.long) * self.token_bytes)
        yield Row(f"KV held, h2o 0.2, 8 x {self.long}", sparse.held, "bytes", off, 1.0, abs(off - 1) < 0.01)

    def offload_row(self) -> Iterator[Row]:
        """InfiniGen against the whole cache, both on the host."""
        guessed, moved = self.decoded["infinigen", 8, self.long], self.decoded["offload", 8, self.long]
        faster = moved.seconds / guessed.seconds
        yield Row(f"infinigen 0.2 / offload, 8 x {self.long}", faster, "times as fast", faster, 1.5, faster >= 1.5)

    def flat(self) -> Iterator[Row]:
        """At a fixed number of entries H2O's step does not depend on the context."""
        entries, contexts = (32, (128, 256)) if self.small else (512, (1024, 8192))
        share = self.whole.context.budget
        self.whole.context.budget = Budget(share=entries, of="tokens")  # asked anew for each request
        try:
            near, far = (self.decode(8, context, "h2o").seconds for context in contexts)
        finally:
            self.whole.context.budget = share
        name = f"h2o {entries} entries, 8 x {contexts[1]} / 8 x {contexts[0]}"
        yield Row(name, far * 1e3, "ms/step", far / near, 1.05, far / near < 1.05)

    def decode(self, batch: int, context: int, policy: str = "full") -> Decoded:
        """Median seconds of a decode step of so many requests, their prompts read, and the KV that they hold."""
        requests = self.begin(batch, context, 24, policy)
        held = self.whole.device_pool.live_bytes
        seconds = []
        while all(not request.is_finished for request in requests):
            seconds.append(timed(self.whole.step))
        run(self.whole)
        self.decoded[policy, batch, context] = found = Decoded(statistics.median(seconds[:-1]), held)
        return found

    def begin(self, batch: int, context: int, tokens: int, policy: str = "full") -> list[Request]:
        """Requests that have their first tokens."""
        self.clear()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        draw = torch.Generator().manual_seed(context)
        requests = [
            self.whole.submit(torch.randint(0, 1000, (context,), generator=draw).tolist(), params, policy)
            for _ in range(batch)
        ]
        while any(len(request.output) < 4 for request in requests):
            self.whole.step()
        return requests

    def clear(self) -> None:
        """Drop what a step that broke has left behind."""
        for request in [*self.whole.scheduler.running, *self.whole.scheduler.waiting]:
            self.whole.abort(request)

    def prefill(self, length: int) -> Iterator[Row]:
        """Tokens a second to the first token of a prompt."""
        seconds = statistics.median(timed(partial(self.read, length)) for _ in range(3))
        yield Row(f"prefill {length}", length / seconds, "tok/s")

    def read(self, length: int, policy: str = "full") -> None:
        """A prompt and its first token."""
        self.clear()
        self.whole.generate([[7] * length], SamplingParams(max_tokens=1, ignore_eos=True), policy)

    def join(self) -> Iterator[Row]:
        """Eight decode and a long prompt joins: what a step with a chunk takes beyond one without, by the chunk."""
        engine, chunk = self.whole, self.long // 8
        requests = self.begin(8, self.short, 32)
        usual = engine.scheduler.config
        engine.scheduler.config = usual.model_copy(update={"max_prefill_tokens": chunk})
        try:
            calm = [timed(engine.step) for _ in range(8)]
            last = SamplingParams(max_tokens=1, ignore_eos=True)
            engine.submit([7] * self.long, last, "full")
            busy = [timed(engine.step) for _ in range(8)]
            for request in requests:
                engine.abort(request)
            engine.submit([7] * self.long, last, "full")
            alone = [timed(engine.step) for _ in range(8)]
        finally:
            engine.scheduler.config = usual
        raised = max(busy) - max(calm)
        share = raised / max(alone)
        yield Row(f"{self.long} joins 8 x {self.short}: ITL raised", raised * 1e3, "ms", share, 1.0, share <= 1.0)

    def workspace(self, length: int) -> Iterator[Row]:
        """Bytes that a prompt takes beside the pool, as torch's allocator has it: twice for twice the tokens."""
        name = f"prefill workspace, h2o, {length}"
        if self.device != "cuda":
            self.read(length, "h2o")
            yield Row(f"{name}: only CUDA's allocator counts it", None, "bytes")
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.read(length, "h2o")
        self.peaks[length] = torch.cuda.max_memory_allocated() - before
        half = self.peaks.get(length // 2)
        grows = None if half is None else self.peaks[length] / half
        yield Row(name, self.peaks[length], "bytes", grows, *((None, None) if grows is None else (2.2, grows < 2.2)))


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


class Report:
    """What was found, said as it comes and written where it was asked for."""

    def __init__(self, machine: dict[str, Any], limit_s: float, out: str | None) -> None:
        self.machine = machine
        self.out = out
        self.begin = time.monotonic()
        self.limit_s = limit_s
        self.rows: list[Row] = []
        self.skipped: list[str] = []
        self.at = ""
        self.say(json.dumps(machine))

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.begin + self.limit_s - time.monotonic()

    def run(self, name: str, step: Step) -> None:
        """Take a step, if there is time; what it raises is a row that was not met."""
        self.at = name
        if self.left_s < LEAST_S:
            self.skipped.append(name)
            return
        try:
            for row in step():
                self.add(row)
        except Exception as error:
            self.add(broken(name, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))

    def add(self, row: Row) -> None:
        """Note a row."""
        self.rows.append(row)
        value = "NA" if row.value is None else f"{row.value:.5g}"
        ratio = "" if row.ratio is None else f"  ({row.ratio:.3g})"
        target = "" if row.target is None else f" target {row.target:.3g}:"
        met = "" if row.met is None else f" {target} {'met' if row.met else 'NOT MET'}"
        self.say(f"{row.name:55} {value:>10} {row.unit}{ratio}{met}")
        if self.out not in (None, "-"):
            Path(str(self.out)).write_text(self.text())

    def say(self, line: str) -> None:
        """To standard output, or beside it where that is for JSON."""
        print(line, file=sys.stderr if self.out == "-" else sys.stdout, flush=True)

    def text(self) -> str:
        """Everything, as JSON."""
        found = {"machine": self.machine, "rows": [asdict(row) for row in self.rows], "skipped": self.skipped}
        return json.dumps(found | {"seconds": time.monotonic() - self.begin}, indent=1)

    def end(self) -> int:
        """Say how it went; the exit code."""
        missed = sum(row.met is False for row in self.rows)
        for name in self.skipped:
            self.say(f"{name}: skipped, no time left")
        took = time.monotonic() - self.begin
        self.say(f"gpu_check: {len(self.rows)} rows, {missed} not met, {len(self.skipped)} skipped, {took:.0f} s")
        if self.out == "-":
            print(self.text(), flush=True)
        elif self.out is not None:
            Path(self.out).write_text(self.text())
        return 1 if missed or self.skipped else 0

    def overrun(self) -> None:
        """End the program, whatever it does: its time is over."""
        self.add(broken(self.at, f"did not end within the {self.limit_s:g} s that there are"))
        os._exit(self.end())


def broken(name: str, why: str) -> Row:
    """The row of a step that gave none."""
    return Row(f"{name}: {why}", None, "", met=False)


def main() -> int:
    """Exit code 0: everything was run and met; 1: something was not; 2: no such device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="time that it may take (default %(default)s)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON on standard output, or in a file after each row"
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device here (--device cpu tries the program itself)", file=sys.stderr)
        return 2
    report = Report(describe(options.device), options.seconds, options.json)
    bound = threading.Timer(options.seconds, report.overrun)
    bound.daemon = True
    bound.start()
    with tempfile.TemporaryDirectory(prefix="kvstudy-gpu-check-") as folder:
        check = Check(options.device, Path(folder))
        for name, step in check.steps():
            report.run(name, step)
    bound.cancel()
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
