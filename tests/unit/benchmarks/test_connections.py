"""An hour of connections: how requests end is counted, 504s by what they say, and growth is told from noise."""

import asyncio
import random
import time

from aiohttp import web

from benchmarks.connections import GROWTH_BYTES, Load, quarters, rows

MIB = 1 << 20
REQUESTS = 300
"""In which each end comes."""
EXPLAINED = "the request's 600 s are over; the request waited for a decode instance with room"


async def answer(request: web.Request) -> web.StreamResponse:
    """What a gateway may answer: whole, streamed, refused as bad, and late, with and without a reason."""
    body = await request.json()
    if body["temperature"] < 0:
        return web.json_response({"error": "temperature"}, status=400)
    if body["stream"]:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(3):
            await response.write(b'data: {"text": "a"}\n\n')
        return response
    text = {1: EXPLAINED, 2: "Deadline Exceeded"}.get(body["max_tokens"] % 3)
    return web.json_response({"text": "a"}) if text is None else web.Response(text=text, status=504)


async def test_ends_are_counted_and_what_504s_waited_for() -> None:
    """The load ends by its count of requests: how many a second has depends on the machine."""

    async def counted(request: web.Request) -> web.StreamResponse:
        if sum(load.ends.values()) >= REQUESTS:
            load.until = time.monotonic()
        return await answer(request)

    served = web.Application()
    served.add_routes([web.post("/v1/completions", counted)])
    runner = web.AppRunner(served, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    load = Load(f"http://127.0.0.1:{runner.addresses[0][1]}", time.monotonic() + 120, 0.001)
    await asyncio.gather(*(load.connection(random.Random(number)) for number in range(4)))
    await runner.cleanup()
    assert set(load.ends) == {"whole 200", "streamed 200", "left", "bad 400", "whole 504"}
    assert set(load.late) == {EXPLAINED.replace("600", "N"), "Deadline Exceeded"}
    assert load.faults() == 0, "504s are judged by what they say"
    assert load.unexplained() == load.late["Deadline Exceeded"] > 0


def test_a_process_that_grows_and_one_that_does_not() -> None:
    flat = [100 * MIB + number % 3 * MIB for number in range(40)]
    grown = [100 * MIB + number * GROWTH_BYTES // 4 for number in range(40)]
    assert quarters(grown)[1] > quarters(grown)[0] + GROWTH_BYTES
    load = Load("", 0.0, 1.0)
    load.ends["broken: ClientOSError"] = 2
    table = {row.name: row.met for row in rows(("a", "b"), list(map(list, zip(flat, grown, strict=True))), load)}
    assert list(table.values()) == [True, False, False, True]
