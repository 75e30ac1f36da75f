// LoRA adapters of a step's rows: results of products += up(down(row)), each row by its own adapter or none.
#pragma once
#include "panels.h"

struct LowRank { Panels down, up; };  // without outputs: nothing is added
// The products of a layer that take additions, in the order of an adapter's matrices.
enum LoraPlace { LORA_QKV = 0, LORA_OUTPUT = 1, LORA_GATE_UP = 2, LORA_DOWN = 3, LORA_PLACES = 4 };
// Mirrored in moonpool/engine/kernels/native/structures.py.
struct Loras {
    const LowRank* const* adapters;  // of each: [layers of the stage, LORA_PLACES]
    const int32_t* of;               // [rows] of the step: which adapter, or -1
};

// The first half of the additions to a product of x [rows, inputs]: memory and `to` are for its `Result`. `wanted`: the
// step's row of each, or null: they are the same. Returns 1 where there is no memory to work in.
template <class T>
int prepare_loras(const Loras& l, int64_t layer, LoraPlace place, const int64_t* wanted, const T* x, int64_t stride, int64_t rows,
                  Memory& memory, LowRankRows& to, int threads);
