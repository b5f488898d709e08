/* Parts of one job on several threads. The results of a kernel must not depend on how many there
   are: parts begin at multiples of `grain`, and what is summed over parts is summed along a tree
   that does not know them. */
#ifndef GRADWIRE_THREADS_H
#define GRADWIRE_THREADS_H

#include "native.h"

typedef void (*gw_task)(void *job, int64_t first, int64_t last);

/* How many threads the kernels that this thread calls may run on, itself included. */
void gw_use_threads(int32_t count);

/* Calls task(job, first, last) for parts that make up 0 .. items; returns when all are done. A part
   has at least `least` items, so that what it takes to start a thread (10 to 30 us) is little
   against it, and begins at a multiple of `grain`. */
void gw_parallel(gw_task task, void *job, int64_t items, int64_t grain, int64_t least);

#endif
