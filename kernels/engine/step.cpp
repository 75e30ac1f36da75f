// The layers of a stage over one packed batch: one call for all of them.
//
// Between two layers the step's watch is looked at: a gate that is shut, or a step that was given up, ends the call. Who
// follows the step is told of each layer.
#include "step.h"

#include <time.h>

#include "quantized.h"

struct Pool { char* values; float* scales; };  // of one layer

// Memory of one step, rows begin at whole cache lines. Rows that are a multiple of 2 KB apart would share few sets.
template <class T> static int64_t apart(int64_t elements) {
    int64_t line = 64 / sizeof(T), stride = (elements + line - 1) / line * line;
    return stride * sizeof(T) % 2048 ? stride : stride + line;
}
template <class T> struct Room {
    T *normed, *qkv, *attended, *inner, *picked, *queries;
    int64_t hidden, columns, heads, wide;  // distances of rows, in elements
    bool take(Memory& memory, const Model& m, int64_t rows, int64_t wanted) {
        int64_t all = (m.heads + 2 * m.kv_heads) * m.head_dim;
        hidden = apart<T>(m.hidden), columns = apart<T>(all), heads = apart<T>(m.heads * m.head_dim), wide = apart<T>(m.inner);
        int64_t count = rows * (hidden + columns + heads + wide) + wanted * (hidden + heads);
        T* p = (T*)memory.get((size_t)count * sizeof(T));
        if (!p) return false;
        normed = p, qkv = normed + rows * hidden, attended = qkv + rows * columns, inner = attended + rows * heads;
        picked = inner + rows * wide, queries = picked + wanted * hidden;
        return true;
    }
};

template <class T> struct Run {
    const Model& m;
    const Step& s;
    Room<T> room;
    int64_t rows;     // of hidden
    T* hidden;
    int D, q_width;
    int64_t index;    // of the layer, in the stage

    // f(r) for all rows, each of `elements`.
    template <class F> void each(int64_t count, int64_t elements, const F& f) const {
        split(count, worth(count * elements, s.threads), [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; r++) f(r);
        });
    }
    void norm(const char* weight) const {
        each(rows, m.hidden, [&](int64_t r) {
            norm_row(hidden + r * m.hidden, (T*)nullptr, (const T*)weight, m.eps, room.normed + r * room.hidden, m.hidden);
        });
    }
    // `wanted`: which rows of the step these are; null: all.
    int times(const Panels& p, LoraPlace place, const int64_t* wanted, const T* x, int64_t stride, int64_t count, void* out,
              int64_t out_stride, int end, int64_t from, int64_t to) const {
        static thread_local Memory memory;
        LowRankRows added{};
        if (s.loras && prepare_loras<T>(*s.loras, index, place, wanted, x, stride, count, memory, added, s.threads)) return 1;
        return product<T>(p, x, stride, count, Result{out, out_stride, end, from, to, added.ups ? &added : nullptr}, s.threads);
    }
    // Heads of one row, at the angles of the batch's row `at`: normed and rotated where they lie.
    void turn(T* heads, int count, const char* weight, int64_t at) const {
        const T *cos = (const T*)s.cos + at * D, *sin = (const T*)s.sin + at * D;
        for (int h = 0; h < count; h++, heads += D) {
            if (weight) norm_row(heads, (T*)nullptr, (const T*)weight, m.eps, heads, D);
            rotate_head(heads, cos, sin, heads, D);
        }
    }
    // Keys and values of one row into the pool; those of a row without a block are there already.
    void keep(const T* keys, const Pool& kv, int64_t r) const {
        if (s.blocks[r] < 0) return;
        if (kv.scales) {
            Quantized to{s.kv_type, kv.values, s.block_stride, s.plane_stride, kv.scales, s.scale_stride, s.scale_plane_stride};
            return to.keep(keys, keys + m.kv_heads * D, s.blocks[r], s.offsets[r], m.kv_heads, D);
        }
        int64_t bytes = D * (int64_t)sizeof(T);
        char* to = kv.values + s.blocks[r] * s.block_stride + s.offsets[r] * bytes;
        for (int h = 0; h < m.kv_heads; h++, to += 2 * s.block_size * bytes) {
            memcpy(to, keys + h * D, bytes);
            memcpy(to + s.block_size * bytes, keys + (m.kv_heads + h) * D, bytes);
        }
    }
    int attend(const T* q, int64_t stride, const Pool& kv, const Items& items) const;
    int queries_of_all(const Layer& layer, const Pool& kv);
    int queries_of_some(const Layer& layer, const Pool& kv);
    int layer(int64_t its_index, bool trimmed);
};

extern "C" int mp_decode(const Attention* a, int threads);
extern "C" int mp_prefill(const Attention* a, int threads);

template <class T> int Run<T>::attend(const T* q, int64_t stride, const Pool& kv, const Items& items) const {
    Attention a{(const char*)q, stride, m.type, kv.values, s.block_stride, s.plane_stride, s.kv_type,
                kv.scales, s.scale_stride, s.scale_plane_stride, s.tables, s.table_stride, items.single, items.singles, m.heads, m.kv_heads, D, (int)s.block_size, m.scale,
                (char*)room.attended, room.heads};
    int code = a.n ? mp_decode(&a, s.threads) : 0;
    a.items = items.several, a.n = items.many;
    return code || !a.n ? code : mp_prefill(&a, s.threads);
}

template <class T> int Run<T>::queries_of_all(const Layer& l, const Pool& kv) {
    if (int code = times(l.qkv, LORA_QKV, nullptr, room.normed, room.hidden, rows, room.qkv, room.columns, PLAIN, 0, l.qkv.outputs)) return code;
    each(rows, room.columns, [&](int64_t r) {
        T* row = room.qkv + r * room.columns;
        turn(row, m.heads, l.q_norm, r);
        turn(row + q_width, m.kv_heads, l.k_norm, r);
        keep(row + q_width, kv, r);
    });
    return attend(room.qkv, room.columns, kv, s.all);
}

// Keys and values of all rows; queries, and all that follows, of the wanted ones only.
template <class T> int Run<T>::queries_of_some(const Layer& l, const Pool& kv) {
    if (int code = times(l.qkv, LORA_QKV, nullptr, room.normed, room.hidden, rows, room.qkv, room.columns, PLAIN, q_width, l.qkv.outputs)) return code;
    each(rows, room.columns, [&](int64_t r) {
        T* row = room.qkv + r * room.columns;
        turn(row, m.kv_heads, l.k_norm, r);
        keep(row, kv, r);
    });
    rows = s.wanted_rows;
    for (int64_t i = 0; i < rows; i++) {
        memcpy(room.picked + i * room.hidden, room.normed + s.wanted[i] * room.hidden, m.hidden * sizeof(T));
        memmove(hidden + i * m.hidden, hidden + s.wanted[i] * m.hidden, m.hidden * sizeof(T));
    }
    if (!rows) return 0;
    if (int code = times(l.qkv, LORA_QKV, s.wanted, room.picked, room.hidden, rows, room.queries, room.heads, PLAIN, 0, q_width)) return code;
    each(rows, q_width, [&](int64_t i) { turn(room.queries + i * room.heads, m.heads, l.q_norm, s.wanted[i]); });
    return attend(room.queries, room.heads, kv, s.some);
}

template <class T> int Run<T>::layer(int64_t its_index, bool trimmed) {
    index = its_index;
    const Layer& l = m.layers[index];
    const int64_t* its = trimmed ? s.wanted : nullptr;
    Pool kv{s.kv + index * s.layer_stride, s.scales ? s.scales + index * s.scale_layer_stride : nullptr};
    norm(l.input_norm);
    if (int code = trimmed ? queries_of_some(l, kv) : queries_of_all(l, kv)) return code;
    if (!rows) return 0;
    if (int code = times(l.output, LORA_OUTPUT, its, room.attended, room.heads, rows, hidden, m.hidden, ADD, 0, m.hidden)) return code;
    norm(l.post_norm);
    if (l.experts) {
        if (int code = add_experts<T>(*l.experts, room.normed, room.hidden, rows, hidden, m.hidden, s.threads)) return code;
    } else if (int code = times(l.gate_up, LORA_GATE_UP, its, room.normed, room.hidden, rows, room.inner, room.wide, PLAIN, 0, l.gate_up.columns())) return code;
    else if (int code = times(l.down, LORA_DOWN, its, room.inner, room.wide, rows, hidden, m.hidden, ADD, 0, m.hidden)) return code;
    if (trimmed) for (int64_t i = rows; i-- > 0;) memmove(hidden + s.wanted[i] * m.hidden, hidden + i * m.hidden, m.hidden * sizeof(T));
    return 0;
}

static bool stopped(const Step& s, int64_t layer) {
    if (!s.watch) return false;
    return __atomic_load_n(&s.watch->aborted, __ATOMIC_ACQUIRE) ||
           __atomic_load_n(&s.watch->open, __ATOMIC_ACQUIRE) < s.index + layer;
}

static void begins(const Step& s, int64_t layer) {
    if (!s.progress) return;
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    s.progress->began_ns[layer] = t.tv_sec * 1000000000ll + t.tv_nsec;
}
template <class T> static int64_t run(const Model& m, const Step& s) {
    static thread_local Memory memory;
    Run<T> run{m, s, {}, s.rows, (T*)s.hidden, m.head_dim, m.heads * m.head_dim, 0};
    if (!run.room.take(memory, m, s.rows, s.wanted ? s.wanted_rows : 0)) return -1;
    for (int64_t layer = s.first; layer < s.last; layer++) {
        if (stopped(s, layer)) return layer;
        begins(s, layer);
        if (run.layer(layer, s.wanted && layer + 1 == s.last)) return -1;
        if (s.progress) came_to(s.progress, s.index + layer + 1);
    }
    return s.last;
}

// Returns the layer that it came to, `last` unless it was stopped; -1 where there is no memory to work in.
extern "C" int64_t mp_step(const Model* m, const Step* s) {
#define CALL(T) (int)run<T>(*m, *s)
    FOR_TYPE(m->type, CALL)
#undef CALL
}
