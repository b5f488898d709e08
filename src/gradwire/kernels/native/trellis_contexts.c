/* Contexts of indices, number for number as reference/trellis.py; segments are independent. */
#include "trellis_model.h"
#include "trellis_tally.h"

typedef struct {
    layout of;
    const int32_t *scaled, *indices; /* `indices` may be null */
    uint8_t *contexts;
    int64_t *counts; /* [segments, 2 CLASSES, 4] zeros, ones, more, by how much more */
    int64_t *errors; /* [segments, 6, 2] */
    int32_t is_signed;
} context_job;

GW_INLINE void tally(int64_t *counts, int32_t k) {
    const int32_t kind = least(k, 2);
    counts[kind]++;
    counts[3] += k - kind;
}

/* u: the number, with its sign changed if that of the index is minus. */
GW_INLINE void tally_error(int64_t *errors, int32_t k, int32_t q, int32_t u) {
    if (k) {
        int64_t *const error = errors + 6 * q + 2 * (k > 2 ? 2 : k - 1);
        error[0]++;
        error[1] += 2 * UNIT * k - UNIT * q - u;
    }
}

/* Counts and errors as in gw_trellis_contexts, where the classes are those of `contexts`. */
void gw_trellis_counts(const int32_t *scaled, const int32_t *indices, const uint8_t *contexts,
                       int64_t count, int32_t is_signed, int64_t *counts, int64_t *errors) {
    int32_t state = 0;
    for (int64_t i = 0; i < count; i++) {
        const int32_t minus = indices[i] < 0, k = minus ? -indices[i] : indices[i], q = state & 1;
        tally(counts + 4 * ((contexts[i] & ~1) | q), k);
        tally_error(errors, k, q, minus ? -scaled[i] : scaled[i]);
        state = next_state(state, k, minus & is_signed);
    }
}

GW_INLINE void contexts_from(const context_job *job, model *m, int64_t first, int64_t end,
                             int64_t *counts, int64_t *errors, int is_first) {
    for (int64_t i = first; i < end; i++) {
        const int32_t c = context(m), x = job->scaled[i], u = x < 0 ? -x : x;
        int32_t k, minus = 0;
        job->contexts[i] = (uint8_t)c;
        if (is_first) {
            k = (u + 50) >> 7;
            tally(counts + 4 * (c & ~1), k);
            tally(counts + 4 * (c | 1), (u + 78) >> 7);
        } else {
            k = job->indices[i];
            minus = k < 0;
            k = minus ? -k : k;
            tally(counts + 4 * c, k);
            tally_error(errors, k, c & 1, minus ? -x : x);
        }
        learn(m, k, minus & job->is_signed, i + 1 == job->of.count);
        if (is_first) m->state = 0;
    }
}

#ifdef GW_WIDE
enum { STRETCH = 128 }; /* elements of a row whose averages are taken first */

/* The averages of some elements of a row, before each of them. */
typedef struct {
    uint32_t rows[STRETCH], columns[STRETCH], lefts[STRETCH], own[STRETCH], states[STRETCH];
    uint32_t sizes[STRETCH], ks[STRETCH];
} stretch;

/* learn() of n elements; `flips` as for next_state(), bit by bit. */
GW_INLINE void learn_stretch(stretch *s, model *m, int64_t n, const uint16_t *flips,
                             const int is_first, int is_last) {
    uint32_t row = m->row, columns = m->columns, left = m->left, *column = m->column;
    int32_t state = m->state;
    const int32_t shift = m->shift, moves = shift != VECTOR_SHIFT;
    for (int j = 0; j < n; j++) {
        const uint32_t v = s->sizes[j], c = *column;
        s->rows[j] = row;
        s->columns[j] = columns;
        s->lefts[j] = left;
        s->own[j] = c;
        s->states[j] = (uint32_t)state;
        left = (left + v) >> 1;
        row += v - (row >> ROW_SHIFT);
        columns += c - (columns >> ROW_SHIFT);
        *column = c + (uint32_t)((int32_t)(v - c) >> shift);
        column += moves;
        if (!is_first)
            state = next_state(state, (int32_t)s->ks[j], flips[j >> 4] >> (j & 15) & 1);
    }
    m->row = row;
    m->columns = columns;
    m->left = left;
    m->column = column;
    m->state = state;
    m->at += n;
    if (m->at == m->width) end_row(m, is_last);
}

/* contexts_from(), a stretch at a time: only the averages wait for each other, and they know
   nothing of classes. */
GW_WIDE GW_INLINE void contexts_tiled(const context_job *job, model *m, int64_t first, int64_t end,
                                      int64_t *counts, int64_t *errors, const int is_first) {
    uint64_t tallies[4][TALLIES];
    stretch s;
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi32(1);
    memset(tallies, 0, sizeof tallies);
    memset(&s, 0, sizeof s);
    for (int64_t i = first, n; i < end; i += n) {
        __m512i total[6] = {zero, zero, zero, zero, zero, zero};
        uint16_t flips[STRETCH / 16];
        n = m->width - m->at < STRETCH ? m->width - m->at : STRETCH;
        if (end - i < n) n = end - i;
        for (int64_t j = 0; j < n; j += 16) {
            const __mmask16 used = (__mmask16)(n - j < 16 ? (1u << (n - j)) - 1 : 0xffff);
            const __m512i u = _mm512_abs_epi32(_mm512_maskz_loadu_epi32(used, job->scaled + i + j));
            const __m512i index =
                is_first ? _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(50)), 7)
                         : _mm512_maskz_loadu_epi32(used, job->indices + i + j);
            const __m512i k = _mm512_abs_epi32(index);
            flips[j / 16] = job->is_signed ? _mm512_cmplt_epi32_mask(index, zero) : 0;
            _mm512_storeu_si512(s.sizes + j, wide_size(k));
            _mm512_storeu_si512(s.ks + j, k);
        }
        learn_stretch(&s, m, n, flips, is_first, i + n == job->of.count);
        for (int64_t j = 0; j < n; j += 16) {
            const int64_t here = n - j < 16 ? n - j : 16;
            const __mmask16 used = (__mmask16)((1u << here) - 1);
            const __m512i class =
                wide_class(_mm512_loadu_si512(s.rows + j), _mm512_loadu_si512(s.columns + j),
                           _mm512_loadu_si512(s.own + j), _mm512_loadu_si512(s.lefts + j));
            const __m512i q =
                is_first ? zero : _mm512_and_si512(_mm512_loadu_si512(s.states + j), one);
            const __m512i context = _mm512_or_si512(_mm512_slli_epi32(class, 1), q);
            _mm512_mask_cvtepi32_storeu_epi8(job->contexts + i + j, used, context);
            if (!counts) continue;
            const __m512i x = _mm512_maskz_loadu_epi32(used, job->scaled + i + j);
            const __m512i k = _mm512_loadu_si512(s.ks + j);
            tally_some(tallies, wide_tag(context, k), here);
            if (is_first) {
                const __m512i other = _mm512_srli_epi32(
                    _mm512_add_epi32(_mm512_abs_epi32(x), _mm512_set1_epi32(78)), 7);
                tally_some(tallies, wide_tag(_mm512_or_si512(context, one), other), here);
            } else {
                const __mmask16 minus = _mm512_mask_cmplt_epi32_mask(
                    used, _mm512_maskz_loadu_epi32(used, job->indices + i + j), zero);
                wide_errors(total, x, _mm512_maskz_mov_epi32(used, k), q, minus);
            }
        }
        for (int t = 0; counts && !is_first && t < 6; t++)
            errors[2 * t + 1] += wide_sum(total[t]);
    }
    if (counts) add_tallies(tallies, is_first, counts, errors);
}

GW_WIDE static void contexts_tiled_first(const context_job *job, model *m, int64_t first,
                                         int64_t end, int64_t *counts, int64_t *errors) {
    contexts_tiled(job, m, first, end, counts, errors, 1);
}

GW_WIDE static void contexts_tiled_known(const context_job *job, model *m, int64_t first,
                                         int64_t end, int64_t *counts, int64_t *errors) {
    contexts_tiled(job, m, first, end, counts, errors, 0);
}

#endif

static void contexts_narrow(const context_job *job, model *m, int64_t first, int64_t end,
                            int64_t s) {
    int64_t unused[2 * CLASSES * KINDS] = {0};
    int64_t *const counts = job->counts ? job->counts + s * 2 * CLASSES * KINDS : unused;
    int64_t *const errors = job->errors + s * SUMS;
#ifdef GW_WIDE
    for (int64_t next; is_wide() && first < end; first = next) {
        next = end - first < MOST_TALLIED ? end : first + MOST_TALLIED;
        (job->indices ? contexts_tiled_known : contexts_tiled_first)(
            job, m, first, next, job->counts ? counts : NULL, errors);
    }
    if (is_wide()) return;
#endif
    if (job->indices)
        contexts_from(job, m, first, end, counts, errors, 0);
    else
        contexts_from(job, m, first, end, counts, errors, 1);
}

#ifdef GW_WIDE
/* Sixteen segments side by side, `steps` elements of each from `from` on, a multiple of 16; those
   of the lanes from `used` on are computed and not used. */
GW_WIDE GW_INLINE void contexts_wide(const context_job *job, models *all, const int64_t *from,
                                      int64_t steps, int used, int is_first, int64_t *counts,
                                      int64_t *errors) {
    uint64_t tallies[4][TALLIES];
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi32(1);
    memset(tallies, 0, sizeof tallies);
    lanes m = load_lanes(all);
    for (int64_t first = 0; first < steps; first += 16) {
        __m512i scaled[16], index[16], tags[16], others[16], total[6];
        __mmask16 is_beyond = 0;
        for (int l = 0; l < 16; l++)
            scaled[l] = _mm512_loadu_si512(job->scaled + from[l] + first);
        transpose(scaled);
        if (!is_first) {
            for (int l = 0; l < 16; l++)
                index[l] = _mm512_loadu_si512(job->indices + from[l] + first);
            transpose(index);
        }
        for (int t = 0; t < 6; t++) total[t] = zero;
        tile own;
        start_tile(&own, &m, all);
        for (int i = 0; i < 16; i++) {
            const __m512i x = scaled[i];
            const __m512i k =
                is_first ? _mm512_srli_epi32(
                               _mm512_add_epi32(_mm512_abs_epi32(x), _mm512_set1_epi32(50)), 7)
                         : _mm512_abs_epi32(index[i]);
            const __m512i c = tile_columns(&own, &m, all, i);
            const __m512i class = wide_class(m.row, m.columns, c, m.left);
            const __m512i q = is_first ? zero : _mm512_and_si512(m.state, one);
            const __m512i context = _mm512_or_si512(_mm512_slli_epi32(class, 1), q);
            tags[i] = wide_tag(context, k);
            if (is_first) {
                const __m512i other = _mm512_srli_epi32(
                    _mm512_add_epi32(_mm512_abs_epi32(x), _mm512_set1_epi32(78)), 7);
                others[i] = wide_tag(_mm512_or_si512(context, one), other);
                is_beyond |= _mm512_cmpgt_epi32_mask(other, _mm512_set1_epi32(2));
            }
            is_beyond |= _mm512_cmpgt_epi32_mask(k, _mm512_set1_epi32(2));
            if (!is_first) {
                const __mmask16 minus = _mm512_cmplt_epi32_mask(index[i], zero);
                wide_errors(total, x, k, q, minus);
                m.state = wide_next_state(m.state, k, job->is_signed ? minus : 0);
            }
            tile_learn(&own, &m, all, c, wide_size(k), from, first, i, job->of.count);
        }
        end_tile(&own, &m, all);
        transpose(tags);
        for (int l = 0; l < used; l++) {
            const int64_t start = from[l] + first;
            _mm_storeu_si128((__m128i *)(void *)(job->contexts + start),
                             _mm512_cvtepi32_epi8(_mm512_and_si512(
                                 _mm512_srli_epi32(tags[l], 2), _mm512_set1_epi32(31))));
        }
        for (int t = 0; t < 6 && !is_first; t++) {
            const __mmask16 lanes = (__mmask16)((1u << used) - 1);
            errors[2 * t + 1] += wide_sum(_mm512_maskz_mov_epi32(lanes, total[t]));
        }
        if (!counts) continue;
        for (int l = 0; l < used; l++) wide_tally(tallies, tags[l], is_beyond);
        if (!is_first) continue;
        transpose(others);
        for (int l = 0; l < used; l++) wide_tally(tallies, others[l], is_beyond);
    }
    store_lanes(all, &m);
    for (int l = 0; l < LANES; l++) from_lane(all, l);
    if (counts) add_tallies(tallies, is_first, counts, errors);
}

GW_WIDE static void contexts_wide_first(const context_job *job, models *all, const int64_t *from,
                                         int64_t steps, int used, int64_t *counts,
                                         int64_t *errors) {
    contexts_wide(job, all, from, steps, used, 1, counts, errors);
}

GW_WIDE static void contexts_wide_known(const context_job *job, models *all, const int64_t *from,
                                         int64_t steps, int used, int64_t *counts,
                                         int64_t *errors) {
    contexts_wide(job, all, from, steps, used, 0, counts, errors);
}

/* Segments `first` to `last`, sixteen at most, side by side. */
static void some_segments(void *given, int64_t first, int64_t last, uint32_t *columns) {
    const context_job *const job = given;
    enum { FLUSH = MOST_TALLIED / LANES }; /* steps after which no tally has overflown */
    models all;
    int64_t from[LANES], end[LANES];
    int64_t left = start_lanes(&all, job->of.count, job->of.segments, job->of.shapes, job->of.most_columns,
                               first, last, columns, from, end);
    int64_t *const counts = job->counts ? job->counts + first * 2 * CLASSES * KINDS : NULL;
    int64_t *const errors = job->errors + first * 12;
    for (left -= left % 16; left; ) {
        const int64_t steps = left < FLUSH ? left : FLUSH;
        (job->indices ? contexts_wide_known : contexts_wide_first)(job, &all, from, steps,
                                                                   (int)(last - first), counts,
                                                                   errors);
        for (int l = 0; l < LANES; l++) from[l] += steps;
        left -= steps;
    }
    for (int l = 0; first + l < last; l++)
        contexts_narrow(job, &all.own[l], from[l], end[l], first + l);
}
#endif

static void one_segment(void *given, int64_t s, model *m) {
    context_job *const job = given;
    const layout *const of = &job->of;
    contexts_narrow(job, m, segment_start(of->count, of->segments, s),
                    segment_start(of->count, of->segments, s + 1), s);
}

static void context_task(void *given, int64_t first, int64_t last) {
    context_job *const job = given;
    segments_task some = NULL;
#ifdef GW_WIDE
    some = some_segments;
#endif
    each_segment(job, &job->of, first, last, one_segment, some);
}

/* `shapes` are tensors as (rows, width) that make up `count` elements, none of them empty; `counts`
   and `errors` are zero; null `counts` are not computed. 0, or -2 without memory. */
int32_t gw_trellis_contexts(const int32_t *scaled, const int32_t *indices, int64_t count,
                            const int64_t *shapes, int64_t most_columns, int64_t segments,
                            int32_t is_signed, uint8_t *contexts, int64_t *counts,
                            int64_t *errors) {
    context_job job = {{count, segments, shapes, most_columns, 0}, scaled, indices,
                       contexts, counts, errors, is_signed};
    each_group(&job, segments, context_task);
    return job.of.failed ? -2 : 0;
}
