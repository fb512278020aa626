// What both kernel files need of vectors: bf16 <-> float, an exp, and sums of 16 vectors at once.
// Everything has a plain version; the AVX-512 ones are taken where the compiler defines the extension.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#include <immintrin.h>
#define HAVE_BF16_SIMD 1
#endif

typedef uint16_t bf16;
#define INLINE static inline __attribute__((always_inline))

INLINE float f32_of_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE bf16 bf16_of_f32(float f) {  // to nearest, ties to even, as torch rounds
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float load_f32(const float *x) { return *x; }
INLINE float load_bf16(const bf16 *x) { return f32_of_bf16(*x); }
INLINE void save_f32(float *x, float f) { *x = f; }
INLINE void save_bf16(bf16 *x, float f) { *x = bf16_of_f32(f); }

#ifdef HAVE_BF16_SIMD
// Lane i of the result is the sum of the 16 lanes of a[i]: a transpose that adds as it goes.
INLINE __m512 sum_each_of_16(const __m512 a[16]) {
    __m512 b[8], c[4];
    for (int i = 0; i < 8; i++)
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d lo = _mm512_castps_pd(b[2 * i]), hi = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi)), _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi)));
    }
    __m512 d0 = _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
    __m512 d1 = _mm512_add_ps(_mm512_shuffle_f32x4(c[2], c[3], 0x88), _mm512_shuffle_f32x4(c[2], c[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(d0, d1, 0x88), _mm512_shuffle_f32x4(d0, d1, 0xdd));
}

// exp to about 1e-7 relative: 2^k times a polynomial on [-ln2/2, ln2/2]. Below -104 it is 0.
INLINE __m512 exp16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
    __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(k, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, k);
}
#endif

// x[i] = exp(x[i] - shift) for n values; returns their sum.
INLINE float exp_and_sum(float *x, int n, float shift) {
    float sum = 0;
    int i = 0;
#ifdef HAVE_BF16_SIMD
    __m512 total = _mm512_setzero_ps();
    for (; i + 16 <= n; i += 16) {
        __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(shift)));
        _mm512_storeu_ps(x + i, e);
        total = _mm512_add_ps(total, e);
    }
    sum = _mm512_reduce_add_ps(total);
#endif
    for (; i < n; i++) sum += x[i] = expf(x[i] - shift);
    return sum;
}
