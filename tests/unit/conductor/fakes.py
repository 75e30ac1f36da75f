"""Members of a cluster that only speak the contract: a prefill and a decode that follow a script, and a kvstore."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from moonpool.base.cluster import JoinAgent
from moonpool.base.contracts import sampling_from_proto
from moonpool.base.errors import MoonpoolError, Overloaded
from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.kv.keys import tokens_from_bytes
from moonpool.base.kv.layout import KVLayout
from moonpool.v1 import conductor_pb2, decode_pb2, kv_pb2, prefill_pb2

from .logprobs import made_up, prompt_scores, scores, told

BLOCK_SIZE = 16
WAIT_S = 60.0


def next_token(length: int) -> int:
    """The one token that follows any `length` tokens, the same at every instance."""
    return 20 + (length * 7) % 61


def choice_token(length: int, choice: int) -> int:
    """The same in one of several answers."""
    return next_token(length + 5 * choice)


def expected(prompt_tokens: int, count: int, choice: int = 0) -> list[int]:
    return [choice_token(prompt_tokens + i, choice) for i in range(count)]


def model_info(**changes: Any) -> conductor_pb2.ModelInfo:
    """What a fake engine serves; keywords change fields of the model or its layout."""
    layout: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 16, "block_size": BLOCK_SIZE}
    layout["dtype"] = "float32"
    layout |= {name: changes.pop(name) for name in list(changes) if name in layout}
    model = {
        "name": "tiny",
        "namespace": b"n" * 32,
        "config_hash": b"c" * 32,
        "vocab_size": 1000,
        "max_tokens": 512,
    }
    return conductor_pb2.ModelInfo(layout=KVLayout.uniform(**layout).to_proto(), **{**model, **changes})


@dataclass
class FakeMember:
    """A member of the cluster: who it is, the load and the keys it reports. By itself, a kvstore."""

    id: str
    kind: kv_pb2.InstanceKind.ValueType
    total_blocks: int = 64
    epoch: int = 1
    address: str = ""
    load: conductor_pb2.LoadReport = field(default_factory=conductor_pb2.LoadReport)
    keys: list[bytes] = field(default_factory=list)
    new_keys: list[bytes] = field(default_factory=list)
    orders: list[conductor_pb2.ReplicateOrder] = field(default_factory=list)
    agent: JoinAgent | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self) -> None:
        """Something happened here."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what happens here to fulfil a condition."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self.changed.wait()

    @property
    def instance(self) -> kv_pb2.Instance:
        return kv_pb2.Instance(id=self.id, epoch=self.epoch, kind=self.kind, address=self.address)

    def take_events(self) -> KeyChanges:
        stored, self.new_keys = self.new_keys, []
        return KeyChanges(stored)

    def store(self, keys: list[bytes]) -> None:
        assert self.agent is not None
        self.keys += keys
        self.new_keys += keys
        self.agent.notify()


@dataclass
class ScriptedPrefill(FakeMember):
    """Samples the first token at once. `before` and `after` are raised or awaited around it, first come first used."""

    before: list[MoonpoolError | asyncio.Event] = field(default_factory=list)
    after: list[MoonpoolError | asyncio.Event] = field(default_factory=list)
    requests: list[prefill_pb2.PrefillRequest] = field(default_factory=list)
    running: int = 0
    first_token: int | None = None
    cached_tokens: int = 0
    loaded_tokens: int = 0
    misses: list[prefill_pb2.StoreMiss] = field(default_factory=list)  # told with every first token
    silent: bool = False  # about log probabilities
    chunks: list[prefill_pb2.TimedTokens] = field(default_factory=list)  # told with every first token
    sent_bytes: int = 0  # told at the end
    queue_s: float = 0.0  # that there is in fact
    took_s: float = 0.0  # told with every first token

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.running += 1
        self.note()
        try:
            if request.HasField("max_queue_s") and self.queue_s > request.max_queue_s:
                yield prefill_pb2.PrefillResponse(stale=prefill_pb2.PrefillStale(drain_s=self.queue_s, taken=3))
                return
            yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted())
            await _meet(self.before)
            length = len(tokens_from_bytes(request.sequence.token_ids))
            token = next_token(length) if self.first_token is None else self.first_token
            sampling, wanted = sampling_from_proto(request.sequence.sampling), request.sequence.sampling
            if self.silent:
                wanted = kv_pb2.Sampling()
            further = [choice_token(length, choice) for choice in range(1, sampling.width)]
            first = prefill_pb2.FirstToken(
                token_id=token,
                further_token_ids=further,
                logprobs=scores(wanted, [token, *further]),
                prompt_logprobs=prompt_scores(wanted, tokens_from_bytes(request.sequence.token_ids)),
                log_probabilities=[-1.0 - choice for choice in range(sampling.beam_width)],
                local_tokens=self.cached_tokens,
                loaded_tokens=self.loaded_tokens,
                computed_tokens=length - self.cached_tokens - self.loaded_tokens,
                misses=self.misses,
                chunks=self.chunks,
                embedding=struct.pack("<2f", 0.6, 0.8) if wanted.embedding else b"",
                transport="tcp",
                prefill_s=self.took_s,
            )
            yield prefill_pb2.PrefillResponse(first_token=first)
            await _meet(self.after)
            yield prefill_pb2.PrefillResponse(finished=prefill_pb2.PrefillFinished(sent_bytes=self.sent_bytes))
        finally:
            self.running -= 1
            self.note()


@dataclass
class ScriptedDecode(FakeMember):
    """Generates by the rule of `next_token`, one message per token."""

    refusals: list[MoonpoolError] = field(default_factory=list)
    slow: list[asyncio.Event] = field(default_factory=list)  # promises are told after these, first come first used
    lease_s: float = 5.0
    predicted_tbt_s: float = 0.0
    held_blocks: int = 0  # of every prompt
    computed: list[str] = field(default_factory=list)  # sequences whose prompts it has computed itself
    computes_prompts: bool = False  # in the role both
    starts: list[decode_pb2.StartSequence] = field(default_factory=list)  # with whole prompts
    prompts: dict[str, prefill_pb2.FirstToken] = field(default_factory=dict)  # to be told with the first tokens
    cached_tokens: int = 0
    misses: list[prefill_pb2.StoreMiss] = field(default_factory=list)
    known: list[list[list[int]]] = field(default_factory=list)  # of each start, behind the first token of each answer
    said: dict[tuple[str, int], int] = field(default_factory=dict)  # tokens of the answers after the first
    gathered: list[str] = field(default_factory=list)  # sequences whose single tokens nobody waits for
    fail_at: list[int] = field(default_factory=list)  # output positions at which a sequence fails, once each
    hold_at: int = -1  # position at which sequences wait for `go`
    break_at: list[int] = field(default_factory=list)  # positions at which the whole stream breaks, once each
    go: asyncio.Event = field(default_factory=asyncio.Event)
    reserved: dict[str, decode_pb2.ReserveRequest] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    requests: list[decode_pb2.ReserveRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    stopped: list[tuple[str, int]] = field(default_factory=list)  # answers that are complete for the conductor
    progress: Callable[[], None] = lambda: None
    streams: int = 0
    outgoing: list[asyncio.Queue[decode_pb2.StepsResponse | None]] = field(default_factory=list)
    resumed: list[decode_pb2.ResumeSequence] = field(default_factory=list)
    owners: dict[str, tuple[asyncio.Task[None], asyncio.Queue[decode_pb2.StepsResponse | None]]] = field(
        default_factory=dict
    )
    ids: Any = field(default_factory=lambda: itertools.count(1))

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        if self.refusals:
            raise self.refusals.pop(0)
        self.reserved[request.sequence.request_id] = request
        self.history.append(request.sequence.request_id)
        self.requests.append(request)
        self.note()
        if self.slow:
            await self.slow.pop(0).wait()
        target = kv_pb2.TransferTarget(
            decode=self.instance, transfer_id=next(self.ids), generation=1, held_blocks=self.held_blocks
        )
        return decode_pb2.ReserveResponse(target=target, lease_s=self.lease_s, predicted_tbt_s=self.predicted_tbt_s)

    async def Steps(self, requests: AsyncIterator[decode_pb2.StepsRequest], context: Any) -> None:
        self.streams += 1
        self.note()
        tasks: dict[str, asyncio.Task[None]] = {}
        outgoing: asyncio.Queue[decode_pb2.StepsResponse | None] = asyncio.Queue()
        self.outgoing.append(outgoing)
        writer = asyncio.create_task(self._write(outgoing, context))
        reader = asyncio.create_task(self._read(requests, tasks, outgoing))
        try:
            await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, reader, *tasks.values()):
                task.cancel()

    def end_streams(self) -> None:
        """End all Steps streams."""
        for outgoing in self.outgoing:
            outgoing.put_nowait(None)

    async def _write(self, outgoing: asyncio.Queue[decode_pb2.StepsResponse | None], context: Any) -> None:
        while (message := await outgoing.get()) is not None:
            await context.write(message)

    async def _read(
        self,
        requests: AsyncIterator[decode_pb2.StepsRequest],
        tasks: dict[str, asyncio.Task[None]],
        outgoing: asyncio.Queue[decode_pb2.StepsResponse | None],
    ) -> None:
        assert (await anext(requests)).HasField("hello")
        async for request in requests:
            if request.HasField("cancel") and request.cancel.HasField("choice"):
                self.stopped.append((request.cancel.request_id, request.cancel.choice))
                self.note()
            elif request.HasField("start"):
                start = request.start
                self.gathered += [start.request_id] * start.gather
                tokens = tokens_from_bytes(self.reserved[start.request_id].sequence.token_ids)
                if start.compute_prompt and self.reserved[start.request_id].computes_prompt:
                    self._compute(start, list(tokens), tasks, outgoing)
                    continue
                if start.compute_prompt:
                    self.computed.append(start.request_id)
                    tasks[start.request_id] = self._run(start.request_id, list(tokens), outgoing)
                    continue
                assert start.first_token_id == next_token(len(tokens))
                for choice, token in enumerate(start.further_token_ids, 1):
                    assert token == choice_token(len(tokens), choice)
                spec = self.reserved[start.request_id].sequence
                known = [
                    list(tokens)
                    for tokens in (start.known_token_ids, *(tokens.token_ids for tokens in start.further_known))
                ]
                if spec.sampling.HasField("logprobs") and not any(known):
                    assert start.logprobs == made_up([start.first_token_id, *start.further_token_ids])
                if spec.sampling.beam_width:
                    outgoing.put_nowait(self._hypotheses(spec, start))
                else:
                    self.known.append(known)
                    for choice, behind in enumerate(known[1:], 1):
                        self.said[start.request_id, choice] = 1 + len(behind)
                    begun = [*tokens, start.first_token_id, *start.known_token_ids]
                    tasks[start.request_id] = self._run(start.request_id, begun, outgoing)
            elif request.HasField("resume"):
                self._resume(request.resume, tasks, outgoing)
            elif request.HasField("cancel"):
                sequence_id = request.cancel.request_id
                self.cancelled.append(sequence_id)
                self.reserved.pop(sequence_id, None)
                if sequence_id in tasks:
                    tasks[sequence_id].cancel()
                self.note()
                self.progress()

    def _compute(
        self,
        start: decode_pb2.StartSequence,
        tokens: list[int],
        tasks: dict[str, asyncio.Task[None]],
        outgoing: asyncio.Queue[decode_pb2.StepsResponse | None],
    ) -> None:
        """Compute a whole prompt; how is told with the first tokens."""
        spec, name = self.reserved[start.request_id].sequence, start.request_id
        self.starts.append(start)
        first = self.prompts[name] = prefill_pb2.FirstToken(
            local_tokens=self.cached_tokens,
            computed_tokens=len(tokens) - self.cached_tokens,
            prompt_logprobs=prompt_scores(spec.sampling, tokens),
            embedding=struct.pack("<2f", 0.6, 0.8) if spec.sampling.embedding else b"",
            misses=self.misses,
        )
        if spec.sampling.beam_width:
            message = self._found(spec)
            message.tokens[0].prompt.CopyFrom(first)
            outgoing.put_nowait(message)
            return
        known = [list(start.known_token_ids), *(list(tokens.token_ids) for tokens in start.further_known)]
        self.known.append(known)
        for choice, behind in enumerate(known[1:], 1):
            self.said[name, choice] = 1 + len(behind)
        begun = [*tokens, next_token(len(tokens)), *known[0]] if known[0] else tokens
        tasks[name] = self._run(name, begun, outgoing)

    def _run(
        self, sequence_id: str, tokens: list[int], outgoing: asyncio.Queue[decode_pb2.StepsResponse | None]
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._generate(sequence_id, tokens, outgoing))
        self.owners[sequence_id] = task, outgoing
        return task

    def _resume(
        self,
        asked: decode_pb2.ResumeSequence,
        tasks: dict[str, asyncio.Task[None]],
        outgoing: asyncio.Queue[decode_pb2.StepsResponse | None],
    ) -> None:
        """What it has promised and not cancelled, it knows; the one before is fenced."""
        self.resumed.append(asked)
        reserved = self.reserved.get(asked.request_id)
        if reserved is None or reserved.resume_secret != asked.secret:
            failed = decode_pb2.SequenceFailed(request_id=asked.request_id, reason="there is no such sequence here")
            outgoing.put_nowait(decode_pb2.StepsResponse(failed=[failed]))
            return
        task, before = self.owners[asked.request_id]
        task.cancel()
        fenced = decode_pb2.SequenceFenced(request_id=asked.request_id)
        before.put_nowait(decode_pb2.StepsResponse(fenced=[fenced]))
        tokens = list(tokens_from_bytes(reserved.sequence.token_ids))
        while len(tokens) < reserved.sequence.prompt_tokens + asked.from_position:
            tokens.append(next_token(len(tokens)))
        for choice, answer in enumerate(asked.further, 1):
            self.said[asked.request_id, choice] = answer.from_position
        tasks[asked.request_id] = self._run(asked.request_id, tokens, outgoing)
        self.note()

    async def _generate(
        self, sequence_id: str, tokens: list[int], outgoing: asyncio.Queue[decode_pb2.StepsResponse | None]
    ) -> None:
        spec = self.reserved[sequence_id].sequence
        most = sampling_from_proto(spec.sampling).max_tokens
        while True:
            position = len(tokens) - spec.prompt_tokens
            if position == most:  # it was known to be whole
                self._further(spec, most - 1, outgoing)
                outgoing.put_nowait(told(spec, 0, most, [], kv_pb2.FINISH_REASON_LENGTH))
                return
            if position in self.fail_at:
                self.fail_at.remove(position)
                del self.reserved[sequence_id]
                failed = decode_pb2.SequenceFailed(request_id=sequence_id, reason="a test says so")
                outgoing.put_nowait(decode_pb2.StepsResponse(failed=[failed]))
                return
            if position in self.break_at:
                self.break_at.remove(position)
                self.reserved.clear()
                outgoing.put_nowait(None)
                return
            if 0 <= self.hold_at <= position:
                await self.go.wait()
            self._further(spec, position, outgoing)
            tokens.append(next_token(len(tokens)))
            reason = kv_pb2.FINISH_REASON_UNSPECIFIED
            if tokens[-1] in spec.end_token_ids:
                reason = kv_pb2.FINISH_REASON_STOP
            elif position + 1 == most:
                reason = kv_pb2.FINISH_REASON_LENGTH
            if reason:
                del self.reserved[sequence_id]
            message = told(spec, 0, position, tokens[-1:], reason)
            if (prompt := self.prompts.pop(sequence_id, None)) is not None:
                message.tokens[0].prompt.CopyFrom(prompt)
            outgoing.put_nowait(message)
            self.note()
            self.progress()
            if reason:
                return
            await asyncio.sleep(0)

    def _hypotheses(self, spec: kv_pb2.SequenceSpec, start: decode_pb2.StartSequence) -> decode_pb2.StepsResponse:
        """The end of a beam search; hypothesis i has i tokens fewer than the first and i less of a score."""
        sampling, prompt = sampling_from_proto(spec.sampling), spec.prompt_tokens
        assert list(start.further_token_ids) == [choice_token(prompt, beam) for beam in range(1, sampling.beam_width)]
        assert list(start.log_probabilities) == [-1.0 - beam for beam in range(sampling.beam_width)]
        return self._found(spec)

    def _found(self, spec: kv_pb2.SequenceSpec) -> decode_pb2.StepsResponse:
        sampling, prompt = sampling_from_proto(spec.sampling), spec.prompt_tokens
        del self.reserved[spec.request_id]
        if self.fail_at:
            self.fail_at.clear()
            failed = decode_pb2.SequenceFailed(request_id=spec.request_id, reason="a test says so")
            return decode_pb2.StepsResponse(failed=[failed])
        found = [
            decode_pb2.SequenceTokens(
                request_id=spec.request_id,
                choice=choice,
                token_ids=expected(prompt, sampling.max_tokens - choice, choice),
                finish_reason=kv_pb2.FINISH_REASON_STOP if choice else kv_pb2.FINISH_REASON_LENGTH,
                score=-0.5 - choice,
            )
            for choice in range(sampling.n)
        ]
        return decode_pb2.StepsResponse(tokens=found)

    def _further(
        self, spec: kv_pb2.SequenceSpec, position: int, outgoing: asyncio.Queue[decode_pb2.StepsResponse | None]
    ) -> None:
        """The answers after the first, which all end with max_tokens, get as far as it before it is told."""
        sampling = sampling_from_proto(spec.sampling)
        last = position + 1 == sampling.max_tokens
        for choice in range(1, sampling.n):
            whose = spec.request_id, choice
            begin = self.said.get(whose, position)
            if whose not in self.stopped and (begin <= position or last):
                new = [choice_token(spec.prompt_tokens + at, choice) for at in range(begin, position + 1)]
                reason = kv_pb2.FINISH_REASON_LENGTH if last else kv_pb2.FINISH_REASON_UNSPECIFIED
                outgoing.put_nowait(told(spec, choice, begin, new, reason))
                self.said[whose] = max(begin, position + 1)


async def _meet(steps: list[MoonpoolError | asyncio.Event]) -> None:
    if not steps:
        return
    step = steps.pop(0)
    if isinstance(step, asyncio.Event):
        await step.wait()
    else:
        raise step


def no_room() -> Overloaded:
    return Overloaded("full", reason="no_decode_room", retry_after_s=1.0)


def prefill(number: int = 0, **settings: Any) -> ScriptedPrefill:
    return ScriptedPrefill(f"prefill-{number}", kv_pb2.INSTANCE_KIND_PREFILL, **settings)


def decode(number: int = 0, **settings: Any) -> ScriptedDecode:
    return ScriptedDecode(f"decode-{number}", kv_pb2.INSTANCE_KIND_DECODE, **settings)


def both(number: int = 0, **settings: Any) -> ScriptedDecode:
    """A decode instance in the role both."""
    return decode(number, computes_prompts=True, **settings)


def store(number: int = 0, **settings: Any) -> FakeMember:
    return FakeMember(f"kvstore-{number}", kv_pb2.INSTANCE_KIND_KVSTORE, **settings)
