/* Philox 4x32-10 (Salmon et al. 2011, sec. 4.3), bit for bit as reference/philox.py.

   `philox_block` is the algorithm. The vector version does the same for several blocks at a
   time: a vector holds one counter word of each block in 64-bit lanes, because the round is a
   32 x 32 -> 64 bit product. Vector multipliers read only the low half of a lane, so the high
   halves may hold anything and nothing is masked until the words are stored. From plain C gcc 12
   makes code that takes 2.4 times as long with AVX-512 and no less than scalar code with AVX2,
   hence the intrinsics. */
#include "threads.h"

/* GRAIN: words of a whole number of batches, vectors of any width. */
enum { ROUNDS = 10, GRAIN = 96, LEAST = 1 << 16 };
#define M0 0xD2511F53u
#define M1 0xCD9E8D57u
#define WEYL0 0x9E3779B9u /* golden ratio */
#define WEYL1 0xBB67AE85u /* sqrt(3) - 1 */

typedef struct {
    uint32_t key[2];
    uint32_t stream[3];
} philox_stream;

GW_INLINE void philox_block(const philox_stream *s, uint32_t number, uint32_t *out) {
    uint32_t x0 = number, x1 = s->stream[0], x2 = s->stream[1], x3 = s->stream[2];
    uint32_t k0 = s->key[0], k1 = s->key[1];
    for (int round = 0; round < ROUNDS; round++) {
        const uint64_t product0 = (uint64_t)x0 * M0, product1 = (uint64_t)x2 * M1;
        x0 = (uint32_t)(product1 >> 32) ^ x1 ^ k0;
        x1 = (uint32_t)product1;
        x2 = (uint32_t)(product0 >> 32) ^ x3 ^ k1;
        x3 = (uint32_t)product0;
        k0 += WEYL0;
        k1 += WEYL1;
    }
    out[0] = x0;
    out[1] = x1;
    out[2] = x2;
    out[3] = x3;
}

#if defined(__x86_64__)
#include <immintrin.h>

enum { CHAINS = 3 }; /* independent, to hide the multiplier's latency; 1, 2 and 4 were slower */

/* NAME writes whole batches of CHAINS vectors of blocks and returns how many words it wrote.
   Block numbers wrap at 2^32 because only the low half of a lane counts. */
#define GW_PHILOX(NAME, TARGET, VECTOR, LANE_NUMBERS, MULTIPLY, STORE)                 \
    TARGET static int64_t NAME(const philox_stream *s, uint32_t number, uint32_t *out, \
                               int64_t count) {                                        \
        enum { LANES = sizeof(VECTOR) / 8, WORDS = 4 * LANES };                        \
        const VECTOR zero = {0}, lanes = LANE_NUMBERS, m0 = zero + M0, m1 = zero + M1; \
        int64_t done = 0;                                                              \
        for (; done + CHAINS * WORDS <= count; done += CHAINS * WORDS) {               \
            VECTOR x0[CHAINS], x1[CHAINS], x2[CHAINS], x3[CHAINS];                     \
            VECTOR k0 = zero + s->key[0], k1 = zero + s->key[1];                       \
            for (int c = 0; c < CHAINS; c++, number += LANES) {                        \
                x0[c] = lanes + number;                                                \
                x1[c] = zero + s->stream[0];                                           \
                x2[c] = zero + s->stream[1];                                           \
                x3[c] = zero + s->stream[2];                                           \
            }                                                                          \
            for (int round = 0; round < ROUNDS; round++) {                             \
                for (int c = 0; c < CHAINS; c++) {                                     \
                    const VECTOR product0 = (VECTOR)MULTIPLY(x0[c], m0);               \
                    const VECTOR product1 = (VECTOR)MULTIPLY(x2[c], m1);               \
                    x0[c] = (product1 >> 32) ^ x1[c] ^ k0;                             \
                    x1[c] = product1;                                                  \
                    x2[c] = (product0 >> 32) ^ x3[c] ^ k1;                             \
                    x3[c] = product0;                                                  \
                }                                                                      \
                k0 += WEYL0;                                                           \
                k1 += WEYL1;                                                           \
            }                                                                          \
            for (int c = 0; c < CHAINS; c++) {                                         \
                const VECTOR first = (x0[c] & 0xFFFFFFFFu) | (x1[c] << 32);            \
                const VECTOR second = (x2[c] & 0xFFFFFFFFu) | (x3[c] << 32);           \
                STORE(out + done + c * WORDS, first, second);                          \
            }                                                                          \
        }                                                                              \
        return done;                                                                   \
    }

typedef uint64_t v4 __attribute__((vector_size(32)));
#define GW_LANES_4 {0, 1, 2, 3}
#define GW_MULTIPLY_4(a, b) _mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#define GW_STORE_4(out, first, second)                                                         \
    do {                                                                                       \
        const __m256i even = _mm256_unpacklo_epi64((__m256i)first, (__m256i)second);           \
        const __m256i odd = _mm256_unpackhi_epi64((__m256i)first, (__m256i)second);            \
        _mm256_storeu_si256((__m256i *)(out), _mm256_permute2x128_si256(even, odd, 0x20));     \
        _mm256_storeu_si256((__m256i *)(out) + 1, _mm256_permute2x128_si256(even, odd, 0x31)); \
    } while (0)
GW_PHILOX(philox_avx2, __attribute__((target("avx2"))), v4, GW_LANES_4, GW_MULTIPLY_4, GW_STORE_4)

typedef uint64_t v8 __attribute__((vector_size(64)));
#define GW_LANES_8 {0, 1, 2, 3, 4, 5, 6, 7}
#define GW_MULTIPLY_8(a, b) _mm512_mul_epu32((__m512i)(a), (__m512i)(b))
#define GW_STORE_8(out, first, second)                                                           \
    do {                                                                                         \
        const v8 low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};          \
        _mm512_storeu_si512(                                                                     \
            out, _mm512_permutex2var_epi64((__m512i)first, (__m512i)low, (__m512i)second));      \
        _mm512_storeu_si512((out) + 16, _mm512_permutex2var_epi64((__m512i)first, (__m512i)high, \
                                                                  (__m512i)second));             \
    } while (0)
GW_PHILOX(philox_avx512, __attribute__((target("avx512f"))), v8, GW_LANES_8, GW_MULTIPLY_8,
          GW_STORE_8)
#endif

GW_INLINE void fill(const philox_stream *s, uint32_t first_block, uint32_t *out, int64_t count) {
    int64_t done = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) done = philox_avx512(s, first_block, out, count);
    else if (__builtin_cpu_supports("avx2")) done = philox_avx2(s, first_block, out, count);
#endif
    for (; done + 4 <= count; done += 4)
        philox_block(s, first_block + (uint32_t)(done / 4), out + done);
    if (done < count) {
        uint32_t last[4];
        philox_block(s, first_block + (uint32_t)(done / 4), last);
        memcpy(out + done, last, (size_t)(count - done) * sizeof *out);
    }
}

typedef struct {
    philox_stream stream;
    uint32_t first_block;
    uint32_t *out;
} drawing;

static void draw_part(void *job, int64_t first, int64_t last) {
    const drawing *d = job;
    fill(&d->stream, d->first_block + (uint32_t)(first / 4), d->out + first, last - first);
}

void gw_philox_words(uint64_t seed, uint32_t stream0, uint32_t stream1, uint32_t stream2,
                     uint32_t first_block, uint32_t *out, int64_t count) {
    drawing d = {{{(uint32_t)seed, (uint32_t)(seed >> 32)}, {stream0, stream1, stream2}},
                 first_block, out};
    gw_parallel(draw_part, &d, count, GRAIN, LEAST);
}

int32_t gw_version(void) { return GW_VERSION; }
