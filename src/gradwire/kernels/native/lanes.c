/* Blocks in rows to blocks side by side and back, as reference/lanes.py.

   64 rows and 512 columns of bits at a time, as 64 vectors of eight words: each step of the
   transposition of eight 64 x 64 matrices (halves, quarters ... change places) is then an operation
   on whole vectors, whatever the instruction set. */
#include "native.h"
#include "polar.h"
#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LANES = 64, WORDS = 8, COLUMNS = 64 * WORDS };

typedef uint64_t row __attribute__((vector_size(8 * WORDS)));
typedef union {
    row rows[LANES];
    uint64_t words[LANES][WORDS];
} tile;

/* Of rows i and i + far the columns that lie `far` apart change places; `low` are those whose
   number lacks that bit. */
#define SWAP(a, b, far, low)                              \
    do {                                                  \
        const row change = ((a) >> (far) ^ (b)) & (low); \
        (b) ^= change;                                    \
        (a) ^= change << (far);                           \
    } while (0)

/* Three distances at a time, on eight rows `apart` from one another: fewer passes. */
#define SWAPS(r, first, apart, low4, low2, low1)                                          \
    do {                                                                                  \
        row v[8];                                                                         \
        for (int k = 0; k < 8; k++) v[k] = (r)[(first) + k * (apart)];                    \
        for (int k = 0; k < 4; k++) SWAP(v[k], v[k + 4], 4 * (apart), low4);              \
        for (int k = 0; k < 8; k++)                                                       \
            if (!(k & 2)) SWAP(v[k], v[k + 2], 2 * (apart), low2);                        \
        for (int k = 0; k < 8; k += 2) SWAP(v[k], v[k + 1], (apart), low1);               \
        for (int k = 0; k < 8; k++) (r)[(first) + k * (apart)] = v[k];                    \
    } while (0)

GW_CLONES static void transpose(tile *a) {
    for (int i = 0; i < 8; i++)
        SWAPS(a->rows, i, 8, 0x00000000FFFFFFFFu, 0x0000FFFF0000FFFFu, 0x00FF00FF00FF00FFu);
    for (int i = 0; i < LANES; i += 8)
        SWAPS(a->rows, i, 1, 0x0F0F0F0F0F0F0F0Fu, 0x3333333333333333u, 0x5555555555555555u);
}

/* Bytes of zero and one as bits; what else they hold is gathered in `all`. */
static void pack_plain(const uint8_t *bytes, int64_t count, uint64_t *words, uint64_t *all) {
    for (int64_t i = 0; i < count; i += 8) {
        uint64_t eight = 0;
        memcpy(&eight, bytes + i, (size_t)(count - i < 8 ? count - i : 8));
        *all |= eight;
        if (i % 64 == 0) words[i / 64] = 0;
        words[i / 64] |= ((eight & 0x0101010101010101u) * 0x0102040810204080u >> 56) << i % 64;
    }
}

static void unpack_plain(const uint64_t *words, int64_t count, uint8_t *bytes) {
    for (int64_t i = 0; i < count; i += 8) {
        const uint64_t byte = words[i / 64] >> i % 64 & 255;
        const uint64_t places = byte * 0x0101010101010101u & 0x8040201008040201u;
        const uint64_t eight = (places + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u;
        memcpy(bytes + i, &eight, (size_t)(count - i < 8 ? count - i : 8));
    }
}

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx512f,avx512bw")))

WIDE static void pack_wide(const uint8_t *bytes, int64_t count, uint64_t *words, uint64_t *all) {
    __m512i seen = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
        const __m512i v = _mm512_loadu_si512(bytes + i);
        seen = _mm512_or_si512(seen, v);
        words[i / 64] = _mm512_test_epi8_mask(v, v);
    }
    if (_mm512_test_epi8_mask(seen, _mm512_set1_epi8(-2))) *all |= 2;
    if (i < count) pack_plain(bytes + i, count - i, words + i / 64, all);
}

WIDE static void unpack_wide(const uint64_t *words, int64_t count, uint8_t *bytes) {
    int64_t i = 0;
    for (; i + 64 <= count; i += 64)
        _mm512_storeu_si512(bytes + i, _mm512_maskz_set1_epi8(words[i / 64], 1));
    if (i < count) unpack_plain(words + i / 64, count - i, bytes + i);
}
#endif

static int wide(void) {
#if defined(__x86_64__)
    return gw_polar_level() >= 2 && __builtin_cpu_supports("avx512bw");
#else
    return 0;
#endif
}

static void pack(const uint8_t *bytes, int64_t count, uint64_t *words, uint64_t *all) {
#if defined(__x86_64__)
    if (wide()) {
        pack_wide(bytes, count, words, all);
        return;
    }
#endif
    pack_plain(bytes, count, words, all);
}

static void unpack(const uint64_t *words, int64_t count, uint8_t *bytes) {
#if defined(__x86_64__)
    if (wide()) {
        unpack_wide(words, count, bytes);
        return;
    }
#endif
    unpack_plain(words, count, bytes);
}

typedef struct {
    uint8_t *rows;
    int64_t blocks, n, stride;
    int packed; /* rows of bits, or else of bytes */
    uint64_t *lanes;
    int bad;
} lanes_job;

static void to_lanes(void *argument, int64_t first, int64_t last) {
    lanes_job *job = argument;
    uint64_t all = 0;
    for (int64_t g = first; g < last; g++) {
        const int64_t left = job->blocks - g * LANES, present = left < LANES ? left : LANES;
        for (int64_t at = 0; at < job->n; at += COLUMNS) {
            const int64_t here = job->n - at < COLUMNS ? job->n - at : COLUMNS;
            tile a;
            if (present < LANES || here < COLUMNS) memset(&a, 0, sizeof a);
            for (int64_t i = 0; i < present; i++) {
                const uint8_t *row = job->rows + (g * LANES + i) * job->stride;
                if (job->packed)
                    memcpy(a.words[i], row + at / 8, (size_t)((here + 7) / 8));
                else
                    pack(row + at, here, a.words[i], &all);
            }
            transpose(&a);
            uint64_t *out = job->lanes + g * job->n + at;
            for (int64_t i = 0; i < here; i++) out[i] = a.words[i % 64][i / 64];
        }
    }
    if (all & ~(uint64_t)0x0101010101010101u) __atomic_store_n(&job->bad, 1, __ATOMIC_RELAXED);
}

static void from_lanes(void *argument, int64_t first, int64_t last) {
    const lanes_job *job = argument;
    for (int64_t g = first; g < last; g++) {
        const int64_t left = job->blocks - g * LANES, present = left < LANES ? left : LANES;
        for (int64_t at = 0; at < job->n; at += COLUMNS) {
            const int64_t here = job->n - at < COLUMNS ? job->n - at : COLUMNS;
            tile a;
            const uint64_t *in = job->lanes + g * job->n + at;
            if (here < COLUMNS) memset(&a, 0, sizeof a);
            for (int64_t i = 0; i < here; i++) a.words[i % 64][i / 64] = in[i];
            transpose(&a);
            for (int64_t i = 0; i < present; i++) {
                uint8_t *row = job->rows + (g * LANES + i) * job->stride;
                if (job->packed)
                    memcpy(row + at / 8, a.words[i], (size_t)((here + 7) / 8));
                else
                    unpack(a.words[i], here, row + at);
            }
        }
    }
}

/* rows [blocks][n] of bytes, or [blocks][ceil(n / 8)] of packed bits; lanes [ceil(blocks / 64)][n].
   Returns 1 if a byte is neither zero nor one. */
int32_t gw_rows_to_lanes(const uint8_t *rows, int64_t blocks, int64_t n, int32_t packed,
                         uint64_t *lanes) {
    lanes_job job = {(uint8_t *)rows, blocks, n, packed ? (n + 7) / 8 : n, packed, lanes, 0};
    if (n > 0) gw_parallel(to_lanes, &job, (blocks + LANES - 1) / LANES, 1, 1 + (1 << 13) / n);
    return job.bad;
}

void gw_lanes_to_rows(const uint64_t *lanes, int64_t blocks, int64_t n, int32_t packed,
                      uint8_t *rows) {
    lanes_job job = {rows, blocks, n, packed ? (n + 7) / 8 : n, packed, (uint64_t *)lanes, 0};
    if (n > 0) gw_parallel(from_lanes, &job, (blocks + LANES - 1) / LANES, 1, 1 + (1 << 13) / n);
}

/* Whole numbers of 1 / scale, at most 127 of them either way. Returns whether all are finite. */
GW_CLONES static int to_ratios(const float *x, int64_t count, float scale, int8_t *out) {
    uint32_t worst = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7FFFFFFFu;
        worst = bits > worst ? bits : worst;
        float v = x[i] * scale;
        v = v < 127.0f ? v : 127.0f;
        v = v > -127.0f ? v : -127.0f;
        /* Adding 1.5 * 2^23 rounds to whole numbers, halves to even, into the lowest bits. */
        v += 12582912.0f;
        memcpy(&bits, &v, sizeof bits);
        out[i] = (int8_t)(uint8_t)bits;
    }
    return worst < 0x7F800000u;
}

/* 8 x 8 bytes: as the bits above, in words. */
GW_INLINE void turn_bytes(uint64_t a[8]) {
    for (int k = 0; k < 4; k++) {
        const uint64_t change = (a[k] >> 32 ^ a[k + 4]) & 0x00000000FFFFFFFFu;
        a[k + 4] ^= change, a[k] ^= change << 32;
    }
    for (int k = 0; k < 8; k++)
        if (!(k & 2)) {
            const uint64_t change = (a[k] >> 16 ^ a[k + 2]) & 0x0000FFFF0000FFFFu;
            a[k + 2] ^= change, a[k] ^= change << 16;
        }
    for (int k = 0; k < 8; k += 2) {
        const uint64_t change = (a[k] >> 8 ^ a[k + 1]) & 0x00FF00FF00FF00FFu;
        a[k + 1] ^= change, a[k] ^= change << 8;
    }
}

typedef struct {
    const float *rows;
    int64_t blocks, n;
    float scale;
    int8_t *out;
    int bad;
} ratios_job;

static void ratio_lanes(void *argument, int64_t first, int64_t last) {
    ratios_job *job = argument;
    int8_t room[LANES][COLUMNS];
    int fine = 1;
    for (int64_t g = first; g < last; g++) {
        const int64_t left = job->blocks - g * LANES, present = left < LANES ? left : LANES;
        for (int64_t at = 0; at < job->n; at += COLUMNS) {
            const int64_t here = job->n - at < COLUMNS ? job->n - at : COLUMNS;
            if (present < LANES || here < COLUMNS) memset(room, 0, sizeof room);
            for (int64_t i = 0; i < present; i++)
                fine &= to_ratios(job->rows + (g * LANES + i) * job->n + at, here, job->scale,
                                  room[i]);
            int8_t *out = job->out + (g * job->n + at) * LANES;
            for (int64_t column = 0; column < here; column += 8)
                for (int64_t lane = 0; lane < LANES; lane += 8) {
                    const int64_t rows = here - column < 8 ? here - column : 8;
                    uint64_t a[8];
                    for (int k = 0; k < 8; k++) memcpy(a + k, room[lane + k] + column, 8);
                    turn_bytes(a);
                    for (int64_t k = 0; k < rows; k++)
                        memcpy(out + (column + k) * LANES + lane, a + k, 8);
                }
        }
    }
    if (!fine) __atomic_store_n(&job->bad, 1, __ATOMIC_RELAXED);
}

/* rows [blocks][n] to out [ceil(blocks / 64)][n][64]. Returns 1 if something is not finite. */
int32_t gw_ratios_to_lanes(const float *rows, int64_t blocks, int64_t n, float scale, int8_t *out) {
    ratios_job job = {rows, blocks, n, scale, out, 0};
    if (n > 0) gw_parallel(ratio_lanes, &job, (blocks + LANES - 1) / LANES, 1, 1 + (1 << 12) / n);
    return job.bad;
}

/* Elements to positions and back, without a transposition: see coding/polar/lanes.py. */

typedef struct {
    const int8_t *ratios;
    int64_t count, blocks, used, n;
    int32_t lanes, certain;
    int8_t *out;
} fill_job;

static void fill_groups(void *argument, int64_t first, int64_t last) {
    const fill_job *job = argument;
    const int64_t lanes = job->lanes, used = job->used;
    for (int64_t g = first; g < last; g++) {
        const int64_t left = job->blocks - g * lanes, present = left < lanes ? left : lanes;
        const int8_t *in = job->ratios + g * used * lanes;
        int64_t here = job->count - g * used * lanes;
        if (here > used * present) here = used * present;
        int8_t *out = job->out + g * job->n * lanes;
        memset(out + used * lanes, job->certain, (size_t)((job->n - used) * lanes));
        if (present == lanes) {
            memcpy(out, in, (size_t)here);
            memset(out + here, 0, (size_t)(used * lanes - here));
            continue;
        }
        memset(out, 0, (size_t)(used * lanes));
        for (int64_t i = 0; i * present < here; i++) {
            const int64_t some = here - i * present < present ? here - i * present : present;
            for (int64_t k = 0; k < some; k++) out[i * lanes + k] = in[i * present + k];
        }
    }
}

/* ratios [count] to out [ceil(blocks / lanes)][n][lanes]: of the first `used` positions, element
   i * present + b of a group with `present` blocks is position i of block b; the others say
   `certain`, and the others are 0. */
void gw_polar_fill(const int8_t *ratios, int64_t count, int64_t blocks, int64_t used, int64_t n,
                   int32_t lanes, int32_t certain, int8_t *out) {
    fill_job job = {ratios, count, blocks, used, n, lanes, certain, out};
    gw_parallel(fill_groups, &job, (blocks + lanes - 1) / lanes, 1, 1 + (1 << 14) / n);
}

/* The lowest `present` < 64 bits of each row of `width` bytes, one after the other. */
GW_INLINE void join_rows(const uint8_t *rows, int64_t count, int64_t present, int64_t width,
                         uint8_t *out) {
    uint64_t waiting = 0;
    int64_t held = 0; /* bits, fewer than 64 */
    for (int64_t i = 0; i < count; i++) {
        uint64_t row = 0;
        memcpy(&row, rows + i * width, (size_t)width);
        row &= ((uint64_t)1 << present) - 1;
        waiting |= row << held;
        held += present;
        if (held < 64) continue;
        memcpy(out, &waiting, 8);
        out += 8;
        held -= 64;
        waiting = row >> (present - held);
    }
    memcpy(out, &waiting, (size_t)(held + 7) / 8);
}

GW_INLINE void cut_rows(const uint8_t *packed, int64_t count, int64_t present, int64_t width,
                        uint8_t *rows) {
    const int64_t bytes = (count * present + 7) / 8;
    for (int64_t i = 0; i < count; i++) {
        const int64_t from = i * present / 8, shift = i * present % 8, left = bytes - from;
        uint64_t row = 0;
        if (left >= 8)
            memcpy(&row, packed + from, 8);
        else
            memcpy(&row, packed + from, (size_t)left);
        row >>= shift;
        if (shift + present > 64) row |= (uint64_t)packed[from + 8] << (64 - shift);
        row &= ((uint64_t)1 << present) - 1;
        memcpy(rows + i * width, &row, (size_t)width);
    }
}

/* rows [groups][count][lanes / 8] to bits without those of lanes that hold no block. */
void gw_join_lanes(const uint8_t *rows, int64_t groups, int64_t count, int64_t blocks,
                   int32_t lanes, uint8_t *out) {
    const int64_t width = lanes / 8, full = (groups - 1) * count * width;
    const int64_t present = blocks - (groups - 1) * lanes;
    if (!count) return; /* there may be no memory */
    memcpy(out, rows, (size_t)full);
    rows += full;
    out += full;
    if (present == lanes) {
        memcpy(out, rows, (size_t)(count * width));
        return;
    }
    switch (width) { /* constants to the compiler */
    case 1: join_rows(rows, count, present, 1, out); break;
    case 2: join_rows(rows, count, present, 2, out); break;
    case 4: join_rows(rows, count, present, 4, out); break;
    default: join_rows(rows, count, present, 8, out);
    }
}

/* The inverse; lanes that hold no block are zero. */
void gw_cut_lanes(const uint8_t *packed, int64_t groups, int64_t count, int64_t blocks,
                  int32_t lanes, uint8_t *rows) {
    const int64_t width = lanes / 8, full = (groups - 1) * count * width;
    const int64_t present = blocks - (groups - 1) * lanes;
    if (!count) return; /* there may be no memory */
    memcpy(rows, packed, (size_t)full);
    packed += full;
    rows += full;
    if (present == lanes) {
        memcpy(rows, packed, (size_t)(count * width));
        return;
    }
    switch (width) {
    case 1: cut_rows(packed, count, present, 1, rows); break;
    case 2: cut_rows(packed, count, present, 2, rows); break;
    case 4: cut_rows(packed, count, present, 4, rows); break;
    default: cut_rows(packed, count, present, 8, rows);
    }
}
