/* Elements kept at random in proportion to their magnitude, as reference/drawn.py: a first choice
   by 16 random bits each, half a Philox word; few of them are undecided after that. */
#include "threads.h"

void gw_philox_words(uint64_t seed, uint32_t stream0, uint32_t stream1, uint32_t stream2,
                     uint32_t first_block, uint32_t *out, int64_t count);

/* BLOCK elements take BLOCK / 2 words: a multiple of what the vector generator makes at a time. */
enum { BLOCK = 3072, LEAST = 1 << 16, MOST_PARTS = 256 };

typedef struct {
    const float *x;
    int64_t count;
    float factor;
    uint64_t seed;
    uint32_t stream[3];
    int64_t *indices;
    float *values;
    int32_t *halves;
    int64_t parts, blocks, room; /* each part has `room` for its results */
    int64_t found[MOST_PARTS];
} drawing;

GW_CLONES static void draw(const drawing *d, int64_t part, int64_t *found) {
    uint32_t words[BLOCK / 2];
    uint16_t halves[BLOCK];
    uint8_t hit[BLOCK];
    const int64_t begin = d->blocks * part / d->parts, end = d->blocks * (part + 1) / d->parts;
    const int64_t offset = d->room * part;
    int64_t kept = 0;
    for (int64_t block = begin; block < end; block++) {
        const int64_t at = block * BLOCK;
        const int64_t n = d->count - at < BLOCK ? d->count - at : BLOCK;
        const float *x = d->x + at;
        gw_philox_words(d->seed, d->stream[0], d->stream[1], d->stream[2], (uint32_t)(at / 8),
                        words, BLOCK / 2);
        memcpy(halves, words, sizeof halves); /* little-endian: low half first */
        memset(hit, 0, sizeof hit);
        for (int64_t i = 0; i < n; i++)
            hit[i] = __builtin_fabsf(x[i]) * d->factor + 1.0f >= (float)halves[i];
        for (int64_t group = 0; group < n; group += 8) {
            uint64_t word;
            memcpy(&word, hit + group, 8);
            for (; word; word &= word - 1) {
                const int64_t i = group + __builtin_ctzll(word) / 8;
                if (kept < d->room) {
                    d->indices[offset + kept] = at + i;
                    d->values[offset + kept] = x[i];
                    d->halves[offset + kept] = halves[i];
                }
                kept++;
            }
        }
    }
    *found = kept;
}

static void draw_parts(void *job, int64_t first, int64_t last) {
    drawing *d = job;
    for (int64_t part = first; part < last; part++) draw(d, part, &d->found[part]);
}

/* Returns how many there are; where that is more than `capacity`, or one part of the vector has
   more than its share of it, the negative of the capacity that would do. */
int64_t gw_draw(const float *x, int64_t count, float factor, uint64_t seed, uint32_t stream0,
                uint32_t stream1, uint32_t stream2, int64_t capacity, int64_t *indices,
                float *values, int32_t *halves) {
    drawing d = {.x = x, .count = count, .factor = factor, .seed = seed,
                 .stream = {stream0, stream1, stream2}, .indices = indices, .values = values,
                 .halves = halves, .blocks = (count + BLOCK - 1) / BLOCK};
    d.parts = gw_parts(count, LEAST);
    if (d.parts > MOST_PARTS) d.parts = MOST_PARTS;
    d.room = capacity / d.parts;
    gw_parallel(draw_parts, &d, d.parts, 1, 1);
    int64_t most = 0, total = 0;
    for (int64_t part = 0; part < d.parts; part++)
        if (d.found[part] > most) most = d.found[part];
    if (most > d.room) return -most * d.parts;
    for (int64_t part = 0; part < d.parts; part++) {
        const int64_t from = d.room * part;
        const size_t n = (size_t)d.found[part];
        if (n && from > total) {
            memmove(indices + total, indices + from, n * sizeof *indices);
            memmove(values + total, values + from, n * sizeof *values);
            memmove(halves + total, halves + from, n * sizeof *halves);
        }
        total += d.found[part];
    }
    return total;
}
