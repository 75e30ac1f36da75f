// A team of threads of our own; see team.cpp. Knows nothing of what is computed.
#pragma once
#include <stdint.h>

// Runs work(job) on the calling thread, and on as many others as come in time, `threads` at most in all. Returns when
// none of them is in it any more: others that come later find nothing to do, so nobody waits for a thread that sleeps.
void run_team(void (*work)(void*), void* job, int threads);
// Processors that this process may run on; no team is larger.
int team_most();
