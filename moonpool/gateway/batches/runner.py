"""Runs batches: beside interactive requests, below them, and on from where a killed gateway stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import count

from moonpool.base import world
from moonpool.base.errors import MoonpoolError
from moonpool.base.runtime.tenant_turns import TenantTurns, Turns
from moonpool.base.scheduling.fair_share import MOST_PRIORITY
from moonpool.base.telemetry.logs import get_logger
from moonpool.gateway.batches.in_process import InProcessClient, InProcessResponse
from moonpool.gateway.batches.lines import MAX_ERRORS, InputFile, LineRequest, line_request
from moonpool.gateway.batches.store import BatchStore, StoredBatch, StoredLine

RETRIED = (408, 409, 425, 429, 502, 503)
"""Statuses after which a line is sent again until its batch's time is over: the cluster is full, or a part is lost."""
RETRIED_A_FEW_TIMES = (500, 504)
"""Statuses after which a line is sent again `MAX_TRIES` times in all: the request itself may be the cause."""
MAX_TRIES = 4
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
LOOK_S = 1.0
"""Seconds between two looks at the cluster while interactive requests wait there."""
ANNOUNCED_S = 30.0
"""Seconds within which the next prompt is announced to come."""
SHARED_CHARS = 256
"""A prompt is announced if it shares less than so much text with the prompt before: else its KV is being computed."""
log = get_logger(__name__)


class BatchRunner:
    """Runs the batches of a store, all at once, in as many slots as there are; tenants take turns at them.

    Attributes:
        store: files and batches.

    Args:
        store: the batches.
        client: sends a line's request to this gateway's application.
        reading: reads lines on a thread, in turns of tenants.
        waiting: how many requests wait in the cluster now; raises MoonpoolError if the cluster does not say.
        concurrency: lines that run at once, of all batches.
        max_line_bytes: bytes of a line at most.
    """

    def __init__(
        self,
        store: BatchStore,
        client: InProcessClient,
        reading: TenantTurns,
        waiting: Callable[[], Awaitable[int]],
        concurrency: int,
        max_line_bytes: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.store, self._client, self._reading, self._waiting = store, client, reading, waiting
        self._max_line_bytes = max_line_bytes
        self._slots = Turns(concurrency, credit=1.0)
        self._sleep = sleep
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Go on with all batches that are under way; then wait until cancelled."""
        for batch in await self.store.under_way():
            self.start(batch)
        await asyncio.Event().wait()

    def start(self, batch: StoredBatch) -> None:
        """Begin with a batch, or go on."""
        task = self._tasks[batch.id] = asyncio.create_task(self._serve(batch))
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def cancel(self, batch: StoredBatch) -> StoredBatch:
        """Cancel a batch that is under way; return the batch as it is then. What has an answer keeps it."""
        changed = await self.store.change(batch, "cancelling")
        task = self._tasks.get(batch.id)
        if changed.status == "cancelling":  # else the batch was over before
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
            self.start(changed)
        return changed

    async def close(self) -> None:
        """Stop; the batches go on with the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve(self, batch: StoredBatch) -> None:
        """Bring a batch to its end, however often the store or a line fails."""
        for pause in _pauses():
            try:
                await self._step(batch)
                return
            except Exception as error:  # a full disk, a database that another program holds, or a defect
                log.warning("a batch goes on later", batch=batch.id, error=repr(error), exc_info=error)
            await self._sleep(pause)
            with suppress(MoonpoolError):
                batch = await self.store.batch(batch.tenant, batch.id)

    async def _step(self, batch: StoredBatch) -> None:
        """Bring a batch to its end from any status."""
        if batch.status == "validating":
            checked = await self._validate(batch)
            if checked is None:
                return
            batch = checked
        if batch.status == "in_progress":
            expired = not await self._run_lines(batch)
            batch = await self.store.change(batch, "finalizing", expired=expired)
        await self._finish(batch)

    async def _validate(self, batch: StoredBatch) -> StoredBatch | None:
        path, endpoint = self.store.path(batch.body["input_file_id"]), batch.body["endpoint"]
        file = InputFile(path, endpoint, self._max_line_bytes)
        while await self._reading.run(batch.tenant, file.read_on):
            pass
        if file.errors:
            data = [error.to_json() for error in file.errors[:MAX_ERRORS]]
            await self.store.change(batch, "failed", errors={"object": "list", "data": data})
            return None
        await self.store.put_lines(batch.id, await self._reading.run(batch.tenant, file.lines))
        return await self.store.change(batch, "in_progress")

    async def _run_lines(self, batch: StoredBatch) -> bool:
        """Run the lines without answer, in their order; False if the batch's time is over before."""
        lines, before = await self.store.lines_to_do(batch.id), ""
        left_s = batch.body["expires_at"] - self.store.now()
        try:
            async with asyncio.timeout(max(0.0, left_s)), asyncio.TaskGroup() as group:
                for line in lines:
                    await self._slots.begin(batch.tenant)
                    try:
                        request = await self._prepare(batch, line, before)
                        running = group.create_task(self._run_line(batch, line, request.body))
                    except BaseException:
                        self._slots.end(batch.tenant, 0.0)
                        raise
                    before = request.head
                    # Not within the task: one that is cancelled before its first step runs no `finally`.
                    running.add_done_callback(lambda _: self._slots.end(batch.tenant, 1.0))
        except TimeoutError:
            return False
        return True

    async def _prepare(self, batch: StoredBatch, line: StoredLine, before: str) -> LineRequest:
        """Wait while interactive requests wait for a place, and announce a prompt whose beginning is new.

        `before` is the head of the line before.
        """
        while await self._interactive_waiting():
            await self._sleep(LOOK_S)
        text, endpoint = await self.store.read_line(batch.body["input_file_id"], line), batch.body["endpoint"]
        request = await self._reading.run(
            batch.tenant, lambda: line_request(text, endpoint, MOST_PRIORITY, within_s=ANNOUNCED_S)
        )
        if request.announcement is not None and (not before or not request.head.startswith(before[:SHARED_CHARS])):
            # The pool is told of a prompt whose beginning is new, so that its KV comes nearer before the line runs.
            await self._client.post("/v1/prefetch", request.announcement, batch.tenant)
        return request

    async def _interactive_waiting(self) -> bool:
        try:
            return await self._waiting() > 0
        except MoonpoolError:
            return False  # the line itself finds out, and is sent again

    async def _run_line(self, batch: StoredBatch, line: StoredLine, body: bytes) -> None:
        for tries, pause in enumerate(_pauses(), 1):
            response = await self._client.post(batch.body["endpoint"], body, batch.tenant)
            if response.status not in RETRIED and (response.status not in RETRIED_A_FEW_TIMES or tries >= MAX_TRIES):
                await self.store.answer(batch.id, line, _answer(line, response), is_error=response.status >= 400)
                return
            await self._sleep(pause)

    async def _finish(self, batch: StoredBatch) -> None:
        """Write the answers into files, and say how the batch ended."""
        cancelled, expired = batch.status == "cancelling", bool(batch.body.get("expired"))
        code, message = (
            ("batch_cancelled", "the batch was cancelled")
            if cancelled
            else ("batch_expired", "the batch's time was over before this request was answered")
        )
        if cancelled or expired:
            for line in await self.store.lines_to_do(batch.id):
                error = json.dumps({"code": code, "message": message})
                await self.store.answer(batch.id, line, _result(line, "null", error), is_error=True)
        counted = await self.store.batch(batch.tenant, batch.id)
        output = await self.store.write_answers(batch, is_error=False)
        errors = await self.store.write_answers(batch, is_error=True)
        await self.store.change(
            counted,
            "cancelled" if cancelled else "expired" if expired else "completed",
            output_file_id=output.id if output is not None else None,
            error_file_id=errors.id if errors is not None else None,
        )


def _pauses() -> Iterator[float]:
    """Yield pauses that grow, without end; each a random part shorter, so that lines do not come back together."""
    for number in count():
        yield min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(number, 10)) * (1.0 - world.random_bits(32) / 2**33)


def _answer(line: StoredLine, response: InProcessResponse) -> str:
    """A line's answer in OpenAI's form: the response as the endpoint gave it, which is not parsed: it may be large."""
    head = json.dumps({"status_code": response.status, "request_id": response.request_id})
    body = response.body.decode().replace("\n", " ") or "null"  # between two parts of JSON: texts have none
    return _result(line, f'{head[:-1]}, "body": {body}}}', "null")


def _result(line: StoredLine, response: str, error: str) -> str:
    """A line of a file of answers, from JSON."""
    head = json.dumps({"id": f"batch_req_{world.random_hex(12)}", "custom_id": line.custom_id})
    return f'{head[:-1]}, "response": {response}, "error": {error}}}'
