/* The code of a trellis-coded quantiser, bytes as reference/trellis.py. It is sequential, since each
   index decides what the next one means; segments are independent of one another. */
#include "trellis_model.h"

enum {
    WAYS = 4, /* segments whose coders take turns */
    PRECISION = 15,
    TAIL_PRECISION = 12,
    LOW = 1 << 16,
    DIRECT = 16, /* tails below have a token of their own */
    TOKENS = 28,
};

static const int32_t MOST_TAIL = 65535;

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
    int32_t wrong;
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

#ifdef GW_WIDE
/* The coders of sixteen segments. */
typedef struct {
    __m512i x;
    uint16_t *next[LANES];
} lane_writers;

/* push() in the lanes of `of`. The quotient is below 2^20 once the state has been written out, so
   that in single precision it is wrong by one at most. */
GW_WIDE GW_INLINE void wide_push(lane_writers *w, __m512i f, __m512i start, const int precision,
                                 __mmask16 of) {
    const __mmask16 full =
        _mm512_mask_cmpge_epu32_mask(of, _mm512_srli_epi32(w->x, 32 - precision), f);
    if (full) {
        uint32_t x[LANES];
        _mm512_storeu_si512(x, w->x);
        for (uint32_t left = full; left; left &= left - 1) {
            const int l = __builtin_ctz(left);
            *--w->next[l] = (uint16_t)x[l];
        }
        w->x = _mm512_mask_srli_epi32(w->x, full, w->x, 16);
    }
    const __m512 ratio = _mm512_div_ps(_mm512_cvtepu32_ps(w->x), _mm512_cvtepi32_ps(f));
    __m512i q = _mm512_cvttps_epu32(ratio);
    __m512i rest = _mm512_sub_epi32(w->x, _mm512_mullo_epi32(q, f));
    const __m512i one = _mm512_set1_epi32(1);
    const __mmask16 below = _mm512_cmplt_epi32_mask(rest, _mm512_setzero_si512());
    const __mmask16 above = _mm512_cmpge_epi32_mask(rest, f);
    q = _mm512_mask_sub_epi32(q, below, q, one);
    rest = _mm512_mask_add_epi32(rest, below, rest, f);
    q = _mm512_mask_add_epi32(q, above, q, one);
    rest = _mm512_mask_sub_epi32(rest, above, rest, f);
    const __m512i x = _mm512_add_epi32(_mm512_slli_epi32(q, (unsigned)precision),
                                       _mm512_add_epi32(start, rest));
    w->x = _mm512_mask_mov_epi32(w->x, of, x);
}

/* The bits that follow the tokens of the lanes in `of`, which are few: their tokens. */
GW_WIDE static __m512i write_extra(lane_writers *w, __m512i tail, __mmask16 of) {
    uint32_t x[LANES];
    int32_t tails[LANES];
    _mm512_storeu_si512(x, w->x);
    _mm512_storeu_si512(tails, tail);
    for (uint32_t left = of; left; left &= left - 1) {
        const int l = __builtin_ctz(left), bits = 31 - __builtin_clz((uint32_t)tails[l]);
        w->next[l] = push(&x[l], 1, (uint32_t)tails[l] - (1u << bits), bits, w->next[l]);
        tails[l] = DIRECT + bits - 4;
    }
    w->x = _mm512_loadu_si512(x);
    return _mm512_loadu_si512(tails);
}

/* The tails of the lanes in `of`. */
GW_WIDE GW_INLINE void write_tails(lane_writers *w, const tables *all, __m512i context,
                                   __m512i tail, __mmask16 of) {
    const __mmask16 more = _mm512_mask_cmpge_epi32_mask(of, tail, _mm512_set1_epi32(DIRECT));
    const __m512i token = more ? write_extra(w, tail, more) : tail;
    const __m512i place = _mm512_add_epi32(
        _mm512_mullo_epi32(context, _mm512_set1_epi32((int32_t)sizeof(tail_table))),
        _mm512_add_epi32(token, token));
    const __m512i half = _mm512_set1_epi32(0xffff), one = _mm512_set1_epi32(1);
    const __m512i frequency = _mm512_and_si512(
        half, _mm512_mask_i32gather_epi32(one, of, place, all->tails[0].frequency, 1));
    const __m512i start = _mm512_and_si512(
        half, _mm512_mask_i32gather_epi32(one, of, place, all->tails[0].start, 1));
    wide_push(w, frequency, start, TAIL_PRECISION, of);
}

/* Segments `first` to `last`, sixteen at most, side by side. */
GW_WIDE static void encode_wide(const encode_job *job, int64_t first, int64_t last) {
    int64_t from[LANES], to[LANES], steps = INT64_MAX;
    uint16_t *ends[LANES];
    uint32_t states[LANES];
    lane_writers w = {_mm512_set1_epi32(LOW), {0}};
    const int used = (int)(last - first);
    const __mmask16 lanes_used = (__mmask16)((1u << used) - 1);
    for (int l = 0; l < LANES; l++) {
        const int64_t s = first + (l < used ? l : 0);
        from[l] = segment_start(job->count, job->segments, s);
        to[l] = segment_start(job->count, job->segments, s + 1);
        if (to[l] - from[l] < steps) steps = to[l] - from[l];
        ends[l] = w.next[l] = job->words + 3 * to[l] + 2 * (s + 1);
    }
    int32_t pairs[2 * CLASSES];
    for (int c = 0; c < 2 * CLASSES; c++) {
        const context_table *const t = &job->tables->contexts[c];
        pairs[c] = (int32_t)(t->frequency[1] | t->frequency[3] << 16);
    }
    const __m512i low_pairs = _mm512_loadu_si512(pairs), high_pairs = _mm512_loadu_si512(pairs + 16);
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi32(1);
    steps -= steps % 16;
    for (int64_t done = 16; done <= steps; done += 16) {
        __m512i index[16], contexts[16];
        for (int l = 0; l < 16; l++) {
            const int64_t at = to[l] - done;
            index[l] = _mm512_loadu_si512(job->indices + at);
            contexts[l] = _mm512_cvtepu8_epi32(
                _mm_loadu_si128((const __m128i *)(const void *)(job->contexts + at)));
        }
        transpose(index);
        transpose(contexts);
        for (int i = 15; i >= 0; i--) {
            const __m512i k = _mm512_abs_epi32(index[i]);
            const __m512i pair = _mm512_permutex2var_epi32(low_pairs, contexts[i], high_pairs);
            const __m512i ones = _mm512_and_si512(pair, _mm512_set1_epi32(0xffff));
            const __m512i more = _mm512_srli_epi32(pair, 16);
            const __m512i both = _mm512_add_epi32(ones, more);
            const __m512i zeros = _mm512_sub_epi32(_mm512_set1_epi32(1 << PRECISION),
                                                   _mm512_add_epi32(both, both));
            const __mmask16 is_other = _mm512_cmpneq_epi32_mask(k, zero);
            const __mmask16 is_more = _mm512_mask_cmpgt_epi32_mask(lanes_used, k, one);
            const __mmask16 minus = _mm512_cmplt_epi32_mask(index[i], zero);
            if (is_more)
                write_tails(&w, job->tables, contexts[i],
                            _mm512_sub_epi32(k, _mm512_set1_epi32(2)), is_more);
            __m512i f = _mm512_mask_mov_epi32(zeros, is_other, ones);
            f = _mm512_mask_mov_epi32(f, is_more, more);
            __m512i start = _mm512_maskz_mov_epi32(is_other, zeros);
            start = _mm512_mask_add_epi32(start, is_more, start, _mm512_add_epi32(ones, ones));
            start = _mm512_mask_add_epi32(start, minus, start, f);
            wide_push(&w, f, start, PRECISION, lanes_used);
        }
    }
    _mm512_storeu_si512(states, w.x);
    for (int l = 0; l < used; l++) {
        for (int64_t i = to[l] - steps - 1; i >= from[l]; i--)
            encode_one(job, i, &states[l], &w.next[l]);
        *--w.next[l] = (uint16_t)(states[l] >> 16);
        *--w.next[l] = (uint16_t)states[l];
        job->lengths[first + l] = ends[l] - w.next[l];
    }
}
#endif

/* Whether an index is too large or a context unknown. */
GW_CLONES static uint32_t is_wrong(const int32_t *indices, const uint8_t *contexts,
                                   int64_t count) {
    uint32_t wrong = 0;
    for (int64_t i = 0; i < count; i++)
        wrong |= (indices[i] > MOST_TAIL + 2) | (indices[i] < -MOST_TAIL - 2) |
                 (contexts[i] >= 2 * CLASSES);
    return wrong;
}

static void encode_task(void *given, int64_t first, int64_t last) {
    encode_job *const job = given;
    const int64_t start = segment_start(job->count, job->segments, first);
    const int64_t end = segment_start(job->count, job->segments, last);
    if (is_wrong(job->indices + start, job->contexts + start, end - start)) {
        __atomic_store_n(&job->wrong, 1, __ATOMIC_RELAXED);
        return;
    }
#ifdef GW_WIDE
    for (int64_t next; is_wide() && last - first > WAYS; first = next) {
        next = last - first < LANES ? last : first + LANES;
        encode_wide(job, first, next);
    }
#endif
    for (; last - first >= WAYS; first += WAYS) encode_some(job, first, WAYS);
    for (; first < last; first++) encode_some(job, first, 1);
}

/* `halves` [2 CLASSES, 2]: the frequencies of +1 and of +more; `tails` [2 CLASSES, TOKENS]. All are
   positive, and so is what they leave to zero. 0, -1 if an index is too large or a context unknown,
   -2 without memory. */
int32_t gw_trellis_encode(const int32_t *indices, const uint8_t *contexts, int64_t count,
                          int64_t segments, const int32_t *halves, const int32_t *tails,
                          uint16_t *words, int64_t *lengths) {
    tables *const t = tabulate(halves, tails);
    if (!t) return -2;
    encode_job job = {indices, contexts, count, segments, t, words, lengths, 0};
    each_group(&job, segments, encode_task);
    free(t);
    return job.wrong ? -1 : 0;
}

typedef struct {
    layout of;
    const uint8_t *bytes;  /* words, not aligned */
    const int64_t *starts; /* [segments + 1] in words */
    const tables *tables;
    int32_t offsets[6];
    int32_t *values;
    int32_t is_signed, wrong;
    const uint8_t *plane; /* of bits that name the quantisers, packed; null if the trellis does */
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

GW_INLINE int32_t decode_one(reader *r, model *m, const decode_job *job, int64_t i) {
    const tables *const all = job->tables;
    const int is_last = i + 1 == job->of.count;
    if (job->plane) m->state = job->plane[i >> 3] >> (i & 7) & 1;
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
    if (job->plane)
        learn_value(m, k, q, is_last);
    else
        learn(m, k, ~s & (k != 0) & job->is_signed, is_last);
    return k == 0 ? 0 : s & 1 ? magnitude : -magnitude;
}

static void finish_segment(decode_job *job, reader *r, model *m, int64_t first, int64_t end) {
    for (int64_t i = first; i < end && !r->missing; i++)
        job->values[i] = decode_one(r, m, job, i);
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
GW_WIDE GW_INLINE void wide_refill(lane_readers *r, const uint8_t *bytes, __mmask16 of) {
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
GW_WIDE static __m512i wide_extra(lane_readers *r, const uint8_t *bytes, __mmask16 of,
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
GW_WIDE GW_INLINE __m512i wide_tail(lane_readers *r, const uint8_t *bytes, const tables *all,
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
GW_WIDE static void some_segments(void *given, int64_t first, int64_t last, uint32_t *columns) {
    decode_job *const job = given;
    models all;
    int64_t from[LANES], end[LANES], i = 0;
    int64_t steps = start_lanes(&all, job->of.count, job->of.segments, job->of.shapes, job->of.most_columns,
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
        tile own;
        start_tile(&own, &m, &all);
        int32_t bits[LANES] = {0}; /* of the plane: segments begin with whole bytes */
        for (int l = 0; job->plane && l < LANES; l++)
            memcpy(&bits[l], job->plane + (from[l] + i) / 8, 2);
        const __m512i plane = _mm512_loadu_si512(bits);
        for (int j = 0; j < 16; j++) {
            if (job->plane) m.state = _mm512_srli_epi32(plane, (unsigned)j);
            const __m512i c = tile_columns(&own, &m, &all, j);
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
            __m512i size = wide_size(k);
            if (job->plane)
                size = _mm512_mask_sub_epi32(size, is_other, size,
                                             _mm512_slli_epi32(q, FRACTION - 1));
            tile_learn(&own, &m, &all, c, size, from, i, j, job->of.count);
        }
        end_tile(&own, &m, &all);
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

static void one_segment(void *given, int64_t s, model *m) {
    decode_job *const job = given;
    const layout *const of = &job->of;
    reader r = start_reader(job, s);
    finish_segment(job, &r, m, segment_start(of->count, of->segments, s),
                   segment_start(of->count, of->segments, s + 1));
}

static void decode_task(void *given, int64_t first, int64_t last) {
    decode_job *const job = given;
    segments_task some = NULL;
#ifdef GW_WIDE
    if (job->starts[job->of.segments] < 1 << 30) some = some_segments;
#endif
    each_segment(job, &job->of, first, last, one_segment, some);
}

/* The caller has checked the tables, and that each segment has two words or more and lies in
   `bytes`. 0, -1 if the bytes are no code, -2 without memory. */
int32_t gw_trellis_decode(const uint8_t *bytes, const int64_t *starts, int64_t count,
                          int64_t segments, const int64_t *shapes, int64_t most_columns,
                          const int32_t *halves, const int32_t *tails, const int32_t *offsets,
                          int32_t is_signed, const uint8_t *plane, int32_t *values) {
    tables *const t = tabulate(halves, tails);
    if (!t) return -2;
    decode_job job = {{count, segments, shapes, most_columns, 0}, bytes, starts, t, {0}, values,
                      is_signed, 0, plane};
    memcpy(job.offsets, offsets, sizeof job.offsets);
    each_group(&job, segments, decode_task);
    free(t);
    return job.of.failed ? -2 : job.wrong ? -1 : 0;
}
