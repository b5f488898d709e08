/* The search of a trellis-coded quantiser, number for number as reference/trellis.py.

   It takes sixteen blocks at a time, one in each lane: a step is the same for all of them, so that
   nothing is shuffled. It keeps two bytes of each step and lane, from which the way back is read. */
#include "threads.h"
#include "trellis.h"

enum {
    TILE = 32,       /* steps whose rates are looked up at once */
    MANY = 6,        /* blocks from which on lanes pay */
    STEEPEST = 16,   /* indices above have the rate of this one */
    FAR = 16383,     /* no number counts as farther from zero */
    NEVER = 1 << 28, /* the cost of a state that no path has reached */
};

/* yes ? a : b, in a way that stays free of branches: they would keep loops from being vectors. */
GW_INLINE int32_t pick(int32_t yes, int32_t a, int32_t b) { return b ^ ((a ^ b) & -yes); }

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

/* Of one block, for all its elements. */
typedef struct {
    int32_t branches[BLOCK][4]; /* costs of even and odd in quantiser 0, and in quantiser 1 */
    uint16_t ways[BLOCK];
} alone_space;

typedef union {
    search_space many;
    alone_space one;
} any_space;

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

/* The way back, along what is `apart` from one step to the next. */
GW_INLINE void trace(const uint16_t *ways, const int32_t *scaled, int64_t apart, int64_t steps,
                     int32_t state, int32_t *indices) {
    for (int64_t i = steps - 1; i >= 0; i--) {
        const int32_t way = ways[i * apart], q = state >> 2, b = way >> (8 + state) & 1;
        const int32_t odd = (state >> 1 & 1) ^ b;
        state = (q | ((state & 1) ^ q) << 1) | b << 2;
        const int32_t x = scaled[i * apart], u = x < 0 ? -x : x;
        const int32_t code = way >> (4 * q + 2 * odd) & 3;
        const int32_t other = ((u + UNIT * q) >> 7) + code - 2;
        const int32_t k = !code ? 0 : other ? other : -1;
        indices[i] = x < 0 ? -k : k;
    }
}

/* ------------------------------------------------------------------ one block at a time */

/* Costs and codes of sixteen elements from `first` on, side by side; what is left of the last
   sixteen is computed and not used. */
GW_INLINE void branches_of(alone_space *space, const search_job *job, int64_t start,
                           int64_t steps) {
    for (int64_t first = 0; first < steps; first += LANES) {
        const int64_t here = steps - first < LANES ? steps - first : LANES;
        int32_t scaled[LANES] = {0}, classes[LANES] = {0}, rates[RATES][LANES];
        int32_t costs[4][LANES], codes[LANES];
        for (int64_t l = 0; l < here; l++) {
            scaled[l] = job->scaled[start + first + l];
            classes[l] = job->contexts[start + first + l] >> 1;
        }
        for (int r = 0; r < RATES; r++)
            for (int l = 0; l < LANES; l++) rates[r][l] = job->rates[r * CLASSES + classes[l]];
        for (int l = 0; l < LANES; l++) {
            const int32_t u = (scaled[l] ^ scaled[l] >> 31) - (scaled[l] >> 31);
            const int32_t flip = (scaled[l] < 0) & job->is_signed;
            int32_t code0, code1;
            cheapest(u, 0, (const int32_t(*)[LANES])rates, l, job->offsets, 1, 0, &costs[0][l],
                     &costs[1][l], &code0);
            cheapest(u, 1, (const int32_t(*)[LANES])rates, l, job->offsets + 3,
                     1 - job->is_signed, flip, &costs[2][l], &costs[3][l], &code1);
            codes[l] = code1 << 4 | code0;
        }
        for (int l = 0; l < LANES; l++) {
            for (int b = 0; b < 4; b++) space->branches[first + l][b] = costs[b][l];
            space->ways[first + l] = (uint16_t)codes[l];
        }
    }
}

GW_CLONES static void branches(alone_space *space, const search_job *job, int64_t start,
                               int64_t steps) {
    branches_of(space, job, start, steps);
}

/* Paths through a block: the state that the way back begins in. */
static int32_t paths(alone_space *space, int64_t steps, int is_last) {
    static const int32_t from[8] = {0, 2, 0, 2, 3, 1, 3, 1};
    int32_t costs[8] = {0, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER};
    for (int64_t i = 0; i < steps; i++) {
        const int32_t *const branch = space->branches[i];
        int32_t next[8], bits = 0, low = INT32_MAX;
        for (int t = 0; t < 8; t++) {
            const int at = 2 * (t >> 2) + (t >> 1 & 1);
            const int32_t a = costs[from[t]] + branch[at], b = costs[from[t] + 4] + branch[at ^ 1];
            next[t] = least(a, b);
            bits |= (b < a) << t;
        }
        for (int t = 0; t < 8; t++) low = least(low, next[t]);
        for (int t = 0; t < 8; t++) costs[t] = next[t] - low;
        space->ways[i] |= (uint16_t)(bits << 8);
    }
    int32_t state = 0;
    for (int32_t t = 1; is_last && t < 8; t++)
        if (costs[t] < costs[state]) state = t;
    return state;
}

#ifdef GW_WIDE
/* The same, all states side by side. */
GW_WIDE static int32_t paths_wide(alone_space *space, int64_t steps, int is_last) {
    const __m256i from = _mm256_setr_epi32(0, 2, 0, 2, 3, 1, 3, 1);
    const __m256i from_other = _mm256_setr_epi32(4, 6, 4, 6, 7, 5, 7, 5);
    const __m256i same = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m256i other = _mm256_setr_epi32(1, 1, 0, 0, 3, 3, 2, 2);
    __m256i costs =
        _mm256_setr_epi32(0, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER, NEVER);
    for (int64_t first = 0; first < steps; first += TILE) {
        const int64_t end = steps - first < TILE ? steps : first + TILE;
        for (int64_t i = first; i < end; i++) {
            const __m256i branch = _mm256_broadcastsi128_si256(
                _mm_loadu_si128((const __m128i *)(const void *)space->branches[i]));
            const __m256i a = _mm256_add_epi32(_mm256_permutevar8x32_epi32(costs, from),
                                               _mm256_permutevar8x32_epi32(branch, same));
            const __m256i b = _mm256_add_epi32(_mm256_permutevar8x32_epi32(costs, from_other),
                                               _mm256_permutevar8x32_epi32(branch, other));
            costs = _mm256_min_epi32(a, b);
            space->ways[i] |= (uint16_t)(_mm256_cmpgt_epi32_mask(a, b) << 8);
        }
        /* Only differences of costs matter. */
        const __m256i first_cost = _mm256_permutevar8x32_epi32(costs, _mm256_setzero_si256());
        costs = _mm256_sub_epi32(costs, first_cost);
    }
    int32_t all[8], state = 0;
    _mm256_storeu_si256((__m256i *)(void *)all, costs);
    for (int32_t t = 1; is_last && t < 8; t++)
        if (all[t] < all[state]) state = t;
    return state;
}
#endif

static void search_alone(alone_space *space, const search_job *job, int64_t start, int64_t steps) {
    const int is_last = start + steps == job->count;
    int32_t state;
    branches(space, job, start, steps);
#ifdef GW_WIDE
    if (is_wide())
        state = paths_wide(space, steps, is_last);
    else
#endif
        state = paths(space, steps, is_last);
    trace(space->ways, job->scaled + start, 1, steps, state, job->indices + start);
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
    if (steps == BLOCK && is_wide()) {
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
        trace(&space->ways[0][l], &space->scaled[0][l], LANES, steps, states[l],
              job->indices + from);
    }
}

static void search_task(void *given, int64_t first, int64_t last) {
    search_job *const job = given;
    any_space *const space = malloc(sizeof *space);
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
        if (blocks < MANY) {
            const int64_t start = first * BLOCK, left = job->count - start;
            blocks = 1;
            search_alone(&space->one, job, start, left < BLOCK ? left : BLOCK);
        } else {
            search_blocks(&space->many, job, first, blocks);
        }
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
