// Work on torch's own OpenMP threads, memory that is kept between calls, and nothing of the arithmetic.
#pragma once
#include <atomic>
#include <stdint.h>
#include <stdlib.h>

// GOMP_parallel of the OpenMP library that torch has loaded, given by the caller; null: one thread.
typedef void (*gomp_parallel_t)(void (*)(void*), void*, unsigned, unsigned);
extern gomp_parallel_t mp_gomp_parallel;

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
static inline void run_team(void (*work)(void*), void* job, int64_t count, int threads) {
    if (threads > count) threads = (int)count;
    if (threads <= 1 || !mp_gomp_parallel) work(job);
    else mp_gomp_parallel(work, job, (unsigned)threads, 0);
}

// f(i) for i in [0, count): claimed one by one, in rising order, by at most `threads` threads.
template <class F> static void parallel(int64_t count, int threads, const F& f) {
    Job<F> job{&f, count, {0}};
    run_team(Job<F>::each, &job, count, threads);
}

// The same with f(i, then): what the same thread does after i is claimed before it; count or more: nothing.
template <class F> static void parallel_ahead(int64_t count, int threads, const F& f) {
    Job<F> job{&f, count, {0}};
    run_team(Job<F>::each_ahead, &job, count, threads);
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
