// Weights of tokens and their sums, to the bit as moonpool/engine/sampling/random_sampler.py defines them: no product is fused
// with a sum, and sums go in one order on every machine.
#pragma once
#include <math.h>

#include "vec.h"

enum { RUN = 128 };  // tokens whose weights are summed up together
enum { LANES = 16 };  // sums of a run: one for each token modulo this, then halved down to one

typedef double vd __attribute__((vector_size(4 * W)));  // W / 2 of them
typedef float vhalf __attribute__((vector_size(2 * W)));
enum { SUMS = LANES / (W / 2) };

// x, which a compiler would otherwise compute together with the sum that follows, without rounding it.
INLINE vf unfused(vf x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}

// 2 ^ ((logit - greatest) * scale) for N vectors; 0 where that is below 2^-126, or the logit is minus infinity. Each is a
// chain of twenty operations: they go side by side, or the processor would wait for them.
template <int N> INLINE void weigh(const float* logits, vf greatest, vf scale, vf* y) {
    const vf magic = splat(12582912.0f);
    const float powers[] = {1.339984826e-3f, 9.618373259e-3f, 5.550329035e-2f, 2.402264846e-1f, 6.931472056e-1f, 1.0f};
    vf x[N], t[N];
    vi alive[N];
#define ALL _Pragma("GCC unroll 8") for (int i = 0; i < N; i++)
    ALL x[i] = unfused((load(logits + i * W) - greatest) * scale);
    ALL alive[i] = x[i] >= splat(-126.0f);  // not of NaN, which is minus infinity times 0
    ALL t[i] = x[i] + magic;  // its low bits are round(x)
    ALL x[i] -= t[i] - magic;
    ALL y[i] = splat(1.537070260e-4f);
#pragma GCC unroll 8
    for (float power : powers) {
        ALL y[i] = unfused(y[i] * x[i]);
        ALL y[i] += power;
    }
    ALL y[i] = (vf)(((vi)y[i] + ((vi)t[i] << 23)) & alive[i]);
#undef ALL
}

// A run of a row's logits, filled up with minus infinity behind the vocabulary.
INLINE const float* run_of(const float* logits, int64_t vocab, int64_t index, float* room) {
    int64_t first = index * RUN, left = vocab - first;
    if (left >= RUN) return logits + first;
    for (int i = 0; i < RUN; i++) room[i] = i < left ? logits[first + i] : -INFINITY;
    return room;
}

INLINE void as_doubles(vf v, vd* low, vd* high) {
#if defined(MP_AVX512)
    *low = (vd)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
    *high = (vd)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(MP_AVX2)
    *low = (vd)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
    *high = (vd)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
#else
    vhalf parts[2];
    memcpy(parts, &v, sizeof v);
    *low = __builtin_convertvector(parts[0], vd), *high = __builtin_convertvector(parts[1], vd);
#endif
}
// t[0] of what is left when t[i] += t[i + s] for s = W / 4, ..., 1. In vectors: a loop over t waits for its own stores.
INLINE double halved(vd t) {
#if W == 16
    t += SHUF(t, t, 4, 5, 6, 7, 0, 1, 2, 3);
    t += SHUF(t, t, 2, 3, 0, 1, 6, 7, 4, 5);
    t += SHUF(t, t, 1, 0, 3, 2, 5, 4, 7, 6);
#elif W == 8
    t += SHUF(t, t, 2, 3, 0, 1);
    t += SHUF(t, t, 1, 0, 3, 2);
#else
    t += SHUF(t, t, 1, 0);
#endif
    return t[0];
}
enum { TOGETHER = 4 };  // vectors that are weighed side by side
// The sum of a run's vectors, from its first token to its last; f(i, to) gives TOGETHER of them from the i-th on.
template <class F> INLINE double sum_of_run(const F& f) {
    vd lanes[SUMS] = {};
    for (int from = 0; from < RUN / W; from += TOGETHER) {
        vf some[TOGETHER];
        f(from, some);
#pragma GCC unroll 4
        for (int i = 0; i < TOGETHER; i++) {
            vd low, high;
            as_doubles(some[i], &low, &high);
            int j = i % (LANES / W);
            lanes[2 * j] += low, lanes[2 * j + 1] += high;
        }
    }
#pragma GCC unroll 8
    for (int s = SUMS / 2; s; s /= 2) for (int i = 0; i < s; i++) lanes[i] += lanes[i + s];
    return halved(lanes[0]);
}
