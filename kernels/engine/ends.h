// What becomes of a product's sums: bias, rounding, the residual sum, gates.
#pragma once
#include "panels.h"

template <class T> INLINE void put_one(const Result& r, int64_t row, int64_t column, float value) {
    int64_t at = row * r.stride + column - r.first;
    T t;
    thin(&t, value);
    if (r.end == WIDE) ((float*)r.out)[at] = wide(t);
    else if (r.end == ADD) thin((T*)r.out + at, wide(((T*)r.out)[at]) + wide(t));
    else ((T*)r.out)[at] = t;
}
template <class T> INLINE void put_vector(const Result& r, int64_t row, int64_t column, vf value) {
    int64_t at = row * r.stride + column - r.first;
    value = rounded<T>(value);
    if (r.end == WIDE) store((float*)r.out + at, value);
    else if (r.end == ADD) narrow((T*)r.out + at, widen((T*)r.out + at) + value);
    else narrow((T*)r.out + at, value);
}
template <class T>
static void finish_plain(const Panels& p, int64_t panel, int64_t row, int rows, const float* sums, const Result& r) {
    const T* bias = (const T*)p.bias;
    for (int v = 0; v < VECTORS; v++) {
        int64_t column = panel * PANEL + v * W;
        bool whole = column >= r.first && column + W <= r.last;
        for (int i = 0; i < rows; i++) {
            const float* sum_ = sums + i * PANEL + v * W;
            if (whole) {
                vf value = load(sum_);
                put_vector<T>(r, row + i, column, bias ? value + widen(bias + column) : value);
            } else {
                for (int64_t c = column < r.first ? r.first : column; c < column + W && c < r.last; c++)
                    put_one<T>(r, row + i, c, bias ? sum_[c - column] + wide(bias[c]) : sum_[c - column]);
            }
        }
    }
}
// Gates and ups: activated and multiplied.
template <class T>
static void finish_gated(const Panels& p, int64_t panel, int64_t row, int rows, const float* sums, const Result& r) {
    int64_t half = p.outputs / 2;
    const T* bias = (const T*)p.bias;
    for (int v = 0; v < VECTORS; v += 2) {
        int64_t column = panel * (PANEL / 2) + v / 2 * W;
        int count = half - column < W ? (int)(half - column) : W;
        if (count <= 0) break;
        float gates[W] = {}, ups[W] = {};
        for (int c = 0; bias && c < count; c++) gates[c] = wide(bias[column + c]), ups[c] = wide(bias[half + column + c]);
        for (int i = 0; i < rows; i++) {
            vf gate = load(sums + i * PANEL + v * W), up = load(sums + i * PANEL + (v + 1) * W);
            if (bias) gate += load(gates), up += load(ups);
            vf value = rounded<T>(silu(rounded<T>(gate))) * rounded<T>(up);
            if (count == W) {
                narrow((T*)r.out + (row + i) * r.stride + column, value);
            } else {
                T some[W];
                narrow(some, value);
                memcpy((T*)r.out + (row + i) * r.stride + column, some, count * sizeof(T));
            }
        }
    }
}
template <class T>
static void finish(const Panels& p, int64_t panel, int64_t row, int rows, float* sums, const Result& r) {
    if (r.added) add_low_rank<T>(*r.added, panel, row, rows, sums);
    if (p.gated) finish_gated<T>(p, panel, row, rows, sums, r);
    else finish_plain<T>(p, panel, row, rows, sums, r);
}
