/* Successive cancellation with lists, as coding/polar/search.py does it in torch: the same bits.

   Rows are those of polar.c, with 64 / size blocks side by side and `size` lanes for the paths of
   each. Where paths fork, lanes of a block change places; the nodes above move theirs afterwards. */
#include "native.h"
#include "polar.h"
#include "threads.h"

#include <stdlib.h>

enum { LANES = 64, FINE = 16, MOST = 32 };

#if defined(__x86_64__)
#include <immintrin.h>
#define VBMI __attribute__((target("avx512f,avx512bw,avx512vbmi")))

VBMI static void move_rows_wide(int8_t *rows, int64_t count, const uint8_t *from) {
    const __m512i index = _mm512_loadu_si512(from);
    for (int64_t i = 0; i < count; i++)
        _mm512_storeu_si512(rows + i * LANES,
                            _mm512_permutexvar_epi8(index, _mm512_loadu_si512(rows + i * LANES)));
}

VBMI static void move_words_wide(uint64_t *words, int64_t count, const uint8_t *from) {
    const __m512i index = _mm512_loadu_si512(from);
    for (int64_t i = 0; i < count; i++)
        words[i] = _mm512_movepi8_mask(_mm512_permutexvar_epi8(index, _mm512_movm_epi8(words[i])));
}
#endif

static int wide(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bw");
#else
    return 0;
#endif
}

/* Lane i becomes what lane from[i] was. */
static void move_rows(int8_t *rows, int64_t count, const uint8_t *from) {
#if defined(__x86_64__)
    if (wide()) {
        move_rows_wide(rows, count, from);
        return;
    }
#endif
    for (int64_t i = 0; i < count; i++) {
        int8_t row[LANES];
        memcpy(row, rows + i * LANES, LANES);
        for (int lane = 0; lane < LANES; lane++) rows[i * LANES + lane] = row[from[lane]];
    }
}

static void move_words(uint64_t *words, int64_t count, const uint8_t *from) {
#if defined(__x86_64__)
    if (wide()) {
        move_words_wide(words, count, from);
        return;
    }
#endif
    for (int64_t i = 0; i < count; i++) {
        uint64_t word = 0;
        for (int lane = 0; lane < LANES; lane++) word |= (words[i] >> from[lane] & 1) << lane;
        words[i] = word;
    }
}

typedef struct {
    const gw_polar_rows *rows;
    const uint8_t *kinds;
    int corrected, size;
    const uint8_t *softplus;     /* [128] of |ratio|, in units of a metric */
    const uint32_t *patterns[2]; /* of free bits, and of even parity: which of the weakest to turn */
    int32_t num_patterns[2];
} list_tree;

typedef struct {
    int paths;
    int32_t metric[LANES];
    uint8_t from[LANES]; /* of each lane the one it was before the node */
    int moved;
} list_state;

/* Adds log(1 + e^-a) of each lane, or of its magnitude. */
GW_CLONES static void add_penalties(const int8_t *alpha, int64_t n, int of_size,
                                    const uint8_t *softplus, int32_t *total) {
    for (int64_t i = 0; i < n; i++) {
        for (int lane = 0; lane < LANES; lane++) {
            const int a = alpha[i * LANES + lane], size = a < 0 ? -a : a;
            total[lane] += softplus[size] + (of_size ? 0 : FINE * (size - a) / 2);
        }
    }
}

/* The `count` least of |a| * n + row in each lane, ascending. */
GW_CLONES static void find_weakest(const int8_t *alpha, int64_t n, int count,
                                   int32_t weakest[MOST][LANES]) {
    for (int k = 0; k < count; k++)
        for (int lane = 0; lane < LANES; lane++) weakest[k][lane] = INT32_MAX;
    for (int64_t i = 0; i < n; i++) {
        int32_t key[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const int32_t a = alpha[i * LANES + lane];
            key[lane] = (a < 0 ? -a : a) * (int32_t)n + (int32_t)i;
        }
        for (int k = 0; k < count; k++)
            for (int lane = 0; lane < LANES; lane++) {
                const int32_t old = weakest[k][lane], new = key[lane];
                weakest[k][lane] = old < new ? old : new;
                key[lane] = old < new ? new : old;
            }
    }
}

typedef struct {
    int32_t cost;
    int32_t path;
    uint32_t choice;
} candidate;

/* Keeps the `most` cheapest in order, of equals those that came first; returns how many there are. */
GW_INLINE int keep(candidate *kept, int used, int most, candidate new) {
    if (used == most && new.cost >= kept[most - 1].cost) return used;
    int at = used < most ? used++ : most - 1;
    for (; at > 0 && kept[at - 1].cost > new.cost; at--) kept[at] = kept[at - 1];
    kept[at] = new;
    return used;
}

/* Takes over the paths kept of the block whose lanes begin at `lane`. */
static void take(list_state *s, int lane, const candidate *kept, int used, int size,
                 uint32_t *choice) {
    for (int j = 0; j < size; j++) {
        const candidate c = kept[j < used ? j : 0];
        s->from[lane + j] = (uint8_t)(lane + c.path);
        s->metric[lane + j] = c.cost;
        choice[lane + j] = j < used ? c.choice : 0;
    }
}

static void repeated(const list_tree *t, const int8_t *alpha, int64_t n, uint64_t *beta,
                     list_state *s) {
    int32_t zero[LANES] = {0}, one[LANES] = {0};
    uint32_t choice[LANES];
    for (int64_t i = 0; i < n; i++)
        for (int lane = 0; lane < LANES; lane++) one[lane] += FINE * alpha[i * LANES + lane];
    add_penalties(alpha, n, 0, t->softplus, zero);
    for (int lane = 0; lane < LANES; lane++) one[lane] += zero[lane]; /* s(-a) = s(a) + a */
    const int most = s->paths * 2 < t->size ? s->paths * 2 : t->size;
    for (int first = 0; first < LANES; first += t->size) {
        candidate kept[MOST] = {{0, 0, 0}};
        int used = 0;
        for (int p = 0; p < s->paths; p++) {
            const int32_t metric = s->metric[first + p];
            used = keep(kept, used, most, (candidate){metric + zero[first + p], p, 0});
            used = keep(kept, used, most, (candidate){metric + one[first + p], p, 1});
        }
        take(s, first, kept, used, t->size, choice);
    }
    uint64_t word = 0;
    for (int lane = 0; lane < LANES; lane++) word |= (uint64_t)choice[lane] << lane;
    for (int64_t i = 0; i < n; i++) beta[i] = word;
    s->paths = most;
    s->moved = 1;
}

static void turned(const list_tree *t, const int8_t *alpha, int64_t n, int parity, uint64_t *beta,
                   list_state *s) {
    int32_t weakest[MOST][LANES], base[LANES] = {0};
    uint32_t patterns[256], choice[LANES], widest = 1;
    int count[2] = {0, 0}, total = 0;
    for (int i = 0; i < t->num_patterns[parity]; i++) {
        const uint32_t bits = t->patterns[parity][i];
        if (n < MOST && bits >> n) continue;
        patterns[total++] = bits;
        widest |= bits;
        count[parity ? __builtin_popcount(bits) & 1 : 0]++;
    }
    const int width = 32 - __builtin_clz(widest);
    const int choices = !parity || count[0] < count[1] ? count[0] : count[1];
    const int most = s->paths * choices < t->size ? s->paths * choices : t->size;
    uint64_t odd = 0;
    find_weakest(alpha, n, width, weakest);
    add_penalties(alpha, n, 1, t->softplus, base);
    t->rows->decide(alpha, n * LANES, (uint8_t *)beta);
    if (parity)
        for (int64_t i = 0; i < n; i++) odd ^= beta[i];
    for (int first = 0; first < LANES; first += t->size) {
        candidate kept[MOST] = {{0, 0, 0}};
        int used = 0;
        for (int p = 0; p < s->paths; p++) {
            const int lane = first + p;
            const int32_t metric = s->metric[lane] + base[lane];
            const unsigned wrong = parity ? ~(unsigned)(odd >> lane) & 1 : 2;
            int32_t cost[MOST];
            if (used == most && metric >= kept[most - 1].cost) continue;
            for (int k = 0; k < width; k++) cost[k] = FINE * (weakest[k][lane] / (int32_t)n);
            for (int i = 0; i < total; i++) {
                int32_t sum = metric;
                if (((unsigned)__builtin_popcount(patterns[i]) & 1) == wrong) continue;
                for (uint32_t bits = patterns[i]; bits; bits &= bits - 1)
                    sum += cost[__builtin_ctz(bits)];
                used = keep(kept, used, most, (candidate){sum, p, patterns[i]});
            }
        }
        take(s, first, kept, used, t->size, choice);
    }
    move_words(beta, n, s->from);
    for (int lane = 0; lane < LANES; lane++)
        for (uint32_t bits = choice[lane]; bits; bits &= bits - 1)
            beta[weakest[__builtin_ctz(bits)][s->from[lane]] % n] ^= (uint64_t)1 << lane;
    s->paths = most;
    s->moved = 1;
}

/* The bits of n rows under node `at`, path by path. `alpha` is written to; scratch has n rows. */
static void list_node(const list_tree *t, int64_t at, int8_t *alpha, int64_t n, int8_t *scratch,
                      uint64_t *beta, list_state *s) {
    const int64_t half = n / 2;
    int8_t *deeper = scratch + half * LANES;
    s->moved = 0;
    switch (t->kinds[at]) {
    case GW_POLAR_FROZEN:
        add_penalties(alpha, n, 0, t->softplus, s->metric);
        memset(beta, 0, (size_t)n * sizeof *beta);
        return;
    case GW_POLAR_REPETITION:
        repeated(t, alpha, n, beta, s);
        return;
    case GW_POLAR_FREE:
        turned(t, alpha, n, 0, beta, s);
        return;
    case GW_POLAR_PARITY:
        turned(t, alpha, n, 1, beta, s);
        return;
    }
    uint8_t from[LANES];
    t->rows->f(alpha, half * LANES, t->corrected, scratch);
    list_node(t, 2 * at, scratch, half, deeper, beta, s);
    const int moved = s->moved;
    if (moved) {
        move_rows(alpha, n, s->from);
        memcpy(from, s->from, sizeof from);
    }
    t->rows->g(alpha, (const uint8_t *)beta, half * LANES, scratch);
    list_node(t, 2 * at + 1, scratch, half, deeper, beta + half, s);
    if (s->moved) {
        move_words(beta, half, s->from);
        if (moved)
            for (int lane = 0; lane < LANES; lane++) s->from[lane] = from[s->from[lane]];
    } else if (moved) {
        memcpy(s->from, from, sizeof from);
        s->moved = 1;
    }
    for (int64_t i = 0; i < half; i++) beta[i] ^= beta[half + i];
}

typedef struct {
    list_tree tree;
    const int8_t *llr;
    int64_t n;
    uint64_t *bits;
    int failed;
} list_job;

/* Of each block's paths the one that turns the least, as a bit of `out`. */
static void nearest(const list_job *job, const int8_t *alpha, const uint64_t *beta, int paths,
                    int block, uint64_t *out) {
    const int size = job->tree.size;
    int32_t wrong[LANES] = {0};
    for (int64_t i = 0; i < job->n; i++)
        for (int lane = 0; lane < LANES; lane++) {
            const int a = alpha[i * LANES + lane], turn = (int)(beta[i] >> lane & 1) != (a < 0);
            wrong[lane] += turn ? (a < 0 ? -a : a) : 0;
        }
    for (int first = 0; first < LANES; first += size, block++) {
        int best = first;
        for (int p = 1; p < paths; p++)
            if (wrong[first + p] < wrong[best]) best = first + p;
        for (int64_t i = 0; i < job->n; i++) out[i] |= (beta[i] >> best & 1) << block;
    }
}

static void list_parts(void *argument, int64_t first, int64_t last) {
    list_job *job = argument;
    const int64_t n = job->n, size = job->tree.size;
    int8_t *alpha = malloc((size_t)(2 * n * LANES));
    uint64_t *beta = malloc((size_t)n * sizeof *beta);
    for (int64_t g = first; g < last && alpha && beta; g++) {
        memset(job->bits + g * n, 0, (size_t)n * sizeof *beta);
        for (int block = 0; block < LANES; block += LANES / (int)size) {
            list_state s = {1, {0}, {0}, 0};
            for (int64_t i = 0; i < n; i++)
                for (int lane = 0; lane < LANES; lane++)
                    alpha[i * LANES + lane] = job->llr[(g * n + i) * LANES + block + lane / size];
            list_node(&job->tree, 1, alpha, n, alpha + n * LANES, beta, &s);
            nearest(job, alpha, beta, s.paths, block, job->bits + g * n);
        }
    }
    if (!alpha || !beta) __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
    free(alpha);
    free(beta);
}

/* llr [groups][n][64], kinds [2n], bits [groups][n]; size is 2, 4 .. 32, free and parity
   are tables of at most 256 patterns. Returns 1 if there is no memory, else 0. */
int32_t gw_polar_list(const int8_t *llr, int64_t groups, int64_t n, const uint8_t *kinds,
                      int32_t corrected, int32_t size, const uint8_t *softplus,
                      const uint32_t *free_patterns, int32_t num_free,
                      const uint32_t *parity_patterns, int32_t num_parity, uint64_t *bits) {
    list_job job = {{gw_polar_best_rows(), kinds, corrected, size, softplus,
                     {free_patterns, parity_patterns}, {num_free, num_parity}},
                    llr, n, bits, 0};
    gw_parallel(list_parts, &job, groups, 1, 1);
    return job.failed;
}
