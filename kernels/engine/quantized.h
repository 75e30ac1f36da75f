// Where quantised keys and values go, one layer of the pool, and how a token's numbers become int8 or e4m3.
#pragma once
#include "pool.h"
#include "rows.h"

INLINE void store_rounded(int8_t* p, vf x) { store_bytes(p, nearest(x)); }
INLINE void store_rounded(f8* p, vf x) {  // e4m3fn, to nearest even; |x| <= 448
    vu u = (vu)x, a = u & 0x7fffffff;
    vu normal = (a - (120u << 23) + 0x7ffff + (a >> 20 & 1)) >> 20;
    vu small = (vu)nearest((vf)a * 512.0f);  // below 2^-6: multiples of 2^-9
    vu is_small = (vu)((vi)a < 0x3c800000);
    store_bytes(p, (vi)((is_small & small) | (~is_small & normal) | (u >> 24 & 0x80)));
}
// D numbers of a token in one head and plane; returns their scale, which is NaN where one of them is.
template <class S, class T> INLINE float quantize(const T* from, S* to, int D, float limit) {
    vi top = {};
    for (int d = 0; d < D; d += W) {
        vi bits = (vi)widen(from + d) & 0x7fffffff;
        top = imax(top, bits);
    }
    float scale = largest(top) / limit, divisor = scale > 0 ? scale : 1.0f;
    for (int d = 0; d < D; d += W) {
        vf x = widen(from + d) / divisor;  // may pass the limit by a rounding
        x = vmax(x, splat(-limit));
        store_rounded(to + d, x < splat(limit) ? x : splat(limit));
    }
    return scale;
}

struct Quantized {
    int type; char* kv; int64_t block_stride, plane_stride;  // in bytes
    float* scales; int64_t scale_stride, scale_plane_stride;  // in floats
    // Keys and values of one token: [heads, D] each.
    template <class T> void keep(const T* k, const T* v, int64_t block, int64_t slot, int heads, int D) const {
        char* to = kv + block * block_stride + slot * D;
        float* scale = scales + block * scale_stride + slot;
        for (int plane = 0; plane < 2 * heads; plane++, to += plane_stride, scale += scale_plane_stride) {
            const T* from = (plane % 2 ? v : k) + plane / 2 * D;
            *scale = type == I8 ? quantize(from, (int8_t*)to, D, 127.0f) : quantize(from, (f8*)to, D, 448.0f);
        }
    }
};
