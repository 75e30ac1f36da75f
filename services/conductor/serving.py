"""One request as the shell has it: its tokens and text, which the core never sees, and what its client is told."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from moonpool.contracts import logprobs_from_proto
from moonpool.errors import InvalidRequest, StreamBroken, Unavailable
from moonpool.kv.keys import BlockKey
from moonpool.kv.selection import Selection
from moonpool.logprobs import Logprobs
from moonpool.v1 import conductor_pb2, kv_pb2, prefill_pb2
from services.conductor.answer import Answer, NewTokens
from services.conductor.core.legs import LEAST_KNOWN
from services.conductor.core.messages import Ask, Finish, Resumed, Target
from services.conductor.outgoing import Outgoing
from services.conductor.resume import Resume, resume_point, target_of
from services.conductor.translate import FINISHES

MAX_TIMES = 512
"""Times of tokens that are kept for `Explain`."""


@dataclass(slots=True)
class Serving:
    """A request that the core has not ended.

    Attributes:
        ask: what the core knows of it.
        number: its first one at the core; it gets another one where it is taken back.
        answer: the tokens and the text so far.
        first_seen: is told of the first token.
        kv_delivered: is told when the KV has arrived at decode, maybe after the answer's end.
        outgoing: what its client is to be told.
        keys: of all full blocks of the prompt and the tokens at the last placement.
        secret: who knows it may resume the request.
        clock: of the core's times, seconds.
        resumes: how often its client has resumed it.
        placement: the last one; `placements` how many there were, `sequence` under which engines have it.
        started: decode was told to start there.
        opening_logprobs: of the tokens with which decode begins, where they are wanted.
        prompt_unscored: the client wants the prompt's log probabilities, and they are not known here.
        transient: its KV was deleted meanwhile: engines keep nothing of it.
        story: what it has gone through; usage and times are the answer's.
    """

    ask: Ask
    answer: Answer
    first_seen: Callable[["Serving"], None]
    kv_delivered: Callable[["Serving"], None]
    keys: list[BlockKey]
    secret: bytes
    clock: Callable[[], float]
    number: int = field(init=False)
    outgoing: Outgoing = field(init=False)
    resumes: int = 0
    placement: conductor_pb2.Placement = field(default_factory=conductor_pb2.Placement)
    placements: int = 0
    sequence: str = ""
    started: bool = False
    opening_logprobs: Logprobs | None = None
    transient: bool = False
    prompt_unscored: bool = field(init=False)
    story: conductor_pb2.Timeline = field(default_factory=conductor_pb2.Timeline)
    _hashed: int = 0
    _spec: kv_pb2.SequenceSpec | None = None
    _finished: conductor_pb2.Finished | None = None
    _placed: conductor_pb2.Placed | None = None
    _scored: conductor_pb2.PromptLogprobs | None = None

    def __post_init__(self) -> None:
        self.number = self.ask.number
        self.prompt_unscored = self.ask.scored
        self.outgoing = Outgoing(whole=self.answer.request.whole)
        self.story.tenant = self.answer.request.tenant
        self.story.arrived_at = time.time() - (self.clock() - self.answer.arrived)

    @property
    def reusable_keys(self) -> tuple[BlockKey, ...]:
        """Keys of the blocks that need not be computed wherever they are: none where the prompt is to be scored."""
        return () if self.prompt_unscored else tuple(self.keys)

    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return max(self.ask.deadline - self.clock(), 0.001)

    def spec(self, sequence: str) -> kv_pb2.SequenceSpec:
        """The engines' form of what is placed under this id."""
        if self._spec is None or self._spec.request_id != sequence:
            answer, scored = self.answer, self.prompt_unscored
            self._spec = answer.request.sequence(sequence, answer.continued[: self._hashed], self.keys, scored=scored)
            self._spec.transient = self.transient
        return self._spec

    def forget(self, selection: Selection, namespace: bytes) -> None:
        """KV was deleted, maybe this request's."""
        named = self.answer.request.tenant in selection.tenants or namespace in selection.namespaces
        if named or not selection.keys.isdisjoint(self.keys):
            self.transient, self._spec = True, None

    def rehash(self) -> int:
        """Keys of all full blocks of the prompt and of what is continued of the answer; returns the latter's length."""
        self._spec = None
        self._hashed = len(self.answer.continued)
        self.keys = self.answer.request.keys_with(self.answer.continued)
        return self._hashed

    def placed(self, placement: conductor_pb2.Placement, sequence: str, target: Target | None) -> None:
        """Tells the client where its request goes, and how to resume it.

        Under the name that it has already it is placed once: a prefill instance has not taken it.
        """
        request, corrected = self.answer.request, sequence == self.sequence
        self.placement, self.sequence, self.started = placement, sequence, False
        self.placements += not corrected
        self._placed = conductor_pb2.Placed(
            request_id=request.id,
            placement=placement,
            prompt_tokens=len(request.prompt),
            seed=request.sampling.seed or 0,
            resume=resume_point(self.secret, placement, sequence, target),
            corrected=corrected,
        )
        self.outgoing.placed(self._placed)

    # --- clients that resume ----------------------------------------------------------------------------------------

    def resumed(self, resume: Resume) -> None:
        """The request was another conductor's, or another call's: text that its client lacks follows."""
        self.resumes = resume.resumed.fence
        self.placement.CopyFrom(resume.point.placement)
        self.rehash()
        for choice in self.answer.choices:
            self.outgoing.delta(choice.rest() if choice.finish else None)

    def rejoin(self, resume: Resume) -> None:
        """Another call of the same client takes the place of the one so far, which ends.

        Raises:
            InvalidRequest: what the client says that it has is not what it was told.
            Unavailable: it has more than is known here. Another conductor went on meanwhile: the tokens come here too,
                or the sequence is known to be the other one's soon, and the request ends here.
        """
        pairs = list(zip(self.answer.choices, resume.answers, strict=True))
        if not all(choice.has(had) or choice.lags(had) for choice, had in pairs):
            raise InvalidRequest("resume.token_ids", "are not those that were told")
        if any(choice.lags(had) for choice, had in pairs):
            raise Unavailable("the client has tokens that have not come here yet")
        self.outgoing.drop()
        self.outgoing, self.resumes = Outgoing(whole=self.answer.request.whole), resume.resumed.fence
        placed = self._placed
        if placed is not None and placed.resume != resume.point:
            placed.corrected = placed.resume.sequence == resume.point.sequence
            self.outgoing.placed(placed)
        if resume.unscored and self._scored is not None:
            self.outgoing.prompt_logprobs(self._scored)
        for choice, had in pairs:
            self.outgoing.delta(choice.again(had))

    def fenced(self, number: int) -> bool:
        """Another conductor has taken the sequence over, by a call that its client made earlier than its last one here.

        Returns:
            Whether it is to be taken back; then it is a new request for the core, of this number.
        """
        resumed = self.ask.resumed
        if self.resumes <= (resumed.fence if resumed is not None else 0):
            return False
        if self._placed is not None:
            point = self._placed.resume
            sequence, target = point.sequence, target_of(point)
        else:
            assert resumed is not None, "what was not placed here was resumed here"
            sequence, target = resumed.sequence, resumed.target
        target = None if self.prompt_unscored else target  # as for a client that resumes without them
        self.ask = replace(self.ask, number=number, resumed=Resumed(self.rehash(), self.resumes, sequence, target))
        return True

    # --- what comes from the instances ------------------------------------------------------------------------------

    def first_token(self, first: prefill_pb2.FirstToken) -> kv_pb2.FinishReason.ValueType:
        """Takes a prefill's token of each answer; returns the reason when they end the request.

        Where there are beams these are candidates, and end nothing.

        Raises:
            StreamBroken: they are not one for each answer, or were others before; or have no log probabilities.
        """
        answer = self.answer
        self._computed(first)
        token_ids = [first.token_id, *first.further_token_ids]
        if answer.request.has_beams:
            if len(first.log_probabilities) != len(token_ids):
                raise StreamBroken(f"{len(first.log_probabilities)} log probabilities came for {len(token_ids)} tokens")
            answer.prefilled(first)
            answer.opening = first
            return kv_pb2.FINISH_REASON_UNSPECIFIED
        if len(token_ids) != len(answer.choices):
            raise StreamBroken(f"{len(token_ids)} first tokens came for {len(answer.choices)} answers")
        answer.prefilled(first)
        self._prompt_scored(first)
        found = logprobs_from_proto(first.logprobs) if first.HasField("logprobs") else None
        self._check(found, len(token_ids))
        for choice, token_id in enumerate(token_ids):
            its = found.part(choice, choice + 1) if found is not None else None
            self.tokens(NewTokens(choice, self._hashed, [token_id], logprobs=its))
        self.opening_logprobs = found
        return answer.finish

    def _computed(self, first: prefill_pb2.FirstToken) -> None:
        """Notes how the prompt was computed, the last time that it was."""
        story = self.story
        for field_name in ("loads", "chunks", "transfer_tail_s", "sent_bytes"):
            story.ClearField(field_name)
        story.local_tokens = first.local_tokens
        story.loads.extend(first.loads)
        story.chunks.extend(first.chunks)

    def delivered(self, finished: prefill_pb2.PrefillFinished) -> None:
        """The KV has arrived at decode."""
        self.story.transfer_tail_s, self.story.sent_bytes = finished.transfer_tail_s, finished.sent_bytes
        self.kv_delivered(self)

    def timeline(self, *, over: bool) -> conductor_pb2.Timeline:
        """What the request has gone through, up to now; `over`: to its end."""
        now = self._finished or self.answer.finished(self.placement, self.clock())
        story = conductor_pb2.Timeline(usage=now.usage, timing=now.timing)
        story.MergeFrom(self.story)
        if not over:
            story.timing.e2e_s = 0.0
        return story

    @property
    def opening_tokens(self) -> list[int]:
        """With which decode begins: the token after those that were placed of one answer, the first ones of several.

        An answer may have more tokens by then (`known_tokens`).
        """
        answer = self.answer
        if answer.opening is not None:
            return [answer.opening.token_id, *answer.opening.further_token_ids]
        return [choice.tokens[self._hashed] for choice in answer.choices]

    @property
    def known_tokens(self) -> Sequence[Sequence[int]]:
        """Of each answer, the tokens behind its opening one that it has already; empty where they are few, or beams'.

        One answer has some when it is being moved, several also when they are placed anew.
        """
        if self.answer.request.has_beams:
            return ()
        known = [choice.tokens[self._hashed + 1 :] for choice in self.answer.choices]
        return known if max(map(len, known)) >= LEAST_KNOWN else ()

    def _prompt_scored(self, first: prefill_pb2.FirstToken) -> None:
        """Tells the client the prompt's log probabilities, where it wants them: once, whatever is placed anew.

        Raises:
            StreamBroken: they are not those of the prompt's tokens but the first.
        """
        request = self.answer.request
        if not self.prompt_unscored:
            return
        scores = logprobs_from_proto(first.prompt_logprobs)
        if len(scores) != len(request.prompt) - 1 or not scores.consistent:
            raise StreamBroken(f"{len(scores)} log probabilities came for a prompt of {len(request.prompt)} tokens")
        self.prompt_unscored = False
        self._scored = conductor_pb2.PromptLogprobs(token_ids=request.prompt, logprobs=first.prompt_logprobs)
        self.outgoing.prompt_logprobs(self._scored)

    def _check(self, found: Logprobs | None, tokens: int) -> None:
        """Log probabilities are there if they are wanted, one for each of some tokens.

        Raises:
            StreamBroken: they are not.
        """
        wanted = self.answer.request.sampling.logprobs is not None
        if wanted != (found is not None) or (found is not None and (len(found) != tokens or not found.consistent)):
            raise StreamBroken(f"the log probabilities are not those of {tokens} tokens")

    def tokens(self, new: NewTokens) -> int:
        """Takes tokens of an answer. Those known already are dropped.

        Returns:
            How many the answer has taken.

        Raises:
            StreamBroken: tokens are missing, or are not those that were told before.
        """
        answer, before = self.answer, self.answer.tokens
        if not 0 <= new.choice < len(answer.choices):
            raise StreamBroken(f"there is no answer {new.choice}")
        choice, token_ids = answer.choices[new.choice], new.token_ids
        if token_ids:
            self._check(new.logprobs, len(token_ids))
        known = choice.known(new.position, token_ids)
        choice.score = new.score
        logprobs = new.logprobs.part(known) if new.logprobs is not None else None
        now = self.clock()
        if len(token_ids) > known and len(self.story.token_s) < MAX_TIMES:
            self.story.token_s.append(now - answer.arrived)
        self.outgoing.delta(answer.extend(new.choice, token_ids[known:], now, logprobs))
        if new.reason:
            self.outgoing.delta(choice.end(new.reason))
        if not before and answer.tokens:
            self.first_seen(self)
        return answer.tokens - before

    def complete(self, finish: Finish) -> None:
        """Tells the client the rest."""
        for delta in self.answer.end(FINISHES[finish]):
            self.outgoing.delta(delta)
        if not self.started:
            self.placement.decode = ""
        self._finished = self.answer.finished(self.placement, self.clock())
        self.outgoing.finished(self._finished)
