// Arranging a matrix in panels, and getting rows of it back.
#include "packed.h"

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


// ---- packed ----
template <int BITS> static void arrange_codes(const Panels& p, int lane, const uint8_t* codes, uint8_t* to) {
    for (int64_t k = 0; k < p.group; k++)
        if (BITS == 8) to[byte_place(k, lane)] = codes[k];
        else to[nibble_place(k, lane)] |= (uint8_t)((codes[k / 2] >> k % 2 * 4 & 15) << nibble_shift(k));
}
static void arrange_packed(const Panels& p, const uint8_t* codes, const char* scales, const char* offsets, int threads) {
    int64_t groups = p.inputs / p.group, code_bytes = p.group * p.bits / 8;
    parallel(p.count(), threads, [&](int64_t panel) {
        char* to = (char*)p.weight + panel * p.bytes();
        memset(to, 0, p.bytes());
        for (int lane = 0; lane < PANEL; lane++) {
            int64_t output = p.output(panel, lane);
            if (output >= p.outputs) continue;  // scales of 0
            for (int64_t g = 0; g < groups; g++) {
                char* group = to + g * p.group_bytes();
                int64_t at = output * groups + g;
                memcpy(group + lane * p.scale_bytes, scales + at * p.scale_bytes, p.scale_bytes);
                group += PANEL * p.scale_bytes;
                if (p.offset_bytes) memcpy(group + lane * p.offset_bytes, offsets + at * p.offset_bytes, p.offset_bytes);
                group += PANEL * p.offset_bytes;
                if (p.bits == 8) arrange_codes<8>(p, lane, codes + at * code_bytes, (uint8_t*)group);
                else arrange_codes<4>(p, lane, codes + at * code_bytes, (uint8_t*)group);
            }
        }
    });
}
static float number(const char* p, int bytes) {
    if (bytes == 4) return load_as<float>(p);
    return wide(load_as<f16>(p));
}
template <class T> static int packed_rows_back(const Panels& p, const int64_t* outputs, int64_t n, T* to, int threads) {
    split(n, worth(n * p.inputs, threads), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            Seat s = seat(p, outputs[i]);
            T* row = to + i * p.inputs;
            const char* group = p.weight + s.panel * p.bytes();
            for (int64_t g = 0; g < p.inputs; g += p.group, group += p.group_bytes()) {
                const char* offsets = group + PANEL * p.scale_bytes;
                const uint8_t* codes = (const uint8_t*)offsets + PANEL * p.offset_bytes;
                float scale = number(group + s.lane * p.scale_bytes, p.scale_bytes);
                float offset = p.offset_bytes ? number(offsets + s.lane * p.offset_bytes, p.offset_bytes) : 0;
                for (int64_t k = 0; k < p.group; k++) {
                    int code = p.bits == 8 ? codes[byte_place(k, s.lane)] : codes[nibble_place(k, s.lane)] >> nibble_shift(k) & 15;
                    thin(row + g + k, (float)(code - p.zero) * scale + offset);
                }
            }
        }
    });
    return 0;
}

extern "C" int64_t mp_panels_bytes(const Panels* p) {  // 0: such a matrix cannot be arranged
#if defined(MP_BF16)
    if (p->type == BF16 && p->inputs % 2) return 0;
#endif
    if (p->bits && (p->inputs % CHUNK || (p->group != CHUNK / 2 && p->group % CHUNK))) return 0;
    return p->count() * p->bytes();
}
// The weight [outputs, inputs] into p's memory.
extern "C" int mp_arrange(const Panels* p, const void* weight, int threads) {
#define CALL(T) arrange<T>(*p, (const T*)weight, threads)
    FOR_TYPE(p->type, CALL)
#undef CALL
}
// Packed rows, with scales and offsets [outputs, groups], into p's memory.
extern "C" void mp_arrange_packed(const Panels* p, const uint8_t* codes, const void* scales, const void* offsets, int threads) {
    arrange_packed(*p, codes, (const char*)scales, (const char*)offsets, threads);
}
// Rows of the weight as they were; indices have been checked.
extern "C" int mp_rows(const Panels* p, const int64_t* outputs, int64_t n, void* to, int threads) {
#define CALL(T) p->bits ? packed_rows_back<T>(*p, outputs, n, (T*)to, threads) : rows_back<T>(*p, outputs, n, (T*)to, threads)
    FOR_TYPE(p->type, CALL)
#undef CALL
}
