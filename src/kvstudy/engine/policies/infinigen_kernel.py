"""InfiniGen's heavy loops in C for the CPU: speculated scores, picking the best, and copying what is fetched.

The rule stays in `infinigen_rules`; here is arithmetic that torch does in many small calls. `kernel()`
answers None where there is no compiler, and plain torch is used.
"""

from __future__ import annotations

import numpy as np
import torch

from kvstudy.engine import kernels


class Kernel:
    """The compiled functions of `kernels/infinigen.c` on tensors."""

    def __init__(self, library: kernels.Library) -> None:
        self._scores = {dtype: library.function(f"ig_scores_{suffix}") for dtype, suffix in kernels.DTYPES.items()}
        self._select, self._gather = library.function("ig_select"), library.function("ig_gather")

    def scores(
        self,
        q: torch.Tensor,
        turn: torch.Tensor,
        scale: float,
        partial: np.ndarray,
        held: np.ndarray,
        room: np.ndarray,
        alpha: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write the first held[row] places of `out` [rows, kv_heads, width]; returns how many are within alpha.

        q: [rows, heads, head_dim]; turn: [rows, kv_heads, head_dim, d'] of the same type; partial: each row's address
        of one layer's partial keys [kv_heads, d', room[row]] in that type; all int64, as the counts [rows, kv_heads].
        """
        rows, heads, width = out.shape
        dim, columns = turn.shape[2:]
        q, turn = q.contiguous(), turn.contiguous()
        counts = torch.empty((rows, heads), dtype=torch.int64)
        failed = self._scores[q.dtype](
            q.data_ptr(), turn.data_ptr(), scale, partial.ctypes.data, held.ctypes.data, room.ctypes.data, rows, heads,
            q.shape[1] // heads, dim, columns, alpha, out.data_ptr(), width, counts.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("infinigen: no memory for its scores")
        return counts

    def select(self, scores: torch.Tensor, held: np.ndarray, numbers: np.ndarray, places: int) -> torch.Tensor:
        """Each row's and head's best numbers[row] < places of the first held[row] scores [rows, kv_heads, width].

        Returns which they are, rising, int64 [rows, kv_heads, places], 0 beyond.
        """
        rows, heads, width = scores.shape
        entries = torch.zeros((rows, heads, places), dtype=torch.int64)
        failed = self._select(
            scores.data_ptr(), width, held.ctypes.data, numbers.ctypes.data, rows, heads, places,
            entries.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("infinigen: no memory to rank the scores")
        return entries

    def gather(
        self, entries: torch.Tensor, numbers: np.ndarray, tables: torch.Tensor, kv: torch.Tensor, into: torch.Tensor
    ) -> None:
        """Copy what `select` found from `kv` to `into` [rows, 2, kv_heads, places, d]; tables: int32 [rows, blocks]."""
        rows, heads, places = entries.shape
        self._gather(
            entries.data_ptr(), numbers.ctypes.data, rows, heads, tables.data_ptr(), tables.stride(0), kv.data_ptr(),
            kv.shape[3], into.shape[4] * kv.element_size(), into.data_ptr(), places, torch.get_num_threads(),
        )  # fmt: skip


def kernel() -> Kernel | None:
    """The compiled functions; None where `kernels` has none."""
    library = kernels.library()
    return None if library is None else Kernel(library)
