"""The debug switch device=cpu: a fork's loop on a machine without a GPU, for correctness only.

CUDA streams, events and synchronisation become no-ops, pinned memory is ordinary memory, half is float32, and tensors
say that they are on the GPU, so that the code takes the path it takes there. The fork's modules see a stand-in for
`torch`; nothing of the fork is edited. What runs under it measures nothing: its speed is no GPU's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


class _Nothing:
    """A stream, an event, a context: does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Of an event."""


class _NoCuda:
    """What the forks ask of `torch.cuda`."""

    Stream = Event = stream = _Nothing

    def synchronize(self, *_: Any) -> None:
        """Everything has happened already."""

    set_device = synchronize


class _Torch:
    """`torch`, with float32 for half, no CUDA and no pinned memory."""

    float16 = half = torch.float32
    cuda = _NoCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        """Unpinned."""
        options.pop("pin_memory", None)
        return torch.empty(*size, **options)

    def zeros(self, *size: Any, **options: Any) -> torch.Tensor:
        """Unpinned."""
        options.pop("pin_memory", None)
        return torch.zeros(*size, **options)


def apply(modules: Iterable[Any]) -> None:
    """Give a fork's modules the stand-in, and this process's tensors what the forks call on them."""
    stand_in = _Torch()
    for module in modules:
        if hasattr(module, "torch"):
            module.torch = stand_in
        if hasattr(module, "np_dtype_to_torch_dtype"):
            module.np_dtype_to_torch_dtype[np.float16] = torch.float32
    patches = {
        "cuda": lambda self, *_, **__: self,
        "half": lambda self, *_, **__: self.float(),
        "pin_memory": lambda self, *_, **__: self,
        "is_cuda": property(lambda self: True),
    }
    for name, value in patches.items():
        setattr(torch.Tensor, name, value)
