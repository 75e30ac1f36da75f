"""One workload in both worlds: `python -m tests.world.trace --requests 50 --prefill 2 --decode 2`.

Prints a line of JSON: what became of each request, and a digest of all messages. The real services serve the requests
on virtual time; with `--simulated` the simulator does, and its line has the same form.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moonpool.base.checkpoint import load_config
from moonpool.base.rpc.tuning import tune_gc
from moonpool.base.telemetry import logs
from moonpool.client import AsyncClient, SamplingParams
from moonpool.conductor.core.actions import AnnouncePlacement
from moonpool.conductor.placement.policies import DEFAULT_POLICY
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.clock import PS
from moonpool.simulator.cluster.cluster import Cluster as SimulatedCluster
from moonpool.simulator.cluster.config import ClusterConfig
from moonpool.simulator.cluster.requests import Request
from moonpool.simulator.network import CallDelays
from moonpool.simulator.traces.mooncake import TraceRequest, read_trace
from tests.world.cluster import MODEL, PROFILE, Cluster, Simulation, answer, leave
from tests.world.network import JITTER_S, LATENCY_S

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "generated.jsonl"
TIMEOUT_S = 600.0
REPORT_S = 0.05
"""Least distance of two load reports of an instance, as the services have it."""


@dataclass(frozen=True, slots=True)
class Run:
    """A workload, and who serves it.

    Attributes:
        trace: a trace's file; its first `requests` are served.
        prefill, decode: instances; there is one conductor and one kvstore.
        seed: of the delays of messages.
        jitter_s: mean of what each message takes beyond the constant delay.
        policy: chooses prefill instances.
        speed: requests come so many times as fast as in the trace.
        decode_prompt_tokens: longest part of a prompt that decode may compute; None = the setting's default.
    """

    trace: Path = TRACE
    requests: int = 20
    prefill: int = 1
    decode: int = 1
    seed: int = 1
    jitter_s: float = JITTER_S
    policy: str = DEFAULT_POLICY
    speed: float = 1.0
    decode_prompt_tokens: int | None = None

    def read(self) -> list[TraceRequest]:
        """The requests."""
        requests = read_trace(self.trace, limit=self.requests)
        return [replace(request, timestamp=request.timestamp / self.speed) for request in requests]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request: where it ran, prompt tokens that were not computed, and its times."""

    prefill: str
    decode: str
    cached_tokens: int
    ttft_s: float
    tpot_s: float
    end_s: float
    """From the first request's arrival."""


async def _serve(simulation: Simulation, run: Run) -> tuple[list[Outcome], list[int]]:
    """What became of all requests, and the numbers of those with wrong tokens."""
    engine = ["--block-size", "512"]
    flags = {
        "conductor": ["--policy", run.policy],
        "kvstore": ["--dram-bytes", str(1 << 28)],
        "prefill": [*engine, "--max-num-batched-tokens", "4096"],
        "decode": engine,
    }
    if run.decode_prompt_tokens is not None:
        flags["conductor"] += ["--set", f"decode_prompt_tokens={run.decode_prompt_tokens}"]
    cluster = Cluster(simulation, {"conductor": 1, "kvstore": 1, "prefill": run.prefill, "decode": run.decode}, flags)
    await cluster.start()
    loop, model = asyncio.get_running_loop(), load_config(Path(MODEL))
    begin, wrong = loop.time(), list[int]()
    async with AsyncClient(cluster.addresses, timeout_s=TIMEOUT_S) as client:

        async def ask(number: int, request: TraceRequest) -> Outcome:
            await asyncio.sleep(max(0.0, begin + request.timestamp / 1000 - loop.time()))
            prompt, came, tokens = request.tokens(model.vocab_size).tolist(), loop.time(), list[int]()
            first = came
            sampling = SamplingParams(max_tokens=request.output_length, temperature=0.0, ignore_eos=True)
            stream = client.stream(token_ids=prompt, sampling=sampling, request_id=f"t-{number}")
            async for event in stream:
                first = first if tokens else loop.time()
                tokens += event.token_ids
            if tokens != answer(prompt, request.output_length):
                wrong.append(number)
            assert stream.result is not None, "the stream has ended well"
            place, now = stream.result.placement, loop.time()
            tpot_s = (now - first) / max(1, len(tokens) - 1)
            cached = stream.result.usage.cached_tokens
            return Outcome(place.prefill, place.decode, cached, first - came, tpot_s, now - begin)

        found = await asyncio.gather(*(ask(*each) for each in enumerate(run.read())))
        await client.stats()  # gauges do not depend on the hash seed either
    await cluster.drain()
    return found, wrong


def served(run: Run, log: str | None = None) -> dict[str, Any]:
    """What the services make of a workload. The process must end with `leave`."""
    simulation = Simulation(run.seed, log, run.jitter_s)
    found, wrong = simulation.run(_serve(simulation, run))
    told = simulation.log
    return {"outcomes": found, "wrong": wrong, "messages": told.messages, "calls": told.calls, "digest": told.digest}


def simulated(run: Run) -> list[Outcome]:
    """What the simulator makes of it."""
    config = ClusterConfig(
        profile=load_profile(PROFILE),
        prefill=run.prefill,
        decode=run.decode,
        delays=CallDelays(LATENCY_S, run.jitter_s),
        seed=run.seed,
        report_s=REPORT_S,
        policy=run.policy,
    )
    if run.decode_prompt_tokens is not None:
        config = replace(config, decode_prompt_tokens=run.decode_prompt_tokens)
    ended: list[Request] = []
    decodes: dict[int, str] = {}

    def hear(now: float, event: object, actions: Sequence[object]) -> None:
        for action in actions:
            if isinstance(action, AnnouncePlacement) and action.target is not None:
                decodes[action.request] = action.target.decode

    cluster = SimulatedCluster(config, ended.append)
    [conductor] = cluster.conductors
    conductor.host.heard = hear
    cluster.feed(run.read())
    cluster.run()
    cluster.check_at_rest()
    return [
        Outcome(
            prefill=each.prefill.replace("p", "prefill-"),
            decode=decodes.get(each.number, "").replace("d", "decode-"),
            cached_tokens=each.reused,
            ttft_s=(each.first_at - each.arrived) / PS,
            tpot_s=(each.ended_at - each.first_at) / PS / max(1, each.made - 1),
            end_s=each.ended_at / PS,
        )
        for each in sorted(ended, key=lambda item: item.number)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    usual = Run()
    parser.add_argument("--trace", type=Path, default=usual.trace, help="in Mooncake's form")
    parser.add_argument("--requests", type=int, default=usual.requests, help="of the trace's beginning")
    parser.add_argument("--prefill", type=int, default=usual.prefill, help="instances")
    parser.add_argument("--decode", type=int, default=usual.decode, help="instances")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of the delays of messages")
    parser.add_argument("--jitter-s", type=float, default=usual.jitter_s, help="mean delay beyond the constant one")
    parser.add_argument("--policy", default=usual.policy, help="chooses prefill instances")
    parser.add_argument("--speed", type=float, default=usual.speed, help="times as fast as in the trace")
    parser.add_argument("--decode-prompt-tokens", type=int, help="longest part of a prompt that decode may compute")
    parser.add_argument("--simulated", action="store_true", help="ask the simulator, not the services")
    parser.add_argument("--log", help="file for all messages, a line each")
    args = parser.parse_args()
    fields = ("trace", "requests", "prefill", "decode", "seed", "jitter_s", "policy", "speed", "decode_prompt_tokens")
    run = Run(**{name: getattr(args, name) for name in fields})
    logs.configure("error", "world", False)
    tune_gc()
    result: dict[str, Any] = {"outcomes": simulated(run)} if args.simulated else served(run, args.log)
    result["outcomes"] = list(map(asdict, result["outcomes"]))
    print(json.dumps(result | {"cpu_s": time.process_time()}))
    leave(1 if result.get("wrong") else 0)


if __name__ == "__main__":
    main()
