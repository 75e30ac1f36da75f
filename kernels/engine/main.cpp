// What the loader asks for: which instructions were compiled in; for tests and benchmarks the team and the ceilings.
#include "cpu_sharing.h"
#include "parallel.h"
#include "vec.h"

#include <time.h>

extern "C" int mp_width() { return W; }
extern "C" int mp_has_bf16() {
#if defined(MP_PAIRS)
    return 1;
#else
    return 0;
#endif
}
// Ceilings for the benchmark: bytes read once, of each part in four streams, to which memory gives more than to one;
// exponentials of what lies in the first cache.
extern "C" int mp_read(const float* p, int64_t bytes, int threads) {
    std::atomic<int> odd{0};
    int64_t parts = bytes >> 20;
    parallel(parts, threads, [&](int64_t i) {
        const float* from = p + (i << 18);
        vu sums_[8] = {};
        for (int64_t k = 0; k < 1 << 16; k += 2 * W)
            for (int j = 0; j < 8; j++) sums_[j] += load_as<vu>(from + (int64_t)(j / 2 << 16) + k + j % 2 * W);
        vu all = {};
        for (int j = 0; j < 8; j++) all ^= sums_[j];
        if (all[0] == 0x12345) odd++;
    });
    return odd;
}
extern "C" int mp_exp(float* p, int64_t n, int64_t times, int exact, int threads) {
    parallel(threads, threads, [&](int64_t t) {
        for (int64_t i = 0; i < times; i++) {
            float* x = p + t * n;
            for (int64_t k = 0; k + W <= n; k += W) store(x + k, (exact ? exp2v<6>(load(x + k)) : exp2v<4>(load(x + k))) * -1.0f);
        }
    });
    return 0;
}
extern "C" int mp_threads_used(int threads) {  // for tests: how many work on a job at the same time
    if (threads > team_most()) threads = team_most();
    struct Meeting { std::atomic<int> arrived; int threads, lent; } meeting{{0}, threads, lent_cores(threads, team_most())};
    auto meet = [](void* p) {  // those that may come are waited for, those that must not a little
        Meeting* m = (Meeting*)p;
        m->arrived++;
        timespec nap{0, 100000};
        for (int tries = 0; m->arrived < m->threads && tries < (m->arrived < m->lent ? 100000 : 200); tries++)
            nanosleep(&nap, nullptr);
    };
    run_team(meet, &meeting, threads);
    return meeting.arrived;
}
