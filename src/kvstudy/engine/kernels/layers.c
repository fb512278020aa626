// A Llama layer but for its attention, on a CPU in bf16: two calls a layer instead of thirty library operations, and matrix
// products that for few tokens read the weights at the memory's speed. Rounds where the library rounds (after each of its
// operations), so that the results agree to the order of summation. `fused.py` says when this is used.
//
// A product y = x W^T has x [m][k] as it lies and W packed by `Library.pack`: [n / 32][k / 2][32] pairs along k. A tile is 32
// outputs of up to 12 tokens: two vectors of W, a pair of x broadcast to each, sums that never go across lanes. An output is
// summed in the order of k whatever m is, so that a row's result does not depend on who shares its batch.
#include "simd.h"

enum { COLUMNS = 32, TOKENS = 12, MAX_TOKENS = 256 };

int layers_available(void) {
#ifdef HAVE_BF16_SIMD
    return MAX_TOKENS;
#else
    return 0;
#endif
}

#ifdef HAVE_BF16_SIMD
INLINE float rounded(float f) { return f32_of_bf16(bf16_of_f32(f)); }

static void rms_norm(const bf16 *x, const bf16 *w, bf16 *out, int n, float eps) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += f32_of_bf16(x[i]) * f32_of_bf16(x[i]);
    const float scale = 1.0f / sqrtf(sum / n + eps);
    for (int i = 0; i < n; i++) out[i] = bf16_of_f32(f32_of_bf16(w[i]) * rounded(f32_of_bf16(x[i]) * scale));
}

static void rotate(bf16 *x, const bf16 *cosine, const bf16 *sine, int dim) {
    const int half = dim / 2;
    for (int i = 0; i < half; i++) {
        const float a = f32_of_bf16(x[i]), b = f32_of_bf16(x[i + half]);
        const float ca = f32_of_bf16(cosine[i]), cb = f32_of_bf16(cosine[i + half]);
        const float sa = f32_of_bf16(sine[i]), sb = f32_of_bf16(sine[i + half]);
        x[i] = bf16_of_f32(rounded(a * ca) + rounded(-b * sa));
        x[i + half] = bf16_of_f32(rounded(b * cb) + rounded(a * sb));
    }
}

INLINE __m512 load16(const bf16 *x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)x)), 16));
}

INLINE void save16(bf16 *x, __m512 f) { _mm256_storeu_si256((void *)x, (__m256i)_mm512_cvtneps_pbh(f)); }

INLINE __m512 rounded16(__m512 f) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(f)), 16));
}

// y[MT][32] of MT tokens; asks for the weights AHEAD bytes further where this is the first walk over them.
INLINE void tile_of(const bf16 *x, int64_t x_row, const uint32_t *w, int pairs, int first, float *y, const int MT) {
    enum { AHEAD = 4096 };
    __m512 acc[TOKENS][2];
#pragma GCC unroll 12
    for (int i = 0; i < MT; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (int d = 0; d < pairs; d++) {
        const uint32_t *at = w + (int64_t)d * COLUMNS;
        const __m512bh low = (__m512bh)_mm512_loadu_si512(at), high = (__m512bh)_mm512_loadu_si512(at + 16);
        if (first) {
            __builtin_prefetch((const char *)at + AHEAD, 0, 2);
            __builtin_prefetch((const char *)at + AHEAD + 64, 0, 2);
        }
#pragma GCC unroll 12
        for (int i = 0; i < MT; i++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(((const int *)(x + i * x_row))[d]);
            acc[i][0] = _mm512_dpbf16_ps(acc[i][0], low, pair);
            acc[i][1] = _mm512_dpbf16_ps(acc[i][1], high, pair);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < MT; i++) {
        _mm512_store_ps(y + i * COLUMNS, acc[i][0]);
        _mm512_store_ps(y + i * COLUMNS + 16, acc[i][1]);
    }
}

static void tile(const bf16 *x, int64_t x_row, const uint32_t *w, int pairs, int first, float *y, int tokens) {
#define GO(MT) \
    case MT: \
        if (first) tile_of(x, x_row, w, pairs, 1, y, MT); \
        else tile_of(x, x_row, w, pairs, 0, y, MT); \
        break
    switch (tokens) {
        GO(1); GO(2); GO(3); GO(4); GO(5); GO(6); GO(7); GO(8); GO(9); GO(10); GO(11); GO(12);
    }
#undef GO
}

// m tokens in the fewest groups of at most TOKENS, as even as can be: where group g begins.
INLINE int groups_of(int m) { return (m + TOKENS - 1) / TOKENS; }
INLINE int group_at(int m, int g) { return (int)((int64_t)m * g / groups_of(m)); }

// out = x W^T, or where `residual` is given out = residual + x W^T. Called by all threads of a team.
static void product(const bf16 *x, int64_t x_row, int m, const uint32_t *w, int n, int k, const bf16 *residual, bf16 *out) {
    float y[TOKENS * COLUMNS] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int j = 0; j < n; j += COLUMNS)
        for (int g = 0; g < groups_of(m); g++) {
            const int from = group_at(m, g), tokens = group_at(m, g + 1) - from;
            tile(x + from * x_row, x_row, w + (int64_t)j * k / 2, k / 2, g == 0, y, tokens);
            for (int i = 0; i < tokens; i++)
                for (int c = 0; c < COLUMNS; c += 16) {
                    const int64_t at = (int64_t)(from + i) * n + j + c;
                    const __m512 value = _mm512_load_ps(y + i * COLUMNS + c);
                    save16(out + at, residual ? _mm512_add_ps(load16(residual + at), rounded16(value)) : value);
                }
        }
}

// act = silu(x W_gate^T) * (x W_up^T), the two weights one after the other. Called by all threads of a team.
static void gated(const bf16 *x, int64_t x_row, int m, const uint32_t *w, int inner, int k, bf16 *act) {
    float gate[TOKENS * COLUMNS] __attribute__((aligned(64))), up[TOKENS * COLUMNS] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int j = 0; j < inner; j += COLUMNS)
        for (int g = 0; g < groups_of(m); g++) {
            const int from = group_at(m, g), tokens = group_at(m, g + 1) - from;
            const uint32_t *w_gate = w + (int64_t)j * k / 2, *w_up = w_gate + (int64_t)inner * k / 2;
            tile(x + from * x_row, x_row, w_gate, k / 2, g == 0, gate, tokens);
            tile(x + from * x_row, x_row, w_up, k / 2, g == 0, up, tokens);
            for (int i = 0; i < tokens * COLUMNS; i += 16) {
                const __m512 a = rounded16(_mm512_load_ps(gate + i)), b = rounded16(_mm512_load_ps(up + i));
                const __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), a));
                const __m512 silu = rounded16(_mm512_div_ps(a, _mm512_add_ps(_mm512_set1_ps(1.0f), e)));
                save16(act + (int64_t)(from + i / COLUMNS) * inner + j + i % COLUMNS, _mm512_mul_ps(silu, b));
            }
        }
}

void linear(const bf16 *x, int64_t x_row, int m, const uint32_t *w, int n, int k, bf16 *out, int threads) {
#pragma omp parallel num_threads(threads)
    for (int from = 0; from < m; from += MAX_TOKENS) {
        const int some = m - from < MAX_TOKENS ? m - from : MAX_TOKENS;
        product(x + from * x_row, x_row, some, w, n, k, NULL, out + (int64_t)from * n);
    }
}

// A layer up to its attention: normed = norm(hidden); qkv = normed W^T; q and k rotated.
void llama_before(const bf16 *hidden, int m, int hidden_size, const bf16 *norm, float eps, const uint32_t *w_qkv, int width,
                  const bf16 *cosine, const bf16 *sine, int rotated_heads, int dim, bf16 *normed, bf16 *qkv, int threads) {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int i = 0; i < m; i++)
            rms_norm(hidden + (int64_t)i * hidden_size, norm, normed + (int64_t)i * hidden_size, hidden_size, eps);
        product(normed, hidden_size, m, w_qkv, width, hidden_size, NULL, qkv);
#pragma omp for schedule(static)
        for (int i = 0; i < m; i++)
            for (int h = 0; h < rotated_heads; h++)
                rotate(qkv + (int64_t)i * width + h * dim, cosine + (int64_t)i * dim, sine + (int64_t)i * dim, dim);
    }
}

// A layer after its attention: hidden += attended W_o^T; hidden += (silu(gate) * up) W_down^T over norm(hidden).
void llama_after(bf16 *hidden, int m, int hidden_size, const bf16 *attended, int attended_width, const uint32_t *w_o,
                 const bf16 *norm, float eps, const uint32_t *w_gate_up, int inner, const uint32_t *w_down, bf16 *normed, bf16 *act,
                 int threads) {
#pragma omp parallel num_threads(threads)
    {
        product(attended, attended_width, m, w_o, hidden_size, attended_width, hidden, hidden);
#pragma omp for schedule(static)
        for (int i = 0; i < m; i++)
            rms_norm(hidden + (int64_t)i * hidden_size, norm, normed + (int64_t)i * hidden_size, hidden_size, eps);
        gated(normed, hidden_size, m, w_gate_up, inner, hidden_size, act);
        product(act, inner, m, w_down, hidden_size, inner, hidden, hidden);
    }
}
#endif
