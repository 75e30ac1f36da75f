"""The engine from its start, or the adapter's, to its end: its keys, requests and reports."""

import asyncio
import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from moonpool.base import world
from moonpool.base.checkpoint import (
    ModelConfig,
    config_hash,
    kv_layout,
    load_config,
    model_name,
    resolve,
    resolve_dtype,
    weights_fingerprint,
)
from moonpool.base.checkpoint.lora import read_adapter
from moonpool.base.checkpoint.picture_rule import read_rule
from moonpool.base.checkpoint.tokenizer import Tokenizer
from moonpool.base.cluster.proto_conversion import read_deletions, speeds_to_proto
from moonpool.base.errors import CheckpointError, InvalidRequest, Overloaded, Unavailable
from moonpool.base.kv.keys import BlockKey, chain_root, namespace
from moonpool.base.kv.layout import KVLayout
from moonpool.base.pictures.base import PictureRule
from moonpool.base.sampling_params import LORA
from moonpool.base.scheduling.latency import prefill_seconds
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.base.telemetry.logs import get_logger
from moonpool.engine.request import IncomingRequest
from moonpool.engine.subscriber import conductor_identity
from moonpool.interop.adapter.base import EngineClient, EngineFacts, EngineLoad, EnginePrompt
from moonpool.interop.adapter.config import AdapterConfig
from moonpool.interop.adapter.engine_answer import EngineAnswer, EnginePart
from moonpool.interop.adapter.promised_request import PromisedRequest
from moonpool.interop.kv_events.cache import EngineCache
from moonpool.interop.kv_events.events import ExtraKeys
from moonpool.interop.kv_events.stream import EventStream
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, prefill_pb2

NAMES_PER_BLOCK = 4
LOOKED_AT = 8
"""Waiting prompts of which is looked up how much is computed: an engine computes few at once."""
OVERDUE_SHARE = 0.1
"""Of the seconds since an engine's last progress, so many are still to come at least: a prompt may take longer than
predicted, and its engine is not free meanwhile."""
log = get_logger(__name__)
SALT_MARK = "moonpool:"
"""Salts of prompts begin so: what follows names the root of the chain, and no hash of an image looks like it."""


@dataclass(frozen=True, slots=True)
class ServedCheckpoint:
    """The checkpoint that the engine serves."""

    name: str
    config: ModelConfig
    dtype: str
    fingerprint: bytes
    pictures: PictureRule | str = "not looked at"
    """What the model makes of pictures; a text says why there is no rule."""

    @classmethod
    def load(cls, config: AdapterConfig) -> "ServedCheckpoint":
        """Read the checkpoint; blocks for as long as hashing the weights takes. Raises CheckpointError."""
        folder: Path = resolve(config.model)
        model = load_config(folder)
        dtype, fingerprint = resolve_dtype(model, config.dtype), weights_fingerprint(folder)
        pictures = read_rule(folder, lambda: Tokenizer.load(folder))
        return cls(model_name(config.model), model, dtype, fingerprint, pictures)

    def layout(self, block_size: int) -> KVLayout:
        """Arrangement of its KV in blocks of so many tokens."""
        return kv_layout(self.config, self.dtype, block_size)


def identify_loras(listed: Mapping[str, str]) -> dict[bytes, str]:
    """Names of LoRA adapters by id, from their folders by name; blocks for as long as hashing takes.

    Those that cannot be read here are left out, with a warning: nobody knows what they compute.
    """
    found: dict[bytes, str] = {}
    for name, folder in listed.items():
        try:
            found[read_adapter(Path(folder)).id] = name
        except CheckpointError as error:
            log.warning("the engine's LoRA adapter is not served", name=name, error=str(error))
    return found


class EngineLife:
    """The engine from its start, or the adapter's, to its end.

    Attributes:
        unsupported: sampling options that are refused by name.

    Args:
        client: of the engine.
        facts: of the engine.
        checkpoint: what it serves.
        config: the adapter's flags.
        notify: called when load or keys have changed.
        loras: the engine's names of its LoRA adapters, by id.
    """

    def __init__(
        self,
        client: EngineClient,
        facts: EngineFacts,
        checkpoint: ServedCheckpoint,
        config: AdapterConfig,
        notify: Callable[[], None],
        loras: Mapping[bytes, str] = MappingProxyType({}),
    ) -> None:
        self.facts, self.layout = facts, checkpoint.layout(facts.block_size)
        self.namespace = facts.page_namespace if config.kvstores else namespace(checkpoint.fingerprint, self.layout)
        # An engine of a pair cannot be asked anew: the KV comes for one request.
        self.unsupported = (*facts.unsupported, *(("thinking_budget",) if config.role != "both" else ()))
        self.client, self._config, self._notify = client, config, notify
        self._checkpoint = checkpoint
        self._loras = loras
        self._plain_roots = {name: chain_root(self.namespace, "", "", lora) for lora, name in loras.items()}
        self._plain_roots[""] = chain_root(self.namespace, "")
        self._epoch = ""  # in salts: another one after each deletion
        self.cache = EngineCache(facts.block_size, self._root_of, NAMES_PER_BLOCK * facts.blocks)
        self.cache_changed = asyncio.Event()
        self.streams = [
            EventStream(source, self.cache.rank(source.rank), self.cache_changed) for source in facts.sources
        ]
        self.load = EngineLoad(0, 0, 0.0)
        self.speeds: SpeedTracker
        self.requests: dict[int, PromisedRequest] = {}
        self._numbers = itertools.count(1)
        self.prompts_taken = self.promises_taken = self.prompts_recomputed = self.answers_failed = 0
        self.tokens_recomputed = self._computable_tokens = 0
        self._computed_before: int | None = None
        self.empty = asyncio.Event()
        self.empty.set()
        self.draining = False
        self.lost = ""
        self._front, self._front_at = (0, 0), 0.0  # the first prompt and its held tokens, and since when

    # --- keys ------------------------------------------------------------------------------------------------------

    def _root_of(self, extra: ExtraKeys | None, lora: str) -> BlockKey | None:
        """The chain of a first block: the salt says its root. Without a salt it is that of nobody's tenant."""
        plain = self._plain_roots.get(lora)
        if extra is None or len(extra) > 1 or plain is None:
            return None
        if not extra:
            # After a deletion every prompt has a salt, so a block without a salt is from before.
            return BlockKey(plain) if not self._epoch else None
        salt = extra[0]
        if not isinstance(salt, str) or not salt.startswith(SALT_MARK):
            return None
        root, _, epoch = salt.removeprefix(SALT_MARK).partition(":")
        try:
            return BlockKey(bytes.fromhex(root)) if epoch == self._epoch and len(root) == 64 else None
        except ValueError:
            return None

    def _salt_of(self, root: bytes) -> str:
        if not self._epoch:
            return "" if root in self._plain_roots.values() else f"{SALT_MARK}{root.hex()}"
        return f"{SALT_MARK}{root.hex()}:{self._epoch}"

    async def forget(self, request: kv_pb2.ForgetRequest) -> kv_pb2.ForgetResponse:
        """Delete KV: all of it, where some of it is named. What the engine cannot delete is not found any more."""
        held, concerned = set(self.cache.held), bool(request.ttl_s)
        for chosen in await read_deletions(request.deletions):
            for selection in chosen.values():
                everyones = bool(selection.tenants) or self.namespace in selection.namespaces
                concerned = concerned or everyones or not held.isdisjoint(selection.keys)
        if not concerned:
            return kv_pb2.ForgetResponse()
        # The engine can only clear its whole cache, and keeps blocks in use: another salt keeps these from being found.
        self._epoch = world.random_hex(4)
        self.cache.restart()
        self.cache_changed.set()
        await self.client.clear_cache()
        return kv_pb2.ForgetResponse(blocks=len(held), bytes=len(held) * self.layout.block_bytes)

    # --- requests --------------------------------------------------------------------------------------------------

    def incoming(self, spec: kv_pb2.SequenceSpec) -> IncomingRequest:
        """A checked request. Raises InvalidRequest, also for options that the engine does not have."""
        rule = self._checkpoint.pictures
        # KV of a pair and of kvstores is named by tokens alone.
        alone = self._config.role == "both" and not self._config.kvstores
        incoming = IncomingRequest.from_proto(
            spec,
            namespace=self.namespace,
            block_size=self.facts.block_size,
            vocab_size=self._checkpoint.config.vocab_size,
            max_tokens=self.facts.max_tokens,
            takes_media=self.facts.pictures and alone and not isinstance(rule, str),
        )
        if incoming.media and not isinstance(rule, str):
            incoming = incoming.with_checked_pictures(rule)
        params = incoming.sampling.params
        for option in params.given:
            if option in self.unsupported:
                raise InvalidRequest(f"sequence.sampling.{option}", f"{self.facts.version} behind an adapter has none")
        if incoming.sampling.thinking is not None and params.logprobs is not None:
            told = f"{self.facts.version} behind an adapter tells none of the tokens that end the thinking"
            raise InvalidRequest("sequence.sampling.logprobs", told)
        if incoming.lora and incoming.lora not in self._loras:
            raise InvalidRequest("sequence.lora", f"{self.facts.version} does not serve {spec.lora.name!r}")
        return incoming

    def check_open(self) -> None:
        """Raise Unavailable if new requests are refused."""
        if self.lost or self.draining:
            raise Unavailable(self.lost or "the adapter is draining")

    @property
    def used_blocks(self) -> int:
        own = sum([self.layout.blocks_for(request.context_tokens) for request in self.requests.values()])
        return min(self.facts.blocks, max(own, round(self.load.usage * self.facts.blocks)))

    @property
    def promised_blocks(self) -> int:
        """Blocks promised to requests that the engine does not know yet."""
        return sum([request.blocks for request in self.requests.values() if not request.answers])

    @property
    def running(self) -> int:
        """Answers that the engine generates for this adapter."""
        return sum([not answer.over for request in self.requests.values() for answer in request.answers])

    def reserve(self, incoming: IncomingRequest, asked: decode_pb2.ReserveRequest) -> PromisedRequest:
        """Promise memory.

        Raises:
            Overloaded: there is none now, or the time between tokens cannot be kept.
            InvalidRequest: there is nothing to generate, or the engine is too small.
        """
        sampling, tokens, width = incoming.sampling, len(incoming.token_ids), incoming.spec.width
        if sampling.total_tokens(self.facts.max_tokens) <= tokens:
            raise InvalidRequest("sequence.sampling.max_tokens", "leaves no token to generate")
        # The prompt's blocks, and a block for each answer.
        blocks = self.layout.blocks_for(tokens) + width
        if blocks > self.facts.blocks:
            raise InvalidRequest("sequence.token_ids", f"needs {blocks} blocks, the engine has {self.facts.blocks}")
        used = self.used_blocks + self.promised_blocks
        if used + blocks > self.facts.blocks:
            raise Overloaded("the engine has no room now", reason="no_decode_room", retry_after_s=1.0)
        tbt_s = self.tbt_s(width)
        if asked.HasField("tbt_slo_s") and tbt_s > asked.tbt_slo_s:
            raise Overloaded(
                "tokens would come too slowly", reason="tbt_slo", predicted_tbt_s=tbt_s, slo_s=asked.tbt_slo_s,
                retry_after_s=1.0,
            )  # fmt: skip
        live = self._admit(incoming, conductor_identity(asked.conductor), blocks)
        live.awaits_kv = self._config.role == "decode"
        self.promises_taken += 1
        return live

    def take(self, incoming: IncomingRequest) -> PromisedRequest:
        """A prompt whose answer, if more than a token is wanted, is generated elsewhere."""
        return self._admit(incoming, "", 0)

    def _admit(self, incoming: IncomingRequest, conductor: str, blocks: int) -> PromisedRequest:
        live = PromisedRequest(next(self._numbers), self.part(incoming), conductor, blocks, self._ended)
        self.requests[live.number] = live
        self.empty.clear()
        self._notify()
        return live

    def tbt_s(self, joining: int = 0) -> float:
        """Predicted seconds between tokens."""
        speeds = self.speeds.speeds
        return speeds.decode_base_s + speeds.decode_per_sequence_s * (self.running + joining)

    def part(self, incoming: IncomingRequest) -> EnginePart:
        """Begin answers to a request at the rank that holds most of its prompt."""
        _, rank = self.cache.matched_blocks(incoming.spec.keys)
        single = len(self.facts.sources) == 1
        salt = self._salt_of(incoming.chain_root)
        expected = self.cached_tokens(incoming)

        def told(cached_tokens: int) -> None:
            self.prompts_recomputed += cached_tokens < expected and self._config.role != "decode"

        pooled = self._config.kvstores
        rank = -1 if single else rank
        lora = self._loras.get(incoming.lora, "")
        return EnginePart(self.client, incoming, salt, rank, told, self._ordered, pooled, lora)

    def _ordered(self, prompt: EnginePrompt) -> None:
        """Note how much the engine may have to compute. vLLM counts all of a prompt that came as transferred."""
        self._computable_tokens += 0 if prompt.transfer is not None else len(prompt.token_ids)

    def observe(self, load: EngineLoad) -> None:
        """Take the engine's load. Warn where KV that should have come from another engine was computed again."""
        self.load = load
        if load.computed_tokens is None or self._config.role != "decode":
            return
        if self._computed_before is None:
            # The engine may have computed prompts before the adapter came.
            self._computed_before = load.computed_tokens
        excess = load.computed_tokens - self._computed_before - self._computable_tokens
        if excess > 0:
            self._computed_before += excess
            self.tokens_recomputed += excess
            log.warning("KV did not come from the other engine and was computed again", tokens=excess)

    def loaded_tokens(self, incoming: IncomingRequest, asked: prefill_pb2.PrefillRequest) -> int:
        """Tokens behind the cached ones that the engine loads from a kvstore, as the conductor expects."""
        if not self._config.kvstores or not asked.HasField("source"):
            return 0
        most = (len(incoming.token_ids) - 1) // self.facts.block_size
        expected = min(asked.source.blocks, most) * self.facts.block_size
        return max(0, expected - self.cached_tokens(incoming))

    def cached_tokens(self, incoming: IncomingRequest) -> int:
        """Tokens of a prompt that the engine is known to hold; the last one is computed in any case."""
        blocks, _ = self.cache.matched_blocks(incoming.spec.keys)
        most = (len(incoming.token_ids) - 1) // self.facts.block_size
        return min(blocks, most) * self.facts.block_size

    def promised(self, transfer_id: int, generation: int, request_id: str) -> PromisedRequest | None:
        """The request of a promise."""
        live = self.requests.get(transfer_id)
        return live if live is not None and (live.number, live.request_id) == (generation, request_id) else None

    def _ended(self, live: PromisedRequest) -> None:
        self.requests.pop(live.number, None)
        for answer in live.answers:
            self.answers_failed += answer.error is not None
            if answer.finish and len(answer.tokens) > 1:
                mean_s = (answer.last_at - answer.first_at) / (len(answer.tokens) - 1)
                self.speeds.observe_decode(max(1, self.running), len(answer.prompt.token_ids), mean_s)
        if not self.requests:
            self.empty.set()
        self._notify()

    def computed(self, answer: EngineAnswer, cached_tokens: int, *, alone: bool) -> None:
        """A prompt has its first token; `alone`: nothing else was computed meanwhile."""
        new, seconds = len(answer.prompt.token_ids) - cached_tokens, answer.first_at - answer.began
        if alone and seconds > 0:
            self.speeds.observe_prefill([(new, cached_tokens, True)], seconds)

    # --- the queue -------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[PromisedRequest]:
        """Requests without a first token, in the order of their promises."""
        return [request for request in self.requests.values() if request.answers and not request.answers[0].tokens]

    def shared_tokens(self, incoming: IncomingRequest) -> int:
        """Leading tokens of a prompt that waiting prompts have in common with it: they are computed before it."""
        keys, blocks = incoming.spec.keys, 0
        for waiting in self.waiting:
            other = waiting.part.incoming.spec.keys
            most = min(len(keys), len(other))
            blocks = max(blocks, bisect_left(range(most), True, key=lambda at, held=other: held[at] != keys[at]))  # type: ignore[misc]
        return min(blocks, (len(incoming.token_ids) - 1) // self.facts.block_size) * self.facts.block_size

    def queue(self) -> tuple[float, int]:
        """Predicted seconds until all prompts are computed, and tokens to compute.

        What is computed of the first prompts is known by their KV events.
        """
        seconds, tokens, now = 0.0, 0, world.monotonic()
        for place, waiting in enumerate(self.waiting):
            held = (
                max(waiting.held_tokens, self.cached_tokens(waiting.part.incoming))
                if place < LOOKED_AT
                else waiting.held_tokens
            )
            new = len(waiting.answers[0].prompt.token_ids) - held
            work_s = prefill_seconds(self.speeds.speeds, new, held)
            # Only the first prompt is at work: what has passed since its last block counts off.
            if not place:
                if (waiting.number, held) != self._front:
                    self._front, self._front_at = (waiting.number, held), now
                since_s = now - self._front_at
                work_s = max(work_s - since_s, OVERDUE_SHARE * since_s)
            seconds, tokens = seconds + work_s, tokens + new
        return seconds, tokens

    def lose(self, why: str) -> None:
        """The engine is lost: every request fails."""
        self.lost = why
        for live in list(self.requests.values()):
            live.fail(why)

    # --- reports ---------------------------------------------------------------------------------------------------

    def load_report(self, kind: kv_pb2.InstanceKind.ValueType) -> conductor_pb2.LoadReport:
        """The load now, as that of an instance of this kind."""
        decode, used = kind == kv_pb2.INSTANCE_KIND_DECODE, self.used_blocks
        drain_s, queued = (None, 0) if decode else self.queue()
        return conductor_pb2.LoadReport(
            running=self.running if decode else len(self.waiting),
            waiting=len([request for request in self.requests.values() if not request.answers]) if decode else 0,
            queued_tokens=queued,
            drain_s=drain_s,
            free_blocks=max(0, self.facts.blocks - used - len(self.cache)),
            cached_blocks=min(len(self.cache), self.facts.blocks - used),
            promised_blocks=self.promised_blocks if decode else 0,
            context_tokens=sum([request.context_tokens for request in self.requests.values()]) if decode else 0,
            speed=speeds_to_proto(self.speeds.speeds),
            draining=self.draining or bool(self.lost),
            taken=self.promises_taken if decode else self.prompts_taken,
            preemptions=self.load.preemptions if decode else 0,
        )

    def hello(self, instance: kv_pb2.Instance, domain: str, model: conductor_pb2.ModelInfo) -> conductor_pb2.JoinHello:
        """How the engine joins as an instance."""
        return conductor_pb2.JoinHello(
            instance=instance,
            model=model,
            total_blocks=self.facts.blocks,
            speed=speeds_to_proto(self.speeds.speeds),
            process=world.this_process(),
            kv_domain=domain,
            unsupported=[*self.unsupported, LORA],
            loras=list(self._loras),
            uses_kvstores=self._config.kvstores,
            arrival_order=True,
            http_address=urlsplit(self._config.engine).netloc,
        )

    def model_info(self) -> conductor_pb2.ModelInfo:
        """What the engine serves."""
        return conductor_pb2.ModelInfo(
            name=self._checkpoint.name,
            namespace=self.namespace,
            layout=self.layout.to_proto(),
            config_hash=config_hash(self._checkpoint.config),
            vocab_size=self._checkpoint.config.vocab_size,
            max_tokens=min(self.facts.max_tokens, self._checkpoint.config.max_position_embeddings),
        )
