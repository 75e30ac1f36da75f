// What is small and frequent, in one pass each: norms, rotations, activations, KV writes.
// Rounding follows transformers, step by step; see moonpool/engine/kernels/reference.py.
#include "parallel.h"
#include "pool.h"
#include "rows.h"

template <class T>
static int rms_norm(const T* x, int64_t stride, T* residual, const T* weight, float eps, T* out, int64_t rows, int64_t n, int threads) {
    split(rows, worth(rows * n, threads), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++)
            norm_row(x + r * stride, residual ? residual + r * n : nullptr, weight, eps, out + r * n, n);
    });
    return 0;
}
extern "C" int mp_rms_norm(int type, const void* x, int64_t stride, void* residual, const void* weight, float eps,
                           void* out, int64_t rows, int64_t n, int threads) {
#define CALL(T) rms_norm<T>((const T*)x, stride, (T*)residual, (const T*)weight, eps, (T*)out, rows, n, threads)
    FOR_TYPE(type, CALL)
#undef CALL
}

template <class T>
static int rope(const T* x, int64_t stride, const T* cos, const T* sin, T* out, int64_t out_stride, int64_t rows,
                int heads, int D, int threads) {
    split(rows, worth(rows * heads * D, threads), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++)
            for (int64_t h = 0; h < heads; h++)
                rotate_head(x + r * stride + h * D, cos + r * D, sin + r * D, out + r * out_stride + h * D, D);
    });
    return 0;
}
extern "C" int mp_rope(int type, const void* x, int64_t stride, const void* cos, const void* sin, void* out,
                       int64_t out_stride, int64_t rows, int heads, int D, int threads) {
#define CALL(T) rope<T>((const T*)x, stride, (const T*)cos, (const T*)sin, (T*)out, out_stride, rows, heads, D, threads)
    FOR_TYPE(type, CALL)
#undef CALL
}

template <class T>
static int silu_mul(const T* x, int64_t stride, T* out, int64_t rows, int64_t n, int threads) {
    // Cut across rows and columns: one row of a large model is work for several threads.
    int64_t units = (n + 1023) / 1024;
    split(rows * units, worth(rows * n, threads), [&](int64_t begin, int64_t end) {
        for (int64_t u = begin; u < end; u++) {
            int64_t r = u / units, i = u % units * 1024, last = i + 1024 < n ? i + 1024 : n;
            const T* gate = x + r * stride;
            for (; i + W <= last; i += W)
                narrow(out + r * n + i, rounded<T>(silu(widen(gate + i))) * widen(gate + n + i));
            for (; i < last; i++) {
                T t;
                thin(&t, silu(splat(wide(gate[i])))[0]);
                thin(out + r * n + i, wide(t) * wide(gate[n + i]));
            }
        }
    });
    return 0;
}
extern "C" int mp_silu_mul(int type, const void* x, int64_t stride, void* out, int64_t rows, int64_t n, int threads) {
#define CALL(T) silu_mul<T>((const T*)x, stride, (T*)out, rows, n, threads)
    FOR_TYPE(type, CALL)
#undef CALL
}

// Copies of runs of bytes: rows of keys and values into their slots, but not where the block is -1; blocks onto blocks.
extern "C" int mp_outside(const int64_t* index, int64_t n, int64_t least, int64_t limit) {
    bool bad = false;
    for (int64_t i = 0; i < n; i++) bad |= index[i] < least || index[i] >= limit;
    return bad;
}
extern "C" int mp_write_kv(const char* k, int64_t k_stride, const char* v, int64_t v_stride, char* kv,
                           int64_t block_stride, const int64_t* blocks, const int64_t* offsets, int64_t rows,
                           int heads, int64_t row_bytes, int64_t block_size, int threads) {
    split(rows, worth(rows * heads * row_bytes, threads), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            if (blocks[r] < 0) continue;
            char* to = kv + blocks[r] * block_stride + offsets[r] * row_bytes;
            for (int h = 0; h < heads; h++, to += 2 * block_size * row_bytes) {
                memcpy(to, k + r * k_stride + h * row_bytes, row_bytes);
                memcpy(to + block_size * row_bytes, v + r * v_stride + h * row_bytes, row_bytes);
            }
        }
    });
    return 0;
}
extern "C" int mp_copy_blocks(char* pool, int64_t layer_stride, int64_t layers, int64_t block_stride,
                              int64_t block_bytes, const int64_t* source, const int64_t* target, int64_t n, int threads) {
    split(layers * n, worth(layers * n * block_bytes, threads), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            char* layer = pool + i / n * layer_stride;
            memcpy(layer + target[i % n] * block_stride, layer + source[i % n] * block_stride, block_bytes);
        }
    });
    return 0;
}
