"""Compiled CPU kernels: built with the system's C compiler at first use, cached, called through ctypes.

The cache is keyed by the sources, the flags, the compiler and the CPU, and lies in `$XDG_CACHE_HOME/kvstudy`,
else `~/.cache/kvstudy`, else a temporary folder; a build is renamed into place whole, so processes that build
at the same time do not disturb one another. OpenMP's symbols are left open and found in torch's own libgomp,
so that torch and the kernels share one pool of threads. Where anything of this fails, `library()` says so
once and answers None, and plain torch is used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = ("attention.c", "prefill.c", "layers.c", "infinigen.c")
HEADERS = ("simd.h",)
BUILD = "-O3 -march=native -fPIC -fopenmp -std=gnu11 -Werror=implicit-function-declaration"
MATH = "-fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math"
FLAGS = f"{BUILD} {MATH}".split()
PACKED_ROWS = 32
"""Outputs that lie side by side in a packed weight."""
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
SIMD_ONLY = ("prefill", "column_sums", "linear", "llama_before", "llama_after")
TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
SIGNATURES = {
    "kv_store": "pplplplllll",
    "kv_gather": "ppppllll" + "i",
    "kv_gather_slots": "ppppllll" + "i",
    "kv_decode_f32": "plpplpplpll" + "iiiii" + "fi",
    "kv_decode_bf16": "plpplpplpll" + "iiiii" + "fi",
    "prefill": "plpllpll" + "iiiii" + "fplpi",
    "column_sums": "plpll" + "iiiii" + "fppi",
    "linear": "plipiipi",
    "llama_before": "piipfpippiippi",
    "llama_after": "piipippfpipppi",
    "ig_scores_f32": "ppfppp" + "lllll" + "fplpi",
    "ig_scores_bf16": "ppfppp" + "lllll" + "fplpi",
    "ig_select": "plpplllpi",
    "ig_gather": "ppllplpllpli",
}


class Library:
    """The kernels as functions on tensors; the same signatures as in `attention`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.threads = torch.get_num_threads()
        self._lib = ctypes.CDLL(str(path))
        self.max_tokens: int = self._lib.layers_available()
        """Tokens up to which the `llama_` calls work; 0 where the CPU has no bfloat16 instructions."""
        for name, letters in SIGNATURES.items():
            if self.max_tokens or name not in SIMD_ONLY:
                getattr(self._lib, name).argtypes = [TYPES[letter] for letter in letters]
        self._decode = {dtype: getattr(self._lib, f"kv_decode_{suffix}") for dtype, suffix in DTYPES.items()}

    def function(self, name: str) -> Any:
        """A C function, as it is, for a module that has its own calls."""
        return getattr(self._lib, name)

    def store(self, kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `attention.store`."""
        _, _, heads, size, dim = kv.shape
        k, v = _rows(k), _rows(v)
        slots = slots.contiguous()
        width = kv.element_size()
        self._lib.kv_store(
            kv.data_ptr(),
            slots.data_ptr(),
            int(slots.dim() == 2),
            k.data_ptr(),
            k.stride(0) * width,
            v.data_ptr(),
            v.stride(0) * width,
            k.shape[0],
            heads,
            size,
            dim * width,
        )

    def decode(
        self, q: Tensor, kv: Tensor, tables: Tensor, lengths: Tensor, scale: float, out: Tensor, mass: Tensor | None
    ) -> None:
        """See `attention.decode`."""
        _, _, kv_heads, size, dim = kv.shape
        q = _rows(q)
        rows, heads, _ = q.shape
        assert tables.dtype == lengths.dtype == torch.int32 and tables.stride(1) == 1
        assert out.stride(2) == 1 and out.stride(1) == dim
        failed = self._decode[kv.dtype](
            q.data_ptr(),
            q.stride(0),
            kv.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            lengths.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            mass.data_ptr() if mass is not None else None,
            mass.stride(0) if mass is not None else 0,
            mass.stride(1) if mass is not None else 0,
            rows,
            heads,
            kv_heads,
            dim,
            size,
            scale,
            self.threads,
        )
        if failed:
            raise MemoryError("decode attention: no memory for its partial results")

    def gather(self, kv: Tensor, table: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """See `attention.gather`."""
        _, _, heads, size, dim = kv.shape
        k = torch.empty((heads, n, dim), dtype=kv.dtype)
        v = torch.empty_like(k)
        table = table.contiguous()
        self._lib.kv_gather(
            kv.data_ptr(),
            table.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            n,
            heads,
            size,
            dim * kv.element_size(),
            self.threads,
        )
        return k, v

    def gather_slots(self, kv: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `attention.gather_slots`."""
        _, _, heads, size, dim = kv.shape
        slots = slots.contiguous()
        k = torch.empty((heads, slots.shape[1], dim), dtype=kv.dtype)
        v = torch.empty_like(k)
        self._lib.kv_gather_slots(
            kv.data_ptr(),
            slots.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            slots.shape[1],
            heads,
            size,
            dim * kv.element_size(),
            self.threads,
        )
        return k, v

    def can_prefill(self, q: Tensor) -> bool:
        """Whether `prefill` and `column_sums` take queries `[c, heads, head_dim]` like these."""
        dim = q.shape[2]
        return self.max_tokens > 0 and q.dtype is torch.bfloat16 and dim % 32 == 0 and dim <= 256

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, out: Tensor, lse: Tensor | None
    ) -> None:
        """See `attention.prefill`."""
        q = _rows(q)
        c, heads, dim = q.shape
        assert k.stride(2) == v.stride(2) == out.stride(2) == 1 and out.stride(1) == dim
        self._lib.prefill(
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
            c,
            start,
            heads,
            k.shape[0],
            dim,
            scale,
            out.data_ptr(),
            out.stride(0),
            lse.data_ptr() if lse is not None else None,
            self.threads,
        )

    def column_sums(self, q: Tensor, k: Tensor, lse: Tensor, start: int, scale: float) -> Tensor:
        """See `attention.column_sums`."""
        q, lse = _rows(q), lse.contiguous()
        c, heads, dim = q.shape
        sums = torch.empty((k.shape[0], start + c), dtype=torch.float32)
        failed = self._lib.column_sums(
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            c,
            start,
            heads,
            k.shape[0],
            dim,
            scale,
            lse.data_ptr(),
            sums.data_ptr(),
            self.threads,
        )
        if failed:
            raise MemoryError("column sums: no memory for the packed queries")
        return sums

    # -- the rest of a layer: see `fused`. All tensors are bfloat16; rows are contiguous
    # --------------------------------

    @staticmethod
    def pack(weight: Tensor) -> Tensor:
        """A weight `[n, k]` for the calls below, `[n / 32, k / 2, 32, 2]`: n a multiple of 32, k even."""
        n, k = weight.shape
        return weight.view(n // PACKED_ROWS, PACKED_ROWS, k // 2, 2).transpose(1, 2).contiguous()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x `[tokens, k]` times a packed weight `[n, k]` transposed."""
        tokens, k = x.shape
        n = weight.shape[0] * PACKED_ROWS
        out = torch.empty((tokens, n), dtype=x.dtype)
        self._lib.linear(x.data_ptr(), x.stride(0), tokens, weight.data_ptr(), n, k, out.data_ptr(), self.threads)
        return out

    def llama_before(
        self,
        hidden: Tensor,
        norm: Tensor,
        eps: float,
        w_qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        rotated_heads: int,
        normed: Tensor,
        qkv: Tensor,
    ) -> None:
        """`normed` and `qkv` (q and k rotated) from `hidden`."""
        tokens, size = hidden.shape
        self._lib.llama_before(
            hidden.data_ptr(),
            tokens,
            size,
            norm.data_ptr(),
            eps,
            w_qkv.data_ptr(),
            qkv.shape[1],
            cos.data_ptr(),
            sin.data_ptr(),
            rotated_heads,
            cos.shape[1],
            normed.data_ptr(),
            qkv.data_ptr(),
            self.threads,
        )

    def llama_after(
        self,
        hidden: Tensor,
        attended: Tensor,
        w_out: Tensor,
        norm: Tensor,
        eps: float,
        w_gate_up: Tensor,
        w_down: Tensor,
        normed: Tensor,
        act: Tensor,
    ) -> None:
        """`hidden` after the layer, in place; `normed` and `act` are scratch."""
        tokens, size = hidden.shape
        self._lib.llama_after(
            hidden.data_ptr(),
            tokens,
            size,
            attended.data_ptr(),
            attended.numel() // tokens,
            w_out.data_ptr(),
            norm.data_ptr(),
            eps,
            w_gate_up.data_ptr(),
            act.shape[1],
            w_down.data_ptr(),
            normed.data_ptr(),
            act.data_ptr(),
            self.threads,
        )


def _rows(x: Tensor) -> Tensor:
    """x `[tokens, heads, dim]` with its last two dimensions contiguous: x itself, where it is so already."""
    _, heads, dim = x.shape
    return x if x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim) else x.contiguous()


@functools.cache
def library() -> Library | None:
    """The kernels, built if need be; None, after one warning, where they cannot be had."""
    if os.environ.get("KVSTUDY_NO_KERNELS"):
        return None
    try:
        _open_openmp()
        return Library(_built())
    except (OSError, subprocess.CalledProcessError) as error:
        detail = (
            error.stderr.decode(errors="replace")[-2000:] if isinstance(error, subprocess.CalledProcessError) else error
        )
        logger.warning("no compiled kernels (%s); attention runs in plain torch, which is slower", detail)
        return None


def describe() -> dict[str, Any] | None:
    """What is in use, for a record of the run."""
    lib = library()
    return None if lib is None else {"build": lib.path.stem, "compiler": _compiler_version(_compiler())}


def _open_openmp() -> None:
    """Make torch's OpenMP runtime visible to the kernels."""
    for name in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)
        return
    ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def _compiler() -> str:
    for name in (os.environ.get("CC", ""), "cc", "gcc"):
        if name and (found := shutil.which(name)):
            return found
    raise FileNotFoundError("no C compiler (cc) found")


def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, check=True, text=True).stdout.splitlines()[0]


def _cpu() -> str:
    """The CPU's model and features: a build for one must not be loaded on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor()


def _built() -> Path:
    """The shared library, from the cache or freshly compiled."""
    compiler = _compiler()
    digest = hashlib.sha256()
    for name in SOURCES + HEADERS:
        digest.update((FOLDER / name).read_bytes())
    digest.update("\0".join([*FLAGS, _compiler_version(compiler), _cpu()]).encode())
    target = _cache() / f"kernels-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = []
        for name in SOURCES:
            objects.append(f"{scratch}/{name}.o")
            command = [compiler, *FLAGS, "-c", str(FOLDER / name), "-o", objects[-1]]
            subprocess.run(command, check=True, capture_output=True)
        # Linked without -fopenmp: see the module's docstring.
        subprocess.run(
            [compiler, "-shared", *objects, "-lm", "-o", f"{scratch}/out.so"], check=True, capture_output=True
        )
        os.replace(f"{scratch}/out.so", target)
    return target


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    for folder in (Path(base) / "kvstudy" if base else None, Path("~/.cache/kvstudy").expanduser()):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            continue
        if os.access(folder, os.W_OK):
            return folder
    # Not shared with other users: what is loaded from here is code.
    private = Path(tempfile.gettempdir()) / f"kvstudy-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    if private.stat().st_uid != os.getuid():
        raise PermissionError(f"{private} belongs to someone else")
    return private
