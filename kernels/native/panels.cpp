// Arranging a matrix in panels, and getting rows of it back.
#include "panels.h"

// Reads all outputs of a panel side by side, and writes it from the first byte to the last.
template <class T> static int arrange(const Panels& p, const T* weight, int threads) {
    int64_t K = p.inputs;
    std::atomic<int> failed{0};
    parallel(p.count(), threads, [&](int64_t panel) {
        static thread_local Memory room;
        T* none = (T*)room.get(K * sizeof(T));  // of lanes that stand for no output
        if (!none) { failed = 1; return; }
        memset((void*)none, 0, K * sizeof(T));
        const T* from[PANEL];
        for (int lane = 0; lane < PANEL; lane++) {
            int64_t output = p.output(panel, lane);
            from[lane] = output < p.outputs ? weight + output * K : none;
        }
        T* to = (T*)(p.weight + panel * p.bytes());
        constexpr int step = paired<T>() ? 2 : 1;
        for (int64_t k = 0; k < K; k += step)
            for (int lane = 0; lane < PANEL; lane++)
                memcpy((void*)(to + place<T>(k, lane)), from[lane] + k, step * sizeof(T));
    });
    return failed;
}
template <class T> static int rows_back(const Panels& p, const int64_t* outputs, int64_t n, T* to, int threads) {
    split(n, worth(n * p.inputs, threads), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            Seat s = seat(p, outputs[i]);
            const T* from = (const T*)(p.weight + s.panel * p.bytes());
            for (int64_t k = 0; k < p.inputs; k++) to[i * p.inputs + k] = from[place<T>(k, s.lane)];
        }
    });
    return 0;
}

extern "C" int64_t mp_panels_bytes(const Panels* p) {  // 0: such a matrix cannot be arranged
#if defined(MP_BF16)
    if (p->type == BF16 && p->inputs % 2) return 0;
#endif
    return p->count() * p->bytes();
}
// The weight [outputs, inputs] into p's memory.
extern "C" int mp_arrange(const Panels* p, const void* weight, int threads) {
#define CALL(T) arrange<T>(*p, (const T*)weight, threads)
    FOR_TYPE(p->type, CALL)
#undef CALL
}
// Rows of the weight as they were; indices have been checked.
extern "C" int mp_rows(const Panels* p, const int64_t* outputs, int64_t n, void* to, int threads) {
#define CALL(T) rows_back<T>(*p, outputs, n, (T*)to, threads)
    FOR_TYPE(p->type, CALL)
#undef CALL
}
