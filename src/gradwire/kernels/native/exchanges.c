/* The messages of exchanges under way: heads in the order of their times, through the NICs of the
   receivers.

   A post is what one member of an exchange sends to the others. Its heads are in order, so a heap
   of posts has all of them. Numbers are those that events get in the order they are added. */
#include <stdlib.h>

#include "nics.h"

typedef struct {
    int32_t size, open; /* members; that have not got all */
    int32_t *left;                /* messages that each member has not got */
    double *last_at;              /* when the last message of each is there, and its event */
    int64_t *last_number;
} exchange;

typedef struct {
    double *heads; /* when the first bit of each message reaches its receiver */
    int32_t *members;
    int64_t *nbytes; /* by member; null: `same` */
    int64_t same, number;
    int32_t exchange, rank, size, next;
} post;

typedef struct {
    nics nics;
    exchange *exchanges;
    int64_t num_exchanges, room_exchanges;
    post **heap;
    int64_t num_posts, room_posts;
} network;

static int posts_before(const post *a, const post *b) {
    return is_before(a->heads[a->next], a->number + a->next, b->heads[b->next],
                     b->number + b->next);
}

static void sift_down(network *n) {
    post *moved = n->heap[0];
    int64_t at = 0;
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= n->num_posts) break;
        if (child + 1 < n->num_posts && posts_before(n->heap[child + 1], n->heap[child])) child++;
        if (!posts_before(n->heap[child], moved)) break;
        n->heap[at] = n->heap[child];
        at = child;
    }
    n->heap[at] = moved;
}

static void sift_up(network *n, int64_t at) {
    post *moved = n->heap[at];
    for (; at > 0 && posts_before(moved, n->heap[(at - 1) / 2]); at = (at - 1) / 2)
        n->heap[at] = n->heap[(at - 1) / 2];
    n->heap[at] = moved;
}

static void free_post(post *p) {
    if (!p) return;
    free(p->heads);
    free(p->members);
    free(p->nbytes);
    free(p);
}

static void free_exchange(exchange *e) {
    free(e->left);
    free(e->last_at);
    free(e->last_number);
    memset(e, 0, sizeof *e);
}

network *gw_exchanges_new(int32_t num_nodes, double *egress, double *ingress, double *delivered,
                          const double *bandwidth, const double *latency) {
    network *n = calloc(1, sizeof *n);
    if (!n) return 0;
    n->nics = (nics){num_nodes, egress, ingress, delivered, bandwidth, latency};
    return n;
}

/* Forgets what is under way. */
void gw_exchanges_clear(network *n) {
    for (int64_t i = 0; i < n->num_posts; i++) free_post(n->heap[i]);
    for (int64_t i = 0; i < n->num_exchanges; i++) free_exchange(&n->exchanges[i]);
    n->num_posts = n->num_exchanges = 0;
}

void gw_exchanges_free(network *n) {
    gw_exchanges_clear(n);
    free(n->heap);
    free(n->exchanges);
    free(n);
}

/* A new exchange of so many members: its number, or -1 without memory. Numbers of exchanges that
   have ended are used again. */
int64_t gw_exchanges_begin(network *n, int32_t size) {
    int64_t number = 0;
    while (number < n->num_exchanges && n->exchanges[number].left) number++;
    if (number == n->room_exchanges) {
        const int64_t room = 2 * n->room_exchanges + 8;
        exchange *more = realloc(n->exchanges, (size_t)room * sizeof *more);
        if (!more) return -1;
        n->exchanges = more;
        n->room_exchanges = room;
    }
    exchange *e = &n->exchanges[number];
    e->size = e->open = size;
    e->left = malloc((size_t)size * sizeof *e->left);
    e->last_at = calloc((size_t)size, sizeof *e->last_at);
    e->last_number = calloc((size_t)size, sizeof *e->last_number);
    if (!e->left || !e->last_at || !e->last_number) {
        free_exchange(e);
        return -1;
    }
    for (int32_t rank = 0; rank < size; rank++) e->left[rank] = size - 1;
    if (number == n->num_exchanges) n->num_exchanges++;
    return number;
}

/* Member `rank` sends at `now`; its events begin with `number`. The ledger's rows of the sender
   are counted. -1 without memory. */
int32_t gw_exchanges_post(network *n, int64_t which, int32_t rank, const int32_t *members,
                          int64_t same, const int64_t *nbytes, double now, int64_t number,
                          int64_t *bytes_to, int64_t *messages_to) {
    const int32_t size = n->exchanges[which].size, src = members[rank];
    if (n->num_posts == n->room_posts) {
        const int64_t room = 2 * n->room_posts + 64;
        post **more = realloc(n->heap, (size_t)room * sizeof *more);
        if (!more) return -1;
        n->heap = more;
        n->room_posts = room;
    }
    post *p = calloc(1, sizeof *p);
    if (!p) return -1;
    p->heads = malloc((size_t)size * sizeof *p->heads);
    p->members = malloc((size_t)size * sizeof *p->members);
    if (nbytes) p->nbytes = malloc((size_t)size * sizeof *p->nbytes);
    if (!p->heads || !p->members || (nbytes && !p->nbytes)) {
        free_post(p);
        return -1;
    }
    memcpy(p->members, members, (size_t)size * sizeof *members);
    if (nbytes) memcpy(p->nbytes, nbytes, (size_t)size * sizeof *nbytes);
    p->same = same;
    p->number = number;
    p->exchange = (int32_t)which;
    p->rank = rank;
    p->size = size;
    for (int32_t i = 0, to = rank; i < size - 1; i++) {
        to = to + 1 == size ? 0 : to + 1;
        const int64_t count = nbytes ? nbytes[to] : same;
        p->heads[i] = leave(&n->nics, now, src, count);
        bytes_to[members[to]] += count;
        messages_to[members[to]]++;
    }
    n->heap[n->num_posts++] = p;
    sift_up(n, n->num_posts - 1);
    return 0;
}

/* The next head that is under way: whether there is one. */
int32_t gw_exchanges_next(const network *n, double *at, int64_t *number) {
    if (!n->num_posts) return 0;
    const post *p = n->heap[0];
    *at = p->heads[p->next];
    *number = p->number + p->next;
    return 1;
}

/* Members that get all messages of an exchange, each with when and the number of that event. */
typedef struct {
    double at;
    int64_t number;
    int32_t exchange, rank;
} completion;

/* Lets heads arrive that come before an event of another kind, given by its time and number, and
   before a member that has all its messages can do something. `next_number`: of the next event
   that is added. Returns how many members are found to get all, at most `room`. */
int64_t gw_exchanges_run(network *n, double limit_at, int64_t limit_number, int64_t *next_number,
                         completion *out, int64_t room) {
    int64_t found = 0;
    while (n->num_posts && found < room) {
        post *p = n->heap[0];
        const double at = p->heads[p->next];
        if (!is_before(at, p->number + p->next, limit_at, limit_number)) break;
        int32_t to = p->rank + 1 + p->next;
        if (to >= p->size) to -= p->size;
        const int32_t src = p->members[p->rank], dst = p->members[to];
        const double arrival = arrive(&n->nics, at, src, dst, p->nbytes ? p->nbytes[to] : p->same);
        exchange *e = &n->exchanges[p->exchange];
        const int64_t number = (*next_number)++;
        if (arrival >= e->last_at[to]) {
            e->last_at[to] = arrival;
            e->last_number[to] = number;
        }
        if (--e->left[to] == 0) {
            out[found++] = (completion){e->last_at[to], e->last_number[to], p->exchange, to};
            if (is_before(e->last_at[to], e->last_number[to], limit_at, limit_number)) {
                limit_at = e->last_at[to];
                limit_number = e->last_number[to];
            }
            if (--e->open == 0) free_exchange(e);
        }
        if (++p->next == p->size - 1) {
            n->heap[0] = n->heap[--n->num_posts];
            free_post(p);
        }
        if (n->num_posts) sift_down(n);
    }
    return found;
}
