// A Llama layer but for its attention, on a CPU in bf16: two calls a layer instead of thirty library operations, and matrix
// products that for few tokens read the weights at the memory's speed. Rounds where the library rounds (after each of its
// operations), so that the results agree to the order of summation. `fused.py` says when this is used.
//
// A product y = x W^T has x [m][k] and W [n][k], both rows contiguous: a dot product along k for each output, 16 of them
// at once in registers (4 rows of x by 4 of W, or 1 by 16), so that W needs no packing.
#include "simd.h"

enum { COLUMNS = 16, MAX_TOKENS = 256 };

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

static void silu_times(const float *gate, const float *up, bf16 *out, int n) {
    float s[COLUMNS];
    for (int from = 0; from < n; from += COLUMNS) {
        for (int i = 0; i < COLUMNS; i++) s[i] = -rounded(gate[from + i]);
        exp_and_sum(s, COLUMNS, 0);
        for (int i = 0; i < COLUMNS; i++) {
            const float g = rounded(gate[from + i]);
            out[from + i] = bf16_of_f32(rounded(g / (1 + s[i])) * rounded(up[from + i]));
        }
    }
}

// y[i][j] = x[i] . w[j] for MT x NT = 16 outputs; asks for the weights `ahead` elements further.
INLINE void sixteen(const bf16 *x, int64_t x_row, const bf16 *w, int k, int64_t ahead, float *y, const int MT, const int NT) {
    __m512 acc[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
    for (int c = 0; c < k; c += 32) {
        __m512bh a[4];
#pragma GCC unroll 4
        for (int i = 0; i < MT; i++) a[i] = (__m512bh)_mm512_loadu_si512(x + i * x_row + c);
#pragma GCC unroll 16
        for (int j = 0; j < NT; j++) {
            const bf16 *at = w + (int64_t)j * k + c;
            const __m512bh b = (__m512bh)_mm512_loadu_si512(at);
            if (ahead) __builtin_prefetch(at + ahead, 0, 2);
#pragma GCC unroll 4
            for (int i = 0; i < MT; i++) acc[i * NT + j] = _mm512_dpbf16_ps(acc[i * NT + j], a[i], b);
        }
    }
    float sums[16];
    _mm512_storeu_ps(sums, sum_each_of_16(acc));
    for (int i = 0; i < MT; i++)
        for (int j = 0; j < NT; j++) y[i * COLUMNS + j] = sums[i * NT + j];
}

// y[m][16]: 16 columns of the product. The first walk over the weights fetches those of the next 16 columns.
static void columns(const bf16 *x, int64_t x_row, int m, const bf16 *w, int k, float *y) {
    const int64_t next = (int64_t)COLUMNS * k;
    int i = 0;
    for (; i + 4 <= m; i += 4)
        for (int j = 0; j < COLUMNS; j += 4)
            sixteen(x + i * x_row, x_row, w + (int64_t)j * k, k, i ? 0 : next, y + i * COLUMNS + j, 4, 4);
    for (; i + 2 <= m; i += 2)
        for (int j = 0; j < COLUMNS; j += 8)
            sixteen(x + i * x_row, x_row, w + (int64_t)j * k, k, i ? 0 : next, y + i * COLUMNS + j, 2, 8);
    for (; i < m; i++) sixteen(x + i * x_row, x_row, w, k, i ? 0 : next, y + i * COLUMNS, 1, 16);
}

// out = x W^T, or where `residual` is given out = residual + x W^T. Called by all threads of a team.
static void product(const bf16 *x, int64_t x_row, int m, const bf16 *w, int n, int k, const bf16 *residual, bf16 *out) {
    float y[MAX_TOKENS * COLUMNS];
#pragma omp for schedule(static)
    for (int j = 0; j < n; j += COLUMNS) {
        columns(x, x_row, m, w + (int64_t)j * k, k, y);
        for (int i = 0; i < m; i++)
            for (int c = 0; c < COLUMNS; c++) {
                const int64_t at = (int64_t)i * n + j + c;
                const float value = y[i * COLUMNS + c];
                out[at] = bf16_of_f32(residual ? f32_of_bf16(residual[at]) + rounded(value) : value);
            }
    }
}

void linear(const bf16 *x, int64_t x_row, int m, const bf16 *w, int n, int k, bf16 *out, int threads) {
#pragma omp parallel num_threads(threads)
    product(x, x_row, m, w, n, k, NULL, out);
}

// A layer up to its attention: normed = norm(hidden); qkv = normed W^T; q and k rotated.
void llama_before(const bf16 *hidden, int m, int hidden_size, const bf16 *norm, float eps, const bf16 *w_qkv, int width,
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
void llama_after(bf16 *hidden, int m, int hidden_size, const bf16 *attended, int attended_width, const bf16 *w_o,
                 const bf16 *norm, float eps, const bf16 *w_gate_up, int inner, const bf16 *w_down, bf16 *normed, bf16 *act,
                 int threads) {
#pragma omp parallel num_threads(threads)
    {
        product(attended, attended_width, m, w_o, hidden_size, attended_width, hidden, hidden);
#pragma omp for schedule(static)
        for (int i = 0; i < m; i++)
            rms_norm(hidden + (int64_t)i * hidden_size, norm, normed + (int64_t)i * hidden_size, hidden_size, eps);
        float gate[MAX_TOKENS * COLUMNS], up[MAX_TOKENS * COLUMNS];
#pragma omp for schedule(static)
        for (int j = 0; j < inner; j += COLUMNS) {
            columns(normed, hidden_size, m, w_gate_up + (int64_t)j * hidden_size, hidden_size, gate);
            columns(normed, hidden_size, m, w_gate_up + (int64_t)(inner + j) * hidden_size, hidden_size, up);
            for (int i = 0; i < m; i++)
                silu_times(gate + i * COLUMNS, up + i * COLUMNS, act + (int64_t)i * inner + j, COLUMNS);
        }
        product(act, inner, m, w_down, hidden_size, inner, hidden, hidden);
    }
}
#endif
