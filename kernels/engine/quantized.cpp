// Quantised KV writes: int8 or e4m3, one scale per token, head and plane. The rule is in moonpool/engine/kernels/reference.py.
#include "quantized.h"
#include "parallel.h"

template <class T>
static void write(const T* k, int64_t k_stride, const T* v, int64_t v_stride, const Quantized& to, const int64_t* blocks,
                  const int64_t* offsets, int64_t rows, int heads, int D, int threads) {
    split(rows, worth(rows * heads * D, threads), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++)
            if (blocks[r] >= 0) to.keep(k + r * k_stride, v + r * v_stride, blocks[r], offsets[r], heads, D);
    });
}

extern "C" int mp_write_quantized(int from_type, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
                                  int type, char* kv, int64_t block_stride, int64_t plane_stride, float* scales,
                                  int64_t scale_stride, int64_t scale_plane_stride, const int64_t* blocks,
                                  const int64_t* offsets, int64_t rows, int heads, int D, int threads) {
    Quantized to{type, kv, block_stride, plane_stride, scales, scale_stride, scale_plane_stride};
#define CALL(T) (write((const T*)k, k_stride, (const T*)v, v_stride, to, blocks, offsets, rows, heads, D, threads), 0)
    FOR_TYPE(from_type, CALL)
#undef CALL
}
