/* The fast Walsh-Hadamard transform of rows of 2^k elements, bit for bit as
   reference/hadamard.py: signs and factor, then stages of distance 1, 2, 4 ..., then signs.

   The first four stages happen inside registers, sixteen elements at a time. The others take
   three stages per pass, which adds the same numbers in the same order as three passes. A long
   row is done chunk by chunk, since a chunk stays in the first-level cache over its passes; only
   the stages that cross chunks go over the whole row.

   Signs of a rotated row are taken while it is in the cache, so that it never goes to memory. */
#include "threads.h"

/* Rows from SHARED elements on are shared by the threads; shorter ones are handed out whole. */
enum { WIDTH = 16, CHUNK_BYTES = 16384, SHARED = 1 << 18, LEAST = 1 << 16, GRAIN = 1024 };

/* How many stages, as a power of two, the next pass takes of those left. */
GW_INLINE int next_radix(int64_t left) {
    return left >= 8 && left != 16 ? 8 : left >= 4 ? 4 : 2;
}

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define GW_SWAP(x, a, b, c, d, e, f, g, h) __builtin_shufflevector(x, x, a, b, c, d, e, f, g, h)
#endif
#endif
#ifndef GW_SWAP
#define GW_SWAP(x, a, b, c, d, e, f, g, h) \
    __builtin_shuffle(x, (__typeof__((x) < (x))){a, b, c, d, e, f, g, h})
#endif

#if defined(__clang__)
#define GW_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define GW_INDEPENDENT _Pragma("GCC ivdep")
#endif

/* T: the element; I: an integer as wide, V and M: eight of each. */
#define GW_TRANSFORM(NAME, T, I, V, M)                                                           \
    typedef T V __attribute__((vector_size(8 * sizeof(T)), aligned(sizeof(T)), may_alias));      \
    typedef I M __attribute__((vector_size(8 * sizeof(T)), aligned(sizeof(T)), may_alias));      \
                                                                                                 \
    /* Bit i of `bits` flips the sign of element i. */                                           \
    GW_INLINE void NAME##_flip8(T *x, uint8_t bits) {                                            \
        const M place = {1, 2, 4, 8, 16, 32, 64, 128};                                           \
        const M zero = {0};                                                                      \
        const I top = (I)((I)1 << (8 * sizeof(T) - 1));                                          \
        const M set = (M)(((zero + (I)bits) & place) != zero);                                   \
        *(M *)x ^= set & (zero + top);                                                           \
    }                                                                                            \
                                                                                                 \
    GW_INLINE void NAME##_flip(T *x, int64_t n, const uint8_t *bits, int64_t first) {            \
        int64_t i = 0;                                                                           \
        if (first % 8 == 0)                                                                      \
            for (; i + 8 <= n; i += 8) NAME##_flip8(x + i, bits[(first + i) / 8]);               \
        for (; i < n; i++)                                                                       \
            if (bits[(first + i) / 8] >> ((first + i) % 8) & 1) x[i] = -x[i];                    \
    }                                                                                            \
                                                                                                 \
    /* Stages 1, 2 and 4 of eight elements: the partner comes by a shuffle, and of each pair     \
       the second is negated, since a + (-b) is a - b to the bit. */                             \
    GW_INLINE void NAME##_eight(V *y) {                                                          \
        const I t = (I)((I)1 << (8 * sizeof(T) - 1));                                            \
        const M one = {0, t, 0, t, 0, t, 0, t}, two = {0, 0, t, t, 0, 0, t, t};                  \
        const M four = {0, 0, 0, 0, t, t, t, t};                                                 \
        V x = *y;                                                                                \
        x = GW_SWAP(x, 1, 0, 3, 2, 5, 4, 7, 6) + (V)((M)x ^ one);                                \
        x = GW_SWAP(x, 2, 3, 0, 1, 6, 7, 4, 5) + (V)((M)x ^ two);                                \
        *y = GW_SWAP(x, 4, 5, 6, 7, 0, 1, 2, 3) + (V)((M)x ^ four);                              \
    }                                                                                            \
                                                                                                 \
    GW_INLINE void NAME##_radix2(T *x, int64_t h, int64_t from, int64_t to) {                    \
        GW_INDEPENDENT for (int64_t j = from; j < to; j++) {                                     \
            const T a = x[j], b = x[j + h];                                                      \
            x[j] = a + b;                                                                        \
            x[j + h] = a - b;                                                                    \
        }                                                                                        \
    }                                                                                            \
                                                                                                 \
    GW_INLINE void NAME##_radix4(T *x, int64_t h, int64_t from, int64_t to) {                    \
        GW_INDEPENDENT for (int64_t j = from; j < to; j++) {                                     \
            const T a = x[j], b = x[j + h], c = x[j + 2 * h], d = x[j + 3 * h];                  \
            const T e = a + b, f = a - b, g = c + d, k = c - d;                                  \
            x[j] = e + g;                                                                        \
            x[j + h] = f + k;                                                                    \
            x[j + 2 * h] = e - g;                                                                \
            x[j + 3 * h] = f - k;                                                                \
        }                                                                                        \
    }                                                                                            \
                                                                                                 \
    GW_INLINE void NAME##_radix8(T *x, int64_t h, int64_t from, int64_t to) {                    \
        GW_INDEPENDENT for (int64_t j = from; j < to; j++) {                                     \
            const T a0 = x[j], a1 = x[j + h], a2 = x[j + 2 * h], a3 = x[j + 3 * h];              \
            const T a4 = x[j + 4 * h], a5 = x[j + 5 * h];                                        \
            const T a6 = x[j + 6 * h], a7 = x[j + 7 * h];                                        \
            const T b0 = a0 + a1, b1 = a0 - a1, b2 = a2 + a3, b3 = a2 - a3;                      \
            const T b4 = a4 + a5, b5 = a4 - a5, b6 = a6 + a7, b7 = a6 - a7;                      \
            const T c0 = b0 + b2, c1 = b1 + b3, c2 = b0 - b2, c3 = b1 - b3;                      \
            const T c4 = b4 + b6, c5 = b5 + b7, c6 = b4 - b6, c7 = b5 - b7;                      \
            x[j] = c0 + c4;                                                                      \
            x[j + h] = c1 + c5;                                                                  \
            x[j + 2 * h] = c2 + c6;                                                              \
            x[j + 3 * h] = c3 + c7;                                                              \
            x[j + 4 * h] = c0 - c4;                                                              \
            x[j + 5 * h] = c1 - c5;                                                              \
            x[j + 6 * h] = c2 - c6;                                                              \
            x[j + 7 * h] = c3 - c7;                                                              \
        }                                                                                        \
    }                                                                                            \
                                                                                                 \
    /* The stages of one pass, for the columns `from` to `to` of all groups of `radix` times h   \
       elements. Columns are counted over groups: h to a group. */                               \
    GW_INLINE void NAME##_pass(T *x, int64_t h, int radix, int64_t from, int64_t to) {           \
        for (int64_t at = from, end; at < to; at = end) {                                        \
            const int64_t group = at / h, first = at - group * h;                                \
            T *y = x + group * radix * h;                                                        \
            end = to < (group + 1) * h ? to : (group + 1) * h;                                   \
            if (radix == 8) NAME##_radix8(y, h, first, first + (end - at));                      \
            else if (radix == 4) NAME##_radix4(y, h, first, first + (end - at));                 \
            else NAME##_radix2(y, h, first, first + (end - at));                                 \
        }                                                                                        \
    }                                                                                            \
                                                                                                 \
    /* Stages h, 2h ... n/2 of x[0 .. n). */                                                     \
    GW_INLINE void NAME##_stages(T *x, int64_t n, int64_t h) {                                   \
        while (h < n) {                                                                          \
            const int radix = next_radix(n / h);                                                 \
            for (int64_t i = 0; i < n; i += radix * h)                                           \
                if (radix == 8) NAME##_radix8(x + i, h, 0, h);                                   \
                else if (radix == 4) NAME##_radix4(x + i, h, 0, h);                              \
                else NAME##_radix2(x + i, h, 0, h);                                              \
            h *= radix;                                                                          \
        }                                                                                        \
    }                                                                                            \
                                                                                                 \
    /* Factor, signs and all stages within chunk elements from `start` on; chunk >= WIDTH. */    \
    GW_INLINE void NAME##_chunk(const T *in, int64_t start, int64_t chunk, T scale,              \
                                const uint8_t *before, int64_t first, T *out) {                  \
        for (int64_t i = start; i < start + chunk; i += WIDTH) {                                 \
            V low = *(const V *)(in + i) * scale;                                                \
            V high = *(const V *)(in + i + 8) * scale;                                           \
            if (before) {                                                                        \
                NAME##_flip8((T *)&low, before[(first + i) / 8]);                                \
                NAME##_flip8((T *)&high, before[(first + i) / 8 + 1]);                           \
            }                                                                                    \
            NAME##_eight(&low);                                                                  \
            NAME##_eight(&high);                                                                 \
            *(V *)(out + i) = low + high;                                                        \
            *(V *)(out + i + 8) = low - high;                                                    \
        }                                                                                        \
        NAME##_stages(out + start, chunk, WIDTH);                                                \
    }                                                                                            \
                                                                                                 \
    /* One row, of whose signs `first` is the bit of the first element; `in` may be `out`. */    \
    GW_INLINE void NAME##_row(const T *in, int64_t n, T scale, const uint8_t *before,            \
                              const uint8_t *after, int64_t first, T *out) {                     \
        const int64_t longest = CHUNK_BYTES / (int64_t)sizeof(T);                                \
        const int64_t chunk = n < longest ? n : longest;                                         \
        if (n < WIDTH) {                                                                         \
            for (int64_t i = 0; i < n; i++) out[i] = in[i] * scale;                              \
            if (before) NAME##_flip(out, n, before, first);                                      \
            for (int64_t h = 1; h < n; h *= 2)                                                   \
                for (int64_t i = 0; i < n; i += 2 * h) NAME##_radix2(out + i, h, 0, h);          \
            if (after) NAME##_flip(out, n, after, first);                                        \
            return;                                                                              \
        }                                                                                        \
        for (int64_t start = 0; start < n; start += chunk)                                       \
            NAME##_chunk(in, start, chunk, scale, before, first, out);                           \
        if (n > chunk) NAME##_stages(out, n, chunk);                                             \
        if (after) NAME##_flip(out, n, after, first);                                            \
    }                                                                                            \
                                                                                                 \
    typedef struct {                                                                             \
        const T *in;                                                                             \
        int64_t n;                                                                               \
        T scale;                                                                                 \
        const uint8_t *before, *after;                                                           \
        int64_t first; /* the bit of the first sign */                                           \
        T *out;                                                                                  \
        int64_t h; /* of a pass over a shared row */                                             \
        int radix;                                                                               \
    } NAME##_job;                                                                                \
                                                                                                 \
    GW_CLONES static void NAME##_rows(void *job, int64_t first, int64_t last) {                  \
        const NAME##_job *j = job;                                                               \
        for (int64_t i = first * j->n; i < last * j->n; i += j->n)                               \
            NAME##_row(j->in + i, j->n, j->scale, j->before, j->after, j->first + i, j->out + i);\
    }                                                                                            \
                                                                                                 \
    GW_CLONES static void NAME##_chunks(void *job, int64_t first, int64_t last) {                \
        const NAME##_job *j = job;                                                               \
        const int64_t chunk = CHUNK_BYTES / (int64_t)sizeof(T);                                  \
        for (int64_t i = first; i < last; i++)                                                   \
            NAME##_chunk(j->in, i * chunk, chunk, j->scale, j->before, j->first, j->out);        \
    }                                                                                            \
                                                                                                 \
    GW_CLONES static void NAME##_columns(void *job, int64_t first, int64_t last) {               \
        const NAME##_job *j = job;                                                               \
        NAME##_pass(j->out, j->h, j->radix, first, last);                                        \
    }                                                                                            \
                                                                                                 \
    GW_CLONES static void NAME##_after(void *job, int64_t first, int64_t last) {                 \
        const NAME##_job *j = job;                                                               \
        NAME##_flip(j->out + first, last - first, j->after, j->first + first);                   \
    }                                                                                            \
                                                                                                 \
    /* One row, on all threads. */                                                               \
    static void NAME##_shared(NAME##_job *j) {                                                   \
        const int64_t chunk = CHUNK_BYTES / (int64_t)sizeof(T);                                  \
        gw_parallel(NAME##_chunks, j, j->n / chunk, 1, LEAST / chunk);                           \
        for (j->h = chunk; j->h < j->n; j->h *= j->radix) {                                      \
            j->radix = next_radix(j->n / j->h);                                                  \
            gw_parallel(NAME##_columns, j, j->n / j->radix, GRAIN, LEAST / 8);                   \
        }                                                                                        \
        if (j->after) gw_parallel(NAME##_after, j, j->n, GRAIN, LEAST);                          \
    }                                                                                            \
                                                                                                 \
    static void NAME(const T *in, int64_t rows, int64_t n, T scale, const uint8_t *before,       \
                     const uint8_t *after, T *out) {                                             \
        NAME##_job j = {in, n, scale, before, after, 0, out, 0, 0};                              \
        if (n < SHARED) {                                                                        \
            gw_parallel(NAME##_rows, &j, rows, 1, LEAST / n);                                    \
            return;                                                                              \
        }                                                                                        \
        for (; j.first < rows * n; j.first += n, j.in += n, j.out += n) NAME##_shared(&j);       \
    }

GW_TRANSFORM(hadamard_float, float, uint32_t, f32x8, u32x8)
GW_TRANSFORM(hadamard_double, double, uint64_t, f64x8, u64x8)

void gw_hadamard(const void *in, int32_t element_bytes, int64_t rows, int64_t n, double scale,
                 const uint8_t *before, const uint8_t *after, void *out) {
    if (element_bytes == 4) hadamard_float(in, rows, n, (float)scale, before, after, out);
    else hadamard_double(in, rows, n, scale, before, after, out);
}

/* The sums of |y| and y^2 in float64 along a tree: element i meets i + n/2, sums meet at a distance
   of n/4, ... The first three levels are done at once, for columns `from` to `to` of h = n / 8. */
GW_INLINE void norm_columns(const float *y, int64_t h, int64_t from, int64_t to, double *s,
                            double *q) {
    GW_INDEPENDENT for (int64_t i = from; i < to; i++) {
        double a[8], b[8];
        for (int k = 0; k < 8; k++) {
            a[k] = (double)__builtin_fabsf(y[i + k * h]);
            b[k] = a[k] * a[k];
        }
        s[i] = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
        q[i] = ((b[0] + b[4]) + (b[2] + b[6])) + ((b[1] + b[5]) + (b[3] + b[7]));
    }
}

GW_INLINE void halve(double *s, double *q, int64_t half, int64_t from, int64_t to) {
    GW_INDEPENDENT for (int64_t i = from; i < to; i++) {
        s[i] += s[i + half];
        q[i] += q[i + half];
    }
}

/* n >= 8; room for 2 (n / 8) numbers. */
GW_INLINE void norms(const float *y, int64_t n, double *room, double *sum, double *squares) {
    const int64_t h = n / 8;
    norm_columns(y, h, 0, h, room, room + h);
    for (int64_t half = h / 2; half > 0; half /= 2) halve(room, room + h, half, 0, half);
    *sum = room[0];
    *squares = room[h];
}

GW_INLINE void pack_positive(const float *row, int64_t n, uint8_t *packed) {
    for (int64_t i = 0; i < n; i += 8) {
        uint8_t positive[8];
        uint64_t bytes;
        for (int k = 0; k < 8; k++) positive[k] = row[i + k] >= 0;
        memcpy(&bytes, positive, 8);
        packed[i / 8] = (uint8_t)((bytes * 0x0102040810204080u) >> 56);
    }
}

typedef struct {
    hadamard_float_job transform; /* its `out`: the rows that threads work in */
    double *room;
    uint8_t *packed;
    double *sum, *squares;
    int64_t half; /* of the tree of a shared row */
} signing;

GW_CLONES static void sign_rows(void *job, int64_t first, int64_t last) {
    const signing *s = job;
    const hadamard_float_job *t = &s->transform;
    float *row = t->out + gw_thread_number() * t->n;
    double *room = s->room + gw_thread_number() * (t->n / 4);
    for (int64_t r = first; r < last; r++) {
        const int64_t at = r * t->n;
        hadamard_float_row(t->in + at, t->n, t->scale, t->before, 0, at, row);
        norms(row, t->n, room, s->sum + r, s->squares + r);
        pack_positive(row, t->n, s->packed + at / 8);
    }
}

/* The levels of `norms` for a shared row: the first three, then one at a time. */
GW_CLONES static void square_columns(void *job, int64_t first, int64_t last) {
    const signing *s = job;
    const int64_t h = s->transform.n / 8;
    norm_columns(s->transform.out, h, first, last, s->room, s->room + h);
}

GW_CLONES static void halve_columns(void *job, int64_t first, int64_t last) {
    const signing *s = job;
    halve(s->room, s->room + s->transform.n / 8, s->half, first, last);
}

GW_CLONES static void sign_part(void *job, int64_t first, int64_t last) {
    const signing *s = job;
    uint8_t *packed = s->packed + (s->transform.first + first) / 8;
    pack_positive(s->transform.out + first, last - first, packed);
}

/* n >= 8. `row` has room for n and `room` for n / 4 numbers, for each thread if n < SHARED. */
void gw_rotated_signs(const float *in, int64_t rows, int64_t n, double scale,
                      const uint8_t *before, float *row, double *room, uint8_t *packed,
                      double *sum, double *squares) {
    signing s = {{in, n, (float)scale, before, 0, 0, row, 0, 0}, room, packed, sum, squares, 0};
    if (n < SHARED) {
        gw_parallel(sign_rows, &s, rows, 1, LEAST / n);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        hadamard_float_shared(&s.transform);
        gw_parallel(square_columns, &s, n / 8, GRAIN, LEAST / 8);
        for (s.half = n / 16; s.half > 0; s.half /= 2)
            gw_parallel(halve_columns, &s, s.half, GRAIN, LEAST);
        sum[r] = room[0];
        squares[r] = room[n / 8];
        gw_parallel(sign_part, &s, n, GRAIN, LEAST);
        s.transform.in += n;
        s.transform.first += n;
    }
}

typedef struct {
    hadamard_float_job transform; /* in place */
    const uint8_t *packed;
    const float *sizes;
} unsigning;

/* Plus or minus `size`, from the bit of the first element on. */
GW_INLINE void unpack_positive(const uint8_t *packed, float size, int64_t n, float *row) {
    for (int64_t i = 0; i < n; i += 8) {
        for (int k = 0; k < 8; k++) row[i + k] = size;
        hadamard_float_flip8(row + i, (uint8_t)~packed[i / 8]);
    }
}

GW_CLONES static void unsign_rows(void *job, int64_t first, int64_t last) {
    const unsigning *u = job;
    const hadamard_float_job *t = &u->transform;
    for (int64_t r = first; r < last; r++) {
        const int64_t at = r * t->n;
        unpack_positive(u->packed + at / 8, u->sizes[r], t->n, t->out + at);
        hadamard_float_row(t->out + at, t->n, t->scale, 0, t->after, at, t->out + at);
    }
}

GW_CLONES static void unsign_part(void *job, int64_t first, int64_t last) {
    const unsigning *u = job;
    const uint8_t *packed = u->packed + (u->transform.first + first) / 8;
    unpack_positive(packed, *u->sizes, last - first, u->transform.out + first);
}

void gw_unrotated_signs(const uint8_t *packed, const float *sizes, int64_t rows, int64_t n,
                        double scale, const uint8_t *after, float *out) {
    unsigning u = {{out, n, (float)scale, 0, after, 0, out, 0, 0}, packed, sizes};
    if (n < SHARED) {
        gw_parallel(unsign_rows, &u, rows, 1, LEAST / n);
        return;
    }
    for (int64_t r = 0; r < rows; r++, u.sizes++) {
        gw_parallel(unsign_part, &u, n, GRAIN, LEAST);
        hadamard_float_shared(&u.transform);
        u.transform.in = u.transform.out += n;
        u.transform.first += n;
    }
}
