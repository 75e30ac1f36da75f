"""A server of completions that answers at once: `python -m benchmarks.instant_server`; what stands behind routers."""

import argparse
import asyncio
import json

from aiohttp import web

from benchmarks.peers.programs import HOST

MODEL = "tiny"
PIECE = " rope"


def completion(text: str, reason: str | None) -> bytes:
    """A completion, or a piece of a streamed one."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    return json.dumps(answer).encode()


def application(answer_tokens: int) -> web.Application:
    """The server: an event for each token if the answer is streamed, one JSON object else."""
    piece = b"data: " + completion(PIECE, None) + b"\n\n"
    last = b"data: " + completion(PIECE, "length") + b"\n\ndata: [DONE]\n\n"
    whole = completion(PIECE * answer_tokens, "length")

    async def complete(request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.Response(body=whole, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(answer_tokens):
            await response.write(piece if number + 1 < answer_tokens else last)
            await asyncio.sleep(0)
        return response

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    served = web.Application()
    served.add_routes(
        [
            *(web.post("/v1/completions", complete), web.get("/v1/models", models)),
            *(web.get("/health", healthy), web.get("/get_server_info", models), web.get("/get_model_info", models)),
        ]
    )
    return served


async def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answer-tokens", type=int, default=32)
    runner = web.AppRunner(application(parser.parse_args().answer_tokens), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, HOST, 0)
    await site.start()
    print(f"ready: {HOST}:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
