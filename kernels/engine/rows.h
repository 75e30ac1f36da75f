// What is done to one row of hidden states: norm, rotation, activation. Rounding follows transformers, step by step;
// see moonpool/engine/kernels/reference.py.
#pragma once
#include "vec.h"

INLINE float wide(float x) { return x; }
INLINE float wide(bf16 x) { return scalar(x); }
INLINE float wide(f16 x) { f16 t[W] = {x}; return widen(t)[0]; }
INLINE void thin(float* p, float x) { *p = x; }
INLINE void thin(bf16* p, float x) { *p = to_bf16(x); }
INLINE void thin(f16* p, float x) { f16 t[W]; narrow(t, splat(x)); *p = t[0]; }

// to = RMS norm of n elements of `from`; with `sum_` that becomes from + sum_ first, and is what is normed.
template <class T> INLINE void norm_row(const T* from, T* sum_, const T* weight, float eps, T* to, int64_t n) {
    vf squares[4] = {};
    float rest = 0;
    int64_t i = 0;
    int j = 0;
    if (sum_) {
        for (; i + W <= n; i += W, j = (j + 1) & 3) {
            vf v = rounded<T>(widen(from + i) + widen(sum_ + i));
            narrow(sum_ + i, v);
            squares[j] += v * v;
        }
        for (; i < n; i++) {
            thin(sum_ + i, wide(from[i]) + wide(sum_[i]));
            rest += wide(sum_[i]) * wide(sum_[i]);
        }
        from = sum_;
    } else {
        for (; i + W <= n; i += W, j = (j + 1) & 3) {
            vf v = widen(from + i);
            squares[j] += v * v;
        }
        for (; i < n; i++) rest += wide(from[i]) * wide(from[i]);
    }
    float mean = (sum((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest) / (float)n;
    float scale = 1.0f / __builtin_sqrtf(mean + eps);
    for (i = 0; i + W <= n; i += W) narrow(to + i, rounded<T>(widen(from + i) * scale) * widen(weight + i));
    for (; i < n; i++) {
        T t;
        thin(&t, wide(from[i]) * scale);
        thin(to + i, wide(t) * wide(weight[i]));
    }
}

// One head of D elements by its position's angles; `to` may be `from`.
template <class T> INLINE void rotate_head(const T* from, const T* c, const T* s, T* to, int D) {
    int half = D / 2, i = 0;
    for (; i + W <= half; i += W) {
        vf low = widen(from + i), high = widen(from + half + i);
        vf a = widen(c + i) * low, b = widen(c + half + i) * high;
        narrow(to + i, a + high * widen(s + i));
        narrow(to + half + i, b + low * widen(s + half + i));
    }
    for (; i < half; i++) {
        float low = wide(from[i]), high = wide(from[half + i]);
        thin(to + i, wide(c[i]) * low + high * wide(s[i]));
        thin(to + half + i, wide(c[half + i]) * high + low * wide(s[half + i]));
    }
}

INLINE vf silu(vf x) {  // x / (1 + e^-x)
    vf t = vmax(x * -LOG2E, splat(-126.0f));
    t = t < splat(126.0f) ? t : splat(126.0f);
    return x / (exp2v<6>(t) + 1.0f);
}

#define FOR_TYPE(type, call)      \
    switch (type) {               \
        case F32: return call(float); \
        case BF16: return call(bf16); \
        case F16: return call(f16);   \
        default: return 1;        \
    }
