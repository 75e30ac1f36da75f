// A mixture of experts. Rows are gathered by expert, so that each chosen expert is one product over its rows; a row's
// results are added in the order of experts, whatever else is in the batch.
#include "experts.h"
#include "rows.h"

#include <math.h>

// ---- routing ----
// The `k` highest of `n` numbers, the first among equals; numbers that are not one come last.
static void highest(const float* from, int64_t n, int64_t k, uint8_t* taken, int32_t* to) {
    memset(taken, 0, n);
    for (int64_t i = 0; i < k; i++) {
        int64_t best = -1;
        for (int64_t j = 0; j < n; j++)
            if (!taken[j] && (best < 0 || from[j] > from[best] || (from[best] != from[best] && from[j] == from[j]))) best = j;
        taken[best] = 1, to[i] = (int32_t)best;
    }
}
static void softmax(float* x, int64_t n) {
    float top = x[0], sum = 0;
    for (int64_t i = 1; i < n; i++) top = x[i] > top ? x[i] : top;
    for (int64_t i = 0; i < n; i++) sum += x[i] = expf(x[i] - top);
    for (int64_t i = 0; i < n; i++) x[i] /= sum;
}
// Of each row the experts, rising, and their weights; `room`: count floats, count bytes, and 2 * groups of both.
static void route(const Experts& e, float* logits, int32_t* chosen, float* weights, float* room) {
    int64_t n = e.count, k = e.chosen, size = n / e.groups;
    float* scores = room;
    uint8_t* taken = (uint8_t*)(room + n + e.groups);
    int32_t best[MAX_CHOSEN];
    if (e.scores == SOFTMAX) softmax(logits, n);
    if (e.scores == SIGMOID) for (int64_t i = 0; i < n; i++) logits[i] = 1 / (1 + expf(-logits[i]));
    for (int64_t i = 0; i < n; i++) scores[i] = e.correction ? logits[i] + e.correction[i] : logits[i];
    if (e.groups_chosen < e.groups) {
        float* sums = room + n;
        for (int64_t g = 0; g < e.groups; g++) {
            highest(scores + g * size, size, e.group_top, taken, best);
            sums[g] = 0;
            for (int i = 0; i < e.group_top; i++) sums[g] += scores[g * size + best[i]];
        }
        highest(sums, e.groups, e.groups_chosen, taken, best);
        for (int64_t g = 0; g < e.groups; g++)
            if (!taken[g]) for (int64_t i = 0; i < size; i++) scores[g * size + i] = -__builtin_inff();
    }
    highest(scores, n, k, taken, chosen);
    float sum = 0;
    for (int64_t i = 0; i < k; i++) weights[i] = logits[chosen[i]], sum += weights[i];
    if (e.scores == SOFTMAX_CHOSEN) softmax(weights, k);
    if (e.normalised) for (int64_t i = 0; i < k; i++) weights[i] /= sum > e.least_sum ? sum : e.least_sum;
    for (int64_t i = 0; i < k; i++) weights[i] *= e.factor;
    for (int64_t i = 1; i < k; i++)  // by expert
        for (int64_t j = i; j > 0 && chosen[j] < chosen[j - 1]; j--) {
            int32_t expert = chosen[j];
            float weight = weights[j];
            chosen[j] = chosen[j - 1], weights[j] = weights[j - 1];
            chosen[j - 1] = expert, weights[j - 1] = weight;
        }
}

// ---- rows of results ----
// to = to + from * weight, each step rounded.
template <class T> static void add_weighted(const T* from, float weight, T* to, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) narrow(to + i, widen(to + i) + rounded<T>(widen(from + i) * weight));
    for (; i < n; i++) {
        T t;
        thin(&t, wide(from[i]) * weight);
        thin(to + i, wide(to[i]) + wide(t));
    }
}

// Rows of some experts: those of expert `expert` are `rows` from `begin` on.
struct Lot { int64_t expert, begin, rows; };

// All lots by their experts' matrices, each in as many parts of columns as threads need to have enough.
template <class T>
static int products(const Panels* matrices, const Lot* lots, int64_t count, const T* x, int64_t stride, T* out, int64_t out_stride, int threads) {
    int64_t parts = threads > 1 ? (8 * threads + count - 1) / count : 1;
    std::atomic<int> failed{0};
    parallel(count * parts, threads, [&](int64_t task) {
        const Lot& lot = lots[task / parts];
        const Panels& p = matrices[lot.expert];
        int64_t part = task % parts, width = p.width(), panels = p.count(), columns = p.columns();
        int64_t first = panels * part / parts * width, last = panels * (part + 1) / parts * width;
        if (last > columns) last = columns;
        if (first >= last) return;
        T* to = out + lot.begin * out_stride + (p.gated ? 0 : first);  // ends of gated ones know no first column
        if (product<T>(p, x + lot.begin * stride, stride, lot.rows, Result{to, out_stride, PLAIN, first, last}, 1)) failed = 1;
    });
    return failed;
}

template <class T> static int64_t apart(int64_t elements) {  // rows begin at whole cache lines
    int64_t line = 64 / sizeof(T);
    return (elements + line - 1) / line * line;
}

template <class T>
int add_experts(const Experts& e, const T* x, int64_t stride, int64_t rows, T* out, int64_t out_stride, int threads) {
    static thread_local Memory memory;
    int64_t hidden = e.router.inputs, inner = e.gate_up[0].columns(), all = rows * e.chosen, shared = e.shared_gate_up.outputs ? rows : 0;
    int64_t wide_inner = shared && e.shared_down.inputs > inner ? e.shared_down.inputs : inner;
    int64_t h = apart<T>(hidden), w = apart<T>(wide_inner), most = all > shared ? all : shared;
    int64_t room = 2 * e.count + 2 * e.groups, floats = rows * (hidden + 2 * e.count + room + 2 * e.chosen) + all;
    int64_t bytes = ((all + rows + shared) * h + most * w + shared) * sizeof(T) + floats * 4 + (e.count + 1) * sizeof(Lot) + 256;
    T* p = (T*)memory.get(bytes);
    if (!p) return 1;
    T *gathered = p, *sum = gathered + all * h, *beside = sum + rows * h, *between = beside + shared * h;  // `gathered` takes results, too
    float* wide_rows = (float*)(((uintptr_t)(between + most * w + shared) + 63) & ~(uintptr_t)63);
    float *logits = wide_rows + rows * hidden, *spare = logits + rows * e.count, *weights = spare + rows * room;
    int32_t *chosen = (int32_t*)(weights + all), *place = chosen + all;
    Lot* lots = (Lot*)(((uintptr_t)(place + all) + 7) & ~(uintptr_t)7);

    split(rows, worth(rows * hidden, threads), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++)
            for (int64_t i = 0; i < hidden; i++) wide_rows[r * hidden + i] = wide(x[r * stride + i]);
    });
    if (product<float>(e.router, wide_rows, hidden, rows, Result{logits, e.count, PLAIN, 0, e.count}, threads)) return 1;
    split(rows, worth(rows * e.count * e.chosen, threads), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++)
            route(e, logits + r * e.count, chosen + r * e.chosen, weights + r * e.chosen, spare + r * room);
    });
    int64_t count = 0, begin = 0;
    int32_t* next = (int32_t*)spare;  // of each expert: where its next row goes
    memset(next, 0, e.count * sizeof(int32_t));
    for (int64_t i = 0; i < all; i++) next[chosen[i]]++;
    for (int64_t expert = 0; expert < e.count; expert++) {
        int64_t its = next[expert];
        next[expert] = (int32_t)begin;
        if (its) lots[count++] = {expert, begin, its};
        begin += its;
    }
    for (int64_t i = 0; i < all; i++) place[i] = next[chosen[i]]++;
    split(all, worth(all * hidden, threads), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) memcpy((void*)(gathered + place[i] * h), x + i / e.chosen * stride, hidden * sizeof(T));
    });
    if (products<T>(e.gate_up, lots, count, gathered, h, between, w, threads)) return 1;
    if (products<T>(e.down, lots, count, between, w, gathered, h, threads)) return 1;
    T* gate = between + most * w;
    if (shared) {
        if (product<T>(e.shared_gate_up, x, stride, rows, Result{between, w, PLAIN, 0, e.shared_gate_up.columns()}, threads)) return 1;
        if (product<T>(e.shared_down, between, w, rows, Result{beside, h, PLAIN, 0, hidden}, threads)) return 1;
        if (e.shared_gate.outputs && product<T>(e.shared_gate, x, stride, rows, Result{gate, 1, PLAIN, 0, 1}, threads)) return 1;
    }
    split(rows, worth(rows * hidden * e.chosen, threads), [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            T* its = sum + r * h;
            memset((void*)its, 0, hidden * sizeof(T));
            for (int64_t i = r * e.chosen; i < (r + 1) * e.chosen; i++) add_weighted(gathered + place[i] * h, weights[i], its, hidden);
            T share = {};
            if (shared && e.shared_gate.outputs) thin(&share, 1 / (1 + expf(-wide(gate[r]))));
            if (shared) add_weighted(beside + r * h, e.shared_gate.outputs ? wide(share) : 1, its, hidden);
            add_weighted(its, 1, out + r * out_stride, hidden);
        }
    });
    return 0;
}
template int add_experts<float>(const Experts&, const float*, int64_t, int64_t, float*, int64_t, int);
template int add_experts<bf16>(const Experts&, const bf16*, int64_t, int64_t, bf16*, int64_t, int);
template int add_experts<f16>(const Experts&, const f16*, int64_t, int64_t, f16*, int64_t, int);
