"""Random eviction: the floor that a policy's choice of entries has to beat at the same budget.

Every token draws a priority in each layer and KV head when it arrives, and the entries with the highest priorities
stay: at any time a uniformly random subset (reservoir sampling), as kvpress's RandomPress keeps after the prompt. It is
H2O's `realdrop` with lots in the place of received attention and no recent window: a decode step attends to the new
token, which is then as likely to leave as any other. The lots depend on the seed, the prompt and the position, never on
who shares the batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable

import numpy as np
import torch
from pydantic import Field

from kvstudy.engine.policies import register
from kvstudy.engine.policies.base import Context, Options, Rows, Seen
from kvstudy.engine.policies.h2o import H2O, H2OOptions
from kvstudy.engine.request import Request


class RandomOptions(Options):
    """What can be chosen beside the budget."""

    seed: int = Field(0, ge=0)


@register
class Random(H2O):
    """H2O's memory, filled by lot."""

    name = "random"
    Options = RandomOptions

    def __init__(self, context: Context, options: RandomOptions) -> None:
        super().__init__(context, H2OOptions.model_validate({"heavy_fraction": 1.0}))
        self.seed = options.seed

    def counts(self) -> Hashable | None:
        return None if self.off else ("lots", self.seed)

    def count_chunk(self, into: torch.Tensor, seen: Seen) -> None:
        layer, chunk = seen.layer, seen.chunk
        lots = self._of_these_heads(self._lots(chunk.request, 0, layer), chunk.request.prompt_tokens)
        into[layer, :, chunk.start : chunk.stop] = torch.from_numpy(lots[chunk.start : chunk.stop].T).to(into)

    def _lots(self, request: Request, position: int, layer: int) -> np.random.Generator:
        prompt = zlib.crc32(np.array(request.prompt, dtype=np.int64).tobytes())
        return np.random.Generator(
            np.random.Philox(key=np.array([self.seed, (prompt << 32) + (layer << 24) + position], np.uint64))
        )

    def _of_these_heads(self, lots: np.random.Generator, count: int) -> np.ndarray:
        """`count` lots for each KV head of the model [count, all heads], of which those of this process's heads."""
        shard, heads = self.context.shard, self.geometry.kv_heads
        drawn: np.ndarray = lots.random((count, heads * shard.size))[:, shard.mine(heads)]
        return drawn

    def _evict(self, rows: Rows) -> np.ndarray:
        """Give each new token its lots, then drop the lowest."""
        batch, g = self.batch, self.geometry
        assert batch is not None
        lots = np.stack([self._of_these_heads(self._lots(r, r.computed, 0), g.layers) for r in rows.requests], axis=1)
        batch.mass.zero_().scatter_(3, batch.free[..., None], torch.from_numpy(lots[..., None]).to(batch.mass))
        return super()._evict(rows)
