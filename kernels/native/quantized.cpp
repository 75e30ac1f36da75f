// Quantised KV writes: int8 or e4m3, one scale per block, head and plane. The rule is in kernels/reference.py.
#include "parallel.h"
#include "pool.h"

static const float largest[] = {0, 0, 0, 127.0f, 448.0f};

INLINE uint8_t store_f8(float x) {  // e4m3fn, to nearest even; |x| <= 448
    uint32_t u;
    memcpy(&u, &x, 4);
    uint32_t sign = u >> 24 & 0x80, a = u & 0x7fffffff;
    if (a < 0x3c800000) {  // below 2^-6: multiples of 2^-9; adding 2^14 leaves just those bits
        float f;
        memcpy(&f, &a, 4);
        f += 16384.0f;
        memcpy(&a, &f, 4);
        return (uint8_t)(sign | (a - 0x46800000));
    }
    a = (a - (120u << 23) + 0x7ffff + (a >> 20 & 1)) >> 20;
    return (uint8_t)(sign | (a > 0x7e ? 0x7e : a));
}
INLINE char stored(int type, float x, float limit) {
    x = x > limit ? limit : x < -limit ? -limit : x;
    return type == I8 ? (char)(int8_t)__builtin_rintf(x) : (char)store_f8(x);
}

// All tokens of one run (same block), one head and plane.
static void run(int from_type, const char* from, int64_t stride, int type, char* plane, float* scale,
                const int64_t* offsets, int64_t rows, int D, int64_t block_tokens) {
    int bytes = type_bytes[from_type];
    float row[256], top = 0;
    bool anew = false;
    for (int64_t r = 0; r < rows; r++) {
        convert(from_type, from + r * stride * bytes, row, D);
        for (int d = 0; d < D; d++) top = __builtin_fabsf(row[d]) > top ? __builtin_fabsf(row[d]) : top;
        anew |= offsets[r] == 0;
    }
    float limit = largest[type], old = anew ? 0.0f : *scale, wanted = top / limit, grown = wanted > old ? wanted : old;
    if (grown != old) {
        if (old == 0) {
            memset(plane, 0, (size_t)block_tokens * D);
        } else {
            float factor = old / grown;
            for (int64_t i = 0; i < block_tokens * D; i += D) {
                convert(type, plane + i, row, D);
                for (int d = 0; d < D; d++) plane[i + d] = stored(type, row[d] * factor, limit);
            }
        }
    } else if (old == 0) {
        memset(plane, 0, (size_t)block_tokens * D);
    }
    for (int64_t r = 0; r < rows; r++) {
        convert(from_type, from + r * stride * bytes, row, D);
        char* to = plane + offsets[r] * D;
        for (int d = 0; d < D; d++) to[d] = grown > 0 ? stored(type, row[d] / grown, limit) : 0;
    }
    *scale = grown;
}

extern "C" int mp_write_quantized(int from_type, const char* k, int64_t k_stride, const char* v, int64_t v_stride,
                                  int type, char* kv, int64_t block_stride, float* scales, int64_t scale_stride,
                                  const int64_t* blocks, const int64_t* offsets, int64_t rows, int heads, int D,
                                  int block_tokens, int threads) {
    // Tokens come in runs of one block (callers with scattered ones have sorted them): each is one growth.
    static thread_local Memory memory;
    int64_t* begins = (int64_t*)memory.get(8 * (rows + 1));
    if (!begins) return 1;
    int64_t runs = 0;
    for (int64_t r = 0; r < rows; r++) if (!r || blocks[r] != blocks[r - 1]) begins[runs++] = r;
    begins[runs] = rows;
    int bytes = type_bytes[from_type];
    parallel(runs * heads, rows * heads * D < 16384 ? 1 : threads, [&](int64_t i) {
        int64_t begin = begins[i / heads], count = begins[i / heads + 1] - begin, head = i % heads;
        char* plane = kv + blocks[begin] * block_stride + head * 2 * block_tokens * D;
        float* scale = scales + blocks[begin] * scale_stride + 2 * head;
        run(from_type, k + (begin * k_stride + head * D) * bytes, k_stride, type, plane, scale, offsets + begin, count, D, block_tokens);
        run(from_type, v + (begin * v_stride + head * D) * bytes, v_stride, type, plane + (int64_t)block_tokens * D, scale + 1,
            offsets + begin, count, D, block_tokens);
    });
    return 0;
}
