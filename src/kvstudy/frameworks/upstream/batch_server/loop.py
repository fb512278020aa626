"""A fork's own `OptLM.generate`, wrapped by hooks: tokens as they come, what was attended, moved and held.

The fork's parser reads the arguments, its classes are built as its own `main` builds them, its loop generates. What is
added from outside: the batch's size and InfiniGen's cap are set before each batch (they are fixed at construction
otherwise), a hook after the last layer hands out tokens, and a few methods are watched to count.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import shims
from .batching import Refused, Totals

PACKAGES = {"h2o": "flexgen", "infinigen": "flexgen", "flexgen": "flexllmgen"}
#: Tokens of InfiniGen's warm-up, by which it skews: the authors' number.
CALIBRATION_TOKENS = 2048


class _AllDone(Exception):
    """Every request of the batch has its last token: the loop may stop."""


class ForkLoop:
    """A fork, its model loaded, ready to generate batch after batch.

    Parameters
    ----------
    config
        The batch server's: `fork`, `arguments` (for the fork's own parser), `model` (shape), `device`, `prefill`,
        `budget`, `offload_dir`.
    tokenize
        Text to token ids, for InfiniGen's warm-up text.
    """

    def __init__(self, config: dict[str, Any], tokenize: Callable[[str], list[int]] | None = None) -> None:
        self.config = config
        self.fork = config["fork"]
        self.debug = config["device"] == "cpu"
        self.sequential = config["prefill"] == "sequential"
        package = PACKAGES[self.fork]
        self.modules: dict[str, Any] = {
            name: importlib.import_module(f"{package}.{name}")
            for name in ("flex_opt", "pytorch_backend", "opt_config", "compression", "utils", "timer")
        }
        self.flex, self.backend = self.modules["flex_opt"], self.modules["pytorch_backend"]
        if self.debug:
            extra = ("skewing_controller", "partial_weight_generation_controller", "kv_selection_controller")
            more = [importlib.import_module(f"infinigen.{name}") for name in extra] if self.fork == "infinigen" else []
            shims.apply([*self.modules.values(), *more])
        self.args = parse(self.flex, config["arguments"])
        self.totals = Totals()
        self.step = 0
        self.layer = 0
        self.batch = 1
        self.prompt_len = 0
        self._on_tokens: Callable[[Sequence[int]], bool] | None = None
        self.gpu, self.cpu, self.env = self._devices()
        self.policy = self._policy()
        shape = config["model"]
        self.opt = self.modules["opt_config"].OptConfig(
            name=shape["name"],
            max_seq_len=shape["max_positions"],
            num_hidden_layers=shape["layers"],
            n_head=shape["heads"],
            hidden_size=shape["hidden_size"],
            input_dim=shape["hidden_size"],
            ffn_embed_dim=4 * shape["hidden_size"],
            vocab_size=shape["vocab_size"],
            pad_token_id=shape["pad_token_id"],
        )
        more_args: tuple[Any, ...] = ()
        if self.fork == "infinigen":
            more_args = (self.args.partial_weight_ratio, self.args.alpha, self.args.max_num_kv)
        self.model = self.flex.OptLM(self.opt, self.env, self.args.path, self.policy, *more_args)
        tensors = [tensor for home in self.model.weight_home for tensor in home.val or ()]
        self._weight_bytes: int = sum(tensor.data.numel() * tensor.data.element_size() for tensor in tensors)
        self._watch()
        if self.fork == "infinigen":
            assert tokenize is not None
            self.skew(tokenize(Path(self.args.warmup_input_path).read_text(encoding="utf-8")))

    # --- what the server asks ----------------------------------------------------------------------

    def check(self, prompt: Sequence[int], max_tokens: int, top_p: float = 1.0) -> None:
        """Raise `Refused` with the reason where the fork cannot serve a request, or would serve it wrongly."""
        shape, length = self.config["model"], len(prompt)
        if length + max_tokens > shape["max_positions"]:
            raise Refused(
                f"prompt and max_tokens reach {length + max_tokens}, the model has {shape['max_positions']} positions"
            )
        if any(not 0 <= token < shape["vocab_size"] for token in prompt):
            raise Refused(f"prompt: token ids lie in 0..{shape['vocab_size'] - 1}")
        if shape["pad_token_id"] in prompt:
            # Its prefill masks every such token, its decode steps none of them.
            raise Refused(
                "prompt: it holds the padding token, which the fork masks in prefill and attends to in decode"
            )
        if top_p != 1.0:
            raise Refused("top_p: the fork samples from all tokens")
        if self.fork == "h2o" and self.args.hh_all and int(length * self.args.hh_ratio) < 2:
            raise Refused(f"int({length} x {self.args.hh_ratio:g}) heavy hitters are fewer than the 2 that it needs")
        if self.kv_bytes(length, max_tokens) > self.config["kv_memory_bytes"]:
            raise Refused("prompt: its KV alone is larger than the KV memory")

    def kv_bytes(self, prompt: int, gen_len: int) -> int:
        """Bytes of one request's cache as the fork allocates it, in its home tier."""
        rows: int = prompt + gen_len - 1
        if self.fork == "h2o" and self.args.hh_all:
            rows = 2 * int(prompt * self.args.hh_ratio)
        return rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * int(self.opt.num_hidden_layers) * int(self.opt.input_dim) * (4 if self.debug else 2)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        gen_len: int,
        temperature: float,
        on_tokens: Callable[[Sequence[int]], bool],
    ) -> None:
        """Generate `gen_len` tokens for prompts of one length; stops early where `on_tokens` answers True."""
        self._prepare(len(prompts), len(prompts[0]), gen_len)
        self._on_tokens = on_tokens
        try:
            self._generate(prompts, gen_len, do_sample=temperature > 0, temperature=temperature or 1.0)
        except _AllDone:
            # What `generate` would have done after its loop.
            for holders in self.model.cache_home:
                for holder in holders:
                    holder.clear()
        finally:
            self._on_tokens = None
            self.modules["timer"].timers("generate").reset()

    def skew(self, ids: Sequence[int]) -> None:
        """InfiniGen's warm-up: one pass over a text, which turns the query and key weights for good."""
        pad = self.opt.pad_token_id
        ids = [token for token in ids if token != pad][: min(CALIBRATION_TOKENS, self.opt.max_seq_len)]
        self._prepare(1, len(ids), 1)
        self._generate([ids], 1, warmup=True)
        self.modules["timer"].timers("generate").reset()
        for name in self.totals.counts:
            self.totals.counts[name] = 0.0

    def weight_bytes(self) -> int:
        """Bytes of the weights where they lie; the token embedding twice, as the fork holds it."""
        return self._weight_bytes

    def live_bytes(self) -> dict[str, int]:
        """Bytes of the caches that are allocated now, by tier."""
        found = {"device": 0, "host": 0}
        for holders in self.model.cache_home:
            for tensor in holders[0].val or ():
                device, data = tensor.device, tensor.data
                if data is not None:  # asked from another thread than the one that generates
                    found["device" if device is self.gpu else "host"] += data.numel() * data.element_size()
        return found

    def allocated_peak(self) -> int | None:
        """Peak of what torch has allocated on the GPU since the last reset; None on a machine without one."""
        return None if self.debug else int(torch.cuda.max_memory_allocated())

    def reset_peaks(self) -> None:
        """That peak starts anew."""
        if not self.debug:
            torch.cuda.reset_peak_memory_stats()

    # --- building it as its own main does ------------------------------------------------------------

    def _devices(self) -> Any:
        backend = self.backend
        if self.debug:
            gpu, cpu = backend.TorchDevice("cpu"), backend.TorchDevice("cpu")
            disk = backend.TorchDisk(self.config["offload_dir"], num_copy_threads=0)
        else:
            gpu, cpu = backend.TorchDevice("cuda:0"), backend.TorchDevice("cpu")
            disk = backend.TorchDisk(self.config["offload_dir"])
            for thread in disk.copy_threads:
                thread.daemon = True
        mixed = backend.TorchMixedDevice([gpu, cpu, disk])
        return gpu, cpu, self.flex.ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=mixed)

    def _policy(self) -> Any:
        args, compression = self.args, self.flex.CompressionConfig
        values = {
            "gpu_batch_size": 1,
            "num_gpu_batches": 1,
            "comp_weight_config": compression(num_bits=4, group_size=64, group_dim=0, symmetric=False),
            "comp_cache_config": compression(num_bits=4, group_size=64, group_dim=2, symmetric=False),
        }
        tiers = ("w_gpu", "w_cpu", "cache_gpu", "cache_cpu", "act_gpu", "act_cpu")
        values.update({f"{tier}_percent": share for tier, share in zip(tiers, args.percent)})  # noqa: B905
        for field in dataclasses.fields(self.flex.Policy):
            if field.name not in values:
                values[field.name] = getattr(args, field.name)
        return self.flex.Policy(**values)

    # --- hooks ---------------------------------------------------------------------------------------

    def _prepare(self, batch: int, prompt_len: int, gen_len: int) -> None:
        """Set what the fork fixes at construction and a server must not: the batch's size, InfiniGen's cap."""
        self.batch, self.prompt_len, self.step = batch, prompt_len, 0
        self.policy = dataclasses.replace(self.policy, gpu_batch_size=batch)
        for part in (self.model, *self.model.layers):
            part.policy = self.policy
        if self.fork == "infinigen":
            cap = self.cap(prompt_len, gen_len)
            for layer in self.model.layers:
                if hasattr(layer, "max_num_kv"):
                    layer.max_num_kv = cap

    def cap(self, prompt_len: int, gen_len: int) -> int:
        """Entries that a layer and head may fetch: the budget less the new token's own, as our policies count."""
        share = self.config["budget"]["share"]
        if share >= 1.0 and self.config["budget"]["of"] == "prompt":
            return prompt_len + gen_len
        entries = share * prompt_len if self.config["budget"]["of"] == "prompt" else share
        return max(1, min(int(entries + 1e-9) - 1, int(self.args.max_num_kv)))

    def _generate(self, prompts: Sequence[Sequence[int]], gen_len: int, **options: Any) -> None:
        with torch.no_grad():
            self.model.generate([list(prompt) for prompt in prompts], max_new_tokens=gen_len, **options)

    def _watch(self) -> None:
        model, gpu = self.model, self.gpu
        store_hidden, compute_layer = model.store_hidden, model.compute_layer
        attend, mha = gpu._attention_value, gpu.mha

        def stored(i: int, j: int, k: int) -> None:
            store_hidden(i, j, k)
            if j == model.num_layers - 1:
                self.step = i + 1
                column = self.prompt_len + i
                if self._on_tokens is not None and self._on_tokens(model.output_ids[:, column].tolist()):
                    raise _AllDone

        def computed(i: int, j: int, k: int) -> None:
            self.layer = getattr(model.layers[j], "layer_id", self.layer)
            compute_layer(i, j, k)

        def attended(q: Any, k: Any, *rest: Any) -> Any:
            now, full = k.shape[2] * self.batch, (self.prompt_len + self.step) * self.batch
            self.totals.add("attended_entries", now)
            self.totals.add("full_entries", full)
            self.totals.add("kept_entries", now if self.fork == "h2o" else full)
            return attend(q, k, *rest)

        model.store_hidden, model.compute_layer = stored, computed
        gpu._attention_value = attended
        if self.sequential:
            gpu.mha = lambda *args: one_by_one(mha, self.backend.TorchTensor, *args)
        copy = self.backend.general_copy

        def copied(dst: Any, dst_indices: Any, src: Any, src_indices: Any) -> None:
            way = {(True, False): "moved_h2d", (False, True): "moved_d2h"}.get(
                (dst.device is self.gpu, src.device is self.gpu)
            )
            if way is not None:
                numbers = [s.stop - s.start for s in dst_indices] if dst_indices else []
                size = src.data.element_size() if hasattr(src.data, "element_size") else 2
                for extent in (*numbers, *dst.shape[len(numbers) :]):
                    size *= int(extent)
                self.totals.add(way, size)
            copy(dst, dst_indices, src, src_indices)

        self.backend.general_copy = self.flex.general_copy = copied


def parse(flex_opt: Any, arguments: Sequence[str]) -> argparse.Namespace:
    """The fork's own parser over our arguments; exits with its own message where it does not take them."""
    parser = argparse.ArgumentParser(prog=flex_opt.__name__)
    flex_opt.add_parser_arguments(parser)
    return parser.parse_args(list(arguments))


def one_by_one(mha: Callable[..., Any], tensor: Any, inputs: Any, mask: Any, *rest: Any) -> Any:
    """A fork's prefill attention, one request of the batch at a time: the score matrix is never larger than one's.

    InfiniGen takes the columns that a batch speculates with from its first request; so does this.
    """
    batch = inputs.shape[0]
    if batch == 1:
        return mha(inputs, mask, *rest)
    donate = next(item for item in rest if isinstance(item, list) and len(item) == 14)
    kept = [False] * len(donate)
    slices = []
    for row in range(batch):
        one = [kept if item is donate else item for item in rest]
        parts = (tensor.create_from_torch(x.data[row : row + 1], x.device) for x in (inputs, mask))
        slices.append(mha(*parts, *one))
    for given, used in ((inputs, donate[0]), (mask, donate[1])):
        if used:
            given.delete()
    joined = []
    for position, first in enumerate(slices[0]):
        if any(first is item for item in rest):
            joined.append(first)  # InfiniGen answers its weights too
        elif torch.is_tensor(first):
            joined.append(first.repeat(batch, 1, 1))
        else:
            # Activations lie [batch, ...]; keys, values and scores [entries, batch x heads, ...].
            data = torch.cat([part[position].data for part in slices], dim=min(position, 1))
            joined.append(tensor.create_from_torch(data, first.device))
    return tuple(joined)
