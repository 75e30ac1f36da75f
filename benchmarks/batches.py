"""What the order of a batch saves: `python -m benchmarks.batches --json`.

A thousand questions over forty shared documents, in the order in which a user would write them: one question about each
document, then the next one. A pool holds few of the documents. Once the file is sent as a batch, whose lines run by
whole chains of shared prefix; once its requests are sent in the order of arrival, as many at once. Told is the share of
prompt tokens that were computed. Engines are emulated: the cache is real, the time is a profile's.

With `--kill`, gateway and conductor are killed (SIGKILL) when a third of the batch is answered, and start again.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.frame import Progress, Row, paired, run
from moonpool.base.bundled import model_dir
from moonpool.cli.stack import GATEWAY_ID, LocalStack, StackPlan

ENDPOINT = "/v1/chat/completions"
CONCURRENCY = 16
WORDS = tuple("the tide of a moon pool turns when ships lie still and every rope hangs down".split())  # noqa: SIM905
LOOK_S = 0.2


@contextmanager
def stack(options: argparse.Namespace) -> Iterator[LocalStack]:
    """A fresh stack without kvstores, so that the pools of engines are all there is."""
    with tempfile.TemporaryDirectory() as folder:
        plan = StackPlan(
            model=str(model_dir()), data_dir=Path(folder), engine=options.engine, http_port=0, log_level="warning",
            time_scale=options.time_scale, kvstore=0, kv_cache_memory_bytes=options.pool_mib << 20,
        )  # fmt: skip
        with LocalStack(plan) as running:
            yield running


def lines(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The requests of a batch, question by question over all documents."""
    drawn = random.Random(options.seed)
    documents = [
        f"Document {number}. " + " ".join(drawn.choice(WORDS) for _ in range(options.words))
        for number in range(options.documents)
    ]
    made = []
    for number in range(options.lines):
        content = f"{documents[number % len(documents)]}\n\nQuestion {number}: what turns?"
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
        made.append({"custom_id": f"{number}", "method": "POST", "url": ENDPOINT, "body": body})
    return made


def computed(usages: list[dict[str, Any]]) -> tuple[float, int]:
    """Share of prompt tokens that were computed, and tokens that were sent."""
    sent = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return (sent - cached) / sent, sent


def as_batch(running: LocalStack, requests: list[dict[str, Any]], *, kill: bool) -> list[dict[str, Any]]:
    """Run the requests as a batch; return their usages. `kill`: gateway and conductor die on the way."""
    with httpx2.Client(base_url=f"http://{running.http_address}", timeout=600) as http:
        content = "".join(json.dumps(each) + "\n" for each in requests).encode()
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}).json()["id"]
        asked = {"input_file_id": file, "endpoint": ENDPOINT, "completion_window": "24h"}
        batch = http.post("/v1/batches", json=asked).json()
        while batch["status"] not in ("completed", "failed"):
            time.sleep(LOOK_S)
            batch = http.get(f"/v1/batches/{batch['id']}").json()
            if kill and batch["request_counts"]["completed"] >= len(requests) // 3:
                kill = False
                for service in (GATEWAY_ID, "conductor"):
                    running.restart(service, kill=True)
        answers = http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    assert not kill, "the batch was over before the kill"
    assert batch["request_counts"] == {"total": len(requests), "completed": len(requests), "failed": 0}, batch
    told = [json.loads(each) for each in answers]
    assert [each["custom_id"] for each in told] == [each["custom_id"] for each in requests]
    return [each["response"]["body"]["usage"] for each in told]


def as_they_come(running: LocalStack, requests: list[dict[str, Any]], *, kill: bool) -> list[dict[str, Any]]:
    """Send the requests in their order, as many at once as a batch has; return their usages. Nothing is killed."""
    assert not kill, "clients do not come back"
    waiting = iter(requests)

    async def client(http: httpx2.AsyncClient, usages: list[dict[str, Any]]) -> None:
        for each in waiting:
            answer = await http.post(ENDPOINT, json=each["body"])
            usages.append(answer.raise_for_status().json()["usage"])

    async def all_clients() -> list[dict[str, Any]]:
        usages: list[dict[str, Any]] = []
        async with httpx2.AsyncClient(base_url=f"http://{running.http_address}", timeout=600) as http:
            await asyncio.gather(*(client(http, usages) for _ in range(CONCURRENCY)))
        return usages

    return asyncio.run(all_clients())


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """The share of computed tokens, and the seconds, of both orders in turn."""
    requests, shares, times = lines(options), list[tuple[float, float]](), list[tuple[float, float]]()
    for number in range(options.runs):
        found = []
        for send in (as_batch, as_they_come):
            with stack(options) as running:
                began = time.perf_counter()
                share, sent = computed(send(running, requests, kill=options.kill and send is as_batch))
                found.append((share, time.perf_counter() - began))
        (ours, seconds), (theirs, their_seconds) = found
        shares.append((ours, theirs))
        times.append((seconds, their_seconds))
        progress(f"run {number + 1} of {options.runs}: {ours:.3f} and {theirs:.3f} of {sent} tokens computed")
    name = f"{options.lines} questions over {options.documents} documents"
    beside = "the order of arrival"
    return [
        paired(f"{name}: tokens computed over tokens sent", "", shares, beside, less_is_better=True, target=1.0),
        paired(f"{name}: time", "s", times, beside, less_is_better=True),
    ]


def flags(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own flags."""
    add = parser.add_argument
    add("--lines", type=int, default=1000)
    add("--documents", type=int, default=40)
    add("--words", type=int, default=400, help="words of a document")
    add("--pool-mib", type=int, default=2, help="KV pool of each engine, MiB")
    add("--engine", default="emulated:llama-70b-a800")
    add("--time-scale", type=float, default=200.0, help="emulated seconds per second")
    add("--seed", type=int, default=1)
    add("--kill", action="store_true", help="kill gateway and conductor in the midst of the batch")


if __name__ == "__main__":
    run("batches", measure, flags=flags)
