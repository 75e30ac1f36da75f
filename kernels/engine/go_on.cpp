// Further steps of a run: each sequence goes on with the token that was chosen for it.
//
// One call from chosen tokens to the logits of the next ones and, where nothing has to be looked at in between, the choice
// and the steps after it. What lies between two calls is Python behind a step, whose caches are cold: there each small
// operation takes its tens of microseconds.
#include "cpu_sharing.h"
#include "go_on.h"

#include <time.h>

extern "C" int mp_rows(const Panels* p, const int64_t* outputs, int64_t n, void* to, int threads);
extern "C" int mp_product(const Panels* p, const void* x, int64_t stride, int64_t rows, void* out, int end, int threads);
extern "C" int mp_rms_norm(int type, const void* x, int64_t stride, void* residual, const void* weight, float eps,
                           void* out, int64_t rows, int64_t n, int threads);

// Every sequence has one token more.
static void advance(GoOn* g) {
    const Step& s = *g->step;
    int64_t bytes = g->model->head_dim * type_bytes[g->model->type];
    int64_t *blocks = (int64_t*)s.blocks, *offsets = (int64_t*)s.offsets;
    int32_t* items = (int32_t*)s.all.single;
    for (int64_t r = 0; r < s.rows; r++) {
        g->tokens[r] = g->chosen[r];
        int64_t position = ++g->positions[r], turn = ++g->turns[r];
        items[4 * r + 3] = ++g->contexts[r];
        blocks[r] = s.tables[r * s.table_stride + position / s.block_size];
        offsets[r] = position % s.block_size;
        memcpy((char*)s.cos + r * bytes, g->cosines + turn * bytes, bytes);
        memcpy((char*)s.sin + r * bytes, g->sines + turn * bytes, bytes);
    }
}
static int embed(const GoOn* g) {
    const Step& s = *g->step;
    if (g->embedding) return mp_rows(g->embedding, g->tokens, s.rows, s.hidden, s.threads);
    int64_t bytes = g->model->hidden * type_bytes[g->model->type];
    for (int64_t r = 0; r < s.rows; r++) memcpy(s.hidden + r * bytes, g->table + g->tokens[r] * bytes, bytes);
    return 0;
}
// Whether the highest logit is all that is wanted of each row.
static bool greedy(const GoOn* g) {
    if (!g->sampling || g->step->rows > INT8_ROWS) return false;
    for (int64_t r = 0; r < g->step->rows; r++) {
        const Row& row = g->sampling->row[r];
        if (row.scale >= 0 || row.mask || row.adjusted() || row.top >= 0) return false;
    }
    return true;
}
// The tokens by the int8 head: 0. 1: by logits, and from now on in this run where the int8 head was of no use; -1: no memory.
static int by_int8_head(GoOn* g) {
    const Step& s = *g->step;
    if (!g->int8_head || !greedy(g)) return 1;
    int code = mp_highest(g->head, g->int8_head, g->normed, s.rows, g->sampling->tokens, s.threads);
    if (code == 1) g->int8_head = nullptr;
    if (!code) memset(g->sampling->failed, 0, s.rows * sizeof(int32_t));
    return code;
}
enum Came { STOPPED, DONE, CHOSEN, NO_MEMORY };
// One step, up to its logits, or its tokens.
static Came compute(GoOn* g) {
    const Step& s = *g->step;
    const Model& m = *g->model;
    advance(g);
    if (embed(g)) return NO_MEMORY;
    int64_t came = mp_step(g->model, &s);
    if (came != s.last) return came < 0 ? NO_MEMORY : STOPPED;
    int code = mp_rms_norm(m.type, s.hidden, m.hidden, nullptr, g->norm, m.eps, g->normed, s.rows, m.hidden, s.threads);
    int found = code ? -1 : by_int8_head(g);
    if (found < 0 || (found && mp_product(g->head, g->normed, m.hidden, s.rows, g->logits, WIDE, s.threads))) return NO_MEMORY;
    for (int64_t r = 0; r < s.rows; r++)
        if (s.offsets[r] == s.block_size - 1) g->full[g->filled++] = s.blocks[r];
    return found ? DONE : CHOSEN;
}
static bool choose(GoOn* g, int64_t step, bool chosen) {
    const Step& s = *g->step;
    if (g->seeds) mp_uniform(g->seeds, g->counters, g->later, s.rows, g->numbers);
    g->later++;
    if (!chosen && (g->failed = mp_sample(g->sampling, s.threads)) < 0) return false;
    memcpy(g->found + step * s.rows, g->chosen, s.rows * sizeof(int32_t));
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    g->over_ns[step] = t.tv_sec * 1000000000ll + t.tv_nsec;
    return true;
}
// Whether a further step may follow without anybody's looking.
static bool goes_on(const GoOn* g, int64_t step) {
    const Watch* watch = g->step->watch;
    if (g->failed || g->over_ns[step] >= g->until_ns || mp_others_compute()) return false;
    if (watch && __atomic_load_n(&watch->awaited, __ATOMIC_ACQUIRE)) return false;
    for (int64_t r = 0; r < g->step->rows; r++)
        for (int64_t i = 0; i < g->end_count; i++)
            if (g->chosen[r] == g->ends[i]) return false;
    return true;
}

// Returns how many steps are done; the one after them was stopped where that says so. -1: no memory to work in. Who
// calls knows that tables hold as many tokens more, of blocks that there are.
extern "C" int64_t mp_go_on(GoOn* g) {
    g->filled = g->failed = g->stopped = 0;
    for (int64_t step = 0;; step++) {
        Came came = compute(g);
        if (came == NO_MEMORY) return -1;
        if (came == STOPPED) return g->stopped = 1, step;
        if (!g->sampling) return step + 1;
        if (!choose(g, step, came == CHOSEN)) return -1;
        if (step + 1 == g->most || !goes_on(g, step)) return step + 1;
    }
}
