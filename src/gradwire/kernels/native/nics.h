/* NICs that serve in order: the same operations in the same order as `Nics` in
   runtime/network/network.py, so that times are the same to the last bit. */
#ifndef GRADWIRE_NICS_H
#define GRADWIRE_NICS_H

#include "native.h"

typedef struct {
    int32_t num_nodes;
    double *egress, *ingress, *delivered; /* delivered[dst][src] */
    const double *bandwidth, *latency;
} nics;

/* Queues a message for sending: when its first bit reaches the receiver. */
GW_INLINE double leave(const nics *n, double now, int32_t src, int64_t nbytes) {
    const double free_at = n->egress[src], start = now > free_at ? now : free_at;
    n->egress[src] = start + (double)nbytes / n->bandwidth[src];
    return start + n->latency[src];
}

/* The first bit is here: when the last one will be. */
GW_INLINE double arrive(const nics *n, double now, int32_t src, int32_t dst, int64_t nbytes) {
    const double free_at = n->ingress[dst], start = now > free_at ? now : free_at;
    double arrival = start + (double)nbytes / n->bandwidth[dst];
    n->ingress[dst] = arrival;
    /* Not before its sender has sent it, nor before the message before it. */
    const double sent = now + (double)nbytes / n->bandwidth[src];
    double *earlier = &n->delivered[(int64_t)dst * n->num_nodes + src];
    if (sent > arrival) arrival = sent;
    if (*earlier > arrival) arrival = *earlier;
    *earlier = arrival;
    return arrival;
}

/* Whether an event comes before another: by time, then in the order they were added. */
GW_INLINE int is_before(double at, int64_t number, double other_at, int64_t other_number) {
    return at < other_at || (at == other_at && number < other_number);
}

#endif
