// A team of threads of our own; see team.cpp. Knows nothing of what is computed.
#pragma once
#include <stdint.h>

// Runs work(job) on the calling thread, and on as many others as come in time, `threads` at most in all. Returns when
// none of them is in it any more: others that come later find nothing to do, so nobody waits for a thread that sleeps.
void run_team(void (*work)(void*), void* job, int threads);
// Processors that this process may run on; no team is larger.
int team_most();
// From now on a team has as many threads as `lent_cores` says; see there.
extern "C" int mp_lend(void* slots, int count, int own);
// Which share of the cores that its regions wanted this process had since it was asked before, as a mean over time; 1
// where it is lent none.
extern "C" double mp_had();
// Of `threads` those that this process may use now, at least one.
int lent_cores(int threads);
// Whether another process that shares our cores computes; no where none are lent.
extern "C" int mp_others_compute();
