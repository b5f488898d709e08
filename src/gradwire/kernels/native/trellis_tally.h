/* How often each index occurs in each context, and by how much values are too large, of sixteen
   elements at a time. */
#ifndef GRADWIRE_TRELLIS_TALLY_H
#define GRADWIRE_TRELLIS_TALLY_H

#include "trellis.h"

#ifdef GW_WIDE
enum {
    TALLIES = 2 * CLASSES * 4, /* by context and |k| = 0, 1, 2, more */
    MOST_TALLIED = 1 << 20,    /* elements after which none has overflown */
};

/* |k| above bit 7, then the context, then which of its tallies counts it. */
GW_WIDE GW_INLINE __m512i wide_tag(__m512i context, __m512i k) {
    const __m512i kind = _mm512_min_epi32(k, _mm512_set1_epi32(3));
    return _mm512_or_si512(_mm512_or_si512(_mm512_slli_epi32(k, 7), _mm512_slli_epi32(context, 2)),
                           kind);
}

/* The first n of sixteen elements: how many, and above bit 24 by how much more than 2. There are four places, so
   that additions to one number do not wait for each other. */
GW_WIDE GW_INLINE void tally_some(uint64_t tallies[4][TALLIES], __m512i tag, int64_t n) {
    uint32_t tags[16];
    _mm512_storeu_si512(tags, tag);
    for (int i = 0; i < n; i++) {
        const uint64_t k = tags[i] >> 7, more = k > 2 ? k - 2 : 0;
        tallies[i & 3][tags[i] & 127] += 1 + (more << 24);
    }
}

/* All of them. */
GW_WIDE GW_INLINE void wide_tally(uint64_t tallies[4][TALLIES], __m512i tag, int is_beyond) {
    uint32_t tags[16];
    _mm512_storeu_si512(tags, tag);
    if (is_beyond)
        for (int i = 0; i < 16; i++) {
            const uint64_t k = tags[i] >> 7, more = k > 2 ? k - 2 : 0;
            tallies[i & 3][tags[i] & 127] += 1 + (more << 24);
        }
    else
        for (int i = 0; i < 16; i++) tallies[i & 3][tags[i] & 127]++;
}

static void add_tallies(uint64_t tallies[4][TALLIES], int is_first, int64_t *counts,
                        int64_t *errors) {
    for (int c = 0; c < 2 * CLASSES; c++)
        for (int k = 0; k < 4; k++)
            for (int i = 0; i < 4; i++) {
                const uint64_t sum = tallies[i][4 * c + k];
                const int64_t n = (int64_t)(sum & 0xffffff);
                counts[KINDS * c + least(k, 2)] += n;
                counts[KINDS * c + 3] += (int64_t)(sum >> 24);
                if (k && !is_first) errors[6 * (c & 1) + 2 * (k - 1)] += n;
            }
}

/* Adds what sixteen values are too large to the sums for |k| = 1, 2, more in either quantiser. */
GW_WIDE GW_INLINE void wide_errors(__m512i total[6], __m512i x, __m512i k, __m512i q,
                                   __mmask16 minus) {
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi32(1);
    const __m512i value = _mm512_sub_epi32(_mm512_slli_epi32(k, 7), _mm512_slli_epi32(q, 6));
    const __m512i error = _mm512_sub_epi32(value, _mm512_mask_sub_epi32(x, minus, zero, x));
    const __mmask16 odd = _mm512_test_epi32_mask(q, one);
    const __mmask16 is[3] = {
        _mm512_cmpeq_epi32_mask(k, one),
        _mm512_cmpeq_epi32_mask(k, _mm512_set1_epi32(2)),
        _mm512_cmpgt_epi32_mask(k, _mm512_set1_epi32(2)),
    };
    for (int t = 0; t < 3; t++) {
        total[t] = _mm512_mask_add_epi32(total[t], is[t] & ~odd, total[t], error);
        total[3 + t] = _mm512_mask_add_epi32(total[3 + t], is[t] & odd, total[3 + t], error);
    }
}

GW_WIDE GW_INLINE int64_t wide_sum(__m512i x) {
    return _mm512_reduce_add_epi64(
        _mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(x)),
                         _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(x, 1))));
}
#endif

#endif
