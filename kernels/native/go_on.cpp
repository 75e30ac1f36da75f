// A further step of a run: each sequence goes on with the token that was chosen for it.
//
// One call from these tokens to the logits of the next ones. What lies between two calls is Python behind a step, whose
// caches are cold: there each small operation takes its tens of microseconds.
#include "step.h"

struct GoOn {
    const Model* model;
    const Step* step;       // one row of each sequence; what its angles, blocks, offsets and items point to is changed here
    const int32_t* chosen;  // [rows], tokens
    int64_t *tokens, *positions;
    int32_t* contexts;
    int64_t* turns;             // [rows], the row of the angles that belongs to each position
    const char *cosines, *sines;  // [N, head_dim]: as many as the run may come to
    const Panels* embedding;    // null: its rows are in `table`, dense
    const char* table;
    const char* norm;           // the last one
    const Panels* head;
    char* normed;
    float* logits;
    int64_t filled;             // blocks that the step fills: written here
};

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
    g->filled = 0;
    for (int64_t r = 0; r < s.rows; r++) {
        g->tokens[r] = g->chosen[r];
        int64_t position = ++g->positions[r], turn = ++g->turns[r];
        items[4 * r + 3] = ++g->contexts[r];
        blocks[r] = s.tables[r * s.table_stride + position / s.block_tokens];
        offsets[r] = position % s.block_tokens;
        g->filled += offsets[r] == s.block_tokens - 1;
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

// Returns the layer that it came to, `last` unless it was stopped; -1 where there is no memory to work in. Without all
// layers there are no logits. Who calls knows that tables hold one token more, of blocks that there are.
extern "C" int64_t mp_go_on(GoOn* g) {
    const Step& s = *g->step;
    const Model& m = *g->model;
    advance(g);
    if (embed(g)) return -1;
    int64_t came = mp_step(g->model, &s);
    if (came != s.last) return came;
    int code = mp_rms_norm(m.type, s.hidden, m.hidden, nullptr, g->norm, m.eps, g->normed, s.rows, m.hidden, s.threads);
    return code || mp_product(g->head, g->normed, m.hidden, s.rows, g->logits, WIDE, s.threads) ? -1 : came;
}
