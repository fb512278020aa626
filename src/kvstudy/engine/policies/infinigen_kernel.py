"""InfiniGen's two heavy loops in C for the CPU: speculated scores, and picking and copying what is fetched.

The rule stays in `infinigen_rules` (threshold, counts, number); here is arithmetic that torch does in many small calls.
`kernel()` answers None where there is no compiler, and plain torch is used. Built and cached as the engine's other
kernels are.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from kvstudy.engine import kernels

SOURCE = r"""
#include <stdint.h>
#include <string.h>

static inline float f32_of_bf16(uint16_t x) { uint32_t b = (uint32_t)x << 16; float f; memcpy(&f, &b, 4); return f; }
static inline float f32_of_f32(float x) { return x; }

enum { BLOCK = 512 };

// scores[r][h][j] = max over the group's queries of q . partial[r][h][:, j], for j < held[r]. partial[r] points to one
// layer's [heads][columns][room[r]].
#define SCORES(SUFFIX, T)                                                                                          \
    void ig_scores_##SUFFIX(const float *q, const int64_t *partial, const int64_t *held, const int64_t *room,     \
                            long rows, long heads, long group, long columns, float *scores, long width, int threads) { \
        _Pragma("omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)")                           \
        for (long r = 0; r < rows; r++)                                                                              \
            for (long h = 0; h < heads; h++) {                                                                       \
                const float *mine = q + (r * heads + h) * group * columns;                                           \
                const T *keys = (const T *)partial[r] + h * columns * room[r];                                        \
                float *out = scores + (r * heads + h) * width;                                                       \
                for (long first = 0; first < held[r]; first += BLOCK) {                                              \
                    long n = held[r] - first < BLOCK ? held[r] - first : BLOCK;                                      \
                    for (long g = 0; g < group; g++) {                                                               \
                        float sum[BLOCK] = {0};                                                                      \
                        for (long c = 0; c < columns; c++) {                                                         \
                            const T *line = keys + c * room[r] + first;                                              \
                            float weight = mine[g * columns + c];                                                    \
                            for (long j = 0; j < n; j++) sum[j] += weight * f32_of_##SUFFIX(line[j]);                 \
                        }                                                                                            \
                        if (g == 0) memcpy(out + first, sum, n * sizeof(float));                                     \
                        else for (long j = 0; j < n; j++)                                                            \
                            if (sum[j] > out[first + j]) out[first + j] = sum[j];                                     \
                    }                                                                                                \
                }                                                                                                    \
            }                                                                                                        \
    }
SCORES(f32, float)
SCORES(bf16, uint16_t)

// Floats as integers in the same order.
static inline uint32_t rank_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The indices of the m greatest of n scores, rising; of equals the first.
static void top(const float *scores, long n, long m, int64_t *picked) {
    uint32_t prefix = 0, mask = 0;
    long wanted = m;  // how many are still to be found among those that share the prefix
    static const int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
    for (int pass = 0; pass < 3; pass++) {
        uint32_t count[2048] = {0}, digits = (1u << widths[pass]) - 1;
        for (long i = 0; i < n; i++) {
            uint32_t rank = rank_of(scores[i]);
            if ((rank & mask) == prefix) count[rank >> shifts[pass] & digits]++;
        }
        long digit = digits;
        while (wanted > count[digit]) wanted -= count[digit--];
        prefix |= (uint32_t)digit << shifts[pass];
        mask |= digits << shifts[pass];
    }
    long at = 0;
    for (long i = 0; i < n && at < m; i++) {
        uint32_t rank = rank_of(scores[i]);
        if (rank > prefix || (rank == prefix && wanted-- > 0)) picked[at++] = i;
    }
}

enum { AHEAD = 12 };

static inline const char *key_of(int64_t entry, const int32_t *table, const char *kv, long heads, long h,
                                 long block_size, long row_bytes) {
    long block = table[entry / block_size];
    return kv + ((block * 2 * heads + h) * block_size + entry % block_size) * row_bytes;
}

// Each row's and head's numbers[r] best entries, and their keys and values, into entries [rows][heads][places] and
// staging [rows][2][heads][places] of row_bytes.
void ig_fetch(const float *scores, long width, const int64_t *held, const int64_t *numbers, long rows, long heads,
              const int32_t *tables, long blocks, const char *kv, long block_size, long row_bytes, char *staging,
              long places, int64_t *entries, int threads) {
    #pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            int64_t *mine = entries + (r * heads + h) * places;
            if (numbers[r] == 0) continue;
            top(scores + (r * heads + h) * width, held[r], numbers[r], mine);
            char *keys = staging + (r * 2 * heads + h) * places * row_bytes;
            char *values = keys + heads * places * row_bytes;
            const int32_t *table = tables + r * blocks;
            for (long j = 0; j < numbers[r]; j++) {
                if (j + AHEAD < numbers[r]) {  // entries lie apart: fetch what comes while this one is copied
                    const char *later = key_of(mine[j + AHEAD], table, kv, heads, h, block_size, row_bytes);
                    for (long b = 0; b < row_bytes; b += 64) {
                        __builtin_prefetch(later + b);
                        __builtin_prefetch(later + heads * block_size * row_bytes + b);
                    }
                }
                const char *key = key_of(mine[j], table, kv, heads, h, block_size, row_bytes);
                memcpy(keys + j * row_bytes, key, row_bytes);
                memcpy(values + j * row_bytes, key + heads * block_size * row_bytes, row_bytes);
            }
        }
}
"""
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Kernel:
    """The compiled functions on tensors."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._scores = {dtype: getattr(library, f"ig_scores_{suffix}") for dtype, suffix in SUFFIXES.items()}
        for function in self._scores.values():
            function.argtypes = (*[pointer] * 4, *[long] * 4, pointer, long, integer)
        self._fetch = library.ig_fetch
        rows_and_tables = (pointer, long, pointer, pointer, long, long, pointer, long)
        self._fetch.argtypes = (*rows_and_tables, pointer, long, long, pointer, long, pointer, integer)

    def scores(
        self,
        q: torch.Tensor,
        partial: np.ndarray,
        held: np.ndarray,
        room: np.ndarray,
        dtype: torch.dtype,
        out: torch.Tensor,
    ) -> None:
        """Write the first held[row] places of `out` [rows, kv_heads, width]; q: float32 [rows, kv_heads, group, d'].

        partial: each row's address of one layer's partial keys [kv_heads, d', room[row]] in `dtype`; all int64.
        """
        rows, heads, group, columns = q.shape
        self._scores[dtype](
            q.data_ptr(), partial.ctypes.data, held.ctypes.data, room.ctypes.data, rows, heads, group, columns,
            out.data_ptr(), out.shape[2], torch.get_num_threads(),
        )  # fmt: skip

    def fetch(
        self,
        scores: torch.Tensor,
        held: np.ndarray,
        numbers: np.ndarray,
        tables: torch.Tensor,
        kv: torch.Tensor,
        into: torch.Tensor,
    ) -> torch.Tensor:
        """Copy each row's and head's best numbers[row] entries from `kv` to `into` [rows, 2, kv_heads, places, d].

        tables: int32 [rows, blocks]. Returns which they are, rising, int64 [rows, kv_heads, places], 0 beyond.
        """
        rows, _, heads, places, dim = into.shape
        entries = torch.zeros((rows, heads, places), dtype=torch.int64)
        self._fetch(
            scores.data_ptr(), scores.shape[2], held.ctypes.data, numbers.ctypes.data, rows, heads,
            tables.data_ptr(), tables.stride(0), kv.data_ptr(), kv.shape[3], dim * kv.element_size(),
            into.data_ptr(), places, entries.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return entries


@functools.cache
def kernel() -> Kernel | None:
    """The compiled functions, built if need be; None where `kernels` has none either."""
    if kernels.library() is None:
        return None
    compiler = kernels._compiler()
    parts = [SOURCE, *kernels.FLAGS, kernels._compiler_version(compiler), kernels._cpu()]
    target = kernels._cache() / f"infinigen-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    try:
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                source, built = Path(scratch, "infinigen.c"), Path(scratch, "infinigen.so")
                source.write_text(SOURCE)
                made = source.with_suffix(".o")
                subprocess.run(
                    [compiler, *kernels.FLAGS, "-c", str(source), "-o", str(made)], check=True, capture_output=True
                )
                # Linked without -fopenmp, as the other kernels are: OpenMP's symbols are torch's own.
                subprocess.run([compiler, "-shared", str(made), "-o", str(built)], check=True, capture_output=True)
                os.replace(built, target)
        return Kernel(target)
    except (OSError, subprocess.CalledProcessError):
        return None
