/* The only threads of this program: helpers that share one piece of work with the thread that brings it.
 *
 * None exists before the first shared work, and all sleep between two. What a pool does with threads is an offer, never
 * a condition: where a thread cannot be had, where another caller has the helpers, and in a process that was forked in
 * the middle of it, the work is done all the same, by fewer threads or by the caller alone. */
#ifndef BWD_POOL_H
#define BWD_POOL_H

#include <stddef.h>

enum { BWD_MAX_THREADS = 1024 };

typedef struct bwd_pool bwd_pool;

/* Does one part of the work. Several threads call it at once, each part is done once. */
typedef void (*bwd_part_fn)(void *work, size_t part);

/* A pool of up to `threads` threads, the caller's own among them: 1 .. BWD_MAX_THREADS. NULL: no memory. */
bwd_pool *bwd_pool_new(int threads);
/* Ends the helpers and waits for them. Nobody may be in bwd_pool_run. NULL is fine. */
void bwd_pool_free(bwd_pool *pool);

int bwd_pool_threads(const bwd_pool *pool);
/* For the work that comes next. Helpers beyond a smaller number stay asleep. */
void bwd_pool_set_threads(bwd_pool *pool, int threads);

/* Does parts 0 .. parts - 1 and returns when all are done; at most `threads` threads take part, and the parts go to
 * whoever comes for the next one. The caller alone when pool is NULL or another thread has the helpers. */
void bwd_pool_run(bwd_pool *pool, size_t threads, size_t parts, bwd_part_fn do_part, void *work);

/* The CPUs that this process may run on; at least 1. */
int bwd_pool_cpus(void);

#endif
