/* The pool without Python, for the sanitizers: every part is done once, whoever does it, and the caller's memory is
 * never touched after the work is over. Under ThreadSanitizer it proves that the hand-overs are ordered.
 *
 * check_pool fork: what children do with it instead. Not for the sanitizers, whose own locks do not survive a fork of a
 * process with busy threads. */
#define _GNU_SOURCE
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/dispatch.h"

static int failures;

static void
expect(int ok, const char *what, long detail)
{
    if (!ok) {
        fprintf(stderr, "%s (%ld)\n", what, detail);
        failures++;
    }
}

/* Plain memory on purpose: a part that is done twice, or a caller that reads too early, is a race that is reported. */
enum { PARTS = 300 };
typedef struct sheet {
    int waits;
    int done[PARTS];
    pthread_t by[PARTS];
    int mode[PARTS];
    atomic_int met;
    bwd_pool *nested;
} sheet;

static void
mark(void *work, size_t part)
{
    sheet *s = work;
    s->done[part]++;
    s->by[part] = pthread_self();
    s->mode[part] = fegetround();
    /* Two parts that wait for each other end only when two threads do them. */
    if (s->waits && part < 2) {
        atomic_fetch_add(&s->met, 1);
        while (atomic_load(&s->met) < 2) {
        }
    }
}

static void
mark_nested(void *work, size_t part)
{
    sheet *s = work, inner = {0};
    bwd_pool_run(s->nested, 8, 10, mark, &inner);
    for (int k = 0; k < 10; k++) {
        s->done[part] += inner.done[k];
    }
}

static int
marked_by_others(const sheet *s, size_t parts)
{
    int others = 0;
    for (size_t k = 0; k < parts; k++) {
        others += !pthread_equal(s->by[k], pthread_self());
    }
    return others;
}

static void
check_run(bwd_pool *pool, size_t threads, size_t parts, int waits)
{
    sheet s = {0};
    s.waits = waits;
    bwd_pool_run(pool, threads, parts, mark, &s);
    for (size_t k = 0; k < PARTS; k++) {
        expect(s.done[k] == (k < parts), "a part was not done once", (long)k);
    }
    if (waits) {
        expect(marked_by_others(&s, parts) > 0, "nobody helped", (long)parts);
    }
    else if (threads < 2 || parts < 2) {
        expect(marked_by_others(&s, parts) == 0, "work for one was shared", (long)parts);
    }
}

static void
check_rounding_is_the_callers(bwd_pool *pool)
{
    static const int modes[] = {FE_UPWARD, FE_TOWARDZERO, FE_TONEAREST};
    for (int i = 0; i < 3; i++) {
        sheet s = {0};
        s.waits = 1;
        fesetround(modes[i]);
        bwd_pool_run(pool, 2, 2, mark, &s);
        expect(s.mode[0] == modes[i] && s.mode[1] == modes[i], "a helper rounds otherwise", i);
    }
}

static void *
run_often(void *pool)
{
    for (int i = 0; i < 2000; i++) {
        check_run(pool, 4, 1 + (size_t)i % 40, 0);
    }
    return NULL;
}

static void
check_callers_at_once(bwd_pool *pool)
{
    pthread_t caller[3];
    for (int i = 0; i < 3; i++) {
        expect(pthread_create(&caller[i], NULL, run_often, pool) == 0, "no thread", i);
    }
    for (int i = 0; i < 20; i++) {
        bwd_pool_set_threads(pool, 1 + i % 5);
        run_often(pool);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(caller[i], NULL);
    }
}

/* A signal for the process goes to a thread that does not block it: never to a helper. */
static pthread_t signalled;
static atomic_int signals;

static void
note_signal(int number)
{
    (void)number;
    signalled = pthread_self();
    atomic_fetch_add(&signals, 1);
}

static void
check_signals(bwd_pool *pool)
{
    struct sigaction note = {.sa_handler = note_signal}, before;
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    sigaction(SIGUSR1, &note, &before);
    check_run(pool, 2, 2, 1);
    pthread_sigmask(SIG_BLOCK, &usr1, NULL);
    kill(getpid(), SIGUSR1);
    usleep(20000);
    expect(atomic_load(&signals) == 0, "a helper took a signal", 0);
    pthread_sigmask(SIG_UNBLOCK, &usr1, NULL);
    expect(atomic_load(&signals) == 1 && pthread_equal(signalled, pthread_self()), "the caller's signal was lost", 0);
    sigaction(SIGUSR1, &before, NULL);
}

/* In a child the helpers are gone: with the pool idle, and with another thread in the middle of its work. */
static void
check_child(bwd_pool *pool, const char *what)
{
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        check_run(pool, 2, 2, 1);
        check_run(pool, 4, PARTS, 0);
        const pid_t grandchild = fork();
        if (grandchild == 0) {
            alarm(20);
            check_run(pool, 2, 2, 1);
            bwd_pool_free(pool);
            _exit(failures != 0);
        }
        int status = -1;
        waitpid(grandchild, &status, 0);
        expect(status == 0, "a grandchild failed", status);
        _exit(failures != 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    expect(status == 0, what, status);
}

static atomic_int stop;

static void *
keep_busy(void *pool)
{
    while (!atomic_load(&stop)) {
        sheet s = {0};
        bwd_pool_run(pool, 2, PARTS, mark, &s);
    }
    return NULL;
}

static void
check_fork(bwd_pool *pool)
{
    check_run(pool, 2, 2, 1);
    check_child(pool, "a child of an idle pool failed");
    check_run(pool, 2, 2, 1);
    pthread_t other;
    expect(pthread_create(&other, NULL, keep_busy, pool) == 0, "no thread", 0);
    for (int i = 0; i < 20; i++) {
        check_child(pool, "a child of a busy pool failed");
    }
    atomic_store(&stop, 1);
    pthread_join(other, NULL);
    check_run(pool, 2, 2, 1);
}

/* Any number of threads gives the bits of one, with and without an update, flat and strided. */
static void
check_steps(bwd_pool *pool)
{
    const size_t rows = 911, columns = 1033, n = rows * columns, bytes = n * sizeof(float);
    const int64_t shape[] = {911, 1033}, strides[] = {1033, 1}, across[] = {1, 911};
    float *memory[2][4];
    double sums[2][3];
    uint64_t counts[2];
    for (int turn = 0; turn < 2; turn++) {
        for (int k = 0; k < 4; k++) {
            memory[turn][k] = malloc(bytes);
            for (size_t i = 0; memory[turn][k] && i < n; i++) {
                memory[turn][k][i] = (float)((i * 2654435761u + (size_t)k * 97) % 1000003) / 1000003.0f;
            }
        }
        float **a = memory[turn];
        bwd_pool *threads = turn ? pool : NULL;
        bwd_job job = {.n = n, .param = a[0], .grad = a[1], .state = {a[2], a[3]}, .step = 2, .rule = BWD_RULE_adamw};
        const bwd_layout layout = {2, shape, strides, across, {strides, across}};
        int count;
        job.format = BWD_FORMAT_f32_f32_f32;
        memcpy(job.hyper, bwd_rule_defaults(job.rule, &count), sizeof(double) * 6);
        const bwd_isa *isa = bwd_isa_best();
        expect(bwd_step(isa, threads, &job) == BWD_OK, "step failed", turn);
        sums[turn][0] = job.grad_sq_sum;
        expect(bwd_step_strided(isa, threads, &job, &layout) == BWD_OK, "strided step failed", turn);
        sums[turn][1] = job.grad_sq_sum;
        expect(bwd_scan_strided(isa, threads, BWD_f32, a[1], 2, shape, across, &sums[turn][2], &counts[turn]) == BWD_OK,
               "scan failed", turn);
    }
    expect(memcmp(sums[0], sums[1], sizeof sums[0]) == 0 && counts[0] == counts[1], "sums differ", 0);
    for (int k = 0; k < 4; k++) {
        expect(memcmp(memory[0][k], memory[1][k], bytes) == 0, "bits differ", k);
        free(memory[0][k]);
        free(memory[1][k]);
    }
}

static void
check_work(bwd_pool *pool)
{
    check_run(NULL, 4, PARTS, 0);
    for (size_t parts = 0; parts <= PARTS; parts += parts < 9 ? 1 : 97) {
        for (size_t threads = 0; threads < 6; threads++) {
            check_run(pool, threads, parts, 0);
        }
    }
    check_run(pool, 2, 2, 1);
    sheet nested = {0};
    nested.nested = pool;
    bwd_pool_run(pool, 4, PARTS, mark_nested, &nested);
    for (int k = 0; k < PARTS; k++) {
        expect(nested.done[k] == 10, "work within work", k);
    }
}

int
main(int argc, char **argv)
{
    bwd_pool *pool = bwd_pool_new(4);
    expect(bwd_pool_cpus() >= 1, "no CPU", bwd_pool_cpus());
    expect(bwd_pool_threads(pool) == 4 && bwd_pool_threads(NULL) == 1, "wrong number", 0);
    if (argc > 1 && strcmp(argv[1], "fork") == 0) {
        check_fork(pool);
    }
    else {
        check_work(pool);
        check_rounding_is_the_callers(pool);
        check_signals(pool);
        check_callers_at_once(pool);
        bwd_pool_set_threads(pool, 7);
        check_steps(pool);
    }
    bwd_pool_free(pool);
    bwd_pool_free(NULL);
    for (int i = 0; i < 100; i++) { /* made and ended, used or not */
        pool = bwd_pool_new(3);
        if (i % 2) {
            check_run(pool, 3, PARTS, 0);
        }
        bwd_pool_free(pool);
    }
    printf("pool: %d failures\n", failures);
    return failures != 0;
}
