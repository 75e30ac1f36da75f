"""What a calm tenant notices when another is hostile: `python -m benchmarks.attacks`.

A calm tenant reads one streamed answer after the other from a local stack with the bundled model. The calm tenant runs
alone, then while a hostile tenant runs one attack, in turns. Compared are the p99 and the longest time between events
in the calm tenant's answers. The hostile client runs in a separate process, `benchmarks.attacks_hostile`. Beside
`bodies` stands the gateway's memory.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.attacks_hostile import ATTACKS, CALM, HOSTILE, MIB, Gateway, chat
from benchmarks.fairness import quantile
from benchmarks.frame import Progress, Row, bounded, run
from moonpool.bundled import model_dir
from moonpool.cli.stack import GATEWAY_ID, LocalStack, StackPlan
from moonpool.rpc.auth import hash_key

P99_AT_MOST, LONGEST_AT_MOST = 2.0, 5.0
"""Times between events while a hostile tenant attacks, over those alone."""
PAUSE_S = 0.5
ANSWER_TOKENS = 400


@contextmanager
def attacking(name: str, address: str, seconds: float) -> Iterator[None]:
    """A hostile process, until the body ends."""
    command = [sys.executable, "-m", "benchmarks.attacks_hostile", name, address, str(seconds)]
    with subprocess.Popen(command) as hostile:
        try:
            time.sleep(PAUSE_S)
            yield
        finally:
            hostile.kill()


async def calm_gaps(gateway: Gateway, seconds: float) -> list[float]:
    """Times between the events of the calm tenant's answers, for so long."""
    body = json.dumps(chat(stream=True, max_tokens=ANSWER_TOKENS, ignore_eos=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {gateway.host}\r\nauthorization: Bearer {CALM}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    gaps: list[float] = []
    until = time.perf_counter() + seconds
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    while (now := time.perf_counter()) < until:
        writer.write(head.encode() + body)
        last = 0.0
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if line.startswith(b"data:"):
                now = time.perf_counter()
                gaps += [now - last] if last else []
                last = now
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return gaps


def resident_bytes(pid: int) -> int:
    """Memory of a process now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """Rows of each attack."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"sha256:{hash_key(name)} {name}\n" for name in (CALM, HOSTILE)))
        extra = {"gateway": ["--api-keys", str(keys), "--set", f"body_memory_bytes={options.body_mib * MIB}"]}
        plan = StackPlan(str(model_dir()), Path(folder), kvstore=0, http_port=0, log_level="warning", extra=extra)
        with LocalStack(plan) as stack:
            host, _, port = stack.http_address.rpartition(":")
            gateway, pid = Gateway(host, int(port)), stack.services[GATEWAY_ID].pid
            asyncio.run(calm_gaps(gateway, options.seconds))
            for name in options.only or ATTACKS:
                pairs, memory = [], 0
                for number in range(options.runs):
                    alone = asyncio.run(calm_gaps(gateway, options.seconds))
                    before = resident_bytes(pid)
                    with attacking(name, stack.http_address, 3 * options.seconds):
                        attacked = asyncio.run(calm_gaps(gateway, options.seconds))
                        memory = max(memory, resident_bytes(pid) - before)
                    time.sleep(PAUSE_S)
                    pairs.append((attacked, alone))
                    told = [f"{1e3 * quantile(it, 0.99):.0f}/{1e3 * max(it):.0f} ms of {len(it)}" for it in pairs[-1]]
                    progress(
                        f"{name}, run {number + 1}: p99/longest {told[0]}, alone {told[1]}, {memory / MIB:.0f} MiB"
                    )
                found += rows(name, pairs)
                if name == "bodies":
                    limit = float(options.body_mib)
                    found.append(bounded("gateway's memory, 300 bodies of 4 MiB", "MiB", [memory / MIB], "set", limit))
    return found


def rows(name: str, pairs: Sequence[tuple[list[float], list[float]]]) -> Iterator[Row]:
    """Ratios of what is measured in turns."""
    for what, of, most in (
        ("p99", lambda gaps: quantile(gaps, 0.99), P99_AT_MOST),
        ("longest", max, LONGEST_AT_MOST),
    ):
        ratios = [of(attacked) / of(alone) for attacked, alone in pairs]
        yield bounded(f"{what} time between events: {name}, over alone", "x", ratios, "wanted at most", most)


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each turn (default 8)")
    parser.add_argument(
        "--body-mib", type=int, default=256, help="the gateway's body_memory_bytes, in MiB (default 256)"
    )
    parser.add_argument("--only", nargs="+", choices=ATTACKS, help="these attacks (default all)")


if __name__ == "__main__":
    run("attacks", measure, flags=flags)
