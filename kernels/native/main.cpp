// What the loader needs: the layout's version, the OpenMP entry, which instructions were compiled in.
#include "parallel.h"
#include "vec.h"

gomp_parallel_t mp_gomp_parallel = nullptr;
extern "C" void mp_init(void* gomp_parallel) { mp_gomp_parallel = (gomp_parallel_t)gomp_parallel; }
extern "C" int mp_width() { return W; }
extern "C" int mp_has_bf16() {
#if defined(MP_BF16)
    return 1;
#else
    return 0;
#endif
}
// Ceilings for the benchmark: bytes read once in order, exponentials of what lies in the first cache.
extern "C" int mp_read(const float* p, int64_t bytes, int threads) {
    std::atomic<int> odd{0};
    int64_t parts = bytes >> 18;
    parallel(parts, threads, [&](int64_t i) {
        const float* from = p + (i << 16);
        vu sums_[8] = {};
        for (int64_t k = 0; k < 1 << 16; k += 8 * W)
            for (int j = 0; j < 8; j++) sums_[j] += load_as<vu>(from + k + j * W);
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
extern "C" int mp_threads_used(int threads) {  // for tests: the size of the team that works on a job
    std::atomic<int> arrived{0};
    auto arrive = [](void* p) { (*(std::atomic<int>*)p)++; };
    if (threads > 1 && mp_gomp_parallel) mp_gomp_parallel(arrive, &arrived, (unsigned)threads, 0);
    else arrive(&arrived);
    return arrived;
}
