/* What every native kernel shares. The library knows nothing of Python or torch: pointers and
   lengths come in through ctypes, and the caller has checked that the lengths agree. */
#ifndef GRADWIRE_NATIVE_H
#define GRADWIRE_NATIVE_H

#include <stdint.h>
#include <string.h>

/* Raise it, here and in _library.py, with every change of a signature: an editable install
   may hold a library from before the change. */
#define GW_VERSION 5

/* Elsewhere the optional build fails and the torch reference runs. */
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the native kernels assume a little-endian machine"
#endif

#define GW_INLINE static inline __attribute__((always_inline))

/* One body, several instruction sets, chosen when the library is loaded. The choice needs
   indirect functions, which musl and macOS lack; they get the compiler's baseline. Features
   are named by level because "arch=skylake-avx512" would ask for Intel's model, not for the
   instructions; gcc knows levels from 12 on. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#if defined(__clang__) || __GNUC__ >= 12
#define GW_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define GW_CLONES __attribute__((target_clones("avx2", "default")))
#endif
#endif
#endif
#ifndef GW_CLONES
#define GW_CLONES
#endif

#endif
