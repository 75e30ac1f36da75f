// What further steps of a run are given; see go_on.cpp. Mirrored in moonpool/engine/kernels/native/structures.py.
#pragma once
#include "sample.h"
#include "int8_panels.h"
#include "step.h"

struct GoOn {
    const Model* model;
    const Step* step;       // one row of each sequence; what its angles, blocks, offsets and items point to is changed here
    const int32_t* chosen;  // [rows], tokens
    int64_t *tokens, *positions;
    int32_t* contexts;
    int64_t* turns;               // [rows], the row of the angles that belongs to each position
    const char *cosines, *sines;  // [N, head_dim]: as many as the run may come to
    const Panels* embedding;      // null: its rows are in `table`, dense
    const char* table;
    const char* norm;             // the last one
    const Panels* head;
    char* normed;
    float* logits;
    const Int8Panels* int8_head;  // of the head; null: there is none, or it was of no use for this run
    // How it goes on by itself.
    const Sampling* sampling;     // null: one step, whose logits are left to the caller
    const uint64_t *seeds, *counters;  // of draws, as many as rows; null: none is drawn
    double* numbers;              // of draws
    uint64_t later;               // steps that the next one is behind `counters`
    const int32_t* ends; int64_t end_count;  // tokens that a run may end with
    int64_t most, until_ns;       // steps at most, and none after one that is over later (CLOCK_MONOTONIC)
    // What was done, written here.
    int64_t* full; int64_t filled;  // blocks that steps have filled, [most, rows] at most
    int32_t* found;               // [most, rows], tokens
    int64_t* over_ns;             // [most], when each step was over
    int64_t failed;               // rows of the last step for which no token was found
    int64_t stopped;              // whether the step after those that are done was stopped
};

extern "C" int64_t mp_go_on(GoOn* g);
