/* The fast Walsh-Hadamard transform of rows of 2^k elements, bit for bit as
   reference/hadamard.py: signs and factor, then stages of distance 1, 2, 4 ..., then signs.

   The first four stages happen inside registers, sixteen elements at a time. The others take
   three stages per pass, which adds the same numbers in the same order as three passes. A long
   row is done chunk by chunk, since a chunk stays in the first-level cache over its passes; only
   the stages that cross chunks go over the whole row.

   Signs of a rotated row are taken while it is in the cache, so that it never goes to memory. */
#include "native.h"

enum { WIDTH = 16, CHUNK_BYTES = 16384 };

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
    GW_INLINE void NAME##_radix2(T *x, int64_t n, int64_t h) {                                   \
        for (int64_t i = 0; i < n; i += 2 * h)                                                   \
            GW_INDEPENDENT for (int64_t j = i; j < i + h; j++) {                                 \
                const T a = x[j], b = x[j + h];                                                  \
                x[j] = a + b;                                                                    \
                x[j + h] = a - b;                                                                \
            }                                                                                    \
    }                                                                                            \
                                                                                                 \
    GW_INLINE void NAME##_radix4(T *x, int64_t n, int64_t h) {                                   \
        for (int64_t i = 0; i < n; i += 4 * h)                                                   \
            GW_INDEPENDENT for (int64_t j = i; j < i + h; j++) {                                 \
                const T a = x[j], b = x[j + h], c = x[j + 2 * h], d = x[j + 3 * h];              \
                const T e = a + b, f = a - b, g = c + d, k = c - d;                              \
                x[j] = e + g;                                                                    \
                x[j + h] = f + k;                                                                \
                x[j + 2 * h] = e - g;                                                            \
                x[j + 3 * h] = f - k;                                                            \
            }                                                                                    \
    }                                                                                            \
                                                                                                 \
    GW_INLINE void NAME##_radix8(T *x, int64_t n, int64_t h) {                                   \
        for (int64_t i = 0; i < n; i += 8 * h)                                                   \
            GW_INDEPENDENT for (int64_t j = i; j < i + h; j++) {                                 \
                const T a0 = x[j], a1 = x[j + h], a2 = x[j + 2 * h], a3 = x[j + 3 * h];          \
                const T a4 = x[j + 4 * h], a5 = x[j + 5 * h];                                    \
                const T a6 = x[j + 6 * h], a7 = x[j + 7 * h];                                    \
                const T b0 = a0 + a1, b1 = a0 - a1, b2 = a2 + a3, b3 = a2 - a3;                  \
                const T b4 = a4 + a5, b5 = a4 - a5, b6 = a6 + a7, b7 = a6 - a7;                  \
                const T c0 = b0 + b2, c1 = b1 + b3, c2 = b0 - b2, c3 = b1 - b3;                  \
                const T c4 = b4 + b6, c5 = b5 + b7, c6 = b4 - b6, c7 = b5 - b7;                  \
                x[j] = c0 + c4;                                                                  \
                x[j + h] = c1 + c5;                                                              \
                x[j + 2 * h] = c2 + c6;                                                          \
                x[j + 3 * h] = c3 + c7;                                                          \
                x[j + 4 * h] = c0 - c4;                                                          \
                x[j + 5 * h] = c1 - c5;                                                          \
                x[j + 6 * h] = c2 - c6;                                                          \
                x[j + 7 * h] = c3 - c7;                                                          \
            }                                                                                    \
    }                                                                                            \
                                                                                                 \
    /* Stages h, 2h ... n/2 of x[0 .. n). */                                                     \
    GW_INLINE void NAME##_stages(T *x, int64_t n, int64_t h) {                                   \
        while (h < n) {                                                                          \
            const int64_t left = n / h; /* 2 to the number of stages left */                     \
            if (left >= 8 && left != 16) {                                                       \
                NAME##_radix8(x, n, h);                                                          \
                h *= 8;                                                                          \
            } else if (left >= 4) {                                                              \
                NAME##_radix4(x, n, h);                                                          \
                h *= 4;                                                                          \
            } else {                                                                             \
                NAME##_radix2(x, n, h);                                                          \
                h *= 2;                                                                          \
            }                                                                                    \
        }                                                                                        \
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
            for (int64_t h = 1; h < n; h *= 2) NAME##_radix2(out, n, h);                         \
            if (after) NAME##_flip(out, n, after, first);                                        \
            return;                                                                              \
        }                                                                                        \
        for (int64_t start = 0; start < n; start += chunk) {                                     \
            for (int64_t i = start; i < start + chunk; i += WIDTH) {                             \
                V low = *(const V *)(in + i) * scale;                                            \
                V high = *(const V *)(in + i + 8) * scale;                                       \
                if (before) {                                                                    \
                    NAME##_flip8((T *)&low, before[(first + i) / 8]);                            \
                    NAME##_flip8((T *)&high, before[(first + i) / 8 + 1]);                       \
                }                                                                                \
                NAME##_eight(&low);                                                              \
                NAME##_eight(&high);                                                             \
                *(V *)(out + i) = low + high;                                                    \
                *(V *)(out + i + 8) = low - high;                                                \
            }                                                                                    \
            NAME##_stages(out + start, chunk, WIDTH);                                            \
        }                                                                                        \
        if (n > chunk) NAME##_stages(out, n, chunk);                                             \
        if (after) NAME##_flip(out, n, after, first);                                            \
    }                                                                                            \
                                                                                                 \
    GW_CLONES static void NAME(const T *in, int64_t rows, int64_t n, T scale,                    \
                               const uint8_t *before, const uint8_t *after, T *out) {            \
        for (int64_t row = 0; row < rows; row++)                                                 \
            NAME##_row(in + row * n, n, scale, before, after, row * n, out + row * n);           \
    }

GW_TRANSFORM(hadamard_float, float, uint32_t, f32x8, u32x8)
GW_TRANSFORM(hadamard_double, double, uint64_t, f64x8, u64x8)

void gw_hadamard(const void *in, int32_t element_bytes, int64_t rows, int64_t n, double scale,
                 const uint8_t *before, const uint8_t *after, void *out) {
    if (element_bytes == 4) hadamard_float(in, rows, n, (float)scale, before, after, out);
    else hadamard_double(in, rows, n, scale, before, after, out);
}

/* The sums of |y| and y^2 in float64 along a tree: element i meets i + n/2, sums meet at a distance
   of n/4, ... The first three levels are done at once. n >= 8; room for 2 (n / 8) numbers. */
GW_INLINE void norms(const float *y, int64_t n, double *room, double *sum, double *squares) {
    const int64_t h = n / 8;
    double *s = room, *q = room + h;
    GW_INDEPENDENT for (int64_t i = 0; i < h; i++) {
        double a[8], b[8];
        for (int k = 0; k < 8; k++) {
            a[k] = (double)__builtin_fabsf(y[i + k * h]);
            b[k] = a[k] * a[k];
        }
        s[i] = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
        q[i] = ((b[0] + b[4]) + (b[2] + b[6])) + ((b[1] + b[5]) + (b[3] + b[7]));
    }
    for (int64_t half = h / 2; half > 0; half /= 2)
        GW_INDEPENDENT for (int64_t i = 0; i < half; i++) {
            s[i] += s[i + half];
            q[i] += q[i + half];
        }
    *sum = s[0];
    *squares = q[0];
}

/* n >= 8. `row` has room for n, `room` for n / 4 numbers. */
GW_CLONES void gw_rotated_signs(const float *in, int64_t rows, int64_t n, double scale,
                                const uint8_t *before, float *row, double *room, uint8_t *packed,
                                double *sum, double *squares) {
    for (int64_t r = 0; r < rows; r++, packed += n / 8) {
        hadamard_float_row(in + r * n, n, (float)scale, before, 0, r * n, row);
        norms(row, n, room, sum + r, squares + r);
        for (int64_t i = 0; i < n; i += 8) {
            uint8_t positive[8];
            uint64_t bytes;
            for (int k = 0; k < 8; k++) positive[k] = row[i + k] >= 0;
            memcpy(&bytes, positive, 8);
            packed[i / 8] = (uint8_t)((bytes * 0x0102040810204080u) >> 56);
        }
    }
}

GW_CLONES void gw_unrotated_signs(const uint8_t *packed, const float *sizes, int64_t rows,
                                  int64_t n, double scale, const uint8_t *after, float *out) {
    for (int64_t r = 0; r < rows; r++, packed += n / 8) {
        float *row = out + r * n;
        const float size = sizes[r];
        for (int64_t i = 0; i < n; i += 8) {
            for (int k = 0; k < 8; k++) row[i + k] = size;
            hadamard_float_flip8(row + i, (uint8_t)~packed[i / 8]);
        }
        hadamard_float_row(row, n, (float)scale, 0, after, r * n, row);
    }
}
