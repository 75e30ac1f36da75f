// What a step is given; see step.cpp and go_on.cpp. Mirrored in moonpool/engine/kernels/native/structures.py.
#pragma once
#include "experts.h"
#include "lora.h"

struct Layer {  // norms in the weights' type; q_norm and k_norm may be null
    const char *input_norm, *post_norm, *q_norm, *k_norm;
    Panels qkv, output, gate_up, down;
    const Experts* experts;  // null: gate_up and down
};
struct Model {
    const Layer* layers;  // of the stage
    int64_t hidden, inner;
    int32_t type, heads, kv_heads, head_dim;
    float eps, scale;  // of norms, of attention's scores
};
// What another thread may change meanwhile: whether the step was given up, the model's highest layer that may run, and
// whether something waits for the step's end.
struct Watch { int64_t aborted, open, awaited; };
// What another thread follows (progress.cpp): the model's layers that are done, from the first on, and whether it is over.
struct Progress { uint32_t word; int64_t* began_ns; };  // of each layer of the stage, when it began (CLOCK_MONOTONIC)
// Sequences to attend with, as in pool.h: those with one row, and those with several.
struct Items { const int32_t* single; int64_t singles; const int32_t* several; int64_t many; };
struct Step {
    int64_t first, last, index;  // layers of the stage, from first up to last; index of the stage's first in the model
    char* hidden; int64_t rows;  // [rows, hidden], dense: in and out
    const char *cos, *sin;       // [rows, head_dim]
    const int64_t *blocks, *offsets;  // where each row's keys and values go; a block of -1: nowhere
    char* kv; int64_t layer_stride, block_stride, plane_stride, block_size;  // of the first layer; strides in bytes
    float* scales; int64_t scale_layer_stride, scale_stride, scale_plane_stride;  // of quantised KV, else null; in floats
    int32_t kv_type;
    const int32_t* tables; int64_t table_stride;
    Items all;
    const int64_t* wanted; int64_t wanted_rows;  // rows that the last layer is computed for, rising; null: all
    Items some;                                  // with rows counted in `wanted`
    const Watch* watch;                          // null: nobody watches
    Progress* progress;                          // null: nobody follows
    const Loras* loras;                          // null: no row has an adapter
    int32_t threads;
};

extern "C" int64_t mp_step(const Model* m, const Step* s);
void came_to(Progress* p, int64_t layer);  // all of the model's layers below this one are done
