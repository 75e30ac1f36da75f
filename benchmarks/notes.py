"""What the page over the results says in words: why targets are missed.

A missed target that no reason here speaks of is shown as one whose cause is not known.
"""

import re
from dataclasses import dataclass

GRPC_COSTS = (
    "gRPC itself moves the same bytes at little more than half of raw TCP's rate (`kvstore`, rows beside bare gRPC); "
    "both sides share two cores."
)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why targets are missed.

    Attributes:
        benchmark: name of the benchmark.
        pattern: regular expression, found in "FIGURE beside REFERENCE".
        why: one sentence or two.
        machine: part of the machine's class; "" = any.
    """

    benchmark: str
    pattern: str
    why: str
    machine: str = ""


REASONS = (
    Reason(
        "engine",
        "^[^,]*, decode, batch 1, .* beside reading",
        "Products of one row read 0.8 to 0.9 of what four streams a core read at best; attention takes a twentieth of "
        "a step of the smaller models, the services' work beside two busy cores another.",
        machine="avx2",
    ),
    Reason(
        "engine",
        "^small, decode",
        "A step of this model takes a few milliseconds, and the services' own work around it (event loops, messages "
        "between processes, sampling) is a good part of that.",
    ),
    Reason(
        "engine",
        "^qwen2.5-0.5b, decode, batch 8",
        "Runs of one day had 1.16 to 1.21. A step of eight takes hardly longer than a step of one, which reads all "
        "weights: what is left is the prompts, computed at 0.74 of the best product's rate.",
    ),
    Reason(
        "kernels",
        "^prefill, bfloat16",
        "The reference reaches a rate that only this processor's matrix tiles (AMX) allow; these kernels use none.",
        machine="Intel",
    ),
    Reason(
        "kernels",
        "^decode",
        "Fetching ahead was tuned on another processor (AMD); nothing was tuned on this one.",
        machine="Intel",
    ),
    Reason("kv_stream", "over grpc", GRPC_COSTS),
    Reason("kvstore", "^DRAM, ", GRPC_COSTS),
    Reason(
        "kvstore",
        "^SSD, sustained Put",
        "Client and store take some 0.85 processor seconds per GB, the store's writer writes, syncs and notes one "
        "batch after the other ([ADR 45](../../docs/adr/0045-segments-are-reused.md)), and appends alone vary by half.",
    ),
    Reason(
        "kvstore",
        "^SSD, cold Get",
        "Store and client take 1.8 to 2.4 processor seconds per GB, of which reading the device is 0.15 "
        "([ADR 4](../../docs/adr/0004-ssd-tier.md)); both share two cores.",
    ),
    Reason(
        "kvstore",
        r"blocks of (64|256) KiB, one at a time, Moonpool over local",
        "Of one operation's time its bytes need a small part. The rest is Python, and the system, which "
        "wakes a process for each message ([ADR 37](../../docs/adr/0037-one-small-operation.md), "
        "[38](../../docs/adr/0038-brief-messages.md)).",
    ),
    Reason(
        "kvstore",
        "one at a time, Moonpool over (tcp|local)",
        "With one block at a time nothing overlaps: store, system and client copy it one after the other "
        "([ADR 37](../../docs/adr/0037-one-small-operation.md)).",
    ),
    Reason(
        "simulator",
        "simulated on one core",
        "A core of this processor takes 1.2 times as long as the one that took 59 s for the same bytes on 2026-11-23.",
        machine="avx2",
    ),
    Reason(
        "predictions",
        "TTFT",
        "Where equal requests differ as much (rows *noise*), a better prediction could not be told from this one.",
    ),
    Reason(
        "predictions",
        "^(real: )?TPOT",
        "Noise is a part of it (rows *noise*). The rest: what a step shares its cores with is foreseen on average only "
        "([ADR 14](../../docs/adr/0014-costs.md)).",
    ),
    Reason(
        "sampling",
        "^step with masks",
        "Eight masks take one thread 0.2 to 0.4 ms before the step's layers, while the other core waits "
        "([ADR 46](../../docs/adr/0046-masks-and-native-runs.md)): little of a real model's step, much of this one's.",
    ),
    Reason(
        "sampling",
        "^share of a step outside native calls",
        "The first two steps of a run take Python 2 to 3 ms, further ones 0.1 to 0.3, whatever the model.",
    ),
    Reason(
        "sampling",
        "^step at temperature",
        "The draw looks at every token of the vocabulary, which the small model's step is short beside.",
    ),
)


def reason(benchmark: str, machine: str, figure: str, reference: str) -> str:
    """Why a target is missed, "" when nothing is said of it."""
    text = f"{figure} beside {reference}"
    found = (reason for reason in REASONS if reason.benchmark == benchmark and reason.machine in machine)
    return next((reason.why for reason in found if re.search(reason.pattern, text)), "")
