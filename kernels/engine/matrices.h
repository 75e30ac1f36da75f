// Products of bfloat16 by ARM's matrix instructions: BFMMLA multiplies four inputs of two rows by those of two outputs.
//
// To an output BFDOT adds two products, each step rounded to odd; BFMMLA does so twice, in order (BFMatMulAdd in the Arm
// Architecture Reference Manual). So one row goes by BFDOT, several by BFMMLA, and a row has the same bits in both.
#pragma once
#include "vec.h"

#if defined(MP_BFMMLA)
INLINE float32x4_t halves(float32x4_t a, float32x4_t b, bool upper) {
    return upper ? vcombine_f32(vget_high_f32(a), vget_high_f32(b)) : vcombine_f32(vget_low_f32(a), vget_low_f32(b));
}
// acc[M][NV vectors] += a[M][pairs] b[pairs][NV vectors]; a pair takes 4 bytes, and so each row of `a` and `b` a whole number
// of bytes. `ahead` is fetched meanwhile, `pace` bytes with each pair.
template <int M, int NV>
INLINE void add_by_matrices(vf (&acc)[M][NV], const void* a, int64_t a_bytes, const void* b, int64_t b_bytes, int64_t pairs,
                            const char* ahead = nullptr, int64_t pace = 0) {
    const char *row = (const char*)a, *weight = (const char*)b;
    if constexpr (M > 1) {
        constexpr int TWOS = (M + 1) / 2;  // an odd last row goes with itself
        float32x4_t sums[TWOS][NV][2];     // two rows by two outputs
        auto second = [](int m) { return 2 * m + 1 < M ? 2 * m + 1 : 2 * m; };
        for (int m = 0; m < TWOS; m++) for (int v = 0; v < NV; v++) for (int h = 0; h < 2; h++)
            sums[m][v][h] = halves((float32x4_t)acc[2 * m][v], (float32x4_t)acc[second(m)][v], h);
        for (; pairs >= 2; pairs -= 2, row += 8, weight += 2 * b_bytes, ahead += 2 * pace) {
            if (pace) __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + pace, 0, 2);
            bfloat16x8_t rows[TWOS];
            for (int m = 0; m < TWOS; m++)
                rows[m] = vreinterpretq_bf16_u32(vcombine_u32(load_as<uint32x2_t>(row + 2 * m * a_bytes), load_as<uint32x2_t>(row + second(m) * a_bytes)));
            for (int v = 0; v < NV; v++) {
                uint32x4_t first = load_as<uint32x4_t>(weight + 4 * W * v), next = load_as<uint32x4_t>(weight + b_bytes + 4 * W * v);
                bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(first, next)), high = vreinterpretq_bf16_u32(vzip2q_u32(first, next));
                for (int m = 0; m < TWOS; m++) {
                    sums[m][v][0] = vbfmmlaq_f32(sums[m][v][0], rows[m], low);
                    sums[m][v][1] = vbfmmlaq_f32(sums[m][v][1], rows[m], high);
                }
            }
        }
        for (int m = 0; m < M; m++) for (int v = 0; v < NV; v++) acc[m][v] = (vf)halves(sums[m / 2][v][0], sums[m / 2][v][1], m % 2);
    }
    for (; pairs; pairs--, row += 4, weight += b_bytes, ahead += pace) {
        if (pace) __builtin_prefetch(ahead, 0, 2);
        for (int v = 0; v < NV; v++) {
            vu its = load_as<vu>(weight + 4 * W * v);
            for (int m = 0; m < M; m++) acc[m][v] = dot2(acc[m][v], load_as<uint32_t>(row + m * a_bytes) - (vu){}, its);
        }
    }
}
#endif
