"""Our engine as a side of `engine.py`: one engine a process, stepped by hand, its policies side by side.

Groups of requests decode by turns: a group's requests are the only ones that the scheduler knows while it is stepped.
KV of policy `full` and `offload` is put in place as random numbers instead of being computed (their time does not
depend on it); the others read their prompts, because what they keep does.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from benchmarks.sides import answer_calls
from kvstudy.engine import kernels, model
from kvstudy.engine.config import Budget, EngineConfig
from kvstudy.engine.core import Engine
from kvstudy.engine.request import Request, SamplingParams

PLACED = ("full", "offload")


class Kvstudy:
    """The calls."""

    engine: Engine

    def __init__(self) -> None:
        self.groups: dict[str, list[Request]] = {}
        self.spent: dict[str, float] = defaultdict(float)
        self.plain: Any = None

    def start(
        self, model: str, cores: list[int], budget: dict[str, Any] | None = None, fill: bool = True, **options: Any
    ) -> None:
        """Load a model folder with these options of `EngineConfig`; `fill` the pools, so that all of them is there."""
        self.engine = Engine(
            EngineConfig(
                model_dir=Path(model),
                cores=cores,
                block_size=32,
                budget=Budget(**(budget or {})),
                max_num_seqs=256,
                **options,
            )
        )
        if fill:
            self.engine.device_pool.kv.normal_()
            self.engine.host_pool.kv.normal_()

    def machine(self) -> dict[str, float]:
        """What limits are computed from: the rates of reading KV and of the largest product, and the model's sizes.

        `layer_flops` and `attention_flops` are of one token, the latter for each token that it attends to.
        """
        words = self.engine.device_pool.kv.view(torch.int32).flatten()
        read = words.numel() * 4 / min(_timed(words.max) for _ in range(5))
        g, entry, weights = (
            self.engine.model.geometry,
            self.engine.device_pool.entry_bytes,
            self.engine.model.weight_bytes,
        )
        found = {
            "bytes_per_s": read,
            "weight_bytes": float(weights),
            "entry_bytes": float(entry),
            "token_bytes": float(entry * g.layers),
            "layer_flops": float(weights - g.dtype.itemsize * self.engine.vocab_size * g.hidden_size),
            "attention_flops": float(4 * g.layers * g.heads * g.head_dim),
        }
        fused = self.engine.model.fused
        if fused is not None and fused.lib is not None:
            x = torch.randn(kernels.PACKED_ROWS * 8, self.engine.model.geometry.hidden_size).bfloat16()
            flops = 2 * x.numel() * self.engine.vocab_size
            found["flops_per_s"] = flops / min(_timed(lambda: fused.head(x)) for _ in range(5))
        return found

    # -- decoding --------------------------------------------------------------------------------------------------

    def begin(self, batch: int, context: int, steps: int, policy: str = "full", group: str = "") -> dict[str, float]:
        """Have a group of requests past their prompts, with `steps` tokens to go; answers what they hold."""
        engine, scheduler = self.engine, self.engine.scheduler
        scheduler.running = []
        before = _held(engine)
        params = SamplingParams(max_tokens=steps + 8, ignore_eos=True)
        draw = torch.Generator().manual_seed(context)
        requests = [
            engine.submit(torch.randint(100, 40000, (context,), generator=draw).tolist(), params, policy)
            for _ in range(batch)
        ]
        if policy in PLACED:
            while scheduler.waiting:
                assert scheduler._admit() is not None, "the pool is too small for this row"
            for request in requests:
                request.computed = context
                request.output.append(1)
                scheduler.prompt_done(request)
        while any(len(request.output) < 3 for request in requests):
            engine.step()
        self.groups[group] = requests
        held = _held(engine)
        return {name: held[name] - before[name] for name in held}

    def decode(self, steps: int, group: str = "") -> list[float]:
        """Seconds of each of so many steps of a group."""
        self.engine.scheduler.running = self.groups[group]
        return [_timed(self.engine.step) for _ in range(steps)]

    def elsewhere(self, steps: int, group: str = "", crowded: bool = False) -> list[float]:
        """`decode` in another thread than this, as a server does it; `crowded`: this one keeps OpenMP workers too."""
        _release_workers()
        if crowded:
            torch.ones(1 << 20).exp()  # large enough for torch to share it out
        with ThreadPoolExecutor(1) as other:
            found = other.submit(self.decode, steps, group).result()
            other.submit(_release_workers).result()
        return found

    def end(self, group: str = "") -> dict[str, float]:
        """Drop a group; answers the share of entries that it attended to."""
        requests = self.groups.pop(group)
        self.engine.scheduler.running = requests
        share = sum(r.attended_entries for r in requests) / max(1, sum(r.full_entries for r in requests))
        for request in list(requests):
            self.engine.abort(request)
        return {"attended_share": share}

    def pace(self, gbps: float | None) -> None:
        """Pace the link from now on."""
        self.engine.link.gbps = gbps

    def split(self, policy: str) -> dict[str, float]:
        """InfiniGen's seconds a stage since the last call; the first call begins to measure."""
        if not self.spent:
            owner: Any = self.engine.policies[policy]
            for stage in ("speculate", "select", "gather"):
                self._watch(owner, f"_{stage}", stage)
            self._watch(owner.staging, "wait", "move")
            self._watch(owner, "decode", "attend")
            self.spent["attend"] = 0.0
        spent = dict(self.spent)
        self.spent.clear()
        self.spent["attend"] = 0.0
        # The wait for what moves is a part of the layer's attention call.
        spent["attend"] = spent.get("attend", 0.0) - spent.get("move", 0.0)
        return spent

    def _watch(self, owner: Any, name: str, stage: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*arguments)
            self.spent[stage] += time.perf_counter() - begin
            return result

        setattr(owner, name, timed)

    def compiled(self, on: bool) -> None:
        """Have the library's layers go through `torch.compile`, our attention left out of it; or no longer."""
        held = self.engine.model
        if self.plain is None:
            self.plain = held.lm
            AttentionInterface.register("kvstudy", torch.compiler.disable(model._attention))
            self.through_compiler = torch.compile(held.lm, dynamic=True)
        held.lm = self.through_compiler if on else self.plain

    # -- prompts ---------------------------------------------------------------------------------------------------

    def prefill(self, length: int, policy: str = "full") -> list[float]:
        """Seconds to the first token of a prompt."""
        self.engine.scheduler.running = []
        prompt = torch.randint(100, 40000, (length,)).tolist()
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        return [_timed(lambda: self.engine.generate([prompt], params, policy))]

    def join(
        self, batch: int, context: int, arriving: int, chunk: int, gaps: int, alone_first: bool
    ) -> dict[str, list[float]]:
        """Seconds of steps in which requests decode undisturbed (`calm`), and in which a prompt joins them (`busy`).

        As many of either as `gaps`; the first of `busy` have one of the prompt's chunks each. `alone` are the same
        prompt's chunks with nobody else there, measured before or after.
        """
        scheduler = self.engine.scheduler
        scheduler.config = self.engine.config.model_copy(update={"max_prefill_tokens": chunk})

        def arrive() -> None:
            self.engine.submit([7] * arriving, SamplingParams(max_tokens=1, ignore_eos=True), "full")

        def alone() -> list[float]:
            scheduler.running = []
            arrive()
            return [_timed(self.engine.step) for _ in range(-(-arriving // chunk))]

        found = {"alone": alone()} if alone_first else {}
        self.begin(batch, context, 2 * gaps)
        found["calm"] = self.decode(gaps)
        arrive()
        found["busy"] = self.decode(gaps)
        self.end()
        return found if alone_first else found | {"alone": alone()}

    def admitted(self, policy: str, prompt: int, output: int) -> dict[str, float]:
        """How many such requests the pools admit: at once, and one after another, each past its prompt before the next.

        Also what `reserve` says of one on the device.
        """
        engine, scheduler = self.engine, self.engine.scheduler
        scheduler.running = []
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        requests = [engine.submit([7] * prompt, params, policy) for _ in range(256)]
        need = engine.policies[policy].reserve(prompt, output)
        at_once = 0
        while scheduler._admit() is not None:
            at_once += 1
        for request in list(scheduler.running):
            scheduler.prompt_done(request)
        after = at_once
        while (request := scheduler._admit()) is not None:
            scheduler.prompt_done(request)
            after += 1
        for request in requests:
            engine.abort(request)
        return {"at_once": at_once, "admitted": after, "peak_bytes": need.device_peak_bytes, "bytes": need.device_bytes}


def _release_workers() -> None:
    """End the OpenMP workers of the calling thread, which libgomp makes anew when they are needed."""
    soft = 1  # omp_pause_soft
    libgomp = next((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    ctypes.CDLL(str(libgomp)).omp_pause_resource_all(soft)


def _held(engine: Engine) -> dict[str, float]:
    return {
        "device": engine.device_pool.live_bytes,
        "device_beside": engine.device_pool.aux_bytes,
        "host": engine.host_pool.live_bytes,
    }


def _timed(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


if __name__ == "__main__":
    ours = Kvstudy()
    names = ("start", "machine", "begin", "decode", "elsewhere", "end", "pace", "split", "compiled", "prefill", "join")
    answer_calls({name: getattr(ours, name) for name in (*names, "admitted")})
