"""What a request costs: the server behind other routers answers right away, and the rows are right."""

import argparse
import asyncio

from aiohttp import web

from benchmarks.frame import Row
from benchmarks.instant_server import application
from benchmarks.requests import Cost, ask, prompts, rows


def test_a_server_that_answers_at_once_is_asked() -> None:
    async def story() -> None:
        runner = web.AppRunner(application(4), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        options = argparse.Namespace(at_once=3, answer_tokens=4)
        for streamed in (False, True):
            await ask(url, prompts(5, 10, 1), options, streamed=streamed)
        await runner.cleanup()

    asyncio.run(story())


def test_prompts_have_no_common_beginning() -> None:
    assert len({prompt.split()[0] for prompt in prompts(20, 5, 3)}) == 20


def test_rows() -> None:
    single = [Cost((0.5, 2.0), (1.0, 3.0)), Cost((0.5, 2.0), (1.0, 3.0))]
    double = [Cost((0.5, 1.0, 1.25), (1.0, 1.5, 1.5))] * 2
    found = rows({1: single, 2: double}, {"other": [Cost((0.25,), (0.5,))] * 2})
    figures = {(row.name, row.limit_name): row for row in found if isinstance(row, Row)}
    assert figures["conductor, a whole answer", "wanted at most"].value == 2.0
    assert figures["gateway, a streamed answer", "wanted at most"].value == 1.0
    beside = figures["whole answers a second and core, gateway and conductor", "other"]
    assert (beside.value, beside.limit_value, beside.ratio) == (400.0, 4000.0, 0.1)
    many = figures["whole answers for each second of the busiest of 2 conductors", "2 times those of a single one"]
    assert (many.value, many.limit_value) == (800.0, 1000.0)
    assert many.ratio == 0.8
    assert many.met is False
