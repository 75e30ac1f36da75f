// Cores that the processes of a host lend each other, by a page that all of them map (moonpool/engine/cpu_sharing.py).
#include "cpu_sharing.h"

#include <atomic>
#include <stdint.h>
#include <time.h>

// One process. It is busy until BUSY_NS after its last region: one that has died frees its cores by that alone.
struct Slot {
    std::atomic<int64_t> owner, share, cores, beat_ns;
};
static const int64_t BUSY_NS = 100000000;

static Slot* slots = nullptr;
static int slot_count = 0, own_slot = 0;

extern "C" int mp_lend(void* page, int count, int own) {
    slots = (Slot*)page, slot_count = count, own_slot = own;
    return 0;
}

static std::atomic<int> aside{0};  // threads of this process that compute beside the team
extern "C" int mp_aside(int change) { return aside.fetch_add(change, std::memory_order_relaxed) + change; }

static int left(int most, int threads) {
    most -= aside.load(std::memory_order_relaxed);
    return most < 1 ? 1 : most < threads ? most : threads;
}

static int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// Since `mp_had` was asked: time from region to region, and the same times the share of its cores that each one had.
// One thread computes at a time. The time after a region, until the next one, counts as the region.
static int64_t since_ns = 0;
static double its_share = 1, whole_ns = 0, had_ns = 0;

static void note(int64_t now, int threads, int wanted) {
    if (since_ns) whole_ns += now - since_ns, had_ns += its_share * (now - since_ns);
    since_ns = now, its_share = wanted > 1 ? (double)threads / wanted : 1;
}

extern "C" double mp_had() {
    note(now_ns(), 1, 1);
    double had = whole_ns > 0 ? had_ns / whole_ns : 1;
    since_ns = 0, whole_ns = had_ns = 0;
    return had;
}

extern "C" int mp_others_compute() {
    if (!slots) return 0;
    int64_t cores = slots[own_slot].cores.load(std::memory_order_relaxed), since = now_ns() - BUSY_NS;
    for (int i = 0; i < slot_count; i++)
        if (i != own_slot && slots[i].beat_ns.load(std::memory_order_relaxed) > since &&
            slots[i].cores.load(std::memory_order_relaxed) == cores) return 1;
    return 0;
}

static int lent(int threads, int most, int64_t now) {
    Slot& own = slots[own_slot];
    own.beat_ns.store(now, std::memory_order_relaxed);
    if (threads <= 1) return threads;
    int64_t share = own.share.load(std::memory_order_relaxed), cores = own.cores.load(std::memory_order_relaxed);
    int64_t all = share;
    for (int i = 0; i < slot_count; i++) {
        Slot& other = slots[i];
        if (i == own_slot || other.beat_ns.load(std::memory_order_relaxed) < now - BUSY_NS) continue;
        if (other.cores.load(std::memory_order_relaxed) == cores) all += other.share.load(std::memory_order_relaxed);
    }
    if (share <= 0 || all <= 0) return left(most, threads);
    return left((int)(most * share / all), threads);
}

int lent_cores(int threads, int most) {
    if (!slots) return left(most, threads);
    int64_t now = now_ns();
    int had = lent(threads, most, now);
    note(now, had, threads);
    return had;
}
