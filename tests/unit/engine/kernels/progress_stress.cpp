// Steps that one thread computes and another one follows: it sees what each layer has written, and each step ends for it.
#include "step.h"

#include <cstdio>
#include <thread>
#include <unistd.h>

extern "C" int mp_over(Progress* p);
extern "C" int mp_follow(const Progress* p, int64_t layer);

int main() {
    enum { STEPS = 3000, LAYERS = 6 };
    int wrong = 0;
    unsigned random = 1;
    for (int step = 0; step < STEPS; step++) {
        Progress progress{0, nullptr};
        int written[LAYERS] = {};
        random = random * 1664525 + 1013904223;
        int last = (random >> 16) % (LAYERS + 1);
        std::thread follower([&] {
            for (int layer = 0; layer < LAYERS; layer++) {
                bool came = mp_follow(&progress, layer);
                wrong += came != (layer < last) || (came && written[layer] != step + layer);
            }
        });
        for (int layer = 0; layer < last; layer++) {
            written[layer] = step + layer;
            came_to(&progress, layer + 1);
            if ((random >> (8 + layer)) % 8 == 0) usleep(30);  // the follower goes to sleep
        }
        mp_over(&progress);
        follower.join();
    }
    printf("%d wrong\n", wrong);
    return wrong != 0;
}
