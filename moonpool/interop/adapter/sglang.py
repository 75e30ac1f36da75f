"""Speaks to SGLang: HTTP, token ids in and out (`/generate`); pairs meet by SGLang's bootstrap."""

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

from moonpool.base import world
from moonpool.base.errors import ConfigError, InvalidRequest, Unavailable
from moonpool.base.logprobs import Logprobs
from moonpool.interop.adapter.base import (
    EngineClient,
    EngineFacts,
    EngineLoad,
    EngineOutput,
    EnginePrompt,
    refused_options,
)
from moonpool.interop.adapter.checked_client import MAX_RANKS
from moonpool.interop.adapter.engine_http import EngineHttp, endpoint_for
from moonpool.interop.kv_events.stream import EventSource

LEAST_BLOCK_SIZE = 16
MAX_SEED = (1 << 31) - 1
ROOM_BITS = 63
NOBODY = "2.2.2.2"
"""Bootstrap host by which an engine of a pair computes without the other one, as SGLang's own first requests do."""
PASSED: Mapping[str, Callable[[Any], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": lambda value: value or -1,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "logit_bias": lambda biases: {str(token): bias for token, bias in biases.items()} or None,
}
"""Sampling parameters that SGLang has under the same name, in SGLang's form; None: left out."""
PASSED_BESIDE: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    "logprobs": lambda top: (
        {} if top is None else {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": top}
    ),
}
"""Options that a request has beside the sampling parameters. All others are refused by name."""


class SglangClient(EngineClient):
    """One SGLang server; see `EngineHttp`."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self._mode = "null"
        self._bootstrap: tuple[str, int] | None = None

    async def describe(self) -> EngineFacts:
        info = await self._info()
        block_size, tokens = int(info.get("page_size") or 1), int(info.get("max_total_num_tokens") or 0)
        self._mode = info.get("disaggregation_mode") or "null"
        if info.get("disable_radix_cache") and self._mode != "decode":  # by default, decode sides keep nothing
            raise ConfigError("engine", "SGLang runs with --disable-radix-cache")
        if block_size < LEAST_BLOCK_SIZE:
            raise ConfigError("engine", f"SGLang's pages have {block_size} tokens; start it with --page-size 64")
        if tokens < block_size:
            raise Unavailable("SGLang does not tell its memory (yet)")
        if self._mode == "prefill":
            host = urlsplit(self._http.url).hostname or ""
            self._bootstrap = host, int(info.get("disaggregation_bootstrap_port") or 8998)
        return EngineFacts(
            version=f"sglang {info.get('version', '')}".strip(),
            life=_life(info),
            block_size=block_size,
            blocks=tokens // block_size,
            max_tokens=int(info.get("context_length") or info.get("max_req_input_len") or tokens),
            sources=self._sources(info),
            unsupported=refused_options((*PASSED, *PASSED_BESIDE)),
        )

    def _sources(self, info: Mapping[str, Any]) -> tuple[EventSource, ...]:
        told = info.get("kv_events_config") or {}
        config = msgspec.json.decode(told) if isinstance(told, str) else told
        if config.get("publisher") != "zmq":
            raise ConfigError(
                "engine", "SGLang publishes no KV events; start it with --kv-events-config (docs/engines.md)"
            )
        host, ranks = urlsplit(self._http.url).hostname or "", int(info.get("dp_size") or 1)
        return tuple([
            EventSource(
                rank,
                endpoint_for(config.get("endpoint") or "tcp://*:5557", rank, host),
                endpoint_for(config.get("replay_endpoint") or "", rank, host),
                config.get("topic") or "",
                salt_field=True,
            )
            for rank in range(min(ranks, MAX_RANKS + 1))
        ])  # fmt: skip

    async def load(self) -> tuple[str, EngineLoad]:
        info, told = await self._info(), await self._http.get_json("/v1/loads")
        loads = told["loads"]
        running, waiting = (sum([int(rank[f"num_{kind}_reqs"]) for rank in loads]) for kind in ("running", "waiting"))
        usage = [float(rank["token_usage"]) for rank in loads]
        return _life(info), EngineLoad(running, waiting, sum(usage) / len(usage) if usage else 0.0)

    async def generate(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        if prompt.transfer is None and (self._mode == "prefill" or (self._mode == "decode" and prompt.timed)):
            prompt = replace(prompt, transfer=_meeting(NOBODY, 0))
        reader = _AnswerReader(prompt.params.logprobs)
        async for message in self._http.events("/generate", request_body(prompt)):
            output = reader.read(message)
            if output is not None:
                yield output
        if not reader.finish:
            raise Unavailable("SGLang ended an answer without a reason")

    def meeting(self, prompt: EnginePrompt) -> Mapping[str, Any] | None:
        """See `EngineClient`: a room at this engine's bootstrap server."""
        if self._bootstrap is None:
            return None
        return _meeting(*self._bootstrap)

    async def clear_cache(self) -> bool:
        return await self._http.posted("/flush_cache")

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _info(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = await self._http.get_json("/server_info")
        return found


def _meeting(host: str, port: int) -> Mapping[str, Any]:
    """A room at a bootstrap server."""
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": world.random_bits(ROOM_BITS)}


def _life(info: Mapping[str, Any]) -> str:
    """SGLang draws a seed at each start, unless one is set."""
    return f"{info.get('random_seed', '')}:{info.get('version', '')}"


def request_body(prompt: EnginePrompt) -> dict[str, Any]:
    """An answer's request in SGLang's form."""
    sampling: dict[str, Any] = {
        "max_new_tokens": prompt.max_tokens,
        "min_new_tokens": prompt.min_tokens,
        "sampling_seed": prompt.seed & MAX_SEED,
        "ignore_eos": True,  # the end tokens are told
        "stop_token_ids": list(prompt.end_token_ids),
        "skip_special_tokens": False,
    }
    passed = {option: form(getattr(prompt.params, option)) for option, form in PASSED.items()}
    sampling |= {option: value for option, value in passed.items() if value is not None}
    body: dict[str, Any] = {
        "rid": f"{prompt.request_id}-{world.random_hex(4)}",  # SGLang refuses an id that it knows
        "input_ids": prompt.token_ids.tolist(),
        "sampling_params": sampling,
        "stream": True,
    }
    for option, form in PASSED_BESIDE.items():
        body |= form(getattr(prompt.params, option))
    if prompt.salt:
        body |= {"extra_key": prompt.salt, "cache_salt": prompt.salt}
    if prompt.priority:
        body["priority"] = prompt.priority
    if prompt.rank >= 0:
        body["data_parallel_rank"] = prompt.rank
    return body | dict(prompt.transfer or {})


class _AnswerReader:
    """Reads a stream. SGLang tells all tokens so far each time, unless started otherwise.

    Attributes:
        finish: see `EngineOutput`.
    """

    def __init__(self, top: int | None) -> None:
        self._top, self._seen, self.finish = top, 0, ""

    def read(self, message: Mapping[str, Any]) -> EngineOutput | None:
        """The output in a message; None without output.

        Raises:
            Unavailable: the engine cannot go on.
            InvalidRequest: the engine refuses the prompt.
        """
        if (error := message.get("error")) is not None:
            raise Unavailable(f"SGLang: {error.get('message', error) if isinstance(error, Mapping) else error}")
        meta, ids = message.get("meta_info") or {}, message.get("output_ids") or []
        count = int(meta.get("completion_tokens", len(ids)))
        new = ids[self._seen :] if len(ids) == count else ids
        first, self._seen = self._seen, count
        finish = meta.get("finish_reason") or {}
        match finish.get("type"):
            case "abort" if finish.get("status_code") == 400:
                raise InvalidRequest("sequence", f"SGLang refuses it: {finish.get('message', '')}")
            case "abort":
                raise Unavailable(f"SGLang ended an answer: {finish.get('message') or 'aborted'}")
            case "stop" | "length" as reason:
                self.finish = reason
        if not new and not self.finish:
            return None
        logprobs = self._logprobs(meta, first, len(new)) if self._top is not None and new else None
        return EngineOutput(tuple(new), logprobs, self.finish, meta.get("cached_tokens"))

    def _logprobs(self, meta: Mapping[str, Any], first: int, count: int) -> Logprobs:
        found = Logprobs()
        chosen, tops = meta.get("output_token_logprobs") or [], meta.get("output_top_logprobs") or []
        begin = first if len(chosen) >= first + count else 0
        for at in range(begin, begin + count):
            logprob, token = chosen[at][:2]
            ranked = sorted(tops[at] if at < len(tops) and tops[at] else [], key=lambda likely: -likely[0])[: self._top]
            found.logprobs.append(logprob)
            found.ranks.append(
                next((rank for rank, likely in enumerate(ranked, 1) if likely[1] == token), len(ranked) + 1)
            )
            found.top_token_ids.extend([likely[1] for likely in ranked])
            found.top_logprobs.extend([likely[0] for likely in ranked])
        return found
