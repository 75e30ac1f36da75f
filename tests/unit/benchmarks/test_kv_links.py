"""The throttled link, and the rate at which loading takes as long as computing."""

import asyncio
import contextlib

import pytest

from benchmarks.kv_links import BURST_S, REST, ThrottledLink, break_even
from moonpool.base.scheduling.latency import overlapped_seconds


async def test_bytes_pass_both_ways_and_ends_are_told() -> None:
    payload = bytes(range(256)) * 400

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()[:2]
    with contextlib.closing(ThrottledLink(target)) as link:
        link.bytes_per_s = 2e6
        host, port = link.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        began = asyncio.get_running_loop().time()
        writer.write(payload)
        writer.write_eof()
        assert await reader.read() == payload
        # Never quicker than the rate, but for what a link may be ahead.
        assert asyncio.get_running_loop().time() - began >= 2 * (len(payload) / 2e6 - 2 * BURST_S)
        writer.close()
    server.close()


@pytest.mark.parametrize("layers", [1, 32])
def test_at_the_break_even_loading_takes_as_long_as_computing(layers: int) -> None:
    cold_s, tokens, token_bytes = 2.0, 1024, 4096
    rate = break_even(cold_s, tokens, token_bytes, layers)
    rest_s = cold_s * REST / (tokens + REST)
    assert overlapped_seconds(tokens * token_bytes / rate, rest_s, layers) == pytest.approx(cold_s)
