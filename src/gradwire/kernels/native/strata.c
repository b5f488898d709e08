/* One element of each of k strata, as reference/strata.py. */
#include "threads.h"

void gw_philox_words(uint64_t seed, uint32_t stream0, uint32_t stream1, uint32_t stream2,
                     uint32_t first_block, uint32_t *out, int64_t count);

/* Words drawn at a time: a multiple of what the vector generator makes. */
enum { BLOCK = 1536, LEAST = 1 << 14 };

typedef struct {
    int64_t numel, k;
    uint64_t seed;
    uint32_t stream[3];
    int64_t done, edge, owed; /* strata so far, where the next begins, remainders left over */
} strata;

/* Positions and sizes of the next n <= BLOCK strata. Stratum i begins at floor(i * numel / k):
   the remainders add up until they make an element. */
GW_INLINE void next(strata *s, int64_t n, int64_t *positions, int64_t *sizes) {
    uint32_t words[BLOCK];
    const int64_t quotient = s->numel / s->k, remainder = s->numel % s->k;
    gw_philox_words(s->seed, s->stream[0], s->stream[1], s->stream[2], (uint32_t)(s->done / 4),
                    words, n);
    for (int64_t i = 0; i < n; i++) {
        s->owed += remainder;
        const int64_t extra = s->owed >= s->k;
        s->owed -= extra ? s->k : 0;
        sizes[i] = quotient + extra;
        positions[i] = s->edge + (int64_t)((uint64_t)words[i] * (uint64_t)sizes[i] >> 32);
        s->edge += sizes[i];
    }
    s->done += n;
}

/* Before stratum `i`. The product may take more than 64 bits. */
GW_INLINE void seek(strata *s, int64_t i) {
    const unsigned __int128 passed = (unsigned __int128)i * (uint64_t)s->numel;
    s->done = i;
    s->edge = (int64_t)(passed / (uint64_t)s->k);
    s->owed = (int64_t)(passed % (uint64_t)s->k);
}

typedef struct {
    strata s;
    int64_t *positions;
    const float *x;
    int32_t scaled;
    float *values;
} gathering;

static void place_part(void *job, int64_t first, int64_t last) {
    const gathering *g = job;
    strata s = g->s;
    int64_t sizes[BLOCK];
    seek(&s, first);
    while (s.done < last)
        next(&s, last - s.done < BLOCK ? last - s.done : BLOCK, g->positions + s.done, sizes);
}

void gw_strata_positions(int64_t numel, int64_t k, uint64_t seed, uint32_t stream0,
                         uint32_t stream1, uint32_t stream2, int64_t *positions) {
    gathering g = {{numel, k, seed, {stream0, stream1, stream2}, 0, 0, 0}, positions, 0, 0, 0};
    gw_parallel(place_part, &g, k, BLOCK, LEAST);
}

static void gather_part(void *job, int64_t first, int64_t last) {
    const gathering *g = job;
    strata s = g->s;
    int64_t positions[BLOCK], sizes[BLOCK];
    seek(&s, first);
    while (s.done < last) {
        const int64_t n = last - s.done < BLOCK ? last - s.done : BLOCK;
        float *target = g->values + s.done;
        next(&s, n, positions, sizes);
        for (int64_t i = 0; i < n; i++) target[i] = g->x[positions[i]];
        if (g->scaled)
            for (int64_t i = 0; i < n; i++) target[i] *= (float)sizes[i];
    }
}

/* The elements at those positions, each times the size of its stratum if `scaled`. */
void gw_strata_gather(const float *x, int64_t numel, int64_t k, uint64_t seed, uint32_t stream0,
                      uint32_t stream1, uint32_t stream2, int32_t scaled, float *values) {
    gathering g = {{numel, k, seed, {stream0, stream1, stream2}, 0, 0, 0}, 0, x, scaled, values};
    gw_parallel(gather_part, &g, k, BLOCK, LEAST);
}
