"""What a request costs conductor and gateway, beside other routers: `python -m benchmarks.requests`.

Engines that compute nothing stand behind a conductor and a gateway (`benchmarks.conductor_engines`), servers that
answer at once behind vLLM's router and LiteLLM (`benchmarks.instant_server`). All get the same completions over
HTTP, first whole, then streamed. Costs are processor time of the measured process, so that client and engines, which
share the machine, do not count. The other routers hand texts on; a conductor tokenises, finds prefixes, places, and
spells.

Then the same requests go through one gateway to 1, 2 and 4 conductors. What the conductors carry together is bounded by
the busiest of them: requests for each second of its processor time.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.frame import Absent, Progress, Row, Skipped, bounded, paired, run
from benchmarks.peers.engines import Environment
from benchmarks.peers.programs import HOST, free_port, listening
from benchmarks.processes import Child, child, cpu_s_of
from moonpool.base.bundled import model_dir

MODEL = "tiny"
WORDS = tuple("the tide of a moon pool turns when ships lie still and every rope hangs down".split())  # noqa: SIM905
PACKAGES = {"vllm_router": ("vllm-router==0.1.17",), "litellm": ("litellm[proxy]==1.108.7",)}
CONDUCTOR_MS, GATEWAY_MS = 1.5, 1.0
CONDUCTORS = (1, 2, 4)
SCALING = 0.9
WARM_UP = 256
KEY = f"sk-{uuid.uuid4().hex}{uuid.uuid4().hex}"
"""LiteLLM does not start without a key; the others ask for none."""
LITELLM_S = 120.0
"""That LiteLLM may take to listen."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor milliseconds a request of each measured process."""

    whole_ms: tuple[float, ...]
    streamed_ms: tuple[float, ...]


def prompts(count: int, words: int, seed: int) -> list[str]:
    """Prompts without a common beginning."""
    generator = random.Random(seed)
    return [f"{generator.random()} {' '.join(generator.choices(WORDS, k=words))}" for _ in range(count)]


async def ask(url: str, asked: Sequence[str], options: argparse.Namespace, *, streamed: bool) -> None:
    """Send all requests, `--at-once` at a time.

    Raises:
        RuntimeError: an answer is an error, or has no text.
    """
    waiting, key = iter(asked), {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=key) as session:

        async def client() -> None:
            for prompt in waiting:
                body = {
                    "model": MODEL, "prompt": prompt, "max_tokens": options.answer_tokens, "temperature": 0,
                    "stream": streamed,
                }  # fmt: skip
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    answer = await response.read()
                if response.status != 200 or answer.count(b'"text"') < 1:
                    raise RuntimeError(f"{response.status}: {answer[:500].decode(errors='replace')}")

        await asyncio.gather(*(client() for _ in range(options.at_once)))


def cost_ms(
    url: str, clocks: Sequence[Callable[[], float]], options: argparse.Namespace, seed: int, *, streamed: bool
) -> tuple[float, ...]:
    """Processor milliseconds a request of each process whose clock is given."""
    asyncio.run(ask(url, prompts(WARM_UP, options.prompt_words, -seed - 1), options, streamed=streamed))
    before = [clock() for clock in clocks]
    asyncio.run(ask(url, prompts(options.requests, options.prompt_words, seed), options, streamed=streamed))
    return tuple([1e3 * (clock() - old) / options.requests for clock, old in zip(clocks, before, strict=True)])


def cost(url: str, clocks: Sequence[Callable[[], float]], options: argparse.Namespace, seed: int) -> Cost:
    """Of whole and of streamed answers."""
    whole = cost_ms(url, clocks, options, seed, streamed=False)
    return Cost(whole, cost_ms(url, clocks, options, seed, streamed=True))


@contextlib.contextmanager
def moonpool(conductors: int, *engine_flags: str) -> Iterator[tuple[str, list[Child]]]:
    """Conductors, engines and a gateway; gives the gateway's URL, the gateway and the conductors."""
    usual = ("--model", str(model_dir()), "--listen", f"{HOST}:0", "--log-level", "warning")
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(child("moonpool.conductor", *usual)) for _ in range(conductors)]
        addresses = ",".join([conductor.address for conductor in running])
        stack.enter_context(child("benchmarks.conductor_engines", "--conductor", addresses, *engine_flags))
        flags = ("--conductor", addresses, "--served-model-name", MODEL)
        gateway = stack.enter_context(child("moonpool.gateway", *usual, *flags))
        yield f"http://{gateway.address}", [gateway, *running]


@contextlib.contextmanager
def vllm_router(python: Path, server: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """The router of vLLM in front of a server; gives its URL, and its processor time."""
    port, metrics = free_port(), free_port()
    command = [
        *(str(python), "-m", "vllm_router.launch_router", "--host", HOST, "--port", str(port)),
        *("--policy", "cache_aware", "--prometheus-port", str(metrics), "--log-level", "error"),
        *("--worker-urls", server),
    ]
    with listening(command, port, {**os.environ, "PYTHONPATH": ""}) as process:
        yield f"http://{HOST}:{port}", lambda: cpu_s_of(process.pid)


@contextlib.contextmanager
def litellm(python: Path, server: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """LiteLLM's proxy in front of a server; gives its URL, and its processor time."""
    port = free_port()
    deployment = {"model": f"text-completion-openai/{MODEL}", "api_base": f"{server}/v1", "api_key": "none"}
    config = python.parent / f"requests-{port}.json"  # JSON is YAML
    config.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": deployment}]}))
    command = [
        *(str(python.with_name("litellm")), "--config", str(config), "--host", HOST, "--port", str(port)),
        *("--num_workers", "1", "--telemetry", "False"),
    ]
    environment = {
        **os.environ, "PYTHONPATH": "", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_MASTER_KEY": KEY,
    }  # fmt: skip
    try:
        with listening(command, port, environment, LITELLM_S) as process:
            yield f"http://{HOST}:{port}", lambda: cpu_s_of(process.pid)
    finally:
        config.unlink()


OTHERS: Mapping[str, tuple[str, Callable[..., contextlib.AbstractContextManager[tuple[str, Callable[[], float]]]]]] = {
    "vLLM router": ("vllm_router", vllm_router),
    "LiteLLM": ("litellm", litellm),
}


def other_costs(options: argparse.Namespace, progress: Progress) -> tuple[dict[str, list[Cost]], list[Absent]]:
    """The other routers' costs, run by run."""
    found: dict[str, list[Cost]] = {}
    absent: list[Absent] = []
    environment = Environment(options.peers, progress, PACKAGES)
    with child("benchmarks.instant_server", "--answer-tokens", str(options.answer_tokens)) as server:
        for name, (package, begin) in OTHERS.items():
            try:
                with begin(environment.python(package), f"http://{server.address}") as (url, clock):
                    for number in range(options.runs):
                        found.setdefault(name, []).append(cost(url, [clock], options, options.seed + number))
                        progress(f"{name}, run {number + 1}: {_told(found[name][-1])}")
            except (Skipped, RuntimeError) as error:
                progress(f"{name}: {error}")
                absent.append(Absent("processor time a request", name, str(error).strip().splitlines()[-1]))
    return found, absent


def own_costs(conductors: int, options: argparse.Namespace, progress: Progress) -> list[Cost]:
    """Ours, run by run: the gateway's, then each conductor's."""
    found = []
    with moonpool(conductors) as (url, measured):
        for number in range(options.runs):
            found.append(cost(url, [process.cpu_s for process in measured], options, options.seed + number))
            progress(f"gateway and {conductors} conductors, run {number + 1}: {_told(found[-1])}")
    return found


def _told(found: Cost) -> str:
    whole, streamed = (" + ".join([f"{value:.2f}" for value in part]) for part in (found.whole_ms, found.streamed_ms))
    return f"whole {whole} ms, streamed {streamed} ms"


def rows(own: Mapping[int, Sequence[Cost]], others: Mapping[str, Sequence[Cost]]) -> list[Row]:
    """Costs beside what is wanted, together beside the other routers, and how conductors add up."""
    table, single = [], own[1]
    for kind, part in (("whole", "whole_ms"), ("streamed", "streamed_ms")):
        costs = [getattr(each, part) for each in single]
        table += [
            bounded(f"conductor, a {kind} answer", "ms", [each[1] for each in costs], "wanted at most", CONDUCTOR_MS),
            bounded(f"gateway, a {kind} answer", "ms", [each[0] for each in costs], "wanted at most", GATEWAY_MS),
        ]
        for name, theirs in others.items():
            pairs = [
                (1e3 / sum(ours), 1e3 / getattr(other, part)[0]) for ours, other in zip(costs, theirs, strict=False)
            ]
            table.append(paired(f"{kind} answers a second and core, gateway and conductor", "1/s", pairs, name))
    for count, runs in own.items():
        if count == 1:
            continue
        pairs = [
            (1e3 / max(many.whole_ms[1:]), count * 1e3 / one.whole_ms[1])
            for many, one in zip(runs, single, strict=True)
        ]
        name = f"whole answers for each second of the busiest of {count} conductors"
        table.append(paired(name, "1/s", pairs, f"{count} times those of a single one", target=SCALING))
    return table


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    others, absent = other_costs(options, progress) if not options.alone else ({}, [])
    own = {count: own_costs(count, options, progress) for count in options.conductors}
    return [*rows(own, others), *absent]


def flags(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own flags."""
    parser.add_argument("--requests", type=int, default=1000, help="of each run")
    parser.add_argument("--at-once", type=int, default=128)
    parser.add_argument("--prompt-words", type=int, default=200)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--conductors", type=int, nargs="+", default=CONDUCTORS, help="1 must be among them")
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="folder that routers are installed in")
    parser.add_argument("--alone", action="store_true", help="without other routers")
    parser.add_argument("--seed", type=int, default=0)


if __name__ == "__main__":
    run("requests", measure, flags=flags)
