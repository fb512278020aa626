"""Which entries a fork keeps and fetches, recorded while it runs, by its own functions.

H2O does not know token positions: its pruning and its replacement move rows. Here the same functions move the rows of a
second, small cache that holds positions. InfiniGen's fetches are positions already. Logits are what the output layer's
linear map answers. For comparing implementations and for tests; a measured run is not traced.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .loop import ForkLoop


class _Functional:
    """`torch.nn.functional` for a fork's module, whose last linear map is kept."""

    def __init__(self, functional: Any) -> None:
        self.functional = functional
        self.last: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.functional, name)

    def linear(self, *args: Any, **options: Any) -> Any:
        """Keep what it answers."""
        self.last = self.functional.linear(*args, **options)
        return self.last


class Trace:
    """Records a loop from now on; `arrays` answers what the last batch did."""

    def __init__(self, loop: ForkLoop) -> None:
        self.loop = loop
        self.logits: list[Any] = []
        self.kept: dict[int, Any] = {}
        self.kept_steps: list[Any] = []
        self.evicted: list[Any] = []
        self.fetched: dict[Any, Any] = {}
        self._pruned: dict[int, list[Any]] = {}
        self._keys_next = True
        self._watch_output()
        if loop.fork == "h2o":
            self._watch_h2o()
        if loop.fork == "infinigen":
            self._watch_infinigen()

    def _watch_output(self) -> None:
        functional = _Functional(self.loop.backend.F)
        self.loop.backend.F = functional
        embed = self.loop.gpu.opt_output_embed

        def watched(*args: Any) -> Any:
            out = embed(*args)
            self.logits.append(functional.last[:, -1, :].float().cpu())
            if self.kept:
                self.kept_steps.append(torch.stack([self.kept[layer] for layer in sorted(self.kept)]).clone())
            return out

        self.loop.gpu.opt_output_embed = watched

    def _watch_h2o(self) -> None:
        loop = self.loop
        prune, replace = loop.gpu._heavy_hitter_pruning, loop.flex.cache_replace

        def pruned(k: Any, v: Any, weights: Any, hh_k: int) -> Any:
            where = torch.arange(k.shape[0], device=k.device).view(-1, 1, 1).expand(-1, k.shape[1], 2).contiguous()
            rows = prune(where, where, weights, hh_k)[0][..., 0].cpu()
            parts = self._pruned.setdefault(loop.layer, [])
            if sum(part.shape[1] for part in parts) >= k.shape[1] * (loop.batch if loop.sequential else 1):
                parts.clear()  # of the batch before
            parts.append(rows)
            self.kept[loop.layer] = torch.cat(parts, dim=1)
            return prune(k, v, weights, hh_k)

        def replaced(dst: Any, indices: Any, src: Any, hh_k: int, oldest: int) -> None:
            if self._keys_next:  # called for the keys, then for the values
                where = torch.zeros(dst.shape[0], dst.shape[1], 2, dtype=torch.long)
                held = self.kept[loop.layer]
                where[: held.shape[0]] = held[..., None]
                device = loop.cpu
                shadow = loop.backend.TorchTensor.create_from_torch(where, device)
                new = torch.full((1, dst.shape[1], 2), loop.prompt_len + loop.step - 1)
                replace(shadow, indices.cpu(), loop.backend.TorchTensor.create_from_torch(new, device), hh_k, oldest)
                self.kept[loop.layer] = shadow.data[: held.shape[0], :, 0]
                self.evicted.append(indices.cpu())
            self._keys_next = not self._keys_next
            replace(dst, indices, src, hh_k, oldest)

        loop.gpu._heavy_hitter_pruning = pruned
        loop.flex.cache_replace = replaced

    def _watch_infinigen(self) -> None:
        loop = self.loop
        select = loop.flex.select_kv

        def selected(index: Any, keys: Any, values: Any) -> Any:
            self.fetched[loop.step, loop.layer + 1] = index.reshape(index.shape[0], -1).cpu()
            return select(index, keys, values)

        loop.flex.select_kv = selected

    def arrays(self) -> dict[str, Any]:
        """NumPy arrays of all that was recorded since the last call, which it forgets.

        `logits` [steps, batch, vocab]; H2O: `kept` [steps - 1, layers, entries, batch x heads] positions after the
        prompt and after each decode step but the last, `evicted` [steps - 2, layers, batch x heads] heavy slots;
        InfiniGen: `fetched` [steps - 1, layers, most, batch x heads], padded with -1, of layers 2 and up.
        """
        out: dict[str, Any] = {"logits": torch.stack(self.logits).numpy()}
        if self.kept_steps:
            # The last step's choice is made and not carried out: there is no next token.
            out["kept"] = torch.stack(self.kept_steps[: max(1, len(self.kept_steps) - 1)]).numpy()
        if self.evicted:
            layers = self.loop.opt.num_hidden_layers
            flat = torch.stack(self.evicted)
            out["evicted"] = flat.view(-1, layers, flat.shape[-1]).numpy()
        if self.fetched:
            steps = sorted({step for step, _ in self.fetched})
            layers_seen = sorted({layer for _, layer in self.fetched})
            most = max(index.shape[0] for index in self.fetched.values())
            heads = next(iter(self.fetched.values())).shape[1]
            fetched = np.full((len(steps), len(layers_seen), most, heads), -1, dtype=np.int64)
            for (step, layer), index in self.fetched.items():
                fetched[steps.index(step), layers_seen.index(layer), : index.shape[0]] = index.numpy()
            out["fetched"] = fetched
        for record in (self.logits, self.kept, self.kept_steps, self.evicted, self.fetched, self._pruned):
            record.clear()
        return out
