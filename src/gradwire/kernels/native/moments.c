/* Sums over a whole vector, as reference/moments.py: in float64, along the tree of
   reference/tables.py. Each block of SUMMED elements has its sums here; the caller adds those. */
#include "threads.h"

enum { SUMMED = 512, LANES = SUMMED / 8, LEAST = 1 << 15 };

typedef struct {
    const float *x;
    int64_t count;
    float threshold;
    double *first, *second; /* [blocks] each */
    int64_t *above, *below;
} moments;

/* The tree over a block: element i meets i + 256, the sums meet at a distance of 128, ... The first
   three levels are done at once, so that few numbers leave the registers. */
#define EIGHT(value, i)                                                                  \
    (((value((i)) + value((i) + 256)) + (value((i) + 128) + value((i) + 384))) +         \
     ((value((i) + 64) + value((i) + 320)) + (value((i) + 192) + value((i) + 448))))

GW_INLINE double fold(double *sums) {
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

/* Elements of a block, filled up with zeros. */
GW_INLINE const float *block_of(const moments *m, int64_t number, float *room) {
    const int64_t at = number * SUMMED, left = m->count - at;
    if (left >= SUMMED) return m->x + at;
    memset(room, 0, SUMMED * sizeof *room);
    memcpy(room, m->x + at, (size_t)left * sizeof *room);
    return room;
}

#define ITSELF(i) ((double)x[i])
#define SQUARE(i) ((double)x[i] * (double)x[i])

GW_CLONES static void block_moments(void *job, int64_t begin, int64_t end) {
    const moments *m = job;
    float room[SUMMED];
    double sums[LANES], squares[LANES];
    for (int64_t number = begin; number < end; number++) {
        const float *x = block_of(m, number, room);
        for (int64_t i = 0; i < LANES; i++) {
            sums[i] = EIGHT(ITSELF, i);
            squares[i] = EIGHT(SQUARE, i);
        }
        m->first[number] = fold(sums);
        m->second[number] = fold(squares);
    }
}

#define OUTER(i) ((double)out[i])
#define INNER(i) ((double)in[i])

GW_CLONES static void block_tails(void *job, int64_t begin, int64_t end) {
    const moments *m = job;
    const float t = m->threshold;
    float room[SUMMED], out[SUMMED], in[SUMMED];
    double outer[LANES], inner[LANES];
    for (int64_t number = begin; number < end; number++) {
        const float *x = block_of(m, number, room);
        int32_t above = 0, below = 0;
        for (int64_t i = 0; i < SUMMED; i++) {
            const float a = __builtin_fabsf(x[i]);
            above += x[i] >= t;
            below += x[i] <= -t;
            out[i] = a >= t ? a : 0.0f;
            in[i] = a >= t ? 0.0f : a;
        }
        for (int64_t i = 0; i < LANES; i++) {
            outer[i] = EIGHT(OUTER, i);
            inner[i] = EIGHT(INNER, i);
        }
        m->first[number] = fold(outer);
        m->second[number] = fold(inner);
        m->above[number] = above;
        m->below[number] = below;
    }
}

static void over_blocks(gw_task task, moments *m) {
    gw_parallel(task, m, (m->count + SUMMED - 1) / SUMMED, 1, LEAST / SUMMED);
}

void gw_moments(const float *x, int64_t count, double *sums, double *squares) {
    moments m = {.x = x, .count = count, .first = sums, .second = squares};
    over_blocks(block_moments, &m);
}

/* threshold > 0, so that what fills the last block up lies inside. */
void gw_tails(const float *x, int64_t count, float threshold, double *outer, double *inner,
              int64_t *above, int64_t *below) {
    moments m = {.x = x, .count = count, .threshold = threshold, .first = outer, .second = inner,
                 .above = above, .below = below};
    over_blocks(block_tails, &m);
}
