/* Rounding at random to whole levels of a bucket's maximum (QSGD), as reference/levels.py: error
   feedback, scales, levels, packing and the new residual in one call. The 16 random bits of an
   element are half a Philox word; a block of the generator serves eight elements. */
#include "stream.h"

void gw_philox_words(uint64_t seed, uint32_t stream0, uint32_t stream1, uint32_t stream2,
                     uint32_t first_block, uint32_t *out, int64_t count);
int32_t gw_pack_uints(const void *values, int32_t size, int64_t count, int32_t width,
                      uint8_t *packed);

/* RANDOM elements' bits are drawn at a time: a multiple of what the vector generator makes. */
enum { BLOCK = 512, RANDOM = 6 * BLOCK };

GW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Asks for the block after this one. Without it every block waits for its reads, because the
   processor looks ahead no further than the arithmetic between them: 7% of the whole. */
GW_INLINE void fetch_next(const float *block, int64_t count) {
    const uintptr_t next = (uintptr_t)block + BLOCK * sizeof *block; /* may lie past the end */
    for (int64_t i = 0; i < count; i += 16)
        __builtin_prefetch((const void *)(next + sizeof *block * (size_t)i));
}

/* Four bits of each of `count` bytes (a multiple of two). */
GW_INLINE void pack_nibbles(const uint8_t *levels, int64_t count, uint8_t *packed) {
    for (int64_t i = 0; i < count / 2; i++) {
        uint16_t pair;
        memcpy(&pair, levels + 2 * i, 2);
        packed[i] = (uint8_t)(pair | pair >> 4);
    }
}

/* The bits of the largest magnitude: they order as the magnitudes do, and NaN comes last. */
GW_INLINE uint32_t largest(const float *p, int64_t count, uint32_t top) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t u;
        memcpy(&u, p + i, 4);
        u &= 0x7FFFFFFFu;
        top = u > top ? u : top;
    }
    return top;
}

GW_INLINE void quantise(const float *p, const uint16_t *random, int64_t count, float scale,
                        float s, uint8_t *levels, float *lost) {
    const float factor = scale > 0 ? s / scale : 0.0f, step = scale / s;
    const int32_t offset = (int32_t)s;
    for (int64_t i = 0; i < count; i++) {
        float v = p[i] * factor;
        v = v > s ? s : v;
        v = v < -s ? -s : v;
        int32_t level = (int32_t)v;
        level -= (float)level > v;
        const float dither = ((float)random[i] + 0.5f) * 0x1p-16f;
        level += dither < v - (float)level;
        levels[i] = (uint8_t)(level + offset);
        float heard = (float)level * step;
        heard = heard > 0x1.fffffep127f ? 0x1.fffffep127f : heard;
        heard = heard < -0x1.fffffep127f ? -0x1.fffffep127f : heard;
        lost[i] = p[i] - heard;
    }
}

/* `num_levels` < 128 above zero, `width` <= 8 bits each. Buckets are multiples of eight. Without
   `lost` only the payload is made. Returns 1 if something is not finite, else 0. */
GW_CLONES int32_t gw_encode_levels(const float *x, const float *residual, int64_t count,
                                   int64_t bucket, int32_t num_levels, int32_t width,
                                   uint64_t seed, uint32_t stream0, uint32_t stream1,
                                   uint32_t stream2, float *scale, uint8_t *packed, float *lost) {
    const int past_caches = lost && lost != residual && count * 4 >= STREAM_BYTES;
    float p[BLOCK], staged[BLOCK];
    uint8_t levels[BLOCK];
    uint16_t random[RANDOM];
    int64_t drawn = 0; /* elements whose bits have been drawn */
    uint32_t highest = 0;
    for (int64_t start = 0; start < count; start += bucket) {
        const int64_t end = smaller(start + bucket, count);
        uint32_t top = 0;
        for (int64_t at = start; at < end; at += BLOCK) {
            const int64_t n = smaller(BLOCK, end - at);
            fetch_next(x + at, n);
            if (residual) fetch_next(residual + at, n);
            corrected(x + at, residual ? residual + at : residual, n, p);
            top = largest(p, n, top);
        }
        float norm;
        memcpy(&norm, &top, 4);
        if (norm > 0 && norm < 0x1p-100f) norm = 0x1p-100f; /* its reciprocal stays finite */
        scale[start / bucket] = norm;
        highest = top > highest ? top : highest;
        if (highest >= 0x7F800000u) return 1;
        const int again = end - start > BLOCK; /* else p still holds the bucket */
        for (int64_t at = start, n; at < end; at += n) {
            if (at == drawn) {
                const int64_t elements = smaller(RANDOM, count - at);
                gw_philox_words(seed, stream0, stream1, stream2, (uint32_t)(at / 8),
                                (uint32_t *)(void *)random, (elements + 1) / 2);
                drawn = at + RANDOM;
            }
            n = smaller(smaller(BLOCK, end - at), drawn - at);
            if (again || at > start)
                corrected(x + at, residual ? residual + at : residual, n, p);
            quantise(p, random + (at - (drawn - RANDOM)), n, norm, (float)num_levels, levels,
                     staged);
            if (width == 4 && n % 2 == 0) pack_nibbles(levels, n, packed + at / 2);
            else gw_pack_uints(levels, 1, n, width, packed + at * width / 8);
            if (lost) put(lost + at, staged, n * 4, past_caches);
        }
    }
    put_done();
    return 0;
}

/* Returns the highest level, or `highest` if that is higher. */
GW_INLINE uint8_t scale_levels(const uint8_t *levels, int64_t count, int32_t offset, float step,
                               uint8_t highest, float *out) {
    for (int64_t i = 0; i < count; i++) highest = levels[i] > highest ? levels[i] : highest;
    for (int64_t i = 0; i < count; i++) {
        float heard = (float)((int32_t)levels[i] - offset) * step;
        heard = heard > 0x1.fffffep127f ? 0x1.fffffep127f : heard;
        out[i] = heard < -0x1.fffffep127f ? -0x1.fffffep127f : heard;
    }
    return highest;
}

/* What was heard of `count` packed levels; widths and buckets as above. Returns the highest. */
GW_CLONES int32_t gw_decode_levels(const uint8_t *packed, const float *scale, int64_t count,
                                   int64_t bucket, int32_t num_levels, int32_t width,
                                   float *out) {
    const int past_caches = count * 4 >= STREAM_BYTES;
    uint8_t highest = 0;
    const uint64_t mask = (1ull << width) - 1;
    uint8_t levels[BLOCK];
    float staged[BLOCK];
    for (int64_t start = 0; start < count; start += bucket) {
        const int64_t end = smaller(start + bucket, count);
        const float step = scale[start / bucket] / (float)num_levels;
        for (int64_t at = start; at < end; at += BLOCK) {
            const int64_t n = smaller(BLOCK, end - at);
            const uint8_t *from = packed + at * width / 8;
            if (width == 4 && n % 2 == 0)
                for (int64_t i = 0; i < n / 2; i++) {
                    const uint16_t pair = (uint16_t)((from[i] & 15) | (from[i] & 240) << 4);
                    memcpy(levels + 2 * i, &pair, 2);
                }
            else
                for (int64_t i = 0; i < n; i += 8) { /* eight levels are `width` bytes */
                    const int64_t left = smaller(8, n - i);
                    uint64_t word = 0;
                    memcpy(&word, from + i * width / 8, (size_t)((left * width + 7) / 8));
                    for (int64_t j = 0; j < left; j++, word >>= width)
                        levels[i + j] = (uint8_t)(word & mask);
                }
            highest = scale_levels(levels, n, num_levels, step, highest, staged);
            put(out + at, staged, n * 4, past_caches);
        }
    }
    put_done();
    return highest;
}
