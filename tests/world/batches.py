"""Batches of a storm: files of requests that a gateway runs in all of its lives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.world.asks import PATHS
from tests.world.clients import REFUSED, Outcome, read_answer
from tests.world.gateway import Gateway

LOOK_S = 1.0
"""Seconds between two looks at a batch, and between two tries."""
UNDER_WAY = ("validating", "in_progress", "finalizing")
BOUNDARY = "storm"


class Batch:
    """A client that sends requests of one interface as a file, and reads their answers once the batch is over.

    A request to the gateway that fails is sent again, as clients do.

    Attributes:
        lives: of the gateway, between the batch's begin and its end.
        fault: what may never happen to a batch; "" for nothing.
    """

    def __init__(self, gateway: Gateway, files: Path, key: str) -> None:
        """Take the folder in which the gateway keeps files, and the client's key."""
        self._gateway, self._files, self._key = gateway, files, key
        self.lives = 0
        self.fault = ""

    async def run(self, outcomes: Sequence[Outcome], now: Callable[[], float]) -> None:
        """Run requests, which have not begun, as one batch; notes what comes of each."""
        path = PATHS[outcomes[0].ask.interface]
        lines = [
            json.dumps({"custom_id": str(number), "method": "POST", "url": path, "body": outcome.ask.body()})
            for number, outcome in enumerate(outcomes)
        ]
        file = await self._told("POST", "/v1/files", _form("\n".join(lines)))
        life = self._gateway.node.life
        body = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
        batch = await self._told("POST", "/v1/batches", body)
        while batch.get("status") in UNDER_WAY:
            await asyncio.sleep(LOOK_S)
            batch = await self._told("GET", f"/v1/batches/{batch['id']}")
        self.lives = self._gateway.node.life - life
        for outcome in outcomes:
            outcome.end = now()
        if not self.fault:
            self._read(batch, outcomes)

    async def _told(self, method: str, path: str, body: dict[str, Any] | bytes | None = None) -> dict[str, Any]:
        """What the gateway answers in the end; nothing if it says what may never be said."""
        while True:
            exchange = await self._gateway.ask(method, path, body, self._key, BOUNDARY)
            await exchange.ended.wait()
            if exchange.whole and exchange.status == 200:
                return exchange.answer
            if exchange.whole and exchange.status not in REFUSED:
                self.fault = f"{method} {path}: {exchange.status} {exchange.content.decode()}"
                return {"id": ""}
            await asyncio.sleep(LOOK_S)

    def _read(self, batch: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
        if batch["status"] != "completed":
            self.fault = f"a batch is {batch['status']}: {batch['errors']}"
            return
        seen = list[int]()
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is None:
                continue
            results = [json.loads(line) for line in (self._files / batch[name]).read_text().splitlines()]
            numbers = [int(result["custom_id"]) for result in results]
            if numbers != sorted(set(numbers)):
                self.fault = f"lines of {name} in the order {numbers}"
            seen += numbers
            for result in results:
                _take(outcomes[int(result["custom_id"])], result["response"], is_error=name == "error_file_id")
        if sorted(seen) != list(range(len(outcomes))):
            self.fault = f"lines {sorted(seen)} of {len(outcomes)} are answered"
        failed = sum(outcome.ended != "complete" for outcome in outcomes)
        counts = {"total": len(outcomes), "completed": len(outcomes) - failed, "failed": failed}
        if batch["request_counts"] != counts:
            self.fault = f"{batch['request_counts']} instead of {counts}"


def _take(outcome: Outcome, response: Mapping[str, Any], *, is_error: bool) -> None:
    if is_error != (response["status_code"] != 200):
        outcome.unexpected = f"status {response['status_code']} in the wrong file"
    if response["status_code"] == 200:
        read_answer(outcome.ask, response["body"], outcome)
        outcome.ended = "complete"
        return
    outcome.ended, outcome.error = "failed", str(response["body"])
    if response["status_code"] not in REFUSED:
        outcome.unexpected = f"{response['status_code']} {outcome.error}"


def _form(content: str) -> bytes:
    """The form of `POST /v1/files`."""
    parts = (
        'content-disposition: form-data; name="purpose"\r\n\r\nbatch',
        f'content-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n{content}',
    )
    return "".join(f"--{BOUNDARY}\r\n{part}\r\n" for part in parts).encode() + f"--{BOUNDARY}--\r\n".encode()
