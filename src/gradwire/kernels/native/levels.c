/* Rounding at random to whole levels of a bucket's maximum (QSGD), as reference/levels.py: error
   feedback, scales, levels, packing and the new residual in one call. The 16 random bits of an
   element are half a Philox word; a block of the generator serves eight elements. */
#include "stream.h"
#include "threads.h"

void gw_philox_words(uint64_t seed, uint32_t stream0, uint32_t stream1, uint32_t stream2,
                     uint32_t first_block, uint32_t *out, int64_t count);
int32_t gw_pack_uints(const void *values, int32_t size, int64_t count, int32_t width,
                      uint8_t *packed);

/* RANDOM elements' bits are drawn at a time: a multiple of what the vector generator makes. BATCH
   elements are read, then quantised: to read and write large pieces in turns is faster than to mix
   them finely. Buckets from SHARED on are shared by the threads. */
enum { BLOCK = 512, RANDOM = 6 * BLOCK, BATCH = 16 * BLOCK, SHARED = 1 << 18, LEAST = 1 << 16 };

GW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

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

/* A maximum below TINY has no finite reciprocal: its bucket is multiplied by RAISED first, and what
   it decodes to is multiplied by the reciprocal last. */
#define TINY 0x1p-100f
#define RAISED 0x1p100f

/* LARGE: s steps may exceed the largest float, and decoded values saturate. SMALL: below TINY. */
enum { PLAIN, LARGE, SMALL };

GW_INLINE void quantise(const float *p, const uint16_t *random, int64_t count, float scale,
                        float s, int range, uint8_t *levels, float *lost) {
    const float raised = range == SMALL ? RAISED : 1.0f;
    const float factor = scale > 0 ? s / (scale * raised) : 0.0f, step = scale * raised / s;
    const int32_t offset = (int32_t)s;
    for (int64_t i = 0; i < count; i++) {
        float v = p[i] * raised * factor;
        v = v > s ? s : v;
        v = v < -s ? -s : v;
        /* Whole numbers are corrected as integers: of floats gcc would make branches, no vectors. */
        int32_t level = (int32_t)v;
        level -= (float)level > v;
        const float dither = ((float)random[i] + 0.5f) * 0x1p-16f;
        level += dither < v - (float)level;
        levels[i] = (uint8_t)(level + offset);
        if (!lost) continue;
        float decoded = (float)level * step;
        if (range == SMALL) decoded *= 1.0f / RAISED;
        if (range == LARGE) {
            decoded = decoded > 0x1.fffffep127f ? 0x1.fffffep127f : decoded;
            decoded = decoded < -0x1.fffffep127f ? -0x1.fffffep127f : decoded;
        }
        lost[i] = p[i] - decoded;
    }
}

typedef struct {
    const float *x, *residual;
    int64_t count, bucket;
    int32_t num_levels, width;
    uint64_t seed;
    uint32_t stream[3];
    float *scale;
    uint8_t *packed;
    float *lost;
    int past_caches;
    int32_t not_finite;
    /* Of the bucket that is shared by the threads: */
    int64_t start, end;
    uint32_t top;
    float norm;
} encoding;

/* Random bits of the elements from `end - RANDOM` to `end`. */
typedef struct {
    uint16_t bits[RANDOM];
    int64_t end;
} dither;

GW_INLINE void corrected_part(const encoding *e, int64_t at, int64_t n, float *p) {
    corrected(e->x + at, e->residual ? e->residual + at : 0, n, p);
}

/* The scale of a bucket, given the bits of its largest magnitude. */
GW_INLINE float norm_of(encoding *e, uint32_t top) {
    float norm;
    memcpy(&norm, &top, 4);
    if (top >= 0x7F800000u) __atomic_store_n(&e->not_finite, 1, __ATOMIC_RELAXED);
    return norm;
}

/* Elements `start` to `end`, all of one bucket; `ready` (or null) holds them, corrected. Bits are
   drawn in order, up to the element `last`. */
GW_INLINE void encode_part(const encoding *e, int64_t start, int64_t end, int64_t last,
                           const float *ready, float norm, dither *random) {
    const float s = (float)e->num_levels;
    float p[BLOCK], staged[BLOCK];
    uint8_t levels[BLOCK];
    for (int64_t at = start, n; at < end; at += n) {
        if (at == random->end) {
            gw_philox_words(e->seed, e->stream[0], e->stream[1], e->stream[2],
                            (uint32_t)(at / 8), (uint32_t *)(void *)random->bits,
                            (smaller(RANDOM, last - at) + 1) / 2);
            random->end = at + RANDOM;
        }
        n = smaller(smaller(BLOCK, end - at), random->end - at);
        const float *from = ready ? ready + (at - start) : p;
        const uint16_t *bits = random->bits + (at - (random->end - RANDOM));
        if (!ready) corrected_part(e, at, n, p);
        if (norm < TINY) quantise(from, bits, n, norm, s, SMALL, levels, e->lost ? staged : 0);
        else if (!e->lost) quantise(from, bits, n, norm, s, PLAIN, levels, 0);
        else if (norm < 0x1p127f) quantise(from, bits, n, norm, s, PLAIN, levels, staged);
        else quantise(from, bits, n, norm, s, LARGE, levels, staged);
        if (e->width == 4 && n % 2 == 0) pack_nibbles(levels, n, e->packed + at / 2);
        else gw_pack_uints(levels, 1, n, e->width, e->packed + at * e->width / 8);
        if (e->lost) put(e->lost + at, staged, n * 4, e->past_caches);
    }
}

GW_INLINE uint32_t largest_of(const encoding *e, int64_t start, int64_t end) {
    float p[BLOCK];
    uint32_t top = 0;
    for (int64_t at = start; at < end; at += BLOCK) {
        const int64_t n = smaller(BLOCK, end - at);
        corrected_part(e, at, n, p);
        top = largest(p, n, top);
    }
    return top;
}

/* Whole buckets, as many at a time as make up a batch. */
GW_CLONES static void encode_buckets(void *job, int64_t first, int64_t last_bucket) {
    encoding *e = job;
    const int64_t bucket = e->bucket, last = smaller(last_bucket * bucket, e->count);
    const int64_t batch = bucket <= BATCH ? BATCH / bucket * bucket : bucket;
    float p[BATCH];
    dither random;
    random.end = first * bucket;
    for (int64_t from = first * bucket; from < last; from += batch) {
        const int64_t to = smaller(from + batch, last);
        for (int64_t start = from; start < to; start += bucket) {
            const int64_t end = smaller(start + bucket, to);
            uint32_t top;
            if (!e->residual) top = largest(e->x + start, end - start, 0);
            else if (bucket <= BATCH) {
                corrected_part(e, start, end - start, p + (start - from));
                top = largest(p + (start - from), end - start, 0);
            } else top = largest_of(e, start, end);
            e->scale[start / bucket] = norm_of(e, top);
        }
        if (__atomic_load_n(&e->not_finite, __ATOMIC_RELAXED)) return;
        for (int64_t start = from; start < to; start += bucket)
            encode_part(e, start, smaller(start + bucket, to), last,
                        !e->residual      ? e->x + start
                        : bucket <= BATCH ? p + (start - from)
                                          : 0,
                        e->scale[start / bucket], &random);
    }
    put_done();
}

/* Parts of one bucket. */
GW_CLONES static void measure_shared(void *job, int64_t first, int64_t last) {
    encoding *e = job;
    const uint32_t top = largest_of(e, e->start + first, e->start + last);
    uint32_t seen = __atomic_load_n(&e->top, __ATOMIC_RELAXED);
    while (top > seen && !__atomic_compare_exchange_n(&e->top, &seen, top, 1, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {}
}

GW_CLONES static void encode_shared(void *job, int64_t first, int64_t last) {
    const encoding *e = job;
    dither random;
    random.end = e->start + first;
    encode_part(e, e->start + first, e->start + last, e->start + last, 0, e->norm, &random);
    put_done();
}

/* `num_levels` < 128 above zero, `width` <= 8 bits each. Buckets are multiples of eight. Without
   `lost` only the payload is made. Returns 1 if something is not finite, else 0. */
int32_t gw_encode_levels(const float *x, const float *residual, int64_t count, int64_t bucket,
                         int32_t num_levels, int32_t width, uint64_t seed, uint32_t stream0,
                         uint32_t stream1, uint32_t stream2, float *scale, uint8_t *packed,
                         float *lost) {
    encoding e = {x, residual, count, bucket, num_levels, width, seed,
                  {stream0, stream1, stream2}, scale, packed, lost,
                  lost && lost != residual && count * 4 >= STREAM_BYTES, 0, 0, 0, 0, 0};
    if (bucket < SHARED) {
        gw_parallel(encode_buckets, &e, (count + bucket - 1) / bucket, 1, LEAST / bucket);
        return e.not_finite;
    }
    for (e.start = 0; e.start < count; e.start = e.end) {
        e.end = smaller(e.start + bucket, count);
        e.top = 0;
        gw_parallel(measure_shared, &e, e.end - e.start, BLOCK, LEAST);
        e.norm = norm_of(&e, e.top);
        scale[e.start / bucket] = e.norm;
        if (e.not_finite) return 1;
        gw_parallel(encode_shared, &e, e.end - e.start, RANDOM, LEAST);
    }
    return 0;
}

/* Returns the highest level, or `highest` if that is higher. */
GW_INLINE uint8_t scale_levels(const uint8_t *levels, int64_t count, int32_t offset, float step,
                               uint8_t highest, float *out) {
    for (int64_t i = 0; i < count; i++) highest = levels[i] > highest ? levels[i] : highest;
    for (int64_t i = 0; i < count; i++) {
        float decoded = (float)((int32_t)levels[i] - offset) * step;
        decoded = decoded > 0x1.fffffep127f ? 0x1.fffffep127f : decoded;
        out[i] = decoded < -0x1.fffffep127f ? -0x1.fffffep127f : decoded;
    }
    return highest;
}

typedef struct {
    const uint8_t *packed;
    const float *scale;
    int64_t count, bucket;
    int32_t num_levels, width;
    float *out;
    int past_caches;
    uint8_t highest;
} decoding;

GW_CLONES static void decode_part(void *job, int64_t first, int64_t last) {
    decoding *d = job;
    const int32_t width = d->width;
    const uint64_t mask = (1ull << width) - 1;
    uint8_t highest = 0;
    uint8_t levels[BLOCK];
    float staged[BLOCK];
    for (int64_t start = first, end; start < last; start = end) {
        const int64_t number = start / d->bucket;
        end = smaller((number + 1) * d->bucket, last);
        const float scale = d->scale[number];
        const float step = (scale < TINY ? scale * RAISED : scale) / (float)d->num_levels;
        for (int64_t at = start; at < end; at += BLOCK) {
            const int64_t n = smaller(BLOCK, end - at);
            const uint8_t *from = d->packed + at * width / 8;
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
            highest = scale_levels(levels, n, d->num_levels, step, highest, staged);
            if (scale < TINY)
                for (int64_t i = 0; i < n; i++) staged[i] *= 1.0f / RAISED;
            put(d->out + at, staged, n * 4, d->past_caches);
        }
    }
    put_done();
    uint8_t seen = __atomic_load_n(&d->highest, __ATOMIC_RELAXED);
    while (highest > seen &&
           !__atomic_compare_exchange_n(&d->highest, &seen, highest, 1, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {}
}

/* The decoded vector of `count` packed levels; widths and buckets as above. Returns the highest. */
int32_t gw_decode_levels(const uint8_t *packed, const float *scale, int64_t count, int64_t bucket,
                         int32_t num_levels, int32_t width, float *out) {
    decoding d = {packed, scale, count, bucket, num_levels, width, out,
                  count * 4 >= STREAM_BYTES, 0};
    gw_parallel(decode_part, &d, count, BLOCK, LEAST);
    return d.highest;
}
