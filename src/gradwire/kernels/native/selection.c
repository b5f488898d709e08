/* Elements of large magnitude, as reference/selection.py: error feedback, selection and the new
   residual in one pass, and the velocity that x is to move, if there is one. Bits of a float's
   magnitude, read as an integer, order as the magnitudes do, with infinity and NaN above all
   numbers; so thresholds here are integers. */
#include "stream.h"
#include "threads.h"

enum { BLOCK = 512, BINS = 1 << 11, SAMPLES = 1 << 16, RUN = 8, LEAST = 1 << 16 };
enum { SHARE = 48 }; /* one of so many elements is looked at for a first guess, if they are few */
enum { MOST_PIECES = 256 };

GW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

GW_INLINE uint32_t magnitude_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u & 0x7FFFFFFFu;
}

/* How x moves a velocity, see `formed`. */
typedef struct {
    float momentum, scale;
    int32_t nesterov, masks;
    float *moved; /* the new velocity, zero where elements were selected if `masks` */
} motion_rule;

/* What is selected from: x + residual; where x moves a velocity, u, that or Nesterov's step. */
GW_INLINE void formed(const motion_rule *rule, const float *x, const float *residual,
                      const float *velocity, int64_t count, float *u, float *p) {
    if (!velocity) {
        corrected(x, residual, count, p);
        return;
    }
    const float momentum = rule->momentum, scale = rule->scale;
    for (int64_t i = 0; i < count; i++) u[i] = momentum * velocity[i] + scale * x[i];
    if (rule->nesterov)
        for (int64_t i = 0; i < count; i++) p[i] = (scale * x[i] + momentum * u[i]) + residual[i];
    else
        for (int64_t i = 0; i < count; i++) p[i] = u[i] + residual[i];
}

GW_INLINE const float *from(const float *vector, int64_t at) { return vector ? vector + at : 0; }

/* A piece of the vector and what was selected of it. Pieces are worked on in any order, so each
   has a range of the results of its own until `compact` puts the ranges together. */
typedef struct {
    int64_t first, last;   /* elements */
    int64_t ties;          /* how many equal to the threshold belong to the selection */
    int64_t offset, room;  /* its range of the results */
    int64_t found;         /* stored only as far as there is room */
    const float *x, *residual, *velocity; /* what `rank_pieces` ranks, `count` elements */
    int64_t count;
} piece;

typedef struct {
    const float *x, *residual, *velocity;
    motion_rule rule;
    uint32_t threshold;
    int64_t *indices;
    float *values;
    float *lost;
    int clear, past_caches;
    int64_t num_pieces;
    piece pieces[MOST_PIECES];
    /* Of one level of the ranking: */
    uint32_t prefix, mask;
    int shift, above;
    int64_t bins[BINS];
} selection;

/* Selects all magnitudes above the threshold and the first `ties` equal to it, in order, as far as
   there is room. `lost` (or null) gets the others, with zeros in place of the selected if
   `clear`. `moves` says whether there is a velocity. */
GW_INLINE void collect(const selection *s, piece *part, int clear, int moves) {
    const float *x = s->x, *residual = s->residual, *velocity = moves ? s->velocity : 0;
    float *lost = s->lost, *moved = moves ? s->rule.moved : 0;
    const int masks = clear && moves && s->rule.masks;
    const int past_caches = s->past_caches;
    const uint32_t threshold = s->threshold;
    int64_t *indices = s->indices + part->offset;
    float *values = s->values + part->offset;
    const int64_t last = part->last, room = part->room;
    int64_t ties = part->ties, found = 0;
    float p[BLOCK], u[BLOCK];
    uint8_t hit[BLOCK];
    for (int64_t at = part->first; at < last; at += BLOCK) {
        const int64_t n = smaller(BLOCK, last - at);
        if (n == BLOCK)
            formed(&s->rule, x + at, from(residual, at), from(velocity, at), BLOCK, u, p);
        else {
            formed(&s->rule, x + at, from(residual, at), from(velocity, at), n, u, p);
            memset(p + n, 0, (size_t)(BLOCK - n) * sizeof *p);
        }
        for (int i = 0; i < BLOCK; i++) {
            uint32_t u;
            memcpy(&u, p + i, 4);
            hit[i] = (u & 0x7FFFFFFFu) >= threshold;
        }
        for (int64_t group = 0; group < n; group += 8) {
            uint64_t word;
            memcpy(&word, hit + group, 8);
            for (; word; word &= word - 1) {
                const int64_t i = group + __builtin_ctzll(word) / 8;
                if (i >= n) break; /* what fills the last block up */
                if (magnitude_bits(p[i]) == threshold && ties-- <= 0) continue;
                if (found < room) {
                    indices[found] = at + i;
                    values[found] = p[i];
                }
                found++;
                if (clear) p[i] = 0.0f;
                if (masks) u[i] = 0.0f;
            }
        }
        if (lost) put(lost + at, p, n * 4, past_caches);
        if (moved) put(moved + at, u, n * 4, past_caches);
    }
    part->found = found;
}

GW_CLONES static void collect_pieces(void *job, int64_t first, int64_t last) {
    selection *s = job;
    for (int64_t i = first; i < last; i++) {
        piece *part = &s->pieces[i];
        if (s->velocity && s->clear) collect(s, part, 1, 1);
        else if (s->velocity) collect(s, part, 0, 1);
        else if (s->clear) collect(s, part, 1, 0);
        else collect(s, part, 0, 0);
    }
    put_done();
}

static void begin(selection *s, const float *x, const float *residual, int64_t *indices,
                  float *values, float *lost) {
    s->x = x;
    s->residual = residual;
    s->velocity = 0;
    s->indices = indices;
    s->values = values;
    s->lost = lost;
}

/* Cuts `count` elements and room for `capacity` results into pieces. */
static void cut(selection *s, int64_t count, int64_t capacity) {
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
    const int64_t n = s->num_pieces = smaller(gw_parts(blocks, LEAST / BLOCK), MOST_PIECES);
    for (int64_t i = 0; i < n; i++) {
        piece *p = &s->pieces[i];
        p->first = blocks * i / n * BLOCK;
        p->last = smaller(blocks * (i + 1) / n * BLOCK, count);
        p->ties = INT64_MAX;
        p->offset = capacity / n * i;
        p->room = i < n - 1 ? capacity / n : capacity - p->offset;
    }
}

/* Collects from all pieces, at most `capacity` in all; returns how many there are. A piece may hold
   more than its share: then, all numbers being known, it is done again with ranges that fit. */
static int64_t collect_all(selection *s, int64_t capacity) {
    gw_parallel(collect_pieces, s, s->num_pieces, 1, 1);
    int64_t total = 0, fits = 1;
    for (int64_t i = 0; i < s->num_pieces; i++) {
        total += s->pieces[i].found;
        fits &= s->pieces[i].found <= s->pieces[i].room;
    }
    if (fits || total > capacity) return total;
    for (int64_t i = 0, offset = 0; i < s->num_pieces; i++) {
        piece *p = &s->pieces[i];
        p->offset = offset;
        offset += p->room = p->found;
    }
    gw_parallel(collect_pieces, s, s->num_pieces, 1, 1);
    return total;
}

/* Results of all pieces in a row. */
static void compact(selection *s) {
    int64_t total = 0;
    for (int64_t i = 0; i < s->num_pieces; i++) {
        const piece *p = &s->pieces[i];
        const size_t n = (size_t)p->found;
        if (p->offset > total) {
            memmove(s->indices + total, s->indices + p->offset, n * sizeof *s->indices);
            memmove(s->values + total, s->values + p->offset, n * sizeof *s->values);
        }
        total += p->found;
    }
}

/* Adds the histogram of some pieces, on the bits of this level, of the elements whose higher bits
   are the prefix. */
GW_CLONES static void count_pieces(void *job, int64_t first, int64_t last) {
    selection *s = job;
    const uint32_t prefix = s->prefix, mask = s->mask;
    const int shift = s->shift, above = s->above;
    int64_t bins[2][BINS]; /* two, so that equal neighbours do not wait for one another */
    float p[BLOCK], u[BLOCK];
    memset(bins, 0, sizeof bins);
    for (int64_t k = first; k < last; k++) {
        const piece *part = &s->pieces[k];
        const int64_t count = part->count;
        for (int64_t at = 0; at < count; at += BLOCK) {
            const int64_t n = smaller(BLOCK, count - at);
            formed(&s->rule, part->x + at, from(part->residual, at), from(part->velocity, at), n,
                   u, p);
            for (int64_t i = 0; i < n; i++) {
                const uint32_t bits = magnitude_bits(p[i]);
                if (bits >> above == prefix >> above) bins[i % 2][bits >> shift & mask]++;
            }
        }
    }
    for (uint32_t bin = 0; bin <= mask; bin++)
        __atomic_fetch_add(&s->bins[bin], bins[0][bin] + bins[1][bin], __ATOMIC_RELAXED);
}

/* How many magnitudes of each piece equal the threshold, in `ties`. */
GW_CLONES static void count_ties(void *job, int64_t first, int64_t last) {
    selection *s = job;
    const uint32_t threshold = s->threshold;
    float p[BLOCK], u[BLOCK];
    for (int64_t k = first; k < last; k++) {
        piece *part = &s->pieces[k];
        int64_t ties = 0;
        for (int64_t at = 0; at < part->count; at += BLOCK) {
            const int64_t n = smaller(BLOCK, part->count - at);
            formed(&s->rule, part->x + at, from(part->residual, at), from(part->velocity, at), n,
                   u, p);
            for (int64_t i = 0; i < n; i++) ties += magnitude_bits(p[i]) == threshold;
        }
        part->ties = ties;
    }
}

/* Sets the threshold to the rank-th largest magnitude of all pieces (rank >= 1), 11 + 10 + 10 bits
   at a time, and every piece's `ties` to how many equal to it belong to the first `rank`. */
static void rank_pieces(selection *s, int64_t rank) {
    static const int shifts[3] = {20, 10, 0};
    int64_t total = 0, equal = 0;
    for (int64_t i = 0; i < s->num_pieces; i++) total += s->pieces[i].count;
    const int64_t least = LEAST * s->num_pieces / (total + 1) + 1;
    s->prefix = 0;
    for (int level = 0; level < 3; level++) {
        s->shift = shifts[level];
        s->above = level ? shifts[level - 1] : 31;
        s->mask = (1u << (s->above - s->shift)) - 1;
        memset(s->bins, 0, sizeof s->bins);
        gw_parallel(count_pieces, s, s->num_pieces, 1, least);
        uint32_t bin = s->mask;
        for (;; bin--) {
            equal = s->bins[bin];
            if (equal >= rank || bin == 0) break;
            rank -= equal;
        }
        s->prefix |= bin << s->shift;
    }
    s->threshold = s->prefix;
    if (equal == rank || s->num_pieces == 1) {
        for (int64_t i = 0; i < s->num_pieces; i++) s->pieces[i].ties = rank;
        return;
    }
    gw_parallel(count_ties, s, s->num_pieces, 1, least);
    for (int64_t i = 0; i < s->num_pieces; i++) { /* the first pieces take what they have */
        piece *p = &s->pieces[i];
        p->ties = smaller(p->ties, rank);
        rank -= p->ties;
    }
}

static int64_t select_above(selection *s, int64_t count, int64_t capacity) {
    s->clear = 1;
    s->past_caches = s->lost && s->lost != s->residual && count * 4 >= STREAM_BYTES;
    cut(s, count, capacity);
    const int64_t found = collect_all(s, capacity);
    if (found <= capacity) compact(s);
    return found;
}

int64_t gw_select_above(const float *x, const float *residual, int64_t count, uint32_t threshold,
                        int64_t capacity, int64_t *indices, float *values, float *lost) {
    selection s;
    begin(&s, x, residual, indices, values, lost);
    s.threshold = threshold;
    return select_above(&s, count, capacity);
}

int64_t gw_move_above(const float *x, const float *residual, const float *velocity,
                      float momentum, float scale, int32_t nesterov, int32_t masks, int64_t count,
                      uint32_t threshold, int64_t capacity, int64_t *indices, float *values,
                      float *lost, float *moved) {
    selection s;
    begin(&s, x, residual, indices, values, lost);
    s.velocity = velocity;
    s.rule = (motion_rule){momentum, scale, nesterov, masks, moved};
    s.threshold = threshold;
    return select_above(&s, count, capacity);
}

/* A threshold that a little more than `rank` elements are likely to reach, from a sample of runs
   at equal distances. */
static uint32_t guess(const selection *whole, int64_t count, int64_t rank) {
    float sample[SAMPLES], u[RUN];
    const int64_t samples = smaller(SAMPLES, count / SHARE / RUN * RUN);
    const int64_t runs = samples / RUN, distance = count / runs;
    for (int64_t r = 0; r < runs; r++) {
        const int64_t at = r * distance;
        formed(&whole->rule, whole->x + at, from(whole->residual, at), from(whole->velocity, at),
               RUN, u, sample + r * RUN);
    }
    const double expected = (double)samples * (double)rank / (double)count;
    const double wanted = 1.05 * expected + 5.0 * __builtin_sqrt(expected) + 8.0;
    if (wanted >= (double)samples) return 0;
    selection s;
    s.num_pieces = 1;
    s.pieces[0].x = sample;
    s.pieces[0].residual = s.pieces[0].velocity = 0;
    s.pieces[0].count = samples;
    rank_pieces(&s, (int64_t)wanted);
    return s.threshold;
}

/* Of the candidates of some pieces keeps those of the selection, and clears them in `lost`. */
static void sift_pieces(void *job, int64_t first, int64_t last) {
    selection *s = job;
    for (int64_t k = first; k < last; k++) {
        piece *p = &s->pieces[k];
        int64_t *indices = s->indices + p->offset, kept = 0, ties = p->ties;
        float *values = s->values + p->offset;
        for (int64_t i = 0; i < p->found; i++) {
            const uint32_t u = magnitude_bits(values[i]);
            if (u < s->threshold || (u == s->threshold && ties-- <= 0)) continue;
            indices[kept] = indices[i];
            values[kept] = values[i];
            kept++;
            if (s->lost) s->lost[indices[i]] = 0.0f;
            if (s->velocity && s->rule.masks) s->rule.moved[indices[i]] = 0.0f;
        }
        p->found = kept;
    }
}

static void select_largest(selection *s, int64_t count, int64_t rank, int64_t capacity) {
    s->past_caches = s->lost && s->lost != s->residual && count * 4 >= STREAM_BYTES;
    cut(s, count, capacity);
    if (count >= 4 * SAMPLES && rank < count / 2) {
        /* Exact for any sample: it only decides how many candidates there are. */
        s->threshold = guess(s, count, rank);
        s->clear = 0;
        const int64_t found = collect_all(s, capacity);
        if (rank <= found && found <= capacity) {
            for (int64_t i = 0; i < s->num_pieces; i++) {
                piece *p = &s->pieces[i];
                p->x = s->values + p->offset;
                p->residual = p->velocity = 0;
                p->count = p->found;
            }
            rank_pieces(s, rank);
            gw_parallel(sift_pieces, s, s->num_pieces, 1, LEAST * s->num_pieces / found + 1);
            compact(s);
            return;
        }
    }
    for (int64_t i = 0; i < s->num_pieces; i++) {
        piece *p = &s->pieces[i];
        p->x = s->x + p->first;
        p->residual = from(s->residual, p->first);
        p->velocity = from(s->velocity, p->first);
        p->count = p->last - p->first;
    }
    rank_pieces(s, rank);
    s->clear = 1;
    collect_all(s, capacity);
    compact(s);
}

/* The `rank` largest magnitudes, 1 <= rank <= count, of equal ones the first; indices ascend.
   `capacity` >= rank is the room in `indices` and `values`. `lost` may be null. */
void gw_select_largest(const float *x, const float *residual, int64_t count, int64_t rank,
                       int64_t capacity, int64_t *indices, float *values, float *lost) {
    selection s;
    begin(&s, x, residual, indices, values, lost);
    select_largest(&s, count, rank, capacity);
}

/* As above, from a residual and what x makes of a velocity; `lost` and `moved` are not null. */
void gw_move_largest(const float *x, const float *residual, const float *velocity, float momentum,
                     float scale, int32_t nesterov, int32_t masks, int64_t count, int64_t rank,
                     int64_t capacity, int64_t *indices, float *values, float *lost,
                     float *moved) {
    selection s;
    begin(&s, x, residual, indices, values, lost);
    s.velocity = velocity;
    s.rule = (motion_rule){momentum, scale, nesterov, masks, moved};
    select_largest(&s, count, rank, capacity);
}
