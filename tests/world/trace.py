"""Serve the first requests of a trace with 1 + 1 + 1 services: `python -m tests.world.trace --requests 20`.

Prints one line of JSON: the digest of all messages, whether all tokens were right, and when they came.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from moonpool.checkpoint import load_config
from moonpool.client import AsyncClient, SamplingParams
from moonpool.engine.emulated.kv import continuation
from moonpool.rpc.tuning import tune_gc
from moonpool.telemetry import logs
from simulator.traces.mooncake import TraceRequest, read_trace
from tests.world.cluster import MODEL, Cluster, Simulation, leave

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "generated.jsonl"
TIMEOUT_S = 600.0


async def _serve(simulation: Simulation, requests: int) -> dict[str, Any]:
    engine = ["--block-size", "512"]
    flags = {
        "kvstore": ["--dram-bytes", str(1 << 28)],
        "prefill": [*engine, "--max-num-batched-tokens", "4096"],
        "decode": engine,
    }
    cluster = Cluster(simulation, dict.fromkeys(("conductor", "kvstore", "prefill", "decode"), 1), flags)
    await cluster.start()
    loop, model = asyncio.get_running_loop(), load_config(Path(MODEL))
    begin, ttft_s, wrong = loop.time(), list[float](), list[str]()
    async with AsyncClient(cluster.addresses, timeout_s=TIMEOUT_S) as client:

        async def ask(number: int, request: TraceRequest) -> None:
            await asyncio.sleep(max(0.0, begin + request.timestamp / 1000 - loop.time()))
            prompt, came, tokens = request.tokens(model.vocab_size).tolist(), loop.time(), list[int]()
            sampling = SamplingParams(max_tokens=request.output_length, temperature=0.0, ignore_eos=True)
            async for event in client.stream(token_ids=prompt, sampling=sampling, request_id=f"t-{number}"):
                if not tokens:
                    ttft_s.append(loop.time() - came)
                tokens += event.token_ids
            if tokens != continuation(prompt, request.output_length, model.vocab_size, model.eos_token_ids):
                wrong.append(f"t-{number}")

        trace = read_trace(TRACE, limit=requests)
        await asyncio.gather(*(ask(*one) for one in enumerate(trace)))
        duration_s = loop.time() - begin - trace[0].timestamp / 1000
    await cluster.drain()
    return {"requests": len(ttft_s), "wrong": wrong, "duration_s": duration_s, "ttft_p50_s": statistics.median(ttft_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--log", help="file for all messages, a line each")
    args = parser.parse_args()
    logs.configure("error", "world", False)
    tune_gc()
    simulation = Simulation(log=args.log)
    result = simulation.run(_serve(simulation, args.requests))
    log = simulation.log
    result |= {"messages": log.messages, "calls": log.calls, "digest": log.digest, "cpu_s": time.process_time()}
    print(json.dumps(result))
    leave(1 if result["wrong"] else 0)


if __name__ == "__main__":
    main()
