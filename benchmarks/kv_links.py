"""When moving KV pays, measured over throttled links: `python -m benchmarks.kv_links [--picture FILE]`.

A kvstore stands behind a proxy that lets so many bytes a second through. Prompts are computed cold and stored; a
prefill pool with room for two prompts forgets each. Then the same prompts come again: the conductor chooses whether
their prefix is loaded over the link or computed. Links are multiples of the *break-even*, at which bringing the prefix
takes as long as computing the prefix did in the same run. `moonpool simulate transfer` predicts this line for other
models and hardware. The first prompt over a link is told apart: nothing is known of the link yet, so its prefix is
loaded.
"""

import argparse
import asyncio
import contextlib
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frame import Progress, Row, paired, run
from moonpool.base.checkpoint import kv_layout, load_config, resolve_dtype
from moonpool.base.checkpoint.named_models import BUNDLED, named_model
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.latency import overlapped_seconds
from moonpool.cli.check import wait_at_rest
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, GenerateResult
from moonpool.simulator.experiments.report import Chart

BLOCK = 64
REST = 64
"""Tokens behind the prefix, always computed."""
LINKS = (0.25, 0.5, 2.0, 4.0)
"""Of the break-even."""
SLOWER, QUICKER = 0.9, 1.2
"""Wanted of cold over cached: below the break-even hardly worse than computing, above clearly better."""
STORED_S = 60.0
"""Seconds within which computed blocks reach the kvstore."""
CHUNK_BYTES = 16 << 10
BURST_S = 0.005
"""A link may be ahead of its rate by so much: a sleep for each chunk would take longer than the chunk."""


class ThrottledLink:
    """A TCP proxy that lets `bytes_per_s` through each way, all connections together; 0 = all. In a thread of its own.

    Args:
        target: where connections lead.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._free_at = {"to": 0.0, "from": 0.0}
        self._thread = threading.Thread(target=self._loop.run_forever, name="link")
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK_BYTES), self._loop
        ).result()
        self._server = server
        host, port = server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        self.bytes_per_s = 0.0

    def close(self) -> None:
        """End all connections and the thread."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind: asyncio.StreamWriter | None = None
        try:
            back, behind = await asyncio.open_connection(*self._target, limit=CHUNK_BYTES)
            await asyncio.gather(self._forward("to", reader, behind), self._forward("from", back, writer))
        except OSError:
            pass  # an end that left: the other one hears of this by its own connection's end
        finally:
            for end in (writer, behind):
                if end is not None:
                    end.close()

    async def _forward(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self.bytes_per_s:
                now = time.monotonic()
                self._free_at[way] = max(now, self._free_at[way]) + len(data) / self.bytes_per_s
                if (ahead := self._free_at[way] - now) > BURST_S:
                    await asyncio.sleep(ahead)
            writer.write(data)
            await writer.drain()
        writer.write_eof()


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds to the first token of each prompt, cold and again; `loaded` = tokens not computed when asked again."""

    cold: Sequence[float]
    again: Sequence[float]
    loaded: Sequence[int]


@contextlib.contextmanager
def stack(model: Path, link: ThrottledLink, port: int, pool_bytes: int, blocks: int) -> Iterator[LocalStack]:
    """A stack whose kvstore is reached over the link, by gRPC alone; prefixes of `blocks` blocks are stored whole."""
    over_grpc = ("--kv-transports", "grpc")
    with tempfile.TemporaryDirectory() as folder:
        plan = StackPlan(
            str(model), Path(folder), block_size=BLOCK, log_level="warning", core_page=Path(folder) / "cores",
            kv_cache_memory_bytes=pool_bytes,
            extra={
                "conductor": ("--set", "peers=false", "--set", "decode_prompt_tokens=0"),
                "prefill": (*over_grpc, "--set", f"write_back_blocks={blocks}"),
                "decode": over_grpc,
                "kvstore": (*over_grpc, "--listen", f"127.0.0.1:{port}", "--advertise", link.address),
            },
        )  # fmt: skip
        with LocalStack(plan) as running:
            yield running


async def ask(client: AsyncClient, prompt: Sequence[int]) -> GenerateResult:
    """One prompt's first token."""
    return await client.generate(token_ids=prompt, sampling=SamplingParams(max_tokens=2, temperature=0.0))


async def both_rounds(address: str, prompts: Sequence[Sequence[int]], link: ThrottledLink, rate: float) -> Times:
    """Prompts cold, over a quick link into the kvstore; then again over the throttled link.

    Raises:
        Unavailable: the kvstore did not get the blocks.
    """
    async with AsyncClient(address) as client:
        link.bytes_per_s = 0.0
        await ask(client, prompts[0][:REST])  # whatever is done at the first request only
        cold = [await ask(client, prompt) for prompt in prompts]
        await asyncio.to_thread(wait_at_rest, address, STORED_S)
        link.bytes_per_s = rate
        again = [await ask(client, prompt) for prompt in prompts]
    return Times(
        [result.timing.ttft_s for result in cold],
        [result.timing.ttft_s for result in again],
        [result.usage.cached_tokens for result in again],
    )


def break_even(cold_s: float, tokens: int, token_bytes: int, layers: int) -> float:
    """Bytes per second at which loading a prefix, layer by layer beside computing the rest, takes as long as `cold_s`.

    Args:
        cold_s: seconds for prefix and rest.
        tokens: of the prefix.
        token_bytes: KV of a token.
        layers: of the model.
    """
    rest_s = cold_s * REST / (tokens + REST)
    spare_s = cold_s - overlapped_seconds(0.0, rest_s, layers) / layers
    return tokens * token_bytes / spare_s


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """A row for each link."""
    model = named_model(options.model) or Path(options.model)
    config = load_config(model)
    layout = kv_layout(config, resolve_dtype(config), BLOCK)
    tokens = options.tokens // BLOCK * BLOCK
    pool_bytes = 2 * (tokens + 2 * BLOCK) * layout.token_bytes
    drawn = random.Random(f"moonpool kv_links {options.seed}")
    progress(f"seed {options.seed}; {tokens} + {REST} tokens, {layout.token_bytes} bytes of KV each")

    def prompts() -> list[list[int]]:
        return [[drawn.randrange(300, 4000) for _ in range(tokens + REST)] for _ in range(max(options.runs + 1, 3))]

    def taken(rate: float) -> Times:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with (
            contextlib.closing(ThrottledLink(("127.0.0.1", port))) as link,
            stack(model, link, port, pool_bytes, tokens // BLOCK) as up,
        ):
            return asyncio.run(both_rounds(up.address, prompts(), link, rate))

    unbound = taken(0.0)
    even = break_even(statistics.median(unbound.cold), tokens, layout.token_bytes, layout.layers)
    progress(f"break-even {even / 1e6:.1f} MB/s")
    series: dict[str, list[tuple[float, float]]] = {"computed": [], "the conductor's choice": [], "loaded": []}
    rows = []
    for factor, times in [*((factor, taken(factor * even)) for factor in LINKS), (0.0, unbound)]:
        name = f"link of {factor:g} x break-even, {factor * even / 1e6:.1f} MB/s" if factor else "link without a bound"
        chosen = list(zip(times.again[1:], times.cold[1:], strict=True))
        target = QUICKER if factor > 1 or not factor else SLOWER
        rows.append(paired(f"TTFT again, {name}", "s", chosen, "cold", less_is_better=True, target=target))
        progress(f"{name}: first {times.again[0]:.2f} s; then tokens loaded {', '.join(map(str, times.loaded[1:]))}")
        if factor:
            points = (statistics.median(times.cold), rows[-1].value, times.again[0])
            for label, seconds in zip(series, points, strict=True):
                series[label].append((factor * even / 1e6, seconds))
    if options.picture is not None:
        chart = Chart(f"TTFT of {tokens} stored tokens by the link's rate", "MB/s", "seconds", series, log_x=True)
        options.picture.write_text(chart.svg(), encoding="utf-8")
    return rows


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--model", default=BUNDLED, help=f"a named model, or a folder (default {BUNDLED})")
    add("--tokens", type=int, default=1024, help="of a stored prefix (default 1024)")
    add("--seed", type=int, default=1, help="of prompts (default 1)")
    add("--picture", type=Path, help="draw TTFT by rate into this SVG file")


if __name__ == "__main__":
    run("kv_links", measure, flags=flags)
