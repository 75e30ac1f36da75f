// Hashes of slices that were computed here, several at a time on threads of their own: see moonpool/base/kv/sealing.py.
// The hash is that of the xxhash package, given by pointer. Needs no lock of Python's.

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace {

// Bytes to be hashed, and where their hash is kept.
struct Seal {
    const void* data;
    uint64_t nbytes;
    uint64_t* hash;
};

using Hash = uint64_t (*)(const void* data, size_t nbytes);

struct Batch {
    Hash hash;
    const Seal* seals;
    int64_t count;
    std::atomic<int64_t> next{0};
};

constexpr int kThreads = 16;
constexpr int64_t kTogether = 4;  // slices that a thread takes at a time: fewer writes to the shared count

void* work(void* given) {
    Batch& batch = *static_cast<Batch*>(given);
    for (;;) {
        const int64_t first = batch.next.fetch_add(kTogether, std::memory_order_relaxed);
        if (first >= batch.count) return nullptr;
        const int64_t end = first + kTogether < batch.count ? first + kTogether : batch.count;
        for (int64_t at = first; at < end; at++) {
            const Seal& seal = batch.seals[at];
            *seal.hash = batch.hash(seal.data, seal.nbytes);
        }
    }
}

}  // namespace

// Makes `count` hashes on `threads` threads at most, the caller's among them. A thread that cannot be had is done without.
extern "C" void mp_seal(Hash hash, const Seal* seals, int64_t count, int threads) {
    Batch batch{hash, seals, count};
    pthread_t others[kThreads];
    int started = 0;
    while (started + 1 < threads && started < kThreads && started * kTogether < count - kTogether) {
        if (pthread_create(&others[started], nullptr, work, &batch) != 0) break;
        started++;
    }
    work(&batch);
    for (int at = 0; at < started; at++) pthread_join(others[at], nullptr);
}
