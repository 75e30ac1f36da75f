// A mixture of experts: a router chooses some networks for each row, whose weighted results are added to the row.
#pragma once
#include "panels.h"

enum { MAX_CHOSEN = 64 };  // experts of a row, groups of a row
enum Scores { SOFTMAX = 0, SIGMOID = 1, SOFTMAX_CHOSEN = 2 };  // softmax over the logits of the chosen experts

// One layer's experts; moonpool/base/families/spec.py says what the numbers mean. Mirrors moonpool/engine/kernels/native/structures.py.
struct Experts {
    int64_t count, chosen;
    int32_t scores, normalised, groups, groups_chosen, group_top;
    float least_sum, factor;
    const float* correction;        // [count], or null
    const Panels *gate_up, *down;   // [count]
    Panels router;                  // of float
    Panels shared_gate_up, shared_down, shared_gate;  // no outputs: there is none
};

// Adds the experts' results for x [rows, hidden] to `out`, both with strides in elements. Returns 1 where there is no
// memory to work in.
template <class T>
int add_experts(const Experts& e, const T* x, int64_t stride, int64_t rows, T* out, int64_t out_stride, int threads);
