// Loops over a team of threads, memory that is kept between calls, and nothing of the arithmetic.
#pragma once
#include <atomic>
#include <stdint.h>
#include <stdlib.h>

#include "team.h"

template <class F> struct Job {
    const F* f;
    int64_t count;
    std::atomic<int64_t> next;
    int64_t claim() { return next.fetch_add(1, std::memory_order_relaxed); }
    static void each(void* p) {
        Job* job = (Job*)p;
        for (int64_t i; (i = job->claim()) < job->count;) (*job->f)(i);
    }
    static void each_ahead(void* p) {
        Job* job = (Job*)p;
        for (int64_t i = job->claim(), then; i < job->count; i = then) (*job->f)(i, then = job->claim());
    }
};
static inline int at_most(int64_t count, int threads) { return threads > count ? (int)count : threads; }

// f(i) for i in [0, count): claimed one by one, in rising order, by at most `threads` threads.
template <class F> static void parallel(int64_t count, int threads, const F& f) {
    Job<F> job{&f, count, {0}};
    run_team(Job<F>::each, &job, at_most(count, threads));
}

// The same with f(i, then): what the same thread does after i is claimed before it; count or more: nothing. Of few, none is
// claimed before its time: the first thread would take two while another has none.
template <class F> static void parallel_ahead(int64_t count, int threads, const F& f) {
    if (count <= 2 * threads) return parallel(count, threads, [&](int64_t i) { f(i, count); });
    Job<F> job{&f, count, {0}};
    run_team(Job<F>::each_ahead, &job, at_most(count, threads));
}

// f(i, n) for all from i to i + n - 1, at most `group`, where neighbours lie one after the other in memory: each thread
// takes the next ones of a run of its own, so that it reads on, and helps with the others' runs when it has no more.
template <class F> struct Runs {
    enum { MOST = 64 };
    struct alignas(64) Run { std::atomic<int64_t> next; int64_t end; };
    const F* f;
    int runs;
    int64_t group;
    std::atomic<int> arrived;
    Run run[MOST];
    static void each(void* p) {
        Runs* all = (Runs*)p;
        int own = all->arrived.fetch_add(1, std::memory_order_relaxed);
        for (int r = 0; r < all->runs; r++) {
            Run& run = all->run[(own + r) % all->runs];
            for (int64_t i; (i = run.next.fetch_add(all->group, std::memory_order_relaxed)) < run.end;)
                (*all->f)(i, run.end - i < all->group ? run.end - i : all->group);
        }
    }
};
template <class F> static void parallel_runs(int64_t count, int64_t group, int threads, const F& f) {
    Runs<F> all;
    threads = at_most(count, threads);
    all.f = &f, all.group = group, all.arrived = 0, all.runs = threads < 1 ? 1 : threads < Runs<F>::MOST ? threads : (int)Runs<F>::MOST;
    for (int r = 0; r < all.runs; r++)
        all.run[r].next = count * r / all.runs, all.run[r].end = count * (r + 1) / all.runs;
    run_team(Runs<F>::each, &all, threads);
}

enum { GRAIN = 16384 };  // elements below which another thread does not pay

static inline int worth(int64_t elements, int threads) {
    int64_t most = elements / GRAIN + 1;
    return most < threads ? (int)most : threads;
}
// f(begin, end) over [0, n) in as many parts as threads.
template <class F> static void split(int64_t n, int threads, const F& f) {
    parallel(threads, threads, [&](int64_t i) { f(n * i / threads, n * (i + 1) / threads); });
}

// Grows, is never shared between threads, and is freed with its thread.
struct Memory {
    void* p = nullptr;
    size_t size = 0;
    void* get(size_t bytes) {
        if (bytes > size) {
            free(p);
            size = (bytes + 4095) & ~(size_t)4095;
            p = aligned_alloc(4096, size);
            if (!p) size = 0;
        }
        return p;
    }
    ~Memory() { free(p); }
};
