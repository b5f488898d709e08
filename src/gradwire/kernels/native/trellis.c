/* Trellis-coded quantisation, number for number as reference/trellis.py, which says what is done.

   The search takes sixteen blocks at a time, one in each lane: a step is the same for all of them,
   so that nothing is shuffled. It keeps two bytes of each step and lane, from which the way back
   is read. The coder is sequential, since each index decides what the next one means; segments are
   independent of one another. */
#include "native.h"
#include "threads.h"

#include <stdlib.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define GW_WIDE __attribute__((target("avx512f,avx512bw,avx512vl")))
#include <immintrin.h>
#endif

enum {
    UNIT = 64,       /* of a step: what scaled numbers count */
    LANES = 16,      /* blocks searched together, or segments */
    WAYS = 4,        /* segments whose coders take turns */
    FEW = 4,         /* segments that are worth lanes */
    BLOCK = 1024,    /* elements of a block */
    CLASSES = 16,    /* of expected magnitude */
    RATES = 8,       /* per class: two quantisers, each with the rates of 0, 1, 2 and a slope */
    TILE = 32,       /* steps whose rates are looked up at once */
    STEEPEST = 16,   /* indices above have the rate of this one */
    FAR = 16383,     /* no number counts as farther from zero */
    NEVER = 1 << 28, /* the cost of a state that no path has reached */
    PRECISION = 15,
    TAIL_PRECISION = 12,
    LOW = 1 << 16,
    DIRECT = 16, /* tails below have a token of their own */
    TOKENS = 28,
};

static const int64_t MOST_TAIL = 65535;

GW_INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

/* yes ? a : b, in a way that stays free of branches: they would keep loops from being vectors. */
GW_INLINE int32_t pick(int32_t yes, int32_t a, int32_t b) { return b ^ ((a ^ b) & -yes); }

/* ------------------------------------------------------------------------- the search */

typedef struct {
    const int32_t *scaled;
    const uint8_t *contexts;
    const int32_t *rates; /* [RATES, CLASSES] */
    int32_t offsets[6];
    int64_t count;
    int32_t *indices;
    int32_t is_signed, failed;
} search_job;

typedef struct {
    int32_t scaled[BLOCK][LANES];
    uint8_t classes[BLOCK][LANES];
    uint16_t ways[BLOCK][LANES]; /* what cheapest() chose, twice, and where states came from */
    int32_t rates[TILE][RATES][LANES];
    int32_t costs[8][LANES];
} search_space;

/* The cost of index k of quantiser q. Index 0 is not zero here but -1, if that is allowed. */
GW_INLINE int32_t cost_of(int32_t u, int32_t k, int32_t q, int32_t one, int32_t two, int32_t slope,
                          const int32_t offsets[3]) {
    const int32_t is_one = (k & ~1) == 0, is_two = k == 2;
    const int32_t first = pick(k == 0, -offsets[0], offsets[0]);
    const int32_t offset = pick(is_one, first, pick(is_two, offsets[1], offsets[2]));
    const int32_t d = u - (2 * UNIT * k - UNIT * q - offset);
    return d * d + pick(is_one, one, two + slope * (least(k, STEEPEST) - 2));
}

/* The cheapest even and odd index of quantiser q: costs, and which of zero, floor - 1, floor and
   floor + 1 they are, as 0 .. 3. With signs (`lowest` is 0, otherwise 1) even and odd change places
   where the number is negative (`flip`), and there is -1. */
GW_INLINE void cheapest(int32_t u, int32_t q, const int32_t (*rates)[LANES], int l,
                        const int32_t offsets[3], int32_t lowest, int32_t flip, int32_t *even,
                        int32_t *odd, int32_t *code) {
    const int32_t one = rates[4 * q + 1][l], two = rates[4 * q + 2][l];
    const int32_t slope = rates[4 * q + 3][l];
    const int32_t k = (u + UNIT * q) >> 7, is_odd = k & 1, z = least(u, FAR);
    const int32_t zero = z * z + rates[4 * q][l];
    const int32_t below = cost_of(u, k - 1, q, one, two, slope, offsets);
    const int32_t here = cost_of(u, k, q, one, two, slope, offsets);
    const int32_t above = cost_of(u, k + 1, q, one, two, slope, offsets);
    const int32_t under = pick(k > lowest, below, NEVER), own = pick(k >= lowest, here, NEVER);
    const int32_t around = least(above, under), around_code = 1 + 2 * (above < under);
    const int32_t swap = is_odd ^ flip;
    const int32_t even_one = pick(swap, around, own);
    *even = least(even_one, zero);
    *odd = pick(swap, own, around);
    *code = (pick(swap, around_code, 2) & -(even_one < zero)) | pick(swap, 2, around_code) << 2;
}

GW_INLINE void search_tile(search_space *space, int64_t first, int64_t steps,
                           const int32_t *offsets, int32_t is_signed) {
    const int32_t offsets0[3] = {offsets[0], offsets[1], offsets[2]};
    const int32_t offsets1[3] = {offsets[3], offsets[4], offsets[5]};
    int32_t costs[8][LANES]; /* local, so that the compiler knows that nothing else is written */
    memcpy(costs, space->costs, sizeof costs);
    for (int64_t i = 0; i < steps; i++) {
        const int32_t *const scaled = space->scaled[first + i];
        const int32_t(*const rates)[LANES] = (const int32_t(*)[LANES])space->rates[i];
        int32_t codes[LANES];
        for (int l = 0; l < LANES; l++) {
            const int32_t u = (scaled[l] ^ scaled[l] >> 31) - (scaled[l] >> 31);
            int32_t even0, odd0, even1, odd1, code0, code1, bits = 0;
            const int32_t flip = (scaled[l] < 0) & is_signed;
            cheapest(u, 0, rates, l, offsets0, 1, 0, &even0, &odd0, &code0);
            cheapest(u, 1, rates, l, offsets1, 1 - is_signed, flip, &even1, &odd1, &code1);
/* Into state t: from `from` with the parity of bit 1 of t, or from `from` + 4 with the other. */
#define ENTER(t, from, same, other)                                   \
    const int32_t a##t = costs[from][l] + same;                       \
    const int32_t b##t = costs[from + 4][l] + other;                  \
    const int32_t next##t = least(a##t, b##t);                        \
    bits |= (b##t < a##t) << t
            ENTER(0, 0, even0, odd0);
            ENTER(1, 2, even0, odd0);
            ENTER(2, 0, odd0, even0);
            ENTER(3, 2, odd0, even0);
            ENTER(4, 3, even1, odd1);
            ENTER(5, 1, even1, odd1);
            ENTER(6, 3, odd1, even1);
            ENTER(7, 1, odd1, even1);
#undef ENTER
            costs[0][l] = next0;
            costs[1][l] = next1;
            costs[2][l] = next2;
            costs[3][l] = next3;
            costs[4][l] = next4;
            costs[5][l] = next5;
            costs[6][l] = next6;
            costs[7][l] = next7;
            codes[l] = bits << 8 | code1 << 4 | code0;
        }
        for (int l = 0; l < LANES; l++) space->ways[first + i][l] = (uint16_t)codes[l];
    }
    /* Only differences of costs matter. */
    for (int l = 0; l < LANES; l++) {
        int32_t low = costs[0][l];
        for (int t = 1; t < 8; t++) low = least(low, costs[t][l]);
        for (int t = 0; t < 8; t++) space->costs[t][l] = costs[t][l] - low;
    }
}

GW_CLONES static void search_steps(search_space *space, int64_t steps, const search_job *job) {
    for (int64_t first = 0; first < steps; first += TILE) {
        const int64_t tile = steps - first < TILE ? steps - first : TILE;
        for (int64_t i = 0; i < tile; i++)
            for (int r = 0; r < RATES; r++)
                for (int l = 0; l < LANES; l++)
                    space->rates[i][r][l] = job->rates[r * CLASSES + space->classes[first + i][l]];
        search_tile(space, first, tile, job->offsets, job->is_signed);
    }
}

#ifdef GW_WIDE
/* Rows r[i] of sixteen numbers become columns: what is off the diagonal changes places, in ever
   larger squares. */
GW_WIDE GW_INLINE void transpose(__m512i r[16]) {
    const __m512i lane =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
    for (int h = 1; h < 16; h *= 2) {
        const __m512i bit = _mm512_set1_epi32(h), other = _mm512_xor_si512(lane, bit);
        const __mmask16 high = _mm512_test_epi32_mask(lane, bit);
        const __m512i second = _mm512_set1_epi32(16);
        const __m512i low_from = _mm512_mask_add_epi32(lane, high, other, second);
        const __m512i high_from = _mm512_mask_add_epi32(other, high, lane, second);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i & h) continue;
            const __m512i a = r[i], b = r[i | h];
            r[i] = _mm512_permutex2var_epi32(a, low_from, b);
            r[i | h] = _mm512_permutex2var_epi32(a, high_from, b);
        }
    }
}

/* Sixteen whole blocks, the first of which begins at `start`; lanes that have none take the first. */
GW_WIDE static void fill_wide(search_space *space, const search_job *job, int64_t start,
                              int64_t blocks) {
    for (int64_t i = 0; i < BLOCK; i += 16) {
        __m512i scaled[16], classes[16];
        for (int l = 0; l < 16; l++) {
            const int64_t from = start + (l < blocks ? l : 0) * BLOCK + i;
            scaled[l] = _mm512_loadu_si512(job->scaled + from);
            classes[l] = _mm512_srli_epi32(
                _mm512_cvtepu8_epi32(
                    _mm_loadu_si128((const __m128i *)(const void *)(job->contexts + from))),
                1);
        }
        transpose(scaled);
        transpose(classes);
        for (int j = 0; j < 16; j++) {
            _mm512_storeu_si512(space->scaled[i + j], scaled[j]);
            _mm_storeu_si128((__m128i *)(void *)space->classes[i + j],
                             _mm512_cvtepi32_epi8(classes[j]));
        }
    }
}

/* trace() of all lanes, from these states. */
GW_WIDE static void trace_wide(const search_space *space, const int32_t *states, int64_t blocks,
                               int32_t *indices) {
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi32(1);
    __m512i state = _mm512_loadu_si512(states);
    for (int64_t i = BLOCK - 16; i >= 0; i -= 16) {
        __m512i index[16];
        for (int j = 15; j >= 0; j--) {
            const __m512i way = _mm512_cvtepu16_epi32(
                _mm256_loadu_si256((const __m256i *)(const void *)space->ways[i + j]));
            const __m512i x = _mm512_loadu_si512(space->scaled[i + j]), u = _mm512_abs_epi32(x);
            const __m512i q = _mm512_srli_epi32(state, 2);
            const __m512i b = _mm512_and_si512(
                _mm512_srlv_epi32(way, _mm512_add_epi32(state, _mm512_set1_epi32(8))), one);
            const __m512i odd =
                _mm512_xor_si512(_mm512_and_si512(_mm512_srli_epi32(state, 1), one), b);
            const __m512i from = _mm512_xor_si512(_mm512_and_si512(state, one), q);
            state = _mm512_or_si512(_mm512_or_si512(q, _mm512_slli_epi32(from, 1)),
                                    _mm512_slli_epi32(b, 2));
            const __m512i place =
                _mm512_add_epi32(_mm512_slli_epi32(q, 2), _mm512_slli_epi32(odd, 1));
            const __m512i code =
                _mm512_and_si512(_mm512_srlv_epi32(way, place), _mm512_set1_epi32(3));
            const __m512i floor =
                _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_slli_epi32(q, 6)), 7);
            const __mmask16 is_other = _mm512_cmpneq_epi32_mask(code, zero);
            const __m512i other =
                _mm512_add_epi32(floor, _mm512_sub_epi32(code, _mm512_set1_epi32(2)));
            const __m512i k = _mm512_mask_sub_epi32(
                _mm512_maskz_mov_epi32(is_other, other),
                _mm512_mask_cmpeq_epi32_mask(is_other, other, zero), zero, one);
            index[j] = _mm512_mask_sub_epi32(k, _mm512_cmplt_epi32_mask(x, zero), zero, k);
        }
        transpose(index);
        for (int l = 0; l < blocks; l++)
            _mm512_storeu_si512(indices + l * BLOCK + i, index[l]);
    }
}

GW_WIDE static void search_wide(search_space *space, int64_t steps, const search_job *job) {
    __m512i table[RATES];
    for (int r = 0; r < RATES; r++) table[r] = _mm512_loadu_si512(job->rates + r * CLASSES);
    for (int64_t first = 0; first < steps; first += TILE) {
        const int64_t tile = steps - first < TILE ? steps - first : TILE;
        for (int64_t i = 0; i < tile; i++) {
            const __m512i class = _mm512_cvtepu8_epi32(
                _mm_loadu_si128((const __m128i *)(const void *)space->classes[first + i]));
            for (int r = 0; r < RATES; r++)
                _mm512_storeu_si512(space->rates[i][r], _mm512_permutexvar_epi32(class, table[r]));
        }
        search_tile(space, first, tile, job->offsets, job->is_signed);
    }
}
#endif

/* Where the way back of a lane begins: at the cheapest state, or at 0. */
GW_INLINE int32_t last_state(const search_space *space, int l, int is_last) {
    int32_t state = 0;
    for (int32_t t = 1; is_last && t < 8; t++)
        if (space->costs[t][l] < space->costs[state][l]) state = t;
    return state;
}

/* The way back. */
GW_INLINE void trace(const search_space *space, int l, int64_t steps, int32_t state,
                     int32_t *indices) {
    for (int64_t i = steps - 1; i >= 0; i--) {
        const int32_t way = space->ways[i][l], q = state >> 2, b = way >> (8 + state) & 1;
        const int32_t odd = (state >> 1 & 1) ^ b;
        state = (q | ((state & 1) ^ q) << 1) | b << 2;
        const int32_t x = space->scaled[i][l], u = x < 0 ? -x : x;
        const int32_t code = way >> (4 * q + 2 * odd) & 3;
        const int32_t other = ((u + UNIT * q) >> 7) + code - 2;
        const int32_t k = !code ? 0 : other ? other : -1;
        indices[i] = x < 0 ? -k : k;
    }
}

/* Sixteen blocks from `first` on; the last block of all may be shorter and is done alone. */
static void search_blocks(search_space *space, const search_job *job, int64_t first,
                          int64_t blocks) {
    const int64_t start = first * BLOCK;
    const int64_t left = job->count - start, steps = left < BLOCK ? left : BLOCK;
    int32_t states[LANES] = {0};
    for (int l = 0; l < LANES; l++)
        for (int t = 0; t < 8; t++) space->costs[t][l] = t ? NEVER : 0;
#ifdef GW_WIDE
    if (steps == BLOCK && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
        fill_wide(space, job, start, blocks);
        search_wide(space, steps, job);
        const int l = (int)blocks - 1;
        states[l] = last_state(space, l, start + blocks * BLOCK == job->count);
        trace_wide(space, states, blocks, job->indices + start);
        return;
    }
#endif
    for (int64_t l = 0; l < LANES; l++) {
        const int64_t from = start + (l < blocks ? l : 0) * BLOCK;
        for (int64_t i = 0; i < steps; i++) {
            space->scaled[i][l] = job->scaled[from + i];
            space->classes[i][l] = job->contexts[from + i] >> 1;
        }
    }
    search_steps(space, steps, job);
    for (int l = 0; l < (int)blocks; l++) {
        const int64_t from = start + l * BLOCK;
        states[l] = last_state(space, l, from + steps == job->count);
        trace(space, l, steps, states[l], job->indices + from);
    }
}

static void search_task(void *given, int64_t first, int64_t last) {
    search_job *const job = given;
    search_space *const space = malloc(sizeof *space);
    if (!space) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    const int64_t whole = job->count / BLOCK;
    while (first < last) {
        int64_t blocks = 1;
        if (first < whole) {
            blocks = (last < whole ? last : whole) - first;
            if (blocks > LANES) blocks = LANES;
        }
        search_blocks(space, job, first, blocks);
        first += blocks;
    }
    free(space);
}

/* 0, or -2 without memory. */
int32_t gw_trellis_search(const int32_t *scaled, const uint8_t *contexts, int64_t count,
                          const int32_t *rates, const int32_t *offsets, int32_t is_signed,
                          int32_t *indices) {
    search_job job = {scaled, contexts, rates, {0}, count, indices, is_signed, 0};
    memcpy(job.offsets, offsets, sizeof job.offsets);
    gw_parallel(search_task, &job, (count + BLOCK - 1) / BLOCK, LANES, LANES);
    return job.failed ? -2 : 0;
}

/* --------------------------------------------------------------------------- contexts */

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

GW_INLINE void learn(model *m, int32_t magnitude, int32_t flips, int is_last) {
    const uint32_t v = (uint32_t)least(magnitude, MOST) << FRACTION, c = *m->column;
    m->left = (m->left + v) >> 1;
    m->row += v - (m->row >> ROW_SHIFT);
    m->columns += c - (m->columns >> ROW_SHIFT);
    *m->column = c + (uint32_t)((int32_t)(v - c) >> m->shift);
    m->column += m->shift != VECTOR_SHIFT;
    m->state = next_state(m->state, magnitude, flips);
    if (++m->at == m->width) end_row(m, is_last);
}

typedef struct {
    const int32_t *scaled, *indices; /* `indices` may be null */
    int64_t count, segments;
    const int64_t *shapes;
    int64_t most_columns;
    uint8_t *contexts;
    int64_t *counts; /* [segments, 2 CLASSES, 4] zeros, ones, more, by how much more */
    int64_t *errors; /* [segments, 6, 2] */
    int32_t is_signed, failed;
} context_job;

GW_INLINE int64_t segment_start(int64_t count, int64_t segments, int64_t s) {
    return s == segments ? count : count / BLOCK * s / segments * BLOCK;
}

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
        learn(m, k, minus & job->is_signed, i + 1 == job->count);
        if (is_first) m->state = 0;
    }
}

static void contexts_narrow(const context_job *job, model *m, int64_t first, int64_t end,
                            int64_t s) {
    int64_t *const counts = job->counts + s * 2 * CLASSES * 4, *const errors = job->errors + s * 12;
    if (job->indices)
        contexts_from(job, m, first, end, counts, errors, 0);
    else
        contexts_from(job, m, first, end, counts, errors, 1);
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

#define GW_WIDER __attribute__((target("avx512f,avx512bw,avx512vl,avx512cd")))

GW_WIDER GW_INLINE __m512i wide_logarithm(__m512i average) {
    const __m512i u = _mm512_add_epi32(average, _mm512_set1_epi32(LEAST));
    const __m512i z = _mm512_lzcnt_epi32(u);
    const __m512i mantissa = _mm512_and_si512(_mm512_srli_epi32(_mm512_sllv_epi32(u, z), 25),
                                              _mm512_set1_epi32(63));
    return _mm512_or_si512(
        _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(31), z), 6), mantissa);
}

GW_WIDER GW_INLINE __m512i wide_class(__m512i row, __m512i columns, __m512i column, __m512i left) {
    const __m512i level = _mm512_add_epi32(
        _mm512_sub_epi32(wide_logarithm(row), wide_logarithm(columns)), wide_logarithm(column));
    const __m512i seven = _mm512_sub_epi32(_mm512_slli_epi32(level, 3), level);
    const __m512i mixed = _mm512_srai_epi32(_mm512_add_epi32(seven, wide_logarithm(left)), 3);
    const __m512i class = _mm512_add_epi32(
        _mm512_srai_epi32(_mm512_sub_epi32(mixed, _mm512_set1_epi32(64 * FRACTION - 32)), 6),
        _mm512_set1_epi32(CLASSES / 2));
    return _mm512_min_epi32(_mm512_max_epi32(class, _mm512_setzero_si512()),
                            _mm512_set1_epi32(CLASSES - 1));
}

GW_WIDER GW_INLINE __m512i wide_next_state(__m512i s, __m512i k, __mmask16 flips) {
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
    for (; ends; ends &= ends - 1) {
        const int l = __builtin_ctz(ends);
        from_lane(all, l);
        end_row(&all->own[l], from[l] + i + 1 == count);
        to_lane(all, l);
    }
}

typedef struct {
    __m512i row, columns, left, column, shift, state, at, width, moves;
} lanes;

GW_WIDER GW_INLINE lanes load_lanes(const models *all) {
    const lanes m = {
        _mm512_loadu_si512(all->row),   _mm512_loadu_si512(all->columns),
        _mm512_loadu_si512(all->left),  _mm512_loadu_si512(all->column),
        _mm512_loadu_si512(all->shift), _mm512_loadu_si512(all->state),
        _mm512_loadu_si512(all->at),    _mm512_loadu_si512(all->width),
        _mm512_loadu_si512(all->moves),
    };
    return m;
}

GW_WIDER GW_INLINE void store_lanes(models *all, const lanes *m) {
    _mm512_storeu_si512(all->row, m->row);
    _mm512_storeu_si512(all->columns, m->columns);
    _mm512_storeu_si512(all->left, m->left);
    _mm512_storeu_si512(all->column, m->column);
    _mm512_storeu_si512(all->state, m->state);
    _mm512_storeu_si512(all->at, m->at);
}

/* learn() but for the trellis: c is what stands in the columns, and i which step this was. */
GW_WIDER GW_INLINE void wide_learn(lanes *m, models *all, __m512i c, __m512i k,
                                   const int64_t *from, int64_t i, int64_t count) {
    const __m512i v = _mm512_slli_epi32(_mm512_min_epi32(k, _mm512_set1_epi32(MOST)), FRACTION);
    m->left = _mm512_srli_epi32(_mm512_add_epi32(m->left, v), 1);
    m->row = _mm512_add_epi32(m->row, _mm512_sub_epi32(v, _mm512_srli_epi32(m->row, ROW_SHIFT)));
    m->columns = _mm512_add_epi32(
        m->columns, _mm512_sub_epi32(c, _mm512_srli_epi32(m->columns, ROW_SHIFT)));
    const __m512i moved = _mm512_add_epi32(c, _mm512_srav_epi32(_mm512_sub_epi32(v, c), m->shift));
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

/* Sixteen segments side by side, `steps` elements of each from `from` on, a multiple of 16; those
   of the lanes from `used` on are done in vain. */
GW_WIDER GW_INLINE void contexts_wide(const context_job *job, models *all, const int64_t *from,
                                      int64_t steps, int used, int is_first, int64_t *counts,
                                      int64_t *errors) {
    /* By context and |k| = 0, 1, 2, more: how many, and above bit 24 by how much more than 2. In
       four places, so that additions to one number do not wait for each other. */
    uint64_t tallies[4][2 * CLASSES][4];
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi32(1);
    memset(tallies, 0, sizeof tallies);
    lanes m = load_lanes(all);
    for (int64_t first = 0; first < steps; first += 16) {
        __m512i scaled[16], index[16], context[16], total[6];
        for (int l = 0; l < 16; l++)
            scaled[l] = _mm512_loadu_si512(job->scaled + from[l] + first);
        transpose(scaled);
        if (!is_first) {
            for (int l = 0; l < 16; l++)
                index[l] = _mm512_loadu_si512(job->indices + from[l] + first);
            transpose(index);
        }
        for (int t = 0; t < 6; t++) total[t] = zero;
        for (int i = 0; i < 16; i++) {
            const __m512i x = scaled[i];
            const __m512i k =
                is_first ? _mm512_srli_epi32(
                               _mm512_add_epi32(_mm512_abs_epi32(x), _mm512_set1_epi32(50)), 7)
                         : _mm512_abs_epi32(index[i]);
            const __m512i c = _mm512_i32gather_epi32(m.column, all->columns_of, 4);
            const __m512i class = wide_class(m.row, m.columns, c, m.left);
            const __m512i q = is_first ? zero : _mm512_and_si512(m.state, one);
            context[i] = _mm512_or_si512(_mm512_slli_epi32(class, 1), q);
            if (!is_first) {
                const __m512i value = _mm512_sub_epi32(_mm512_slli_epi32(k, 7),
                                                       _mm512_slli_epi32(q, 6));
                const __mmask16 minus = _mm512_cmplt_epi32_mask(index[i], zero);
                const __m512i error =
                    _mm512_sub_epi32(value, _mm512_mask_sub_epi32(x, minus, zero, x));
                const __mmask16 odd = _mm512_test_epi32_mask(q, one);
                const __mmask16 is[3] = {
                    _mm512_cmpeq_epi32_mask(k, one),
                    _mm512_cmpeq_epi32_mask(k, _mm512_set1_epi32(2)),
                    _mm512_cmpgt_epi32_mask(k, _mm512_set1_epi32(2)),
                };
                for (int t = 0; t < 3; t++) {
                    total[t] = _mm512_mask_add_epi32(total[t], is[t] & ~odd, total[t], error);
                    total[3 + t] =
                        _mm512_mask_add_epi32(total[3 + t], is[t] & odd, total[3 + t], error);
                }
                m.state = wide_next_state(m.state, k, job->is_signed ? minus : 0);
            }
            wide_learn(&m, all, c, k, from, first + i, job->count);
        }
        transpose(context);
        for (int l = 0; l < used; l++) {
            const int64_t start = from[l] + first;
            _mm_storeu_si128((__m128i *)(void *)(job->contexts + start),
                             _mm512_cvtepi32_epi8(context[l]));
        }
        for (int t = 0; t < 6 && !is_first; t++) {
            const __mmask16 lanes = (__mmask16)((1u << used) - 1);
            const __m512i own = _mm512_maskz_mov_epi32(lanes, total[t]);
            const __m512i wide = _mm512_add_epi64(
                _mm512_cvtepi32_epi64(_mm512_castsi512_si256(own)),
                _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(own, 1)));
            errors[2 * t + 1] += _mm512_reduce_add_epi64(wide);
        }
        for (int l = 0; l < used; l++) {
            const int64_t start = from[l] + first;
            for (int i = 0; i < 16; i++) {
                const int32_t c = job->contexts[start + i];
                int32_t k;
                if (is_first) {
                    const int32_t x = job->scaled[start + i], u = x < 0 ? -x : x;
                    const int32_t other = (u + 78) >> 7;
                    k = (u + 50) >> 7;
                    tallies[i & 3][c | 1][least(other, 3)] +=
                        1 + ((uint64_t)(other - least(other, 2)) << 24);
                } else {
                    k = job->indices[start + i];
                    k = k < 0 ? -k : k;
                }
                tallies[i & 3][c][least(k, 3)] += 1 + ((uint64_t)(k - least(k, 2)) << 24);
            }
        }
    }
    store_lanes(all, &m);
    for (int l = 0; l < LANES; l++) from_lane(all, l);
    for (int c = 0; c < 2 * CLASSES; c++)
        for (int kind = 0; kind < 4; kind++)
            for (int i = 0; i < 4; i++) {
                const uint64_t sum = tallies[i][c][kind];
                const int64_t n = (int64_t)(sum & 0xffffff);
                counts[4 * c + least(kind, 2)] += n;
                counts[4 * c + 3] += (int64_t)(sum >> 24);
                if (kind && !is_first) errors[6 * (c & 1) + 2 * (kind - 1)] += n;
            }
}

GW_WIDER static void contexts_wide_first(const context_job *job, models *all, const int64_t *from,
                                         int64_t steps, int used, int64_t *counts,
                                         int64_t *errors) {
    contexts_wide(job, all, from, steps, used, 1, counts, errors);
}

GW_WIDER static void contexts_wide_known(const context_job *job, models *all, const int64_t *from,
                                         int64_t steps, int used, int64_t *counts,
                                         int64_t *errors) {
    contexts_wide(job, all, from, steps, used, 0, counts, errors);
}

static int is_wide(void) {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512cd");
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

/* Segments `first` to `last`, sixteen at most, side by side. */
static void contexts_of_some(const context_job *job, int64_t first, int64_t last,
                             uint32_t *columns) {
    enum { FLUSH = 1 << 16 }; /* steps after which no tally has overflown */
    models all;
    int64_t from[LANES], end[LANES];
    int64_t left = start_lanes(&all, job->count, job->segments, job->shapes, job->most_columns,
                               first, last, columns, from, end);
    int64_t *const counts = job->counts + first * 2 * CLASSES * 4;
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

static void context_task(void *given, int64_t first, int64_t last) {
    context_job *const job = given;
    int64_t columns_of_all = job->most_columns;
#ifdef GW_WIDE
    const int wide = is_wide() && job->most_columns < 1 << 24;
    if (wide) columns_of_all = LANES * lane_columns(job->most_columns);
#endif
    uint32_t *const columns = malloc((size_t)columns_of_all * sizeof *columns);
    if (!columns) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
    for (int64_t s = first, next; columns && s < last; s = next) {
        next = s + 1;
#ifdef GW_WIDE
        if (wide && last - s >= FEW) {
            next = last - s < LANES ? last : s + LANES;
            contexts_of_some(job, s, next, columns);
            continue;
        }
#endif
        model m;
        const int64_t from = segment_start(job->count, job->segments, s);
        start_model(&m, job->shapes, from, columns);
        contexts_narrow(job, &m, from, segment_start(job->count, job->segments, s + 1), s);
    }
    free(columns);
}

/* `shapes` are tensors as (rows, width) that make up `count` elements, none of them empty; `counts`
   and `errors` are zero. 0, or -2 without memory. */
int32_t gw_trellis_contexts(const int32_t *scaled, const int32_t *indices, int64_t count,
                            const int64_t *shapes, int64_t most_columns, int64_t segments,
                            int32_t is_signed, uint8_t *contexts, int64_t *counts,
                            int64_t *errors) {
    context_job job = {scaled,   indices, count,  segments,  shapes, most_columns,
                       contexts, counts,  errors, is_signed, 0};
    gw_parallel(context_task, &job, segments, LANES, 1);
    return job.failed ? -2 : 0;
}

/* -------------------------------------------------------------------------- the coder */

/* Symbols of an element: 0, +1, -1, more, -more. */
typedef struct {
    uint32_t frequency[5], start[5];
    int32_t tail;
} context_table;

typedef struct {
    uint16_t frequency[TOKENS], start[TOKENS];
    uint8_t token_of[1 << TAIL_PRECISION];
} tail_table;

typedef struct {
    context_table contexts[2 * CLASSES];
    tail_table tails[2 * CLASSES];
    uint32_t beyond; /* bytes are read four at a time */
} tables;

static tables *tabulate(const int32_t *halves, const int32_t *tails) {
    tables *const t = malloc(sizeof *t);
    for (int c = 0; t && c < 2 * CLASSES; c++) {
        context_table *const own = &t->contexts[c];
        const uint32_t one = (uint32_t)halves[2 * c], more = (uint32_t)halves[2 * c + 1];
        const uint32_t f[5] = {(1u << PRECISION) - 2 * (one + more), one, one, more, more};
        uint32_t start = 0;
        for (int s = 0; s < 5; s++) {
            own->frequency[s] = f[s];
            own->start[s] = start;
            start += f[s];
        }
        start = 0;
        own->tail = c;
        for (int s = 0; s < TOKENS; s++) {
            const uint32_t frequency = (uint32_t)tails[c * TOKENS + s];
            t->tails[c].frequency[s] = (uint16_t)frequency;
            t->tails[c].start[s] = (uint16_t)start;
            memset(t->tails[c].token_of + start, s, frequency);
            start += frequency;
        }
    }
    return t;
}

/* A tail below DIRECT is its own token, one of 2^b .. 2^(b + 1) - 1 has b bits after it. */
GW_INLINE int32_t extra_bits(int32_t token) { return token < DIRECT ? 0 : token - DIRECT + 4; }

GW_INLINE uint16_t *push(uint32_t *x, uint32_t f, uint32_t start, int precision, uint16_t *next) {
    const uint32_t full = (*x >> (32 - precision)) >= f;
    next[-1] = (uint16_t)*x;
    next -= full;
    *x >>= 16 * full;
    const uint32_t q = *x / f;
    *x += start + q * ((1u << precision) - f);
    return next;
}

typedef struct {
    const int32_t *indices;
    const uint8_t *contexts;
    int64_t count, segments;
    const tables *tables;
    uint16_t *words;  /* three for each element and two for each segment, written from behind */
    int64_t *lengths; /* [segments] words */
} encode_job;

/* Writes element i before what was written last, at *next. */
GW_INLINE void encode_one(const encode_job *job, int64_t i, uint32_t *x, uint16_t **next) {
    const int32_t k = job->indices[i], sign = k < 0, u = sign ? -k : k;
    const context_table *const t = &job->tables->contexts[job->contexts[i]];
    const int32_t symbol = u == 0 ? 0 : (u == 1 ? 1 : 3) + sign;
    if (u >= 2) {
        const int32_t tail = u - 2;
        const tail_table *const own = &job->tables->tails[t->tail];
        int32_t token = tail;
        if (tail >= DIRECT) {
            const int32_t bits = 31 - __builtin_clz((uint32_t)tail);
            token = DIRECT + bits - 4;
            *next = push(x, 1, (uint32_t)tail - (1u << bits), bits, *next);
        }
        *next = push(x, own->frequency[token], own->start[token], TAIL_PRECISION, *next);
    }
    *next = push(x, t->frequency[symbol], t->start[symbol], PRECISION, *next);
}

/* `ways` segments from `first` on, which take turns: none of them keeps the processor busy. */
GW_INLINE void encode_some(const encode_job *job, int64_t first, const int ways) {
    int64_t from[WAYS], to[WAYS], steps = INT64_MAX;
    uint16_t *ends[WAYS], *next[WAYS];
    uint32_t x[WAYS];
    for (int w = 0; w < ways; w++) {
        from[w] = segment_start(job->count, job->segments, first + w);
        to[w] = segment_start(job->count, job->segments, first + w + 1);
        if (to[w] - from[w] < steps) steps = to[w] - from[w];
        ends[w] = next[w] = job->words + 3 * to[w] + 2 * (first + w + 1);
        x[w] = LOW;
    }
    for (int64_t i = 1; i <= steps; i++)
#pragma GCC unroll 4
        for (int w = 0; w < ways; w++) encode_one(job, to[w] - i, &x[w], &next[w]);
    for (int w = 0; w < ways; w++) {
        for (int64_t i = to[w] - steps - 1; i >= from[w]; i--) encode_one(job, i, &x[w], &next[w]);
        *--next[w] = (uint16_t)(x[w] >> 16);
        *--next[w] = (uint16_t)x[w];
        job->lengths[first + w] = ends[w] - next[w];
    }
}

static void encode_task(void *given, int64_t first, int64_t last) {
    const encode_job *const job = given;
    for (; last - first >= WAYS; first += WAYS) encode_some(job, first, WAYS);
    for (; first < last; first++) encode_some(job, first, 1);
}

/* `halves` [2 CLASSES, 2]: the frequencies of +1 and of +more; `tails` [2 CLASSES, TOKENS]. All are
   positive, and so is what they leave to zero. 0, -1 if an index is too large or a context unknown,
   -2 without memory. */
int32_t gw_trellis_encode(const int32_t *indices, const uint8_t *contexts, int64_t count,
                          int64_t segments, const int32_t *halves, const int32_t *tails,
                          uint16_t *words, int64_t *lengths) {
    uint32_t wrong = 0;
    for (int64_t i = 0; i < count; i++)
        wrong |= (indices[i] > MOST_TAIL + 2) | (indices[i] < -MOST_TAIL - 2) |
                 (contexts[i] >= 2 * CLASSES);
    if (wrong) return -1;
    tables *const t = tabulate(halves, tails);
    if (!t) return -2;
    encode_job job = {indices, contexts, count, segments, t, words, lengths};
    gw_parallel(encode_task, &job, segments, WAYS, 1);
    free(t);
    return 0;
}

typedef struct {
    const uint8_t *bytes; /* words, not aligned */
    const int64_t *starts; /* [segments + 1] in words */
    int64_t count, segments;
    const int64_t *shapes;
    int64_t most_columns;
    const tables *tables;
    int32_t offsets[6];
    int32_t *values;
    int32_t is_signed, failed, wrong;
} decode_job;

typedef struct {
    const uint8_t *next, *end;
    uint32_t x, missing;
} reader;

GW_INLINE void refill(reader *r) {
    const uint32_t empty = r->x < LOW, there = r->next < r->end;
    uint16_t word = 0;
    if (empty) {
        if (there) memcpy(&word, r->next, 2);
        r->missing |= !there;
        r->next += there ? 2 : 0;
        r->x = r->x << 16 | word;
    }
}

static int32_t decode_tail(reader *r, const tail_table *own) {
    const uint32_t slot = r->x & ((1u << TAIL_PRECISION) - 1), token = own->token_of[slot];
    r->x = own->frequency[token] * (r->x >> TAIL_PRECISION) + slot - own->start[token];
    refill(r);
    const int32_t bits = extra_bits((int32_t)token);
    if (!bits) return (int32_t)token;
    const uint32_t low = r->x & ((1u << bits) - 1);
    r->x >>= bits;
    refill(r);
    return (int32_t)(1u << bits | low);
}

GW_INLINE int32_t decode_one(reader *r, model *m, const decode_job *job, int is_last) {
    const tables *const all = job->tables;
    const int32_t c = context(m), q = c & 1;
    const context_table *const t = &all->contexts[c];
    const uint32_t slot = r->x & ((1u << PRECISION) - 1);
    const int32_t s = (slot >= t->start[1]) + (slot >= t->start[2]) + (slot >= t->start[3]) +
                      (slot >= t->start[4]);
    r->x = t->frequency[s] * (r->x >> PRECISION) + slot - t->start[s];
    refill(r);
    int32_t k = (s + 1) >> 1;
    if (k == 2) k += decode_tail(r, &all->tails[t->tail]);
    const int32_t magnitude = 2 * UNIT * k - UNIT * q -
                              job->offsets[3 * q + (k > 2 ? 2 : k ? k - 1 : 0)];
    learn(m, k, ~s & (k != 0) & job->is_signed, is_last);
    return k == 0 ? 0 : s & 1 ? magnitude : -magnitude;
}

static void finish_segment(decode_job *job, reader *r, model *m, int64_t first, int64_t end) {
    for (int64_t i = first; i < end && !r->missing; i++)
        job->values[i] = decode_one(r, m, job, i + 1 == job->count);
    if (r->missing || r->next != r->end || r->x != LOW)
        __atomic_store_n(&job->wrong, 1, __ATOMIC_RELAXED);
}

static reader start_reader(const decode_job *job, int64_t s) {
    const uint8_t *const start = job->bytes + 2 * job->starts[s];
    reader r = {start + 4, job->bytes + 2 * job->starts[s + 1], 0, 0};
    memcpy(&r.x, start, 4);
    return r;
}

#ifdef GW_WIDE
typedef struct {
    __m512i x, at, end; /* `at` and `end` count bytes */
    __mmask16 missing;
} lane_readers;

/* refill() of the lanes in `of`. Two bytes too many are read, those before. */
GW_WIDER GW_INLINE void wide_refill(lane_readers *r, const uint8_t *bytes, __mmask16 of) {
    const __mmask16 empty = _mm512_mask_cmplt_epu32_mask(of, r->x, _mm512_set1_epi32(LOW));
    const __mmask16 there = _mm512_mask_cmplt_epi32_mask(empty, r->at, r->end);
    const __m512i before = _mm512_sub_epi32(r->at, _mm512_set1_epi32(2));
    const __m512i pair =
        _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, before, bytes, 1);
    r->missing |= empty & ~there;
    r->x = _mm512_mask_or_epi32(r->x, there, _mm512_slli_epi32(r->x, 16),
                                _mm512_srli_epi32(pair, 16));
    r->at = _mm512_mask_add_epi32(r->at, there, r->at, _mm512_set1_epi32(2));
}

/* Bits that follow the tokens of the lanes in `of`: few have any. */
GW_WIDER static __m512i wide_extra(lane_readers *r, const uint8_t *bytes, __mmask16 of,
                                   __m512i token) {
    const __m512i one = _mm512_set1_epi32(1);
    const __m512i bits = _mm512_sub_epi32(token, _mm512_set1_epi32(DIRECT - 4));
    const __m512i high = _mm512_sllv_epi32(one, bits);
    const __m512i low = _mm512_and_si512(r->x, _mm512_sub_epi32(high, one));
    r->x = _mm512_mask_srlv_epi32(r->x, of, r->x, bits);
    wide_refill(r, bytes, of);
    return _mm512_mask_or_epi32(token, of, high, low);
}

/* The tails of the lanes in `of`. */
GW_WIDER GW_INLINE __m512i wide_tail(lane_readers *r, const uint8_t *bytes, const tables *all,
                                     __m512i context, __mmask16 of) {
    const __m512i zero = _mm512_setzero_si512(), byte = _mm512_set1_epi32(255);
    const __m512i half = _mm512_set1_epi32(0xffff);
    const __m512i slot =
        _mm512_and_si512(r->x, _mm512_set1_epi32((1 << TAIL_PRECISION) - 1));
    const __m512i own =
        _mm512_mullo_epi32(context, _mm512_set1_epi32((int32_t)sizeof(tail_table)));
    const __m512i token = _mm512_and_si512(
        byte, _mm512_mask_i32gather_epi32(zero, of, _mm512_add_epi32(own, slot),
                                          all->tails[0].token_of, 1));
    const __m512i place = _mm512_add_epi32(own, _mm512_add_epi32(token, token));
    const __m512i frequency = _mm512_and_si512(
        half, _mm512_mask_i32gather_epi32(zero, of, place, all->tails[0].frequency, 1));
    const __m512i start = _mm512_and_si512(
        half, _mm512_mask_i32gather_epi32(zero, of, place, all->tails[0].start, 1));
    const __m512i x = _mm512_add_epi32(
        _mm512_mullo_epi32(frequency, _mm512_srli_epi32(r->x, TAIL_PRECISION)),
        _mm512_sub_epi32(slot, start));
    r->x = _mm512_mask_mov_epi32(r->x, of, x);
    wide_refill(r, bytes, of);
    const __mmask16 more = _mm512_mask_cmpge_epi32_mask(of, token, _mm512_set1_epi32(DIRECT));
    return more ? wide_extra(r, bytes, more, token) : token;
}

/* Segments `first` to `last`, sixteen at most, side by side. */
GW_WIDER static void decode_wide(decode_job *job, int64_t first, int64_t last, uint32_t *columns) {
    models all;
    int64_t from[LANES], end[LANES], i = 0;
    int64_t steps = start_lanes(&all, job->count, job->segments, job->shapes, job->most_columns,
                                first, last, columns, from, end);
    const int used = (int)(last - first);
    uint32_t x[LANES], at[LANES], limit[LANES];
    for (int l = 0; l < LANES; l++) {
        const reader r = start_reader(job, first + (l < used ? l : 0));
        x[l] = r.x;
        at[l] = (uint32_t)(r.next - job->bytes);
        limit[l] = (uint32_t)(r.end - job->bytes);
    }
    lane_readers r = {_mm512_loadu_si512(x), _mm512_loadu_si512(at), _mm512_loadu_si512(limit), 0};
    int32_t pairs[2 * CLASSES], offsets[16] = {0};
    for (int c = 0; c < 2 * CLASSES; c++) {
        const context_table *const t = &job->tables->contexts[c];
        pairs[c] = (int32_t)(t->frequency[1] | t->frequency[3] << 16);
    }
    for (int q = 0; q < 2; q++)
        for (int k = 1; k < 4; k++) offsets[4 * q + k] = job->offsets[3 * q + k - 1];
    const __m512i low_pairs = _mm512_loadu_si512(pairs), high_pairs = _mm512_loadu_si512(pairs + 16);
    const __m512i moved = _mm512_loadu_si512(offsets);
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi32(1);
    lanes m = load_lanes(&all);
    for (steps -= steps % 16; i < steps && !r.missing; i += 16) {
        __m512i values[16];
        for (int j = 0; j < 16; j++) {
            const __m512i c = _mm512_i32gather_epi32(m.column, all.columns_of, 4);
            const __m512i class = wide_class(m.row, m.columns, c, m.left);
            const __m512i q = _mm512_and_si512(m.state, one);
            const __m512i context = _mm512_or_si512(_mm512_slli_epi32(class, 1), q);
            const __m512i pair = _mm512_permutex2var_epi32(low_pairs, context, high_pairs);
            const __m512i ones = _mm512_and_si512(pair, _mm512_set1_epi32(0xffff));
            const __m512i more = _mm512_srli_epi32(pair, 16);
            const __m512i both = _mm512_add_epi32(ones, more);
            const __m512i zeros = _mm512_sub_epi32(_mm512_set1_epi32(1 << PRECISION),
                                                   _mm512_add_epi32(both, both));
            const __m512i slot =
                _mm512_and_si512(r.x, _mm512_set1_epi32((1 << PRECISION) - 1));
            /* Slots of 0, 1, -1, more, -more. */
            const __m512i second = _mm512_add_epi32(zeros, ones);
            const __m512i third = _mm512_add_epi32(second, ones);
            const __m512i fourth = _mm512_add_epi32(third, more);
            const __mmask16 is_other = _mm512_cmpge_epi32_mask(slot, zeros);
            const __mmask16 from_second = _mm512_cmpge_epi32_mask(slot, second);
            const __mmask16 is_more = _mm512_cmpge_epi32_mask(slot, third);
            const __mmask16 from_fourth = _mm512_cmpge_epi32_mask(slot, fourth);
            __m512i start = _mm512_maskz_mov_epi32(is_other, zeros);
            start = _mm512_mask_mov_epi32(start, from_second, second);
            start = _mm512_mask_mov_epi32(start, is_more, third);
            start = _mm512_mask_mov_epi32(start, from_fourth, fourth);
            __m512i frequency = _mm512_mask_mov_epi32(zeros, is_other, ones);
            frequency = _mm512_mask_mov_epi32(frequency, is_more, more);
            r.x = _mm512_add_epi32(
                _mm512_mullo_epi32(frequency, _mm512_srli_epi32(r.x, PRECISION)),
                _mm512_sub_epi32(slot, start));
            wide_refill(&r, job->bytes, 0xffff);
            __m512i k = _mm512_maskz_mov_epi32(is_other, one);
            if (is_more) {
                const __m512i tail = wide_tail(&r, job->bytes, job->tables, context, is_more);
                k = _mm512_mask_add_epi32(k, is_more, tail, _mm512_set1_epi32(2));
            }
            const __m512i which = _mm512_or_si512(_mm512_slli_epi32(q, 2),
                                                  _mm512_min_epi32(k, _mm512_set1_epi32(3)));
            const __m512i value = _mm512_sub_epi32(
                _mm512_sub_epi32(_mm512_slli_epi32(k, 7), _mm512_slli_epi32(q, 6)),
                _mm512_permutexvar_epi32(which, moved));
            const __mmask16 negative = (from_second & ~is_more) | from_fourth;
            values[j] = _mm512_mask_sub_epi32(_mm512_maskz_mov_epi32(is_other, value), negative,
                                              zero, value);
            m.state = wide_next_state(m.state, k, job->is_signed ? negative : 0);
            wide_learn(&m, &all, c, k, from, i + j, job->count);
        }
        transpose(values);
        for (int l = 0; l < used; l++)
            _mm512_storeu_si512(job->values + from[l] + i, values[l]);
    }
    store_lanes(&all, &m);
    _mm512_storeu_si512(x, r.x);
    _mm512_storeu_si512(at, r.at);
    for (int l = 0; l < used; l++) {
        reader own = {job->bytes + at[l], job->bytes + limit[l], x[l], r.missing >> l & 1};
        from_lane(&all, l);
        finish_segment(job, &own, &all.own[l], from[l] + i, end[l]);
    }
}
#endif

static void decode_task(void *given, int64_t first, int64_t last) {
    decode_job *const job = given;
    int64_t columns_of_all = job->most_columns;
#ifdef GW_WIDE
    const int wide = is_wide() && job->most_columns < 1 << 24 &&
                     job->starts[job->segments] < 1 << 30;
    if (wide) columns_of_all = LANES * lane_columns(job->most_columns);
#endif
    uint32_t *const columns = malloc((size_t)columns_of_all * sizeof *columns);
    if (!columns) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
    for (int64_t s = first, next; columns && s < last; s = next) {
        next = s + 1;
#ifdef GW_WIDE
        if (wide && last - s >= FEW) {
            next = last - s < LANES ? last : s + LANES;
            decode_wide(job, s, next, columns);
            continue;
        }
#endif
        model m;
        reader r = start_reader(job, s);
        const int64_t from = segment_start(job->count, job->segments, s);
        start_model(&m, job->shapes, from, columns);
        finish_segment(job, &r, &m, from, segment_start(job->count, job->segments, s + 1));
    }
    free(columns);
}

/* The caller has checked the tables, and that each segment has two words or more and lies in
   `bytes`. 0, -1 if the bytes are no code, -2 without memory. */
int32_t gw_trellis_decode(const uint8_t *bytes, const int64_t *starts, int64_t count,
                          int64_t segments, const int64_t *shapes, int64_t most_columns,
                          const int32_t *halves, const int32_t *tails, const int32_t *offsets,
                          int32_t is_signed, int32_t *values) {
    tables *const t = tabulate(halves, tails);
    if (!t) return -2;
    decode_job job = {bytes,        starts, count, segments, shapes,
                      most_columns, t,      {0},   values,   is_signed, 0, 0};
    memcpy(job.offsets, offsets, sizeof job.offsets);
    gw_parallel(decode_task, &job, segments, LANES, 1);
    free(t);
    return job.failed ? -2 : job.wrong ? -1 : 0;
}
