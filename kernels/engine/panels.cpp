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
// Scales, offsets or units of an output in rows [outputs, count], and where a panel has them.
struct Column {
    const char* rows;
    int64_t count, bytes;
    void put(char* to, int64_t output, int64_t at, int lane) const {
        memcpy(to + lane * bytes, rows + (output * count + at) * bytes, bytes);
    }
};
static void arrange_codes(const Panels& p, int lane, const uint8_t* codes, uint8_t* to) {
    for (int64_t k = 0; k < p.group; k++) {
        if (p.bits == 8) { to[byte_place(k, lane)] = codes[k]; continue; }
        int code = p.bits == 4 ? codes[k / 2] >> k % 2 * 4 & 15 : codes[k];
        CodePlace at = code_place(p.bits, k, lane);
        to[at.nibble] |= (uint8_t)((code & 15) << nibble_shift(k));
        if (p.bits > 4) to[at.higher] |= (uint8_t)(code >> 4 << at.shift);
    }
}
static void arrange_packed(const Panels& p, const PackedMatrix& from, int threads) {
    int64_t groups = p.inputs / p.group, blocks = p.inputs / p.block, code_bytes = p.bits == 4 ? p.group / 2 : p.group;
    Column scales{from.scales, groups, p.scale_bytes}, offsets{from.offsets, groups, p.offset_bytes};
    Column units{from.units, blocks, 2}, offset_units{from.offset_units, blocks, 2};
    parallel(p.count(), threads, [&](int64_t panel) {
        char* to = (char*)p.weight + panel * p.bytes();
        memset(to, 0, p.bytes());
        for (int lane = 0; lane < PANEL; lane++) {
            int64_t output = p.output(panel, lane);
            if (output >= p.outputs) continue;  // scales of 0
            char* at = to;
            for (int64_t g = 0; g < groups; g++) {
                if (g % (p.block / p.group) == 0) {
                    int64_t block = g / (p.block / p.group);
                    if (p.scale_bytes == 1) units.put(at, output, block, lane), at += PANEL * 2;
                    if (p.offset_bytes == 1) offset_units.put(at, output, block, lane), at += PANEL * 2;
                }
                scales.put(at, output, g, lane), at += PANEL * p.scale_bytes;
                if (p.offset_bytes) offsets.put(at, output, g, lane), at += PANEL * p.offset_bytes;
                arrange_codes(p, lane, from.codes + (output * groups + g) * code_bytes, (uint8_t*)at);
                at += PANEL * p.group * p.bits / 8;
            }
        }
    });
}
static float number(const char* p, int bytes, float unit) {
    if (bytes == 1) return (float)*(const int8_t*)p * unit;
    if (bytes == 4) return load_as<float>(p);
    return wide(load_as<f16>(p));
}
static int code_at(const Panels& p, const uint8_t* codes, int64_t k, int lane) {
    if (p.bits == 8) return codes[byte_place(k, lane)];
    CodePlace at = code_place(p.bits, k, lane);
    int code = codes[at.nibble] >> nibble_shift(k) & 15;
    return p.bits == 4 ? code : code | (codes[at.higher] >> at.shift & ((1 << (p.bits - 4)) - 1)) << 4;
}
static float value_of(const Panels& p, int code) {
    if (p.values == FLOAT_TABLE) return p.floats[code];
    if (p.values >= FLOAT_E4M3) return float8(p.values, code);
    return (float)((p.values == BYTE_TABLE ? p.table[code] : code) - p.zero);
}
template <class T> static int packed_rows_back(const Panels& p, const int64_t* outputs, int64_t n, T* to, int threads) {
    split(n, worth(n * p.inputs, threads), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            Seat s = seat(p, outputs[i]);
            T* row = to + i * p.inputs;
            const char* at = p.weight + s.panel * p.bytes();
            float unit = 0, offset_unit = 0;
            auto take = [&](int bytes, float of) {
                float x = bytes ? number(at + s.lane * bytes, bytes, of) : 0;
                at += PANEL * bytes;
                return x;
            };
            for (int64_t g = 0; g < p.inputs; g += p.group) {
                if (g % p.block == 0) {
                    if (p.scale_bytes == 1) unit = take(2, 0);
                    if (p.offset_bytes == 1) offset_unit = take(2, 0);
                }
                float scale = take(p.scale_bytes, unit), offset = take(p.offset_bytes, offset_unit);
                for (int64_t k = 0; k < p.group; k++)
                    thin(row + g + k, value_of(p, code_at(p, (const uint8_t*)at, k, s.lane)) * scale + offset);
                at += PANEL * p.group * p.bits / 8;
            }
        }
    });
    return 0;
}

extern "C" int64_t mp_panels_bytes(const Panels* p) {  // 0: such a matrix cannot be arranged
#if defined(MP_PAIRS)
    if (p->type == BF16 && p->inputs % 2) return 0;
#endif
    if (p->bits && (p->inputs % CHUNK || (p->group != CHUNK / 2 && p->group % CHUNK) || p->group % higher_inputs(p->bits))) return 0;
    return p->count() * p->bytes();
}
// The weight [outputs, inputs] into p's memory.
extern "C" int mp_arrange(const Panels* p, const void* weight, int threads) {
#define CALL(T) arrange<T>(*p, (const T*)weight, threads)
    FOR_TYPE(p->type, CALL)
#undef CALL
}
// Packed rows into p's memory.
extern "C" void mp_arrange_packed(const Panels* p, const PackedMatrix* from, int threads) { arrange_packed(*p, *from, threads); }
// Rows of the weight as they were; indices have been checked.
extern "C" int mp_rows(const Panels* p, const int64_t* outputs, int64_t n, void* to, int threads) {
#define CALL(T) p->bits ? packed_rows_back<T>(*p, outputs, n, (T*)to, threads) : rows_back<T>(*p, outputs, n, (T*)to, threads)
    FOR_TYPE(p->type, CALL)
#undef CALL
}
