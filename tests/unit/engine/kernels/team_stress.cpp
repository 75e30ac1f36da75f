// Three callers with regions of any size, by teams of up to eight threads that sleep now and then: each part is done once,
// and what is claimed ahead by the thread that claimed it.
#include "parallel.h"

#include <cstdio>
#include <thread>
#include <unistd.h>
#include <vector>

int main() {
    std::atomic<int> wrong{0};
    auto call = [&](unsigned random) {
        for (int i = 0; i < 4000; i++) {
            random = random * 1664525 + 1013904223;
            int threads = 1 + (random >> 16) % 8, count = (random >> 8) % 50;
            std::atomic<int> done{0};
            auto part = [&](int64_t) { done++; };
            auto ahead = [&](int64_t i, int64_t then) {
                static thread_local int64_t claimed = -1;
                wrong += claimed >= 0 && claimed != i;
                wrong += then < count && count <= 2 * threads;  // of few, another thread may want it
                claimed = then < count ? then : -1;
                done++;
            };
            if (i % 3 == 0) parallel(count, threads, part);
            else if (i % 3 == 1) parallel_ahead(count, threads, ahead);
            else parallel_runs(count, 1 + random % 4, threads, [&](int64_t i, int64_t n) { while (n--) part(i++); });
            wrong += done != count;
            if (i % 97 == 0) usleep(300);  // the team goes to sleep
        }
    };
    std::vector<std::thread> callers;
    for (unsigned i = 0; i < 3; i++) callers.emplace_back(call, i);
    for (auto& caller : callers) caller.join();
    printf("%d wrong\n", (int)wrong);
    fflush(stdout);
    _exit(wrong != 0);  // the team's threads have no end
}
