// A team of threads that waits for work without sleeping for a while, then sleeps.
//
// A decode step is a hundred regions with some microseconds between them: threads that sleep at once (as OpenMP's do
// with a passive wait policy) cost more than the work, threads that never sleep take the cores from everyone else. Ours
// look for work for SPIN_NS, then wait in the kernel (futex).
//
// All is in one word: the round, whether it is open, and how many threads are inside. Threads enter an open round by
// counting themselves in, so the caller who closes it waits only for those who did. A round of few threads is for the
// first ones; the others go on sleeping.
#include "cpu_sharing.h"
#include "team.h"

#include <atomic>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum : uint32_t { INSIDE = 0xff, OPEN = 0x100, ROUND = 0x200 };
static const int64_t SPIN_NS = 50000;

typedef std::atomic<uint32_t> Bed;  // 1 while a thread sleeps in it, and nobody has woken it
struct alignas(64) Worker { Bed bed{0}; };
static Worker workers[INSIDE];
static struct {
    alignas(64) std::atomic<uint32_t> word{0};
    alignas(64) Bed bed{0};  // the caller's
    std::atomic<bool> busy{false};
    std::atomic<int> places{0};  // for others than the caller, in this round
    void (*work)(void*);
    void* job;
    int started = 0;  // workers, never fewer
} team;

static int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}
static inline void breathe() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}
static void wake(Bed& bed) {
    if (bed.load() && bed.exchange(0)) syscall(SYS_futex, (uint32_t*)&bed, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}
// Who makes ready(word) hold must change the word first, then wake the bed.
template <class Ready> static uint32_t sleep_until(const Ready& ready, Bed& bed) {
    for (;;) {
        bed.store(1);
        uint32_t word = team.word.load();
        if (ready(word)) {
            bed.store(0);
            return word;
        }
        syscall(SYS_futex, (uint32_t*)&bed, FUTEX_WAIT_PRIVATE, 1, nullptr, nullptr, 0);
    }
}
// Returns when ready(word) holds, and that word: looks for a while, then sleeps.
template <class Ready> static uint32_t await(const Ready& ready, Bed& bed) {
    uint32_t word = team.word.load(std::memory_order_acquire);
    int64_t until = 0;
    for (int turn = 1; !ready(word); turn++) {
        breathe();
        if (turn % 32 == 0) {
            int64_t now = now_ns();
            if (!until) until = now + SPIN_NS;
            if (now > until) return sleep_until(ready, bed);
        }
        word = team.word.load(std::memory_order_acquire);
    }
    return word;
}

static void* serve(void* p) {
    int index = (int)(intptr_t)p;
    uint32_t done = 1;  // the last round that this thread was in; at first none
    for (;;) {
        auto ready = [&](uint32_t w) { return w & OPEN && (w & ~(ROUND - 1)) != done && index < team.places.load(); };
        uint32_t word = await(ready, workers[index].bed);
        if (!team.word.compare_exchange_strong(word, word + 1)) continue;
        team.work(team.job);
        done = word & ~(ROUND - 1);
        uint32_t left = team.word.fetch_sub(1);
        if (!(left & OPEN) && (left & INSIDE) == 1) wake(team.bed);
    }
    return nullptr;
}

static void forget_threads() {  // in a forked child, where there are none
    team.word = 0, team.bed = 0, team.busy = false, team.started = 0;
    for (Worker& worker : workers) worker.bed = 0;
}

static void start_threads(int count) {
    static const int forked = pthread_atfork(nullptr, nullptr, forget_threads);
    (void)forked;
    sigset_t all, before;  // signals are for the program's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; team.started < count; team.started++) {
        if (pthread_create(&thread, nullptr, serve, (void*)(intptr_t)team.started)) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

int team_most() {
    static const int most = [] {
        cpu_set_t set;
        int count = sched_getaffinity(0, sizeof set, &set) ? (int)sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&set);
        return count < 1 ? 1 : count > (int)INSIDE ? (int)INSIDE : count;
    }();
    return most;
}

void run_team(void (*work)(void*), void* job, int threads) {
    if (threads > team_most()) threads = team_most();
    threads = lent_cores(threads, team_most());
    // One caller at a time has the team; another, or a region inside a region, does its work alone.
    if (threads <= 1 || team.busy.exchange(true)) return work(job);
    team.work = work, team.job = job;
    team.places.store(threads - 1);
    uint32_t round = (team.word.load(std::memory_order_relaxed) & ~(ROUND - 1)) + ROUND;
    team.word.store(round | OPEN);
    if (team.started < threads - 1) start_threads(threads - 1);
    for (int i = 0; i < threads - 1; i++) wake(workers[i].bed);
    work(job);
    uint32_t word = team.word.fetch_and(~(uint32_t)OPEN);
    if (word & INSIDE) await([](uint32_t w) { return !(w & INSIDE); }, team.bed);
    team.busy.store(false, std::memory_order_release);
}
