/* Shared by the kernels of trellis-coded quantisation; reference/trellis.py specifies them. */
#ifndef GRADWIRE_TRELLIS_H
#define GRADWIRE_TRELLIS_H

#include "native.h"

#include <stdlib.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define GW_WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512cd")))
#include <immintrin.h>
#endif

enum {
    UNIT = 64,     /* of a step: what scaled numbers count */
    LANES = 16,    /* blocks searched together, or segments */
    BLOCK = 1024,  /* elements of a block */
    CLASSES = 16,  /* of expected magnitude */
    KINDS = 4,     /* of indices counted: 0, 1, more, and by how much more */
    SUMS = 12,     /* of errors: how many and how much, for |k| = 1, 2, more in either quantiser */
    RATES = 8,     /* per class: two quantisers, each with the rates of 0, 1, 2 and a slope */
};

GW_INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

GW_INLINE int64_t segment_start(int64_t count, int64_t segments, int64_t s) {
    return s == segments ? count : count / BLOCK * s / segments * BLOCK;
}

int32_t gw_trellis_search(const int32_t *scaled, const uint8_t *contexts, int64_t count,
                          const int32_t *rates, const int32_t *offsets, int32_t is_signed,
                          int32_t *indices);
int32_t gw_trellis_contexts(const int32_t *scaled, const int32_t *indices, int64_t count,
                            const int64_t *shapes, int64_t most_columns, int64_t segments,
                            int32_t is_signed, uint8_t *contexts, int64_t *counts,
                            int64_t *errors);
void gw_trellis_counts(const int32_t *scaled, const int32_t *indices, const uint8_t *contexts,
                       int64_t count, int32_t is_signed, int64_t *counts, int64_t *errors);
int32_t gw_trellis_tables(const int64_t *counts, const double *bits, int8_t *levels, char *text,
                          double *size);

#ifdef GW_WIDE
GW_INLINE int is_wide(void) {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512cd");
}

/* Rows r[i] of sixteen numbers become columns: what is off the diagonal changes places, in ever
   larger squares. */
GW_WIDE GW_INLINE void transpose(__m512i r[16]) {
    const __m512i lane =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
    for (int h = 1; h < 16; h *= 2) {
        const __m512i bit = _mm512_set1_epi32(h), other = _mm512_xor_si512(lane, bit);
        const __mmask16 high = _mm512_test_epi32_mask(lane, bit);
        const __m512i second = _mm512_set1_epi32(16);
        const __m512i low_from = _mm512_mask_add_epi32(lane, high, other, second);
        const __m512i high_from = _mm512_mask_add_epi32(other, high, lane, second);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i & h) continue;
            const __m512i a = r[i], b = r[i | h];
            r[i] = _mm512_permutex2var_epi32(a, low_from, b);
            r[i | h] = _mm512_permutex2var_epi32(a, high_from, b);
        }
    }
}
#endif

#endif
