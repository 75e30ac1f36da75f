"""A generated workload like coding agents': sessions with turns, tools, thinking people, sub-agents, compaction.

Published figures from recorded coding agents that the default mix meets (`statistics` prints a trace's figures): 43
turns a session (median), 142,000 prompt tokens and 444 answer tokens a request (medians), over 96 % of the prompt
tokens in blocks that the session had before, 44 % of the sessions with sub-agents. Times of tools and people are not
published; the mix says what is assumed. `python -P -m moonpool.simulator.traces.agentic --seed 1 --sessions 40 --out
FILE`.
"""

import argparse
import heapq
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median

from moonpool.simulator.traces.mooncake import BLOCK_SIZE, TraceRequest, reusable_share, write_trace


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal distribution: the median, and the logarithm's standard deviation."""

    median: float
    sigma: float

    def draw(self, draws: random.Random) -> float:
        """Draw a value."""
        return draws.lognormvariate(math.log(self.median), self.sigma)


@dataclass(frozen=True, slots=True)
class AgenticMix:
    """What sessions are like. Lengths are tokens, times seconds."""

    sessions_per_s: float = 0.02
    """Sessions that begin in a second, Poisson."""
    agents: int = 3
    """Programs, each with a separate system prompt and tools; the n-th is used 1/n times as often as the first."""
    system: Lognormal = Lognormal(24_000, 0.3)
    task: Lognormal = Lognormal(60_000, 0.7)
    """What a session begins with behind the system prompt."""
    turns: Lognormal = Lognormal(43, 0.8)
    answer: Lognormal = Lognormal(444, 0.9)
    result: Lognormal = Lognormal(1_300, 1.0)
    """What a tool or a person adds to a turn."""
    tool_s: Lognormal = Lognormal(2.0, 1.3)
    person_s: Lognormal = Lognormal(45.0, 1.0)
    person_share: float = 0.08
    """Turns that wait for a person instead of a tool."""
    delegating: float = 0.44
    """Sessions with sub-agents."""
    delegations: Lognormal = Lognormal(2.0, 0.7)
    """Number of turns in such a session that start sub-agents."""
    at_once: int = 3
    """Most sub-agents that a turn starts."""
    sub_task: Lognormal = Lognormal(4_000, 0.8)
    sub_turns: Lognormal = Lognormal(12, 0.6)
    compact_at: int = 260_000
    """A longer prompt is compacted: the system prompt and a summary are left."""
    summary: Lognormal = Lognormal(9_000, 0.3)


@dataclass(slots=True)
class _Agent:
    """An agent in the middle of the session."""

    session: str
    system: Sequence[int]
    history: list[int] = field(default_factory=list)
    """Full blocks behind the system prompt."""
    rest: int = 0
    """Tokens behind the full blocks."""
    turns: int = 0
    last: str = ""
    """The last request's name."""
    at: float = 0.0
    """Milliseconds at which the next request comes at the earliest."""


class AgenticWorkload:
    """Sessions in starting order; equal seeds give equal sessions."""

    def __init__(self, seed: int, mix: AgenticMix | None = None) -> None:
        self._draws = random.Random(f"moonpool agentic workload {seed}")
        self._mix = AgenticMix() if mix is None else mix
        self._ids = count()
        self._systems = [self._blocks(self._mix.system.draw(self._draws)) for _ in range(self._mix.agents)]
        self._weights = [1 / (place + 1) for place in range(self._mix.agents)]

    def requests(self, sessions: int) -> list[TraceRequest]:
        """Return all requests from `sessions` sessions, ordered by earliest arrival."""
        now, everything = 0.0, []
        for number in range(sessions):
            now += self._draws.expovariate(self._mix.sessions_per_s)
            everything.append(list(self._session(f"s{number}", round(1000 * now))))
        return list(heapq.merge(*everything, key=lambda request: request.timestamp))

    def _session(self, name: str, at: float) -> Iterator[TraceRequest]:
        mix, draws = self._mix, self._draws
        turns = max(1, round(mix.turns.draw(draws)))
        delegated: set[int] = set()
        if draws.random() < mix.delegating and turns > 1:
            starts = max(1, round(mix.delegations.draw(draws)))
            delegated |= set(draws.sample(range(turns - 1), min(turns - 1, starts)))
        agent = _Agent(name, draws.choices(self._systems, self._weights)[0], at=at)
        self._grow(agent, mix.task.draw(draws))
        children: list[TraceRequest] = []
        for turn in range(turns):
            children.sort(key=lambda request: request.timestamp)
            request = self._turn(agent, children)
            yield from children
            yield request
            children = []
            for number in range(draws.randint(1, mix.at_once) if turn in delegated else 0):
                children += self._sub_agent(agent, f"{name}/{turn}.{number}")

    def _sub_agent(self, parent: _Agent, name: str) -> list[TraceRequest]:
        """An agent with a separate history; the first request waits for the parent's last request."""
        system = self._draws.choices(self._systems, self._weights)[0]
        agent = _Agent(name, system, last=parent.last, at=parent.at)
        self._grow(agent, self._mix.sub_task.draw(self._draws))
        return [self._turn(agent, ()) for _ in range(max(1, round(self._mix.sub_turns.draw(self._draws))))]

    def _turn(self, agent: _Agent, children: Sequence[TraceRequest]) -> TraceRequest:
        """The agent's next request, after the sub-agents' ends."""
        mix, draws = self._mix, self._draws
        delay = 0.0
        if agent.last:
            waits = mix.person_s if draws.random() < mix.person_share else mix.tool_s
            delay = float(round(1000 * waits.draw(draws)))
        ends = {child.session: child for child in children}.values()
        wait_for = (agent.last, *(child.name for child in ends)) if agent.last else ()
        at = max([agent.at, *(child.timestamp for child in ends)]) + delay
        chain = (*agent.system, *agent.history)
        ids = (*chain, next(self._ids)) if agent.rest else chain
        tokens, answer = len(chain) * BLOCK_SIZE + agent.rest, max(1, round(mix.answer.draw(draws)))
        request = TraceRequest(
            at, tokens, answer, ids, session=agent.session, name=f"{agent.session}#{agent.turns}", wait_for=wait_for,
            delay=delay,
        )  # fmt: skip
        agent.turns, agent.last, agent.at = agent.turns + 1, request.name, at
        if tokens > mix.compact_at:
            agent.history, agent.rest = [], 0
            self._grow(agent, mix.summary.draw(draws))
        self._grow(agent, answer + mix.result.draw(draws))
        return request

    def _grow(self, agent: _Agent, tokens: float) -> None:
        """Add tokens at the history's end; blocks that become full get ids."""
        blocks, agent.rest = divmod(agent.rest + max(1, round(tokens)), BLOCK_SIZE)
        agent.history += [next(self._ids) for _ in range(blocks)]

    def _blocks(self, tokens: float) -> list[int]:
        return [next(self._ids) for _ in range(max(1, round(tokens / BLOCK_SIZE)))]


def statistics(requests: Sequence[TraceRequest]) -> dict[str, float]:
    """Return the published kinds of figures for a trace with sessions.

    Medians over a session's turns (sub-agents are separate sessions, and left out), prompt tokens and answer tokens;
    the share of prompt tokens in blocks that came before; the share of sessions with sub-agents.
    """
    turns: dict[str, int] = {}
    for request in requests:
        turns[request.session] = turns.get(request.session, 0) + 1
    main = {name: number for name, number in turns.items() if "/" not in name}
    parents = {name.partition("/")[0] for name in turns if "/" in name}
    return {
        "sessions": len(main),
        "requests": len(requests),
        "turns_p50": median(main.values()),
        "input_tokens_p50": median([request.input_length for request in requests if "/" not in request.session]),
        "output_tokens_p50": median([request.output_length for request in requests]),
        "reusable_share": round(reusable_share(requests), 4),
        "with_sub_agents": round(len(parents) / len(main), 3),
    }


def main() -> None:
    """Write a trace and print the statistics."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--sessions-per-s", type=float, default=AgenticMix().sessions_per_s)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    mix = AgenticMix(sessions_per_s=options.sessions_per_s)
    requests = AgenticWorkload(options.seed, mix).requests(options.sessions)
    write_trace(options.out, requests)
    sys.stdout.write(json.dumps(statistics(requests)) + "\n")


if __name__ == "__main__":
    main()
