/* Quantisers that a plane of bits names, number for number as reference/plane.py, which says what
   is done. */
#include "trellis_model.h"
#include "trellis_tally.h"

enum {
    STEEPEST = 16,   /* indices above have the rate of this one */
    FAR = 16383,     /* no number counts as farther from zero */
    RATIO_SHIFT = 7, /* 32 units of a ratio to a squared step */
    CERTAIN = 127,
};

/* The cost of index k of quantiser q, if k is not 0. */
GW_INLINE int32_t cost_of(int32_t u, int32_t k, int32_t q, int32_t one, int32_t two, int32_t slope,
                          const int32_t offsets[3]) {
    const int32_t offset = k == 1 ? offsets[0] : k == 2 ? offsets[1] : offsets[2];
    const int32_t d = u - (2 * UNIT * k - UNIT * q - offset);
    return d * d + (k == 1 ? one : two + slope * (least(k, STEEPEST) - 2));
}

/* The least cost in quantiser q: of zero, or of one of the two indices around the number. Rates
   are those of 0, 1, 2 and of one more. */
GW_INLINE int32_t cheapest(int32_t u, int32_t q, int32_t zero, int32_t one, int32_t two,
                           int32_t slope, const int32_t offsets[3], int32_t *index) {
    const int32_t z = least(u, FAR), nothing = z * z + zero, k = (u + UNIT * q) >> 7;
    const int32_t below = cost_of(u, k, q, one, two, slope, offsets);
    const int32_t above = cost_of(u, k + 1, q, one, two, slope, offsets);
    const int32_t low = k > 0 && below < nothing ? below : nothing;
    const int32_t low_index = k > 0 && below < nothing ? k : 0;
    *index = above < low ? k + 1 : low_index;
    return least(above, low);
}

/* What indices cost: rates of 0, 1, 2 and of one more by context, and by how much values move. */
typedef struct {
    int32_t rates[2 * CLASSES][4];
    int32_t offsets[2][3];
} prices;

static void fill_prices(prices *p, const int32_t *rates, const int32_t *offsets) {
    for (int c = 0; c < 2 * CLASSES; c++)
        for (int r = 0; r < 4; r++)
            p->rates[c][r] = rates[(4 * (c & 1) + r) * CLASSES + (c >> 1)];
    memcpy(p->offsets, offsets, sizeof p->offsets);
}

#ifdef GW_WIDE
/* Tables of 32 numbers, by context. */
typedef struct {
    __m512i low, high;
} wide_table;

GW_WIDE GW_INLINE wide_table load_table(const prices *p, int r) {
    int32_t own[2 * CLASSES];
    for (int c = 0; c < 2 * CLASSES; c++) own[c] = p->rates[c][r];
    const wide_table t = {_mm512_loadu_si512(own), _mm512_loadu_si512(own + 16)};
    return t;
}

GW_WIDE GW_INLINE __m512i look_up(wide_table t, __m512i context) {
    return _mm512_permutex2var_epi32(t.low, context, t.high);
}

/* The squared error of index k of quantiser q; `moved` are the offsets at 4 q + |k|, and its |k| 3
   stands for more. */
GW_WIDE GW_INLINE __m512i wide_square(__m512i u, __m512i k, __m512i q, __m512i moved) {
    const __m512i kind = _mm512_min_epi32(k, _mm512_set1_epi32(3));
    const __m512i offset =
        _mm512_permutexvar_epi32(_mm512_or_si512(_mm512_slli_epi32(q, 2), kind), moved);
    const __m512i value = _mm512_sub_epi32(
        _mm512_sub_epi32(_mm512_slli_epi32(k, 7), _mm512_slli_epi32(q, 6)), offset);
    const __m512i d = _mm512_sub_epi32(u, value);
    return _mm512_mullo_epi32(d, d);
}

typedef struct {
    wide_table zero, one, two, three, slope;
    __m512i moved;
} wide_prices;

GW_WIDE GW_INLINE wide_prices load_prices(const prices *p) {
    int32_t offsets[16] = {0};
    for (int q = 0; q < 2; q++)
        for (int k = 1; k < 4; k++) offsets[4 * q + k] = p->offsets[q][k - 1];
    wide_prices all = {load_table(p, 0), load_table(p, 1), load_table(p, 2), load_table(p, 2),
                       load_table(p, 3), _mm512_loadu_si512(offsets)};
    all.three.low = _mm512_add_epi32(all.three.low, all.slope.low);
    all.three.high = _mm512_add_epi32(all.three.high, all.slope.high);
    return all;
}

/* What indices k >= 2 cost beyond 3, by slope: most are 3 at most. */
GW_WIDE GW_INLINE __m512i wide_beyond(__m512i k, __m512i slope) {
    const __m512i three = _mm512_set1_epi32(3);
    const __m512i more =
        _mm512_sub_epi32(_mm512_min_epi32(k, _mm512_set1_epi32(STEEPEST)), three);
    return _mm512_mullo_epi32(slope, _mm512_max_epi32(more, _mm512_setzero_si512()));
}

/* cheapest(); `other` is where the index is not zero. Nothing that is slow depends on the context,
   which depends on the element before. */
GW_WIDE GW_INLINE __m512i wide_cheapest(__m512i u, __m512i q, __m512i context,
                                        const wide_prices *p, __m512i *index, __mmask16 *other) {
    const __m512i one = _mm512_set1_epi32(1), two = _mm512_set1_epi32(2);
    const __m512i z = _mm512_min_epi32(u, _mm512_set1_epi32(FAR));
    const __m512i far = _mm512_mullo_epi32(z, z);
    const __m512i k = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_slli_epi32(q, 6)), 7);
    const __m512i next = _mm512_add_epi32(k, one);
    const __m512i error_below = wide_square(u, k, q, p->moved);
    const __m512i error_above = wide_square(u, next, q, p->moved);
    const __mmask16 is_one = _mm512_cmpeq_epi32_mask(k, one);
    const __mmask16 from_one = _mm512_cmpge_epi32_mask(k, one);
    const __mmask16 from_two = _mm512_cmpge_epi32_mask(k, two);
    const __mmask16 from_three = _mm512_cmpgt_epi32_mask(k, two);
    const __m512i rate1 = look_up(p->one, context), rate2 = look_up(p->two, context);
    const __m512i rate3 = look_up(p->three, context);
    __m512i rate_below = _mm512_mask_mov_epi32(rate2, is_one, rate1);
    __m512i rate_above = _mm512_mask_mov_epi32(rate1, from_one, rate2);
    rate_below = _mm512_mask_mov_epi32(rate_below, from_three, rate3);
    rate_above = _mm512_mask_mov_epi32(rate_above, from_two, rate3);
    if (from_three) {
        const __m512i slope = look_up(p->slope, context);
        rate_below = _mm512_add_epi32(rate_below, wide_beyond(k, slope));
        rate_above = _mm512_add_epi32(rate_above, wide_beyond(next, slope));
    }
    const __m512i nothing = _mm512_add_epi32(far, look_up(p->zero, context));
    const __m512i below = _mm512_add_epi32(error_below, rate_below);
    const __m512i above = _mm512_add_epi32(error_above, rate_above);
    const __mmask16 is_below = _mm512_mask_cmplt_epi32_mask(from_one, below, nothing);
    const __m512i low = _mm512_mask_mov_epi32(nothing, is_below, below);
    const __mmask16 is_above = _mm512_cmplt_epi32_mask(above, low);
    *index = _mm512_mask_mov_epi32(_mm512_maskz_mov_epi32(is_below, k), is_above, next);
    *other = is_below | is_above;
    return _mm512_min_epi32(above, low);
}
#endif

typedef struct {
    const int32_t *scaled;
    const uint8_t *contexts;
    prices of;
    int8_t *ratios;
} ratio_job;

GW_INLINE int32_t ratio_of(int32_t even, int32_t odd) {
    const int32_t ratio = (odd - even + (1 << (RATIO_SHIFT - 1))) >> RATIO_SHIFT;
    return ratio < -CERTAIN ? -CERTAIN : least(ratio, CERTAIN);
}

#ifdef GW_WIDE
/* Sixteen elements at a time; where it stopped. */
GW_WIDE static int64_t wide_ratios(const ratio_job *job, int64_t first, int64_t last) {
    const wide_prices p = load_prices(&job->of);
    const __m512i most = _mm512_set1_epi32(CERTAIN), one = _mm512_set1_epi32(1);
    for (; first + 16 <= last; first += 16) {
        const __m512i u = _mm512_abs_epi32(_mm512_loadu_si512(job->scaled + first));
        const __m512i context = _mm512_or_si512(
            _mm512_cvtepu8_epi32(
                _mm_loadu_si128((const __m128i *)(const void *)(job->contexts + first))),
            one);
        __m512i index;
        __mmask16 other;
        const __m512i odd = wide_cheapest(u, one, context, &p, &index, &other);
        const __m512i even = wide_cheapest(u, _mm512_setzero_si512(),
                                           _mm512_xor_si512(context, one), &p, &index, &other);
        const __m512i half = _mm512_set1_epi32(1 << (RATIO_SHIFT - 1));
        const __m512i ratio = _mm512_srai_epi32(
            _mm512_add_epi32(_mm512_sub_epi32(odd, even), half), RATIO_SHIFT);
        const __m512i low = _mm512_max_epi32(ratio, _mm512_sub_epi32(_mm512_setzero_si512(), most));
        _mm_storeu_si128((__m128i *)(void *)(job->ratios + first),
                         _mm512_cvtepi32_epi8(_mm512_min_epi32(low, most)));
    }
    return first;
}
#endif

static void ratio_task(void *given, int64_t first, int64_t last) {
    const ratio_job *const job = given;
    const prices *const of = &job->of;
#ifdef GW_WIDE
    if (is_wide()) first = wide_ratios(job, first, last);
#endif
    for (int64_t i = first; i < last; i++) {
        const int32_t x = job->scaled[i], u = x < 0 ? -x : x;
        const int32_t *const r = of->rates[job->contexts[i] & ~1], *const s = r + 4;
        int32_t k;
        const int32_t even = cheapest(u, 0, r[0], r[1], r[2], r[3], of->offsets[0], &k);
        const int32_t odd = cheapest(u, 1, s[0], s[1], s[2], s[3], of->offsets[1], &k);
        job->ratios[i] = (int8_t)ratio_of(even, odd);
    }
}

void gw_plane_ratios(const int32_t *scaled, const uint8_t *contexts, int64_t count,
                     const int32_t *rates, const int32_t *offsets, int8_t *ratios) {
    ratio_job job = {.scaled = scaled, .contexts = contexts, .ratios = ratios};
    fill_prices(&job.of, rates, offsets);
    gw_parallel(ratio_task, &job, count, 64, 1 << 15);
}

typedef struct {
    layout of;
    const int32_t *scaled;
    const uint8_t *plane; /* packed */
    prices cost;
    int32_t *indices;
    uint8_t *contexts;
    int64_t *counts; /* [segments, 2 CLASSES, KINDS] */
    int64_t *errors; /* [segments, SUMS] */
} choose_job;

/* What was chosen. In four places, so that additions to one number do not wait for each other. */
typedef struct {
    uint32_t counts[4][2 * CLASSES][4]; /* of |k| = 0, 1, 2, more */
    int64_t beyond[4][2 * CLASSES];     /* by how much they are more than 2 */
    int64_t errors[4][2][4];            /* by quantiser and |k| */
} tallies;

GW_INLINE void tally(const choose_job *job, tallies *t, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
        const int32_t c = job->contexts[i], q = c & 1, x = job->scaled[i], k = job->indices[i];
        const int32_t u = x < 0 ? -x : x, size = k < 0 ? -k : k, kind = least(size, 3);
        t->counts[i & 3][c][kind]++;
        t->errors[i & 3][q][kind] += 2 * UNIT * size - UNIT * q - u;
        if (size > 2) t->beyond[i & 3][c] += size - 2;
    }
}

/* As gw_trellis_contexts leaves them for a segment. */
static void keep(const choose_job *job, int64_t s, const tallies *t) {
    int64_t *const counts = job->counts + s * 2 * CLASSES * KINDS;
    int64_t *const errors = job->errors + s * SUMS;
    for (int p = 0; p < 4; p++)
        for (int c = 0; c < 2 * CLASSES; c++)
            for (int k = 0; k < 4; k++) {
                counts[KINDS * c + least(k, 2)] += t->counts[p][c][k];
                if (k) errors[6 * (c & 1) + 2 * (k - 1)] += t->counts[p][c][k];
            }
    for (int p = 0; p < 4; p++)
        for (int c = 0; c < 2 * CLASSES; c++) counts[KINDS * c + 3] += t->beyond[p][c];
    for (int p = 0; p < 4; p++)
        for (int q = 0; q < 2; q++)
            for (int k = 1; k < 4; k++) errors[6 * q + 2 * (k - 1) + 1] += t->errors[p][q][k];
}

static void choose_from(choose_job *job, model *m, tallies *t, int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
        const int32_t x = job->scaled[i], u = x < 0 ? -x : x;
        m->state = job->plane[i >> 3] >> (i & 7) & 1;
        const int32_t c = context(m), q = c & 1, *const rates = job->cost.rates[c];
        int32_t k;
        cheapest(u, q, rates[0], rates[1], rates[2], rates[3], job->cost.offsets[q], &k);
        job->indices[i] = x < 0 ? -k : k;
        job->contexts[i] = (uint8_t)c;
        learn_value(m, k, q, i + 1 == job->of.count);
    }
    tally(job, t, first, end);
}

static void choose_segment(void *given, int64_t s, model *m) {
    choose_job *const job = given;
    const layout *const of = &job->of;
    tallies t = {0};
    choose_from(job, m, &t, segment_start(of->count, of->segments, s),
                segment_start(of->count, of->segments, s + 1));
    keep(job, s, &t);
}

#ifdef GW_WIDE
/* Segments `first` to `last`, sixteen at most, side by side. */
GW_WIDE static void choose_segments(void *given, int64_t first, int64_t last, uint32_t *columns) {
    choose_job *const job = given;
    models all;
    tallies t = {0};
    int64_t from[LANES], end[LANES], i = 0;
    int64_t steps = start_lanes(&all, job->of.count, job->of.segments, job->of.shapes,
                                job->of.most_columns, first, last, columns, from, end);
    const int used = (int)(last - first);
    const __mmask16 lanes_used = (__mmask16)((1u << used) - 1);
    int64_t *const counts = job->counts + first * 2 * CLASSES * KINDS;
    int64_t *const errors = job->errors + first * SUMS, tallied = 0;
    uint64_t tallies[4][TALLIES];
    memset(tallies, 0, sizeof tallies);
    const wide_prices p = load_prices(&job->cost);
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi32(1);
    lanes m = load_lanes(&all);
    for (steps -= steps % 16; i < steps; i += 16) {
        __m512i scaled[16], tags[16];
        __m512i total[6] = {zero, zero, zero, zero, zero, zero};
        __mmask16 is_beyond = 0;
        int32_t bits[LANES] = {0}; /* of the plane: segments begin with whole bytes */
        for (int l = 0; l < LANES; l++) {
            scaled[l] = _mm512_loadu_si512(job->scaled + from[l] + i);
            memcpy(&bits[l], job->plane + (from[l] + i) / 8, 2);
        }
        const __m512i plane = _mm512_loadu_si512(bits);
        transpose(scaled);
        tile own;
        start_tile(&own, &m, &all);
        for (int j = 0; j < 16; j++) {
            const __m512i c = tile_columns(&own, &m, &all, j);
            const __m512i class = wide_class(m.row, m.columns, c, m.left);
            const __m512i q = _mm512_and_si512(_mm512_srli_epi32(plane, (unsigned)j), one);
            const __m512i context = _mm512_or_si512(_mm512_slli_epi32(class, 1), q);
            const __m512i x = scaled[j], u = _mm512_abs_epi32(x);
            __m512i index;
            __mmask16 other;
            wide_cheapest(u, q, context, &p, &index, &other);
            tags[j] = wide_tag(context, index);
            is_beyond |= _mm512_cmpgt_epi32_mask(index, _mm512_set1_epi32(2));
            wide_errors(total, u, index, q, 0);
            const __m512i size = _mm512_mask_sub_epi32(
                wide_size(index), other, wide_size(index), _mm512_slli_epi32(q, FRACTION - 1));
            scaled[j] =
                _mm512_mask_sub_epi32(index, _mm512_cmplt_epi32_mask(x, zero), zero, index);
            tile_learn(&own, &m, &all, c, size, from, i, j, job->of.count);
        }
        end_tile(&own, &m, &all);
        transpose(scaled);
        transpose(tags);
        for (int l = 0; l < used; l++) {
            _mm512_storeu_si512(job->indices + from[l] + i, scaled[l]);
            _mm_storeu_si128((__m128i *)(void *)(job->contexts + from[l] + i),
                             _mm512_cvtepi32_epi8(_mm512_and_si512(
                                 _mm512_srli_epi32(tags[l], 2), _mm512_set1_epi32(31))));
            wide_tally(tallies, tags[l], is_beyond);
        }
        for (int e = 0; e < 6; e++)
            errors[2 * e + 1] += wide_sum(_mm512_maskz_mov_epi32(lanes_used, total[e]));
        if ((tallied += 16 * LANES) >= MOST_TALLIED) {
            add_tallies(tallies, 0, counts, errors);
            memset(tallies, 0, sizeof tallies);
            tallied = 0;
        }
    }
    add_tallies(tallies, 0, counts, errors);
    store_lanes(&all, &m);
    for (int l = 0; l < used; l++) {
        from_lane(&all, l);
        choose_from(job, &all.own[l], &t, from[l] + i, end[l]);
    }
    keep(job, first, &t);
}
#endif

static void choose_task(void *given, int64_t first, int64_t last) {
    choose_job *const job = given;
    segments_task some = NULL;
#ifdef GW_WIDE
    some = choose_segments;
#endif
    each_segment(job, &job->of, first, last, choose_segment, some);
}

/* `counts` and `errors` as in gw_trellis_contexts, zero before. 0, or -2 without memory. */
int32_t gw_plane_choose(const int32_t *scaled, const uint8_t *plane, int64_t count,
                        const int32_t *rates, const int32_t *offsets, const int64_t *shapes,
                        int64_t most_columns, int64_t segments, int32_t *indices,
                        uint8_t *contexts, int64_t *counts, int64_t *errors) {
    choose_job job = {.of = {count, segments, shapes, most_columns, 0},
                      .scaled = scaled,
                      .plane = plane,
                      .indices = indices,
                      .contexts = contexts,
                      .counts = counts,
                      .errors = errors};
    fill_prices(&job.cost, rates, offsets);
    each_group(&job, segments, choose_task);
    return job.of.failed ? -2 : 0;
}
