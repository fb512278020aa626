"""The compiled kernels against plain torch, and both against attention written out."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstudy.engine import attention, kernels

needs_kernels = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
DTYPES = [torch.float32, torch.bfloat16]


def pool_for(
    lengths: list[int], kv_heads: int, size: int, dim: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, ...]:
    """A pool whose tables are shuffled, and which has NaN wherever no row's entry lies."""
    torch.manual_seed(seed)
    widest = -(-max(lengths) // size)
    kv = torch.full((len(lengths) * widest + 2, 2, kv_heads, size, dim), float("nan"), dtype=dtype)
    tables = torch.randperm(len(kv))[: len(lengths) * widest].view(len(lengths), widest).int()
    for row, length in enumerate(lengths):
        entry = torch.arange(length)
        slots = tables[row, entry // size].long() * size + entry % size
        shape = (length, kv_heads, dim)
        attention.store(kv, slots, torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
    return kv, tables, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    """All other tests of compiled code are left out where it is not to be had, and would not notice a broken one."""
    assert kernels.library() is not None


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 600])), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    size=st.sampled_from([1, 3, 8, 16, 32]),
    dim=st.sampled_from([8, 16, 24, 48, 64, 80, 128]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_decode_kernel_equals_torch(
    dtype: torch.dtype, lengths: list[int], kv_heads: int, group: int, size: int, dim: int, seed: int
) -> None:
    kv, tables, n = pool_for(lengths, kv_heads, size, dim, dtype, seed)
    q = torch.randn(len(lengths), kv_heads * group, dim).to(dtype)
    results = []
    for use in (True, False):
        attention.use_kernels(use)
        out, mass = torch.empty_like(q), torch.full((len(lengths), kv_heads, max(lengths)), -1.0)
        attention.decode(q, kv, tables, n, dim**-0.5, out, mass)
        results.append((out.float(), mass))
    attention.use_kernels(True)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    assert (results[0][0] - results[1][0]).abs().max() <= tolerance
    assert (results[0][1] - results[1][1]).abs().max() <= 1e-4
    for row, length in enumerate(lengths):
        assert results[0][1][row, :, :length].sum(-1) == pytest.approx(float(group), rel=1e-4)
        assert (results[0][1][row, :, length:] == -1.0).all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_to_the_bit_alone_in_a_batch_and_on_two_threads(dtype: torch.dtype) -> None:
    lengths = [700, 5, 256]
    kv, tables, n = pool_for(lengths, 2, 16, 64, dtype, 0)
    q = torch.randn(3, 6, 64).to(dtype)
    lib = kernels.library()
    assert lib is not None
    before, results = lib.threads, []
    for lib.threads in (1, 2):
        out = torch.empty_like(q)
        attention.decode(q, kv, tables, n, 0.125, out)
        results.append(out)
    lib.threads = before
    one = torch.empty_like(q[:1])
    attention.decode(q[:1], kv, tables[:1], n[:1], 0.125, one)
    assert torch.equal(results[0], results[1])
    assert torch.equal(one, results[0][:1])


@pytest.mark.parametrize("use", [pytest.param(True, marks=needs_kernels), False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_and_gather_are_inverse(use: bool, dtype: torch.dtype) -> None:
    attention.use_kernels(use)
    kv = torch.zeros(9, 2, 3, 4, 16, dtype=dtype)
    k, v = torch.randn(10, 3, 16).to(dtype), torch.randn(10, 3, 16).to(dtype)
    table = torch.tensor([7, 2, 5, 0], dtype=torch.int32)
    entry = torch.arange(10)
    slots = table[entry // 4].long() * 4 + entry % 4
    attention.store(kv, slots, k, v)
    back_k, back_v = attention.gather(kv, table, 10)
    assert torch.equal(back_k, k.transpose(0, 1)) and torch.equal(back_v, v.transpose(0, 1))
    own = torch.stack([slots[torch.randperm(10)] for _ in range(3)])  # a slot a head
    some_k, some_v = attention.gather_slots(kv, own)
    for head in range(3):
        at = [slots.tolist().index(s) for s in own[head].tolist()]
        assert torch.equal(some_k[head], k[at, head]) and torch.equal(some_v[head], v[at, head])
    fresh = torch.zeros_like(kv)
    attention.store(fresh, own.T, some_k.transpose(0, 1), some_v.transpose(0, 1))
    assert torch.equal(fresh, kv)
    attention.use_kernels(True)


@pytest.mark.parametrize("method", [attention._prefill_flash, attention._prefill_blocks])
@pytest.mark.parametrize(("start", "c"), [(0, 1), (0, 33), (21, 13), (6, 1)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4)])
def test_prefill_is_causal_attention(
    method: object, start: int, c: int, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "KEY_BLOCK", 8)
    torch.manual_seed(start)
    n = start + c
    q, k, v = torch.randn(c, heads, 16), torch.randn(n, kv_heads, 16), torch.randn(n, kv_heads, 16)
    out, lse = torch.empty_like(q), torch.empty(heads, c)
    method(q, k.transpose(0, 1), v.transpose(0, 1), start, 0.3, out, lse)  # type: ignore[operator]
    group = heads // kv_heads
    scores = torch.einsum("chd,nhd->hcn", q, k.repeat_interleave(group, 1)) * 0.3
    hidden = torch.arange(n) > start + torch.arange(c)[:, None]
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    expected = torch.einsum("hcn,nhd->chd", p, v.repeat_interleave(group, 1))
    assert (out - expected).abs().max() < 1e-5
    assert (lse - scores.masked_fill(hidden, float("-inf")).logsumexp(-1)).abs().max() < 1e-5
    sums = attention.column_sums(q, k.transpose(0, 1), lse, start, 0.3)
    assert (sums - p.view(kv_heads, group, c, n).sum((1, 2))).abs().max() < 1e-5


@needs_kernels
@given(
    start=st.sampled_from([0, 1, 40, 64, 130]),
    c=st.integers(1, 90),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    dim=st.sampled_from([32, 64, 96, 128]),
)
@settings(max_examples=30, deadline=None)
def test_prefill_kernel_equals_torch(start: int, c: int, kv_heads: int, group: int, dim: int) -> None:
    torch.manual_seed(c)
    heads, n = kv_heads * group, start + c
    wide = torch.randn(c, heads + 1, dim).bfloat16()  # rows further apart than they are long
    q = wide[:, :heads]
    k, v = (torch.randn(n, kv_heads, dim).bfloat16().transpose(0, 1) for _ in range(2))
    out, lse = torch.empty(c, heads, dim, dtype=torch.bfloat16), torch.empty(heads, c)
    attention.prefill(q, k, v, start, dim**-0.5, out, lse)
    expected, norm = torch.empty(c, heads, dim), torch.empty(heads, c)
    attention._prefill_blocks(q.float(), k.float(), v.float(), start, dim**-0.5, expected, norm)
    assert (out - expected).abs().max() < 0.03
    assert (lse - norm).abs().max() < 1e-4
    sums = attention.column_sums(q, k, lse, start, dim**-0.5)
    exact = attention.column_sums(q.float(), k.float(), norm, start, dim**-0.5)
    assert (sums - exact).abs().max() < 1e-3 * exact.max()


@needs_kernels
@pytest.mark.skipif(not (kernels.library() and kernels.library().max_tokens), reason="no bfloat16 instructions")  # type: ignore[union-attr]
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 256])
@pytest.mark.parametrize(("k", "n"), [(64, 32), (96, 64), (576, 960)])
def test_linear_kernel(tokens: int, k: int, n: int) -> None:
    lib = kernels.library()
    assert lib is not None
    torch.manual_seed(tokens)
    x, w = torch.randn(tokens, k).bfloat16(), torch.randn(n, k).bfloat16()
    expected = x.float() @ w.float().T
    assert (lib.linear(x, lib.pack(w)).float() - expected).abs().max() < 0.01 * expected.abs().max()


def test_without_a_compiler_torch_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(
        kernels, "_compiler", lambda: (_ for _ in ()).throw(FileNotFoundError("no C compiler (cc) found"))
    )
    kernels.library.cache_clear()
    try:
        assert kernels.library() is None
        assert kernels.library() is None
        assert caplog.text.count("no C compiler") == 1
    finally:
        monkeypatch.undo()
        kernels.library.cache_clear()


@needs_kernels
def test_a_build_goes_to_the_cache_folder_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = kernels._built()
    assert path.parent.parent == tmp_path
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert kernels._built() == path
