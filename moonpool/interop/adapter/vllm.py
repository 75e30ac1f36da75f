"""Speaks to vLLM: HTTP, token ids in and out (`/inference/v1/generate`, which `--enable-scale-out` opens)."""

import base64
import re
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from moonpool.base.errors import ConfigError, InvalidRequest, Unavailable
from moonpool.base.kv.media import MediaItem
from moonpool.base.logprobs import Logprobs
from moonpool.interop.adapter.base import (
    EngineClient,
    EngineFacts,
    EngineLoad,
    EngineOutput,
    EnginePrompt,
    refused_options,
)
from moonpool.interop.adapter.engine_http import EngineHttp, endpoint_for
from moonpool.interop.kv_events.stream import EventSource

GENERATE = "/inference/v1/generate"
RENDER = "/v1/chat/completions/render"
"""Makes of a chat's pictures what `GENERATE` takes beside token ids."""
MAX_RENDERED_BYTES = 256 << 20
"""Of a rendered picture, and of those that are kept: pictures of earlier turns come again."""
MAX_SEED = (1 << 63) - 1
PASSED: Mapping[str, Callable[[Any], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "logprobs": lambda value: value,
    "logit_bias": lambda biases: {str(token): bias for token, bias in biases.items()} or None,
}
"""Options that vLLM has under the same name, in vLLM's form; None: left out. All others are refused by name: grammars
begin with the first token, so that an answer that moves would lose its grammar."""
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Samples = dict[str, list[tuple[dict[str, str], float]]]


class VllmClient(EngineClient):
    """One vLLM server; see `EngineHttp`."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self._block_size, self._model = 1, ""
        self._rendered: dict[bytes, RenderedPicture] = {}  # by digest, the oldest first

    async def describe(self) -> EngineFacts:
        models = await self._http.get_json("/v1/models")
        version = (await self._http.get_json("/version"))["version"]
        samples = read_samples(await self._http.get("/metrics"))
        cache = _labels(samples, "vllm:cache_config_info")
        if cache.get("enable_prefix_caching") == "False":
            raise ConfigError("engine", "vLLM runs without --enable-prefix-caching")
        paths = (await self._http.get_json("/openapi.json"))["paths"]
        if GENERATE not in paths:
            raise ConfigError("engine", "vLLM runs without --enable-scale-out, which opens /inference/v1/generate")
        self._block_size, self._model = int(cache["block_size"]), str(models["data"][0]["id"])
        return EngineFacts(
            version=f"vllm {version}",
            life=_life(samples),
            block_size=self._block_size,
            blocks=int(cache["num_gpu_blocks"]),
            max_tokens=int(models["data"][0]["max_model_len"]),
            sources=self._sources(await self._http.get_json("/kv_event_sources")),
            unsupported=refused_options(PASSED),
            loras={model["id"]: model["root"] for model in models["data"] if model.get("parent")},
            page_namespace=bytes.fromhex(samples["moonpool_kv_info"][0][0]["namespace"])
            if "moonpool_kv_info" in samples
            else b"",
            pictures=RENDER in paths,
        )

    def _sources(self, told: Mapping[str, Mapping[str, Any]]) -> tuple[EventSource, ...]:
        if not told or not all(
            events["enable_kv_cache_events"] and events["publisher"] == "zmq" for events in told.values()
        ):
            raise ConfigError(
                "engine", "vLLM publishes no KV events; start it with --kv-events-config (docs/engines.md)"
            )
        host = urlsplit(self._http.url).hostname or ""
        return tuple([
            EventSource(
                int(rank),
                endpoint_for(events["endpoint"], int(rank), host),
                endpoint_for(events.get("replay_endpoint") or "", int(rank), host),
                events.get("topic") or "",
            )
            for rank, events in told.items()
        ])  # fmt: skip

    async def load(self) -> tuple[str, EngineLoad]:
        samples = read_samples(await self._http.get("/metrics"))
        usage = [value for _, value in samples.get("vllm:kv_cache_usage_perc", [])] or [0.0]
        running = sum([value for _, value in samples.get("vllm:num_requests_running", [])])
        waiting = sum([value for _, value in samples.get("vllm:num_requests_waiting", [])])
        preemptions = sum([value for _, value in samples.get("vllm:num_preemptions_total", [])])
        by_source = samples.get("vllm:prompt_tokens_by_source_total", [])
        computed = [value for labels, value in by_source if labels.get("source") == "local_compute"]
        return _life(samples), EngineLoad(
            int(running), int(waiting), sum(usage) / len(usage), int(preemptions),
            int(sum(computed)) if computed else None,
        )  # fmt: skip

    async def generate(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        if prompt.keep:
            yield await self._prefill(prompt)
            return
        if prompt.transfer is not None and (len(prompt.token_ids) - 1) % self._block_size == 0:
            async with aclosing(self._after_whole_blocks(prompt)) as outputs:
                async for again in outputs:
                    yield again
            return
        headers = {"X-data-parallel-rank": str(prompt.rank)} if prompt.rank >= 0 else {}
        finish, top = "", prompt.params.logprobs or 0
        async for message in self._http.events(GENERATE, await self._body(prompt), headers):
            output = read_chunk(message, top)
            if output is not None:
                finish = output.finish or finish
                yield output
        if not finish:
            raise Unavailable("vLLM ended an answer without a reason")

    async def _after_whole_blocks(self, prompt: EnginePrompt) -> AsyncGenerator[EngineOutput, None]:
        """An answer behind a prompt of whole blocks and a first token.

        NIXL's connector asks the other engine for all blocks, also for the one of the first token, which is not there:
        vLLM 0.32 then ends. So this engine draws the first token again, which must be the same.
        """
        *before, first = prompt.token_ids
        again = replace(
            prompt,
            token_ids=array("i", before),
            max_tokens=prompt.max_tokens + 1,
            min_tokens=prompt.min_tokens + 1 if prompt.min_tokens else 0,
        )
        missing = True
        async with aclosing(self.generate(again)) as outputs:
            async for output in outputs:
                if not missing or not output.token_ids:
                    yield output
                    continue
                missing = False
                if output.token_ids[0] != first:
                    raise Unavailable("vLLM drew another first token than the engine that computed the prompt")
                logprobs = output.logprobs and output.logprobs.part(1, len(output.token_ids))
                yield replace(output, token_ids=output.token_ids[1:], logprobs=logprobs)

    async def _prefill(self, prompt: EnginePrompt) -> EngineOutput:
        """Compute a prompt that is kept: only whole answers tell where KV is."""
        message = await self._http.post_json(GENERATE, await self._body(prompt))
        output = read_chunk(message, prompt.params.logprobs or 0)
        if output is None:
            raise Unavailable("vLLM gave no token")
        details = (message.get("usage") or {}).get("prompt_tokens_details") or {}
        return replace(output, cached_tokens=details.get("cached_tokens"), transfer=message.get("kv_transfer_params"))

    async def _body(self, prompt: EnginePrompt) -> dict[str, Any]:
        body = request_body(prompt)
        return body if not prompt.media else body | {"features": await self._features(prompt)}

    async def _features(self, prompt: EnginePrompt) -> dict[str, Any]:
        """What vLLM takes of a prompt's pictures. Their hashes are Moonpool's digests, so that KV events tell these."""
        places, data = list[dict[str, Any]](), list[str]()
        media = prompt.media
        for item in media:
            rendered = self._rendered.pop(item.digest, None) or await self._render(item)
            self._rendered[item.digest] = rendered
            theirs, tokens = rendered.place["length"], item.end - item.begin
            if theirs != tokens:
                raise InvalidRequest("sequence.media", f"vLLM makes {theirs} tokens of a picture, not {tokens}")
            _check_mask(prompt.token_ids[item.begin : item.end], rendered.place.get("is_embed"))
            places.append({**rendered.place, "offset": item.begin})
            data.append(rendered.data)
        held = sum([len(rendered.data) for rendered in self._rendered.values()])
        for digest in list(self._rendered)[: -len(media)]:
            if held <= MAX_RENDERED_BYTES:
                break
            held -= len(self._rendered.pop(digest).data)
        hashes = [item.digest.hex() for item in media]
        return {
            name: {"image": values}
            for name, values in (("mm_hashes", hashes), ("mm_placeholders", places), ("kwargs_data", data))
        }

    async def _render(self, item: MediaItem) -> "RenderedPicture":
        url = f"data:image/png;base64,{base64.b64encode(item.content).decode()}"
        picture = {"url": url} | ({"detail": item.detail} if item.detail else {})
        turn = {"role": "user", "content": [{"type": "image_url", "image_url": picture}]}
        told = await self._http.post_json(RENDER, {"model": self._model, "messages": [turn]}, MAX_RENDERED_BYTES)
        features = told["features"]
        [place], data = features["mm_placeholders"]["image"], (features.get("kwargs_data") or {}).get("image")
        if not data or data[0] is None:
            why = "vLLM keeps pictures to itself; start it with --mm-processor-cache-gb 0 (docs/engines.md)"
            raise Unavailable(why)
        return RenderedPicture(dict(place), str(data[0]))

    async def clear_cache(self) -> bool:
        """See `EngineClient`. vLLM can clear the cache if started with VLLM_SERVER_DEV_MODE=1."""
        return await self._http.posted("/reset_prefix_cache")

    async def aclose(self) -> None:
        await self._http.aclose()


def _check_mask(tokens: Sequence[int], mask: Sequence[bool] | None) -> None:
    """Check that vLLM puts rows of a picture where the model's rule has marks. Versions up to 0.32 tell no mask.

    Raises:
        InvalidRequest: vLLM would put rows elsewhere.
    """
    shown = [True] * len(tokens) if mask is None else list(mask)
    marks, others = (
        {token for token, row in zip(tokens, shown, strict=False) if row is kind} for kind in (True, False)
    )
    if len(shown) == len(tokens) and len(marks) == 1 and marks.isdisjoint(others):
        return
    if mask is None:
        why = "vLLM's endpoint does not take pictures between whose rows this model has other tokens"
        raise InvalidRequest("sequence.media", why)
    raise InvalidRequest("sequence.media", "vLLM's mask of a picture (is_embed) has rows at other tokens")


@dataclass(frozen=True, slots=True)
class RenderedPicture:
    """A picture as vLLM has prepared it.

    Attributes:
        place: `length` in tokens, and which of the tokens have embeddings, if not all.
        data: what the encoder reads, in vLLM's form.
    """

    place: Mapping[str, Any]
    data: str


def request_body(prompt: EnginePrompt) -> dict[str, Any]:
    """An answer's request in vLLM's form."""
    sampling: dict[str, Any] = {
        "max_tokens": prompt.max_tokens,
        "min_tokens": prompt.min_tokens,
        "seed": prompt.seed & MAX_SEED,
        "ignore_eos": True,  # the end tokens are told
        "stop_token_ids": list(prompt.end_token_ids),
        "detokenize": False,
    }
    passed = {option: form(getattr(prompt.params, option)) for option, form in PASSED.items()}
    sampling |= {option: value for option, value in passed.items() if value is not None}
    body: dict[str, Any] = {
        "request_id": prompt.request_id,
        "token_ids": prompt.token_ids.tolist(),
        "sampling_params": sampling,
        "stream": not prompt.keep,
    }
    if not prompt.keep:
        body["stream_options"] = {"include_usage": True}
    if prompt.lora:
        body["model"] = prompt.lora
    if prompt.salt:
        body["cache_salt"] = prompt.salt
    if prompt.priority:
        body["priority"] = prompt.priority
    transfer = dict(prompt.transfer or {})
    if prompt.keep:
        transfer |= {"do_remote_decode": True, "do_remote_prefill": False}
    if prompt.tenant is not None:
        transfer["moonpool_tenant"] = prompt.tenant
    if transfer:
        body["kv_transfer_params"] = transfer
    return body


def read_chunk(message: Mapping[str, Any], top: int = 0) -> EngineOutput | None:
    """The output in a chunk of a stream, with `top` likely tokens at each position; None without output.

    Raises:
        Unavailable: the engine cannot go on.
    """
    if (error := message.get("error")) is not None:
        raise Unavailable(f"vLLM: {error.get('message', error) if isinstance(error, Mapping) else error}")
    details = (message.get("usage") or {}).get("prompt_tokens_details") or {}
    choices = message.get("choices") or ()
    if not choices:
        cached = details.get("cached_tokens")
        return None if cached is None else EngineOutput(cached_tokens=cached)
    [choice] = choices
    finish = choice.get("finish_reason") or ""
    if finish not in ("", "stop", "length"):
        raise Unavailable(f"vLLM ended an answer: {finish}")
    return EngineOutput(tuple(choice.get("token_ids") or ()), _read_logprobs(choice.get("logprobs"), top), finish)


def _read_logprobs(message: Mapping[str, Any] | None, top: int) -> Logprobs | None:
    """Log probabilities by position. vLLM lists the most likely tokens, and the sampled token."""
    if message is None:
        return None
    found = Logprobs()
    for token in message["content"] or ():
        found.logprobs.append(token["logprob"])
        found.ranks.append(token.get("rank") or 1)
        ranked = sorted(token.get("top_logprobs") or (), key=lambda likely: (-likely["logprob"], likely["token_id"]))[
            :top
        ]
        found.top_token_ids.extend([likely["token_id"] for likely in ranked])
        found.top_logprobs.extend([likely["logprob"] for likely in ranked])
    return found


def read_samples(text: str) -> Samples:
    """Prometheus samples, by name: labels and value."""
    found: Samples = {}
    for name, labels, value in _SAMPLE.findall(text):
        found.setdefault(name, []).append((dict(_LABEL.findall(labels)), float(value)))
    return found


def _labels(samples: Samples, name: str) -> dict[str, str]:
    if name not in samples:
        raise Unavailable(f"vLLM does not report {name} (yet)")
    return samples[name][0][0]


def _life(samples: Samples) -> str:
    started = samples.get("process_start_time_seconds")
    return str(started[0][1]) if started else ""
