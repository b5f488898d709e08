/* Indices of a trellis-coded quantiser and tables that fit each other: reference/trellis_fit.py. */
#include "trellis.h"

#include <math.h>

enum {
    FINE = 4, /* offsets are multiples of it */
    LEVEL = 47,
    LEVELS = 2 * LEVEL + 1,
    MOST_RATE = 1 << 17,
    CONTEXTS = 2 * CLASSES,
};

/* What levels stand for: bits of an event [LEVELS], of 0, +1 and +more [LEVELS, LEVELS, 3], of the
   tail 0 and of one more [LEVELS, 2]. */
typedef struct {
    const double *event, *symbol, *tail;
} level_bits;

typedef struct {
    int8_t levels[CONTEXTS][3];
    int32_t offsets[6];
} prior;

static void rates_of(const prior *p, const level_bits *bits, double weight, int32_t is_signed,
                     int32_t rates[RATES][CLASSES]) {
    for (int c = 0; c < CONTEXTS; c++) {
        const int8_t *const own = p->levels[c];
        const double *const symbol = bits->symbol + 3 * ((own[0] + LEVEL) * LEVELS + own[1] + LEVEL);
        const double *const tail = bits->tail + 2 * (own[2] + LEVEL);
        const double of[4] = {symbol[0], symbol[1], symbol[2] + tail[0], tail[1]};
        for (int r = 0; r < 4; r++)
            rates[4 * (c & 1) + r][c >> 1] = least((int32_t)rint(of[r] * weight), MOST_RATE);
        if (is_signed && (c & 1)) rates[4][c >> 1] = MOST_RATE;
    }
}

static void offsets_of(const int64_t *errors, double pays, int32_t *offsets) {
    int64_t gain = 0;
    for (int i = 0; i < 6; i++) {
        const int64_t n = errors[2 * i], total = errors[2 * i + 1];
        const double mean = rint((double)total / (double)(FINE * (n ? n : 1)));
        offsets[i] = FINE * (int32_t)(mean < -8 ? -8 : mean > 7 ? 7 : mean);
        gain += offsets[i] * (2 * total - n * offsets[i]);
    }
    if (!((double)gain > pays)) memset(offsets, 0, 6 * sizeof *offsets);
}

/* Squared error and energy of one block of every `stride`. */
GW_CLONES static void squares(const int32_t *scaled, const int32_t *indices,
                              const uint8_t *contexts, int64_t count, int64_t stride,
                              const int32_t *offsets, double *error, double *energy) {
    *error = *energy = 0;
    if (stride > 1) count = count / BLOCK * BLOCK;
    for (int64_t first = 0; first < count; first += stride * BLOCK) {
        const int64_t end = count - first < BLOCK ? count : first + BLOCK;
        int64_t own = 0, all = 0;
        for (int64_t i = first; i < end; i++) {
            const int32_t k = indices[i], minus = -(k < 0), u = (k ^ minus) - minus;
            const int32_t q = contexts[i] & 1, kind = least(u, 3);
            const int32_t move0 = kind == 1 ? offsets[0] : kind == 2 ? offsets[1] : offsets[2];
            const int32_t move1 = kind == 1 ? offsets[3] : kind == 2 ? offsets[4] : offsets[5];
            const int32_t value = 2 * UNIT * u - UNIT * q - (q ? move1 : move0);
            const int32_t x = (scaled[i] ^ minus) - minus, d = (u ? value : 0) - x;
            own += (int64_t)d * d;
            all += (int64_t)x * x;
        }
        *error += (double)own;
        *energy += (double)all;
    }
}

/* `found` [2]: the squared error and the energy. */
void gw_trellis_squares(const int32_t *scaled, const int32_t *indices, const uint8_t *contexts,
                        int64_t count, int64_t stride, const int32_t *offsets, double *found) {
    squares(scaled, indices, contexts, count, stride < 2 ? 1 : stride, offsets, found, found + 1);
}

typedef struct {
    const int32_t *scaled;
    int64_t count;
    int32_t is_signed;
    level_bits bits;
    double weight, pays; /* of a bit, and what offsets must gain */
} fit;

/* The tables and offsets for counts and errors. */
static int32_t fit_to(const fit *f, const int64_t *counts, const int64_t *errors, prior *p,
                      char *text, double *size) {
    if (errors) offsets_of(errors, f->pays, p->offsets);
    return gw_trellis_tables(counts, f->bits.event, p->levels[0], text, size);
}

static int32_t search(const fit *f, const uint8_t *contexts, const prior *p, int32_t *indices) {
    int32_t rates[RATES][CLASSES];
    rates_of(p, &f->bits, f->weight, f->is_signed, rates);
    return gw_trellis_search(f->scaled, contexts, f->count, rates[0], p->offsets, f->is_signed,
                             indices);
}

/* Rounds of search and count. */
static int32_t converge(const fit *f, const uint8_t *contexts, int32_t rounds, int32_t *indices,
                      prior *p, char *text) {
    double size;
    for (int32_t r = 0; r < rounds; r++) {
        int64_t counts[CONTEXTS * KINDS] = {0}, errors[SUMS] = {0};
        const int32_t status = search(f, contexts, p, indices);
        if (status) return status;
        gw_trellis_counts(f->scaled, indices, contexts, f->count, f->is_signed, counts, errors);
        fit_to(f, counts, errors, p, text, &size);
    }
    return 0;
}

/* The same on one block of every `stride`; `indices` has room for all. */
static int32_t settle_some(const fit *f, const uint8_t *contexts, int64_t stride, int32_t rounds,
                           int32_t *indices, prior *p, char *text) {
    if (stride < 2 || !rounds) return converge(f, contexts, rounds, indices, p, text);
    const int64_t blocks = (f->count / BLOCK + stride - 1) / stride;
    int32_t *const scaled = malloc((size_t)(blocks * BLOCK) * (sizeof *scaled + 1));
    if (!scaled) return -2;
    uint8_t *const where = (uint8_t *)(scaled + blocks * BLOCK);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t from = b * stride * BLOCK;
        memcpy(scaled + b * BLOCK, f->scaled + from, BLOCK * sizeof *scaled);
        memcpy(where + b * BLOCK, contexts + from, BLOCK);
    }
    fit some = *f;
    some.scaled = scaled;
    some.count = blocks * BLOCK;
    const int32_t status = converge(&some, where, rounds, indices, p, text);
    free(scaled);
    return status;
}

/* gw_trellis_contexts, with sums over all segments; `sums` has room for those of each. */
static int32_t find_contexts(const fit *f, const int32_t *indices, const int64_t *shapes,
                             int64_t most_columns, int64_t segments, int64_t *sums,
                             uint8_t *contexts, int64_t *counts, int64_t *errors) {
    enum { COUNTS = CONTEXTS * KINDS };
    int64_t *const own = counts ? sums : NULL, *const wrong = sums + segments * COUNTS;
    memset(sums, 0, (size_t)(segments * (COUNTS + SUMS)) * sizeof *sums);
    const int32_t status =
        gw_trellis_contexts(f->scaled, indices, f->count, shapes, most_columns, segments,
                            indices ? f->is_signed : 0, contexts, own, wrong);
    if (!counts) return status;
    memset(counts, 0, COUNTS * sizeof *counts);
    memset(errors, 0, SUMS * sizeof *errors);
    for (int64_t s = 0; s < segments; s++) {
        for (int i = 0; i < COUNTS; i++) counts[i] += own[s * COUNTS + i];
        for (int i = 0; i < SUMS; i++) errors[i] += wrong[s * SUMS + i];
    }
    return status;
}

/* `shapes` as for gw_trellis_contexts. If `is_given`, `levels` [2 CLASSES, 3] and `offsets` are
   those that the search takes; both become those of the indices. `text` has the room that
   gw_trellis_tables asks for, `numbers` becomes the bits of all, the squared error and the energy.
   The length of the text, or -2 without memory. */
int32_t gw_trellis_fit(const int32_t *scaled, int64_t count, const int64_t *shapes,
                       int64_t most_columns, int64_t segments, int32_t is_signed,
                       int32_t is_given, int32_t rounds, int32_t passes, int64_t stride,
                       const double *event, const double *symbol, const double *tail,
                       double weight, double pays, int32_t *indices, uint8_t *contexts,
                       int8_t *levels, int32_t *offsets, char *text, double *numbers) {
    const fit f = {scaled, count, is_signed, {event, symbol, tail}, weight, pays};
    int64_t counts[CONTEXTS * KINDS], errors[SUMS];
    int64_t *const sums = malloc((size_t)segments * sizeof counts + (size_t)segments * sizeof errors);
    if (!sums) return -2;
    prior p, found;
    memcpy(p.levels, levels, sizeof p.levels);
    memcpy(p.offsets, offsets, sizeof p.offsets);
    int32_t length = 0;
    int32_t status = find_contexts(&f, NULL, shapes, most_columns, segments, sums, contexts,
                                   is_given ? NULL : counts, errors);
    if (!status && !is_given) {
        for (int c = 1; is_signed && c < CONTEXTS; c += 2) {
            counts[c * KINDS + 1] += counts[c * KINDS];
            counts[c * KINDS] = 0;
        }
        fit_to(&f, counts, NULL, &p, text, numbers);
        status = settle_some(&f, contexts, stride, rounds, indices, &p, text);
    }
    for (int32_t pass = 0; !status && pass < passes; pass++) {
        status = search(&f, contexts, &p, indices);
        if (!status)
            status = find_contexts(&f, indices, shapes, most_columns, segments, sums, contexts,
                                   counts, errors);
        length = fit_to(&f, counts, errors, &found, text, numbers);
        if (!is_given) p = found;
    }
    free(sums);
    if (status) return status;
    squares(scaled, indices, contexts, count, stride < 2 ? 1 : stride, found.offsets, numbers + 1,
            numbers + 2);
    memcpy(levels, found.levels, sizeof found.levels);
    memcpy(offsets, found.offsets, sizeof found.offsets);
    return length;
}
