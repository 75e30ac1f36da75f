"""Take the processor from services for a while: `python -m tests.world.starvation --service decode-0 --how starve`.

`starve` is a machine with too much to do: the services are ready to run and do not. `stop` is SIGSTOP. Prints a line of
JSON: which services the conductor counted as lost, whether the tokens of a stream were right, and how often the stream
was placed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moonpool.base.checkpoint import load_config
from moonpool.base.rpc.tuning import tune_gc
from moonpool.base.telemetry import logs
from moonpool.client import AsyncClient, SamplingParams
from moonpool.engine.emulated.kv import continuation
from tests.world.cluster import MODEL, Cluster, Simulation, leave

PROMPT, TOKENS = list(range(30, 130)), 40


KEPT: list[Simulation] = []
"""What is destroyed would run code of services that are no more."""


def starved(names: Sequence[str], how: str, seconds: float = 20.0) -> dict[str, Any]:
    """What became of a stream; see above. The process must end with `leave` afterwards."""
    KEPT.append(simulation := Simulation())
    found: dict[str, Any] = simulation.run(_serve(simulation, names, how, seconds))
    return found


async def _serve(simulation: Simulation, names: Sequence[str], how: str, seconds: float) -> dict[str, Any]:
    counts = {"conductor": 1, "kvstore": 1, "prefill": 1, "decode": 2}
    cluster = Cluster(simulation, counts, {})
    await cluster.start()
    services, model = [cluster.services[name] for name in names], load_config(Path(MODEL))
    lost: set[str] = set()
    async with AsyncClient(cluster.addresses, timeout_s=600.0) as client:
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        stream, tokens = client.stream(token_ids=PROMPT, sampling=sampling), list[int]()
        async for event in stream:
            before, tokens = len(tokens), [*tokens, *event.token_ids]
            if before < TOKENS // 2 <= len(tokens):
                for service in services:
                    service.starve() if how == "starve" else service.stop()
                await asyncio.sleep(seconds)
                if "conductor-0" not in names:
                    lost = set(cluster.services) - {
                        instance.id for instance in (await client.cluster_state()).instances
                    }
                for service in services:
                    service.resume()
        assert stream.result is not None
    await cluster.drain()
    right = tokens == continuation(PROMPT, TOKENS, model.vocab_size, model.eos_token_ids)
    return {"lost": sorted(lost - {"conductor-0"}), "right": right, "placements": len(stream.result.placements)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--service", action="append", required=True)
    parser.add_argument("--how", choices=("starve", "stop"), required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    tune_gc()
    logs.configure("error", "world", False)
    print(json.dumps(starved(options.service, options.how, options.seconds)))
    leave(0)


if __name__ == "__main__":
    main()
