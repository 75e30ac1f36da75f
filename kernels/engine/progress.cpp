// How far a step has come, for one thread that follows it while others compute: it sleeps in the kernel in between.
#include "step.h"

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

enum : uint32_t { OVER = 1u << 31 };

// Called by the computing thread alone. What it has done before is seen by who reads the word.
static void tell(Progress* p, uint32_t word) {
    __atomic_store_n(&p->word, word, __ATOMIC_RELEASE);
    syscall(SYS_futex, &p->word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
void came_to(Progress* p, int64_t layer) { tell(p, (uint32_t)layer); }

// No further layer is computed.
extern "C" int mp_over(Progress* p) { return tell(p, p->word | OVER), 0; }

// Waits for one of the model's layers. Returns whether it was computed: 0 when it is over before.
extern "C" int mp_follow(const Progress* p, int64_t layer) {
    for (;;) {
        uint32_t word = __atomic_load_n(&p->word, __ATOMIC_ACQUIRE);
        if ((word & ~OVER) > layer) return 1;
        if (word & OVER) return 0;
        syscall(SYS_futex, &p->word, FUTEX_WAIT_PRIVATE, word, nullptr, nullptr, 0);
    }
}
