"""Tensor parallelism: several processes, each with a part of every layer and of the KV heads, in lockstep.

`torchrun --nproc-per-node N -m kvstudy.engine.server --config FILE` starts one process a device; the library shards
the linear layers by the model's own `tp_plan` and sums what rows give. Each process runs the same engine over its own
heads: the same scheduler, fed with the same requests in the same order, makes the same plan, so only commands travel
(rank 0 sends them, the others `follow`), the tokens that rank 0 samples, and what a rule needs of all heads at once
(InfiniGen's number of entries to fetch). Commands go over gloo, on the CPU; tensors over whatever the device has.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Command = tuple[str, Any]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True, slots=True)
class Shard:
    """One process's part of the KV heads; without tensor parallelism all of them."""

    rank: int = 0
    size: int = 1
    gather: Callable[[torch.Tensor], torch.Tensor] = _same
    """`[..., its heads]` -> `[..., all heads]`, in the order of the model's."""

    def mine(self, kv_heads: int) -> slice:
        """Which of all heads are this process's, `kv_heads` of them."""
        return slice(self.rank * kv_heads, (self.rank + 1) * kv_heads)


class NotShared(ValueError):
    """There are not as many processes as the model was to be shared by."""


class Group:
    """The processes that share a model; made in each of them before the model is loaded."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Join. Raises `NotShared` where torchrun has not started `size` processes."""
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started != size:
            raise NotShared(f"tensor_parallel is {size} and torchrun started {started} processes: make them equal")
        # A follower waits for the next command for as long as nobody asks anything.
        forever = datetime.timedelta(days=365)
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=forever)
        self.commands = dist.new_group(backend="gloo", timeout=forever)
        self.rank, self.size = dist.get_rank(), size

    @property
    def leads(self) -> bool:
        """Whether this is the process that clients talk to."""
        return self.rank == 0

    def shard(self) -> Shard:
        """What policies are to know of it."""
        return Shard(self.rank, self.size, self.gather)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every process's x side by side in the last dimension, in the order of ranks."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def tokens(self, sampled: list[int] | None, count: int) -> list[int]:
        """Rank 0's sampled tokens, in every process."""
        shared = torch.tensor(sampled if sampled is not None else [0] * count, dtype=torch.int64)
        dist.broadcast(shared, 0, group=self.commands)
        tokens: list[int] = shared.tolist()
        return tokens

    def tell(self, command: str, argument: Any = None) -> None:
        """From rank 0 to all others."""
        dist.broadcast_object_list([(command, argument)], 0, group=self.commands)

    def hear(self) -> Command:
        """Wait for what rank 0 tells next."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, 0, group=self.commands)
        heard: Command = box[0]
        return heard
