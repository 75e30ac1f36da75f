// Cores that the processes of a host share; see cpu_sharing.cpp. Knows nothing of the team that uses them.
#pragma once

// Shares cores from now on by a page of `count` slots, of which `own` is this process's.
extern "C" int mp_lend(void* slots, int count, int own);
// Fraction of the cores requested by its regions that this process got since the last call, as a mean over time; 1
// without sharing.
extern "C" double mp_had();
// Whether another process that shares our cores computes; no without sharing.
extern "C" int mp_others_compute();
// Number of `threads` that this process may use now, at least one. `most`: processors that it may run on.
int lent_cores(int threads, int most);
