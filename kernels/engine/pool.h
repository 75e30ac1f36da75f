// The paged pool and a batch's queries as the attention kernels are given them. Mirrors moonpool/engine/kernels/native/structures.py.
#pragma once
#include "vec.h"

struct Attention {
    const char* q; int64_t q_stride; int q_type;          // [rows, heads, head_dim], stride in elements
    const char* kv; int64_t block_stride, plane_stride; int kv_type;  // in bytes; a plane is one head's keys or values
    const float* scales; int64_t scale_stride, scale_plane_stride;    // [blocks, kv_heads, 2, block_size] or null, in floats
    const int32_t* tables; int64_t table_stride;
    const int32_t* items;                                 // [n, 4]: first row, rows, row of the tables, context
    int64_t n; int heads, kv_heads, head_dim, block_size; float scale;
    char* out; int64_t out_stride;                        // in q's type, stride in elements
    int window, chunked;                                  // tokens that a row sees, its own included, 0: all; whether they begin anew
    const float* sinks;                                   // [heads] or null: a further score of each head, without a value
    // The first token that a row at `position` sees.
    int first_seen(int position) const {
        int first = !window ? 0 : chunked ? position / window * window : position - window + 1;
        return first > 0 ? first : 0;
    }
    float sink(int head) const { return sinks ? sinks[head] * LOG2E : -__builtin_inff(); }  // as a score of softmax in powers of 2
};
static const int type_bytes[] = {4, 2, 2, 1, 1};

// ---- one row of head_dim elements from its type to another ----
template <class C, class S> INLINE void convert(const char* from, C* to, int D, float scale) {
    for (int d = 0; d < D; d += W) narrow(to + d, widen((const S*)from + d) * scale);
}
template <class C> INLINE void convert(int type, const char* from, C* to, int D, float scale = 1.0f) {
    switch (type) {
        case F32: return convert<C, float>(from, to, D, scale);
        case BF16: return convert<C, bf16>(from, to, D, scale);
        case F16: return convert<C, f16>(from, to, D, scale);
        case I8: return convert<C, int8_t>(from, to, D, scale);
        default: return convert<C, f8>(from, to, D, scale);
    }
}
INLINE void put(int type, char* to, int64_t index, vf v) {
    if (type == F32) narrow((float*)to + index, v);
    else if (type == BF16) narrow((bf16*)to + index, v);
    else narrow((f16*)to + index, v);
}
// Products in bf16, where the machine has them, or in float.
INLINE bool in_bf16(const Attention& a) {
#if defined(MP_PAIRS)
    return a.q_type == BF16 && a.kv_type != F32 && a.kv_type != F16;
#else
    return false;
#endif
}
