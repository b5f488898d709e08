/* Stores that go past the caches, for results larger than those. A plain store first reads the
   line it is about to overwrite: a third of the traffic of a kernel that reads one vector and
   writes another. */
#ifndef GRADWIRE_STREAM_H
#define GRADWIRE_STREAM_H

#include "native.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

enum { STREAM_BYTES = 1 << 23 }; /* smaller results are likely to be read from the cache soon */

/* Copies `size` bytes out of a staging array; `past_caches` only if the result is large. */
GW_INLINE void put(void *out, const void *staged, int64_t size, int past_caches) {
#if defined(__x86_64__)
    char *to = out;
    const char *from = staged;
    if (past_caches && (uintptr_t)to % 16 == 0) {
        int64_t i = 0;
        for (; i + 64 <= size; i += 64) {
            const __m128i a = _mm_loadu_si128((const __m128i *)(from + i));
            const __m128i b = _mm_loadu_si128((const __m128i *)(from + i + 16));
            const __m128i c = _mm_loadu_si128((const __m128i *)(from + i + 32));
            const __m128i d = _mm_loadu_si128((const __m128i *)(from + i + 48));
            _mm_stream_si128((__m128i *)(to + i), a);
            _mm_stream_si128((__m128i *)(to + i + 16), b);
            _mm_stream_si128((__m128i *)(to + i + 32), c);
            _mm_stream_si128((__m128i *)(to + i + 48), d);
        }
        if (i < size) memcpy(to + i, from + i, (size_t)(size - i));
        return;
    }
#else
    (void)past_caches;
#endif
    memcpy(out, staged, (size_t)size);
}

/* Makes the streamed stores visible to other threads, as plain ones are. */
GW_INLINE void put_done(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* x + residual of one block; without a residual, x. */
GW_INLINE void corrected(const float *x, const float *residual, int64_t count, float *p) {
    if (residual)
        for (int64_t i = 0; i < count; i++) p[i] = x[i] + residual[i];
    else memcpy(p, x, (size_t)count * sizeof *p);
}

#endif
