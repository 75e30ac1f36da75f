"""A generated workload in Mooncake's trace form: conversations, shared system prompts, and one-offs.

The shipped `benchmarks/traces/generated.jsonl` comes from this module. The workload imitates no particular trace;
policies are also compared on this workload, so that no single trace decides. `python -m
moonpool.simulator.traces.workload
--seed 1 --out FILE`.
"""

import argparse
import dataclasses
import heapq
import random
from collections.abc import Sequence
from pathlib import Path

from moonpool.simulator.traces.mooncake import BLOCK_SIZE, TraceRequest, write_trace


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadMix:
    """What comes.

    Attributes:
        conversations, questions: shares of arrivals that open a conversation, and that ask one application once; other
            arrivals are new documents, read once.
        applications: system prompts, the n-th asked for 1/n times as often as the first.
        rate_per_s: arrivals per second, Poisson; turns in conversations under way come on top.
        pause_s: median time between two turns; lognormal.
        goes_on: probability that a first turn is followed by another; 0.2 more for later turns. first_turn, later_turn,
        question, document: natural logarithm of the median number of new blocks; lognormal.
        answer_tokens: mean answer length; exponential.
        tenants: the requests' tenants, called "t0", "t1", ...: all turns in a conversation are one tenant's, and the
            n-th comes 1/n times as often as the first; 0 = no tenant. Applications are shared by all tenants, but
            tenants share no KV.
        several: share of requests that want several answers, at most `most_choices`.
        burst_factor: factor on arrivals during the first `burst_s` in every `burst_every_s` seconds; 1 = no bursts.
    """

    conversations: float = 0.55
    questions: float = 0.25
    applications: int = 12
    rate_per_s: float = 1.0
    pause_s: float = 240.0
    goes_on: float = 0.5
    first_turn: float = 1.8
    later_turn: float = 1.0
    question: float = 1.5
    document: float = 3.0
    answer_tokens: float = 100.0
    tenants: int = 0
    several: float = 0.0
    most_choices: int = 4
    burst_factor: float = 1.0
    burst_s: float = 20.0
    burst_every_s: float = 120.0

    def rate_at(self, now: float) -> float:
        """Arrivals per second at a time."""
        return self.rate_per_s * (self.burst_factor if now % self.burst_every_s < self.burst_s else 1.0)


CHAT = WorkloadMix(
    conversations=1.0,
    questions=0.0,
    applications=3,
    pause_s=4.0,
    goes_on=0.55,
    first_turn=0.2,
    later_turn=0.0,
    answer_tokens=60.0,
)
"""Short conversations only, for stacks on small machines."""


class Workload:
    """Requests in time order; equal seeds give equal requests."""

    def __init__(self, seed: int, mix: WorkloadMix | None = None) -> None:
        self._random = random.Random(f"moonpool workload {seed}")
        self._wishes = random.Random(f"moonpool workload {seed} wishes")  # so that the rest does not depend on them
        self._mix = WorkloadMix() if mix is None else mix
        self._next_id = 0
        self._prompts = [self._blocks(self._random.randint(1, 8)) for _ in range(self._mix.applications)]
        self._weights = [1 / (place + 1) for place in range(self._mix.applications)]
        self._names = [f"t{place}" for place in range(self._mix.tenants)]
        self._turns: list[tuple[float, int, Sequence[int], int, str]] = []  # when, number, history before, turn, tenant
        self._requests: list[TraceRequest] = []

    def requests(self, count: int) -> list[TraceRequest]:
        """The first `count` requests."""
        now = 0.0
        while len(self._requests) < count:
            now += self._random.expovariate(self._mix.rate_at(now))
            while self._turns and self._turns[0][0] <= now:
                at, _, history, turn, tenant = heapq.heappop(self._turns)
                self._turn(at, history, turn, tenant)
            self._arrival(now)
        return self._requests[:count]

    def _arrival(self, now: float) -> None:
        kind, tenant = self._random.random(), self._somebody()
        if kind < self._mix.conversations + self._mix.questions:
            prompt = self._random.choices(self._prompts, self._weights)[0]
            if kind < self._mix.conversations:
                self._turn(now, prompt, 1, tenant)
            else:
                self._ask(now, [*prompt, *self._lengthened(self._mix.question)], tenant)
        else:
            self._ask(now, self._lengthened(self._mix.document), tenant)

    def _somebody(self) -> str:
        weights = [1 / (place + 1) for place in range(len(self._names))]
        return self._wishes.choices(self._names, weights)[0] if self._names else ""

    def _turn(self, now: float, history: Sequence[int], turn: int, tenant: str) -> None:
        history = [*history, *self._lengthened(self._mix.first_turn if turn == 1 else self._mix.later_turn)]
        self._ask(now, history, tenant)
        if self._random.random() < self._mix.goes_on + (0.2 if turn > 1 else 0.0):
            at = now + self._mix.pause_s * self._random.lognormvariate(0.0, 1.0)
            heapq.heappush(self._turns, (at, len(self._requests), history, turn + 1, tenant))

    def _ask(self, now: float, chain: Sequence[int], tenant: str) -> None:
        """A request. The last block is not full: once full, the block is another block, so that this id comes once."""
        ids = (*chain, *self._blocks(1))
        tokens = len(chain) * BLOCK_SIZE + self._random.randint(1, BLOCK_SIZE - 1)
        answer = 1 + round(self._random.expovariate(1 / self._mix.answer_tokens))
        choices = self._wishes.randint(2, self._mix.most_choices) if self._wishes.random() < self._mix.several else 1
        self._requests.append(TraceRequest(round(1000 * now), tokens, answer, ids, tenant, choices))

    def _lengthened(self, mean: float) -> list[int]:
        return self._blocks(min(int(self._random.lognormvariate(mean, 1.0)), 200))

    def _blocks(self, count: int) -> list[int]:
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))


def main() -> None:
    """Write a trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--tenants", type=int, default=0, help="tenant of these requests; 0 = no tenant")
    parser.add_argument("--several", type=float, default=0.0, help="share of requests of 2 to 4 answers")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    mix = WorkloadMix(tenants=options.tenants, several=options.several)
    write_trace(options.out, Workload(options.seed, mix).requests(options.requests))


if __name__ == "__main__":
    main()
