/* Helpers wait on a semaphore each. Work stands behind a door: a helper that is called goes in, takes parts until none
 * is left and goes out; the caller shuts the door when the parts are gone and waits only for those who are inside. A
 * helper that the system has not woken by then finds the door shut, so a busy machine costs the caller nothing. */
#define _GNU_SOURCE /* sched_getaffinity, pthread_setname_np, MADV_WIPEONFORK */
#include "core/pool.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* The door: how many helpers are inside, and whether it is shut. */
enum { SHUT = 1 << 16 };
_Static_assert((int)BWD_MAX_THREADS < (int)SHUT, "the count must not reach the bit");

typedef struct helper {
    struct crew *crew;
    pthread_t thread;
    sem_t wake;
    atomic_int called; /* woken and not yet up: one call at a time is enough */
} helper;

/* What belongs to one process. A fork leaves the threads behind in the parent, whatever they were doing. */
typedef struct crew {
    atomic_int owner; /* its process id; negative while that process makes the crew its own */
    atomic_int busy;
    atomic_int refused; /* the system gave no further thread: not asked again at every step */
    int helpers;        /* threads that exist */
    atomic_int ending;
    bwd_part_fn do_part;
    void *work;
    size_t parts;
    fenv_t float_mode; /* the caller's: rounding, and whether denormals are flushed */
    sem_t emptied;     /* the last helper inside left through a shut door */
    _Alignas(64) atomic_int door;
    _Alignas(64) atomic_size_t next;
    _Alignas(64) helper helper[BWD_MAX_THREADS - 1];
} crew;

struct bwd_pool {
    atomic_int threads;
    crew *crew;
};

bwd_pool *
bwd_pool_new(int threads)
{
    bwd_pool *pool = malloc(sizeof *pool);
    crew *c = mmap(NULL, sizeof *c, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!pool || c == MAP_FAILED) {
        free(pool);
        if (c != MAP_FAILED) {
            munmap(c, sizeof *c);
        }
        return NULL;
    }
#ifdef MADV_WIPEONFORK
    /* A child finds zeros, which no process owns. The process id alone would do until it comes up a second time. */
    (void)madvise(c, sizeof *c, MADV_WIPEONFORK);
#endif
    atomic_init(&pool->threads, threads);
    pool->crew = c;
    return pool;
}

static void
wait_for(sem_t *semaphore)
{
    while (sem_wait(semaphore) != 0) {
        /* a signal of the caller's came in between */
    }
}

static void
call(helper *h)
{
    if (!atomic_exchange(&h->called, 1)) {
        sem_post(&h->wake);
    }
}

static void
take_parts(crew *c)
{
    for (size_t part; (part = atomic_fetch_add(&c->next, 1)) < c->parts;) {
        c->do_part(c->work, part);
    }
}

static bool
go_in(crew *c)
{
    int inside = atomic_load(&c->door);
    while (!(inside & SHUT)) {
        if (atomic_compare_exchange_weak(&c->door, &inside, inside + 1)) {
            return true;
        }
    }
    return false;
}

static void *
helper_main(void *self)
{
    helper *h = self;
    crew *c = h->crew;
    for (;;) {
        wait_for(&h->wake);
        atomic_store(&h->called, 0);
        if (!go_in(c)) {
            if (atomic_load(&c->ending)) {
                return NULL;
            }
            continue;
        }
        (void)fesetenv(&c->float_mode);
        take_parts(c);
        if (atomic_fetch_sub(&c->door, 1) == SHUT + 1) {
            sem_post(&c->emptied);
        }
    }
}

/* Takes the crew for one piece of work; false when another thread has it. Whoever comes first in a process finds no
 * crew yet, or that of a parent, and starts with no helpers. */
static bool
claim(crew *c)
{
    const int self = (int)getpid();
    int owner = atomic_load(&c->owner);
    if (owner == self) {
        return !atomic_exchange(&c->busy, 1);
    }
    if (owner == -self || !atomic_compare_exchange_strong(&c->owner, &owner, -self)) {
        return false;
    }
    c->helpers = 0;
    atomic_store(&c->ending, 0);
    atomic_store(&c->refused, 0);
    atomic_store(&c->door, SHUT);
    atomic_store(&c->busy, 1);
    (void)sem_init(&c->emptied, 0, 0);
    atomic_store(&c->owner, self);
    return true;
}

/* Up to `wanted` helpers: how many there are then. They take no signal but those of a fault of their own, which a
 * handler such as Python's faulthandler should see. */
static int
recruit(crew *c, int wanted)
{
    static const int own_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    if (c->helpers >= wanted || atomic_load(&c->refused)) {
        return c->helpers < wanted ? c->helpers : wanted;
    }
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof own_faults / sizeof *own_faults; i++) {
        sigdelset(&blocked, own_faults[i]);
    }
    (void)pthread_sigmask(SIG_SETMASK, &blocked, &before);
    while (c->helpers < wanted) {
        helper *h = &c->helper[c->helpers];
        h->crew = c;
        atomic_init(&h->called, 0);
        (void)sem_init(&h->wake, 0, 0);
        if (pthread_create(&h->thread, NULL, helper_main, h) != 0) {
            atomic_store(&c->refused, 1);
            break;
        }
        (void)pthread_setname_np(h->thread, "bwdfuse"); /* for top and for debuggers */
        c->helpers++;
    }
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return c->helpers;
}

static void
share(crew *c, int helpers, size_t parts, bwd_part_fn do_part, void *work)
{
    c->do_part = do_part;
    c->work = work;
    c->parts = parts;
    (void)fegetenv(&c->float_mode);
    atomic_store(&c->next, 0);
    atomic_store(&c->door, 0);
    for (int i = 0; i < helpers; i++) {
        call(&c->helper[i]);
    }
    take_parts(c);
    if (atomic_fetch_or(&c->door, SHUT) != 0) {
        wait_for(&c->emptied);
    }
}

void
bwd_pool_run(bwd_pool *pool, size_t threads, size_t parts, bwd_part_fn do_part, void *work)
{
    const size_t most = (size_t)bwd_pool_threads(pool);
    threads = threads < most ? threads : most;
    threads = threads < parts ? threads : parts;
    if (threads > 1 && claim(pool->crew)) {
        share(pool->crew, recruit(pool->crew, (int)threads - 1), parts, do_part, work);
        atomic_store(&pool->crew->busy, 0);
        return;
    }
    for (size_t part = 0; part < parts; part++) {
        do_part(work, part);
    }
}

void
bwd_pool_free(bwd_pool *pool)
{
    if (!pool) {
        return;
    }
    crew *c = pool->crew;
    if (atomic_load(&c->owner) == (int)getpid()) {
        atomic_store(&c->ending, 1);
        for (int i = 0; i < c->helpers; i++) {
            call(&c->helper[i]);
            (void)pthread_join(c->helper[i].thread, NULL);
        }
    }
    munmap(c, sizeof *c);
    free(pool);
}

int
bwd_pool_threads(const bwd_pool *pool)
{
    return pool ? atomic_load(&pool->threads) : 1;
}

void
bwd_pool_set_threads(bwd_pool *pool, int threads)
{
    atomic_store(&pool->threads, threads);
    atomic_store(&pool->crew->refused, 0);
}

int
bwd_pool_cpus(void)
{
    cpu_set_t *set = NULL;
    int count = 0;
    /* The kernel refuses a set that is smaller than its own. */
    for (int cpus = 1024; count == 0 && cpus <= 1 << 20; cpus *= 2) {
        const size_t size = CPU_ALLOC_SIZE(cpus);
        if (!(set = CPU_ALLOC(cpus))) {
            break;
        }
        if (sched_getaffinity(0, size, set) == 0) {
            count = CPU_COUNT_S(size, set);
        }
        CPU_FREE(set);
    }
    return count > 0 ? count : 1;
}
