/* Parts of one job on several threads. The results of a kernel must not depend on how many there
   are: parts begin at multiples of `grain`, and what is summed over parts is summed along a tree
   that does not know them. */
#ifndef GRADWIRE_THREADS_H
#define GRADWIRE_THREADS_H

#include "native.h"

enum { GW_MOST_THREADS = 64 };

typedef void (*gw_task)(void *job, int64_t first, int64_t last);

/* How many threads the kernels that this thread calls may run on, itself included. */
void gw_use_threads(int32_t count);

/* How many that is; one inside a task. */
int32_t gw_threads(void);

/* For tests: parts of at least this many items, whatever a kernel asks for; 0 ends it. */
void gw_least_items(int64_t items);

/* Calls task(job, first, last) for parts that make up 0 .. items; returns when all are done. A part
   has about `least` items or more, so that what it takes to start a thread (10 to 30 us) is little
   against it, and begins at a multiple of `grain`. There are more parts than threads, and a thread
   takes the next when it is done with one: it may be slowed down by others on its processor. */
void gw_parallel(gw_task task, void *job, int64_t items, int64_t grain, int64_t least);

/* Into how many parts to cut what gw_parallel is to do, for a kernel that keeps a result of each
   part: 1 if there is one thread. The kernel then calls gw_parallel with parts as items. */
int64_t gw_parts(int64_t items, int64_t least);

/* Inside a task, the number of the thread that runs it, below the count given to gw_use_threads
   and GW_MOST_THREADS; for memory that tasks use one after another. */
int32_t gw_thread_number(void);

#endif
