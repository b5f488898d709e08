/* What is expected of the elements of a segment: the model that contexts and the decoder follow,
   alone or sixteen segments side by side. */
#ifndef GRADWIRE_TRELLIS_MODEL_H
#define GRADWIRE_TRELLIS_MODEL_H

#include "threads.h"
#include "trellis.h"

enum { FEW = 4 }; /* segments that are worth lanes */
enum { START = 1024, LEAST = 16, ROW_SHIFT = 6, VECTOR_SHIFT = 7, MOST = 1023, FRACTION = 12 };

/* What is expected of the next element, from those before it. */
typedef struct {
    uint32_t row, columns, left, mean; /* averages; `columns` is of the columns along the row */
    uint32_t *column, *columns_of;     /* of the element, and the first of the tensor */
    int64_t at, width, rows_done;      /* of the row */
    int64_t rows_left;                 /* of the tensor, this one included */
    const int64_t *shape;              /* of the tensor, (rows, width) */
    int32_t shift, state;
} model;

GW_INLINE uint32_t logarithm(uint32_t u) {
    const uint32_t z = (uint32_t)__builtin_clz(u);
    return (31 - z) << 6 | (u << z >> 25 & 63);
}

static void start_row(model *m) {
    m->row = m->columns = 3 * m->mean;
    m->left = m->mean;
    m->column = m->columns_of;
    const int64_t a = m->rows_done;
    m->shift = m->shape[0] == 1 ? VECTOR_SHIFT : a < 4 ? 2 : a < 12 ? 3 : a < 28 ? 4 : 5;
}

static void start_tensor(model *m) {
    const int64_t columns = m->shape[0] == 1 ? 1 : m->shape[1];
    for (int64_t j = 0; j < columns; j++) m->columns_of[j] = m->mean;
    m->width = m->shape[1];
    m->rows_left = m->shape[0];
    m->rows_done = m->at = 0;
    start_row(m);
}

/* The segment that begins at element `first`. */
static void start_model(model *m, const int64_t *shapes, int64_t first, uint32_t *columns) {
    m->shape = shapes;
    while (first >= m->shape[0] * m->shape[1]) {
        first -= m->shape[0] * m->shape[1];
        m->shape += 2;
    }
    m->columns_of = columns;
    m->mean = START;
    m->state = 0;
    start_tensor(m);
    m->rows_left -= first / m->width;
    m->at = first % m->width;
    m->column += m->shape[0] == 1 ? 0 : m->at;
}

static void end_row(model *m, int is_last) {
    m->mean += (uint32_t)((int32_t)((m->row >> ROW_SHIFT) - m->mean) >> ROW_SHIFT);
    if (m->mean < LEAST) m->mean = LEAST;
    m->at = 0;
    m->rows_done++;
    if (--m->rows_left) {
        start_row(m);
    } else if (!is_last) {
        m->shape += 2;
        start_tensor(m);
    }
}

GW_INLINE int32_t context(const model *m) {
    const int32_t level = (int32_t)(logarithm(m->row + LEAST) - logarithm(m->columns + LEAST) +
                                    logarithm(*m->column + LEAST));
    const int32_t mixed = (7 * level + (int32_t)logarithm(m->left + LEAST)) >> 3;
    const int32_t class = ((mixed - 64 * FRACTION + 32) >> 6) + CLASSES / 2;
    return (class < 0 ? 0 : class >= CLASSES ? CLASSES - 1 : class) << 1 | (m->state & 1);
}

/* `flips`: for a negative index, if signs count. */
GW_INLINE int32_t next_state(int32_t s, int32_t k, int32_t flips) {
    return ((s ^ s >> 1) & 1) | ((s >> 2 ^ k ^ (s & flips)) & 1) << 1 | (s & 1) << 2;
}

GW_INLINE void learn_size(model *m, uint32_t v, int is_last) {
    const uint32_t c = *m->column;
    m->left = (m->left + v) >> 1;
    m->row += v - (m->row >> ROW_SHIFT);
    m->columns += c - (m->columns >> ROW_SHIFT);
    *m->column = c + (uint32_t)((int32_t)(v - c) >> m->shift);
    m->column += m->shift != VECTOR_SHIFT;
    if (++m->at == m->width) end_row(m, is_last);
}

GW_INLINE void learn(model *m, int32_t magnitude, int32_t flips, int is_last) {
    m->state = next_state(m->state, magnitude, flips);
    learn_size(m, (uint32_t)least(magnitude, MOST) << FRACTION, is_last);
}

/* Where a plane names the quantisers: of the index, what its value is in terms of two steps. */
GW_INLINE void learn_value(model *m, int32_t magnitude, int32_t q, int is_last) {
    const uint32_t half = (uint32_t)(q & (magnitude != 0)) << (FRACTION - 1);
    learn_size(m, ((uint32_t)least(magnitude, MOST) << FRACTION) - half, is_last);
}

#ifdef GW_WIDE
typedef struct {
    model own[LANES];
    uint32_t row[LANES], columns[LANES], left[LANES], column[LANES]; /* `column` as a number */
    uint32_t shift[LANES], state[LANES], at[LANES], width[LANES], moves[LANES];
    uint32_t *columns_of;
} models;

GW_INLINE void to_lane(models *all, int l) {
    const model *const m = &all->own[l];
    all->row[l] = m->row;
    all->columns[l] = m->columns;
    all->left[l] = m->left;
    all->column[l] = (uint32_t)(m->column - all->columns_of);
    all->shift[l] = (uint32_t)m->shift;
    all->state[l] = (uint32_t)m->state;
    all->at[l] = (uint32_t)m->at;
    all->width[l] = m->width > INT32_MAX ? 0 : (uint32_t)m->width;
    all->moves[l] = m->shift != VECTOR_SHIFT;
}

GW_INLINE void from_lane(models *all, int l) {
    model *const m = &all->own[l];
    m->row = all->row[l];
    m->columns = all->columns[l];
    m->left = all->left[l];
    m->column = all->columns_of + all->column[l];
    m->state = (int32_t)all->state[l];
    m->at = all->at[l];
}

/* logarithm() of an average, and WIDE_BIAS more: the exponent and the first six bits of a float. */
enum { WIDE_BIAS = 127 << 6 };

GW_WIDE GW_INLINE __m512i wide_logarithm(__m512i average) {
    const __m512i u = _mm512_add_epi32(average, _mm512_set1_epi32(LEAST));
    const __m512 number = _mm512_cvt_roundepu32_ps(u, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    return _mm512_srli_epi32(_mm512_castps_si512(number), 17);
}

/* The biases of the logarithms add up to eight. */
GW_WIDE GW_INLINE __m512i wide_class(__m512i row, __m512i columns, __m512i column, __m512i left) {
    const __m512i level = _mm512_add_epi32(
        _mm512_sub_epi32(wide_logarithm(row), wide_logarithm(columns)), wide_logarithm(column));
    const __m512i seven = _mm512_sub_epi32(_mm512_slli_epi32(level, 3), level);
    const __m512i sum = _mm512_add_epi32(seven, wide_logarithm(left));
    /* An eighth, then a 64th of it, and classes are counted from the least. */
    const int32_t middle = 64 * FRACTION - 32 + WIDE_BIAS - 64 * (CLASSES / 2);
    const __m512i class =
        _mm512_srai_epi32(_mm512_sub_epi32(sum, _mm512_set1_epi32(8 * middle)), 9);
    return _mm512_min_epi32(_mm512_max_epi32(class, _mm512_setzero_si512()),
                            _mm512_set1_epi32(CLASSES - 1));
}

GW_WIDE GW_INLINE __m512i wide_next_state(__m512i s, __m512i k, __mmask16 flips) {
    const __m512i one = _mm512_set1_epi32(1);
    const __m512i low = _mm512_and_si512(_mm512_xor_si512(s, _mm512_srli_epi32(s, 1)), one);
    const __m512i parity = _mm512_mask_xor_epi32(k, flips, k, s);
    const __m512i middle =
        _mm512_and_si512(_mm512_xor_si512(_mm512_srli_epi32(s, 2), parity), one);
    return _mm512_or_si512(_mm512_or_si512(low, _mm512_slli_epi32(middle, 1)),
                           _mm512_slli_epi32(_mm512_and_si512(s, one), 2));
}

/* Rows that have ended, where bit l of `ends` is set. */
static void end_rows(models *all, uint32_t ends, const int64_t *from, int64_t i, int64_t count) {
    for (int l = 0; l < LANES; l++) {
        if (!(ends >> l & 1)) continue;
        from_lane(all, l);
        end_row(&all->own[l], from[l] + i + 1 == count);
        to_lane(all, l);
    }
}

typedef struct {
    __m512i row, columns, left, column, shift, state, at, width, moves;
} lanes;

GW_WIDE GW_INLINE lanes load_lanes(const models *all) {
    const lanes m = {
        _mm512_loadu_si512(all->row),   _mm512_loadu_si512(all->columns),
        _mm512_loadu_si512(all->left),  _mm512_loadu_si512(all->column),
        _mm512_loadu_si512(all->shift), _mm512_loadu_si512(all->state),
        _mm512_loadu_si512(all->at),    _mm512_loadu_si512(all->width),
        _mm512_loadu_si512(all->moves),
    };
    return m;
}

GW_WIDE GW_INLINE void store_lanes(models *all, const lanes *m) {
    _mm512_storeu_si512(all->row, m->row);
    _mm512_storeu_si512(all->columns, m->columns);
    _mm512_storeu_si512(all->left, m->left);
    _mm512_storeu_si512(all->column, m->column);
    _mm512_storeu_si512(all->state, m->state);
    _mm512_storeu_si512(all->at, m->at);
}

GW_WIDE GW_INLINE __m512i wide_size(__m512i k) {
    return _mm512_slli_epi32(_mm512_min_epi32(k, _mm512_set1_epi32(MOST)), FRACTION);
}

/* Averages with v, where c stands in the columns: what stands there next. */
GW_WIDE GW_INLINE __m512i wide_average(lanes *m, __m512i c, __m512i v) {
    m->left = _mm512_srli_epi32(_mm512_add_epi32(m->left, v), 1);
    m->row = _mm512_add_epi32(m->row, _mm512_sub_epi32(v, _mm512_srli_epi32(m->row, ROW_SHIFT)));
    m->columns = _mm512_add_epi32(
        m->columns, _mm512_sub_epi32(c, _mm512_srli_epi32(m->columns, ROW_SHIFT)));
    return _mm512_add_epi32(c, _mm512_srav_epi32(_mm512_sub_epi32(v, c), m->shift));
}

/* learn_size() of v: c is what stands in the columns, and i which step this was. */
GW_WIDE GW_INLINE void wide_learn(lanes *m, models *all, __m512i c, __m512i v,
                                  const int64_t *from, int64_t i, int64_t count) {
    const __m512i moved = wide_average(m, c, v);
    _mm512_i32scatter_epi32(all->columns_of, m->column, moved, 4);
    m->column = _mm512_add_epi32(m->column, m->moves);
    m->at = _mm512_add_epi32(m->at, _mm512_set1_epi32(1));
    const uint32_t ends = _mm512_cmpeq_epi32_mask(m->at, m->width);
    if (ends) {
        store_lanes(all, m);
        end_rows(all, ends, from, i, count);
        *m = load_lanes(all);
    }
}

/* The columns of sixteen steps in which no row ends, read and written at once: one by one they would
   take most of the time. Vectors have one column, which stays. */
typedef struct {
    __m512i of[16], last;
    __mmask16 stays;
    int is_whole; /* otherwise a row ends */
} tile;

GW_WIDE GW_INLINE void start_tile(tile *t, const lanes *m, const models *all) {
    const __m512i left = _mm512_sub_epi32(m->width, m->at);
    t->is_whole = _mm512_cmpgt_epu32_mask(left, _mm512_set1_epi32(16)) == 0xffff;
    if (!t->is_whole) return;
    uint32_t column[16];
    _mm512_storeu_si512(column, m->column);
    for (int l = 0; l < 16; l++) t->of[l] = _mm512_loadu_si512(all->columns_of + column[l]);
    transpose(t->of);
    t->last = t->of[0];
    t->stays = _mm512_cmpeq_epi32_mask(m->moves, _mm512_setzero_si512());
}

/* What stands in the columns at step i of the tile. */
GW_WIDE GW_INLINE __m512i tile_columns(const tile *t, const lanes *m, const models *all, int i) {
    return t->is_whole ? _mm512_mask_mov_epi32(t->of[i], t->stays, t->last)
                       : _mm512_i32gather_epi32(m->column, all->columns_of, 4);
}

/* wide_learn() at step i of the tile that begins at step `first`. */
GW_WIDE GW_INLINE void tile_learn(tile *t, lanes *m, models *all, __m512i c, __m512i v,
                                  const int64_t *from, int64_t first, int i, int64_t count) {
    if (t->is_whole)
        t->of[i] = t->last = wide_average(m, c, v);
    else
        wide_learn(m, all, c, v, from, first + i, count);
}

GW_WIDE GW_INLINE void end_tile(tile *t, lanes *m, models *all) {
    if (!t->is_whole) return;
    uint32_t column[16], last[16];
    _mm512_storeu_si512(column, m->column);
    _mm512_storeu_si512(last, t->last);
    transpose(t->of);
    for (int l = 0; l < 16; l++) {
        if (t->stays >> l & 1)
            all->columns_of[column[l]] = last[l];
        else
            _mm512_storeu_si512(all->columns_of + column[l], t->of[l]);
    }
    m->column = _mm512_add_epi32(m->column, _mm512_slli_epi32(m->moves, 4));
    m->at = _mm512_add_epi32(m->at, _mm512_set1_epi32(16));
}


/* Columns that a lane remembers: not a power of two, which would put all lanes into one place of
   the cache. */
GW_INLINE int64_t lane_columns(int64_t most_columns) { return (most_columns + 15) / 16 * 16 | 16; }

/* Models of the segments `first` to `last`, sixteen at most, where they begin and end, and how many
   elements the shortest has. Lanes that are left do what the first does. */
static int64_t start_lanes(models *all, int64_t count, int64_t segments, const int64_t *shapes,
                           int64_t most_columns, int64_t first, int64_t last, uint32_t *columns,
                           int64_t *from, int64_t *end) {
    int64_t shortest = INT64_MAX;
    all->columns_of = columns;
    for (int l = 0; l < LANES; l++) {
        const int64_t s = first + (first + l < last ? l : 0);
        from[l] = segment_start(count, segments, s);
        end[l] = segment_start(count, segments, s + 1);
        if (end[l] - from[l] < shortest) shortest = end[l] - from[l];
        start_model(&all->own[l], shapes, from[l], columns + l * lane_columns(most_columns));
        to_lane(all, l);
    }
    return shortest;
}
#endif

/* What there is to go through, segment by segment. */
typedef struct {
    int64_t count, segments;
    const int64_t *shapes;
    int64_t most_columns;
    int32_t failed; /* no memory */
} layout;

/* One segment with a model of its own, or several side by side with room for all their columns. */
typedef void (*segment_task)(void *job, int64_t s, model *m);
typedef void (*segments_task)(void *job, int64_t first, int64_t last, uint32_t *columns);

/* Segments `first` to `last`; `some` is null where there are no lanes. */
static void each_segment(void *job, layout *of, int64_t first, int64_t last, segment_task one,
                         segments_task some) {
    int64_t columns_of_all = of->most_columns;
#ifdef GW_WIDE
    if (!is_wide() || of->most_columns >= 1 << 24) some = NULL;
    if (some) columns_of_all = LANES * lane_columns(of->most_columns);
#endif
    uint32_t *const columns = malloc((size_t)columns_of_all * sizeof *columns);
    if (!columns) __atomic_store_n(&of->failed, 1, __ATOMIC_RELAXED);
    for (int64_t s = first, next; columns && s < last; s = next) {
        next = s + 1;
        if (some && last - s >= FEW) {
            next = last - s < LANES ? last : s + LANES;
            some(job, s, next, columns);
        } else {
            model m;
            start_model(&m, of->shapes, segment_start(of->count, of->segments, s), columns);
            one(job, s, &m);
        }
    }
    free(columns);
}

/* A task for segments `first` to `last`. */
typedef void (*range_task)(void *job, int64_t first, int64_t last);

typedef struct {
    void *job;
    int64_t segments, groups;
    range_task task;
} group_job;

static void group_task(void *given, int64_t first, int64_t last) {
    const group_job *const of = given;
    for (int64_t g = first; g < last; g++)
        of->task(of->job, of->segments * g / of->groups, of->segments * (g + 1) / of->groups);
}

/* Calls task() for groups of sixteen segments at most. A group takes nearly as long with few
   segments as with sixteen, so there are as many as keep all threads busy to the end. */
static void each_group(void *job, int64_t segments, range_task task) {
    const int64_t threads = gw_threads(), full = (segments + LANES - 1) / LANES;
    const int64_t rounds = (full + threads - 1) / threads, few = (segments + FEW - 1) / FEW;
    int64_t groups = rounds * threads < few ? rounds * threads : few;
    if (groups < full) groups = full;
    group_job of = {job, segments, groups, task};
    gw_parallel(group_task, &of, groups, 1, 1);
}

#endif
