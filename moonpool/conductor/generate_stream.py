"""One request in the conductor's shell: output so far, messages to the client, and resuming."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from moonpool.base.contracts import are_logprobs_of, copy_logprobs, logprobs_from_proto
from moonpool.base.errors import InvalidRequest, StreamBroken, Unavailable
from moonpool.base.kv.delete_kv import KVSelection
from moonpool.base.kv.keys import BlockKey
from moonpool.base.logprobs import Logprobs
from moonpool.base.telemetry.trace_context import traceparent
from moonpool.conductor.choice_output import UNFINISHED, ChoiceOutput
from moonpool.conductor.core.events import CompletionReason
from moonpool.conductor.core.request_spec import MIN_KNOWN_TOKENS, DecodeReservation, RequestSpec, ResumeState
from moonpool.conductor.decode_streams import NewTokens
from moonpool.conductor.output_queue import OutputQueue
from moonpool.conductor.proto_conversion import FINISH_REASONS
from moonpool.conductor.request_history import RequestHistory
from moonpool.conductor.resume import resume_point, target_of
from moonpool.conductor.valid_request import ResumeRequest, ServedModel, ValidRequest
from moonpool.v1 import conductor_pb2, kv_pb2, prefill_pb2


class GenerateStream:
    """The shell's only record about one request, from reading to end.

    Attributes:
        request: what the client asked for, with the core's `spec`.
        number: the request's first number at the core. A request that is taken back gets another number in `spec`.
        choices: the outputs.
        outgoing: messages to the client.
        keys: keys for all full blocks in the prompt and the tokens at the last placement.
        secret: a client that resumes the request must show the secret.
        resumes: how often the client has resumed the request.
        placement: the last one; `placements` counts them, `sequence` is the id that engines see.
        started: decode was told to start there.
        write_back: kvstores that the last reservation at decode names.
        candidates: tokens that may follow the prompt of deferred answers; None for others.
        opening_logprobs: log probabilities for decode's first tokens, if wanted.
        prompt_unscored: the client wants the prompt's log probabilities or embedding, not known here yet.
        history: what happened to the request, for `Explain`.
    """

    def __init__(
        self,
        request: ValidRequest,
        served: ServedModel,
        secret: bytes,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        on_first_token: Callable[[GenerateStream], None],
        on_delivered: Callable[[GenerateStream], None],
    ) -> None:
        """A request without output.

        Args:
            request: the request.
            served: the model that is served.
            secret: a client that resumes the request must show the secret.
            clock: the core's clock, seconds.
            wall_clock: gives seconds since 1970.
            on_first_token: called with the first new token.
            on_delivered: called when the KV has arrived at decode, perhaps after the request's end.
        """
        self.request = request
        self.secret = secret
        self.number = 0
        self.choices = [ChoiceOutput(request, index, served) for index in range(request.sampling.n)]
        self.outgoing = OutputQueue(whole=request.whole)
        self.keys: list[BlockKey] = list(request.prompt_keys)
        self.resumes = 0
        self.placement = conductor_pb2.Placement()
        self.placements = 0
        self.sequence = ""
        self.started = False
        self.write_back: tuple[str, ...] = ()
        self.candidates: prefill_pb2.FirstToken | None = None
        self.opening_logprobs: Logprobs | None = None
        self.untold = 0
        """New tokens of which the core has not heard, from any sequence."""
        self.prompt_unscored = request.spec.scored
        self.history = RequestHistory(request, clock, wall_clock)
        self._traceparent = traceparent.get()
        self._clock = clock
        self._on_first_token = on_first_token
        self._on_delivered = on_delivered
        self._transient = False  # the KV was deleted meanwhile: engines keep no block
        self._placed_tokens = 0  # of the answer, in `keys` and in the sequence's prompt
        self._sequence_spec: kv_pb2.SequenceSpec | None = None
        self._placed: conductor_pb2.Placed | None = None
        self._prompt_logprobs: conductor_pb2.GenerateResponse | None = None
        self._embedding: conductor_pb2.GenerateResponse | None = None
        self._finished: conductor_pb2.Finished | None = None

    # --- what is known of the request ---------------------------------------------------------------------------------

    @property
    def spec(self) -> RequestSpec:
        """What the core knows of the request."""
        return self.request.spec

    @property
    def tokens(self) -> int:
        """Tokens generated so far, of all choices."""
        return sum([len(choice.tokens) for choice in self.choices])

    @property
    def finish(self) -> kv_pb2.FinishReason.ValueType:
        """The first choice's reason, once all choices are complete."""
        return self.choices[0].finish if all(choice.finish for choice in self.choices) else UNFINISHED

    @property
    def ttft_s(self) -> float:
        """Seconds from the arrival to the first new token; 0 before the first token."""
        return self.history.first_token_at - self.spec.arrived if self._new_tokens else 0.0

    @property
    def tpot_s(self) -> float:
        """Mean seconds between two tokens of the longest choice; 0 before the second token."""
        count = max(choice.new for choice in self.choices)
        return (self.history.last_token_at - self.history.first_token_at) / (count - 1) if count > 1 else 0.0

    @property
    def _new_tokens(self) -> int:
        return sum([choice.new for choice in self.choices])

    @property
    def _continued(self) -> array[int]:
        """Generated tokens that prefill computes with the prompt when the request is placed again: of a single choice.

        With several choices prefill computes the prompt alone, and decode gets the known tokens. Deferred
        answers begin again.
        """
        alone = len(self.choices) == 1 and not self.spec.deferred
        return self.choices[0].tokens if alone else array("i")

    def remaining_s(self) -> float:
        """Return the seconds until the deadline."""
        return max(self.spec.deadline - self._clock(), 0.001)

    def timeline(self, *, over: bool) -> conductor_pb2.Timeline:
        """Return what happened to the request so far; `over`: until the end."""
        now = self.finished
        timeline = conductor_pb2.Timeline(usage=now.usage, timing=now.timing)
        timeline.MergeFrom(self.history.timeline)
        if not over:
            timeline.timing.e2e_s = 0.0
        return timeline

    @property
    def finished(self) -> conductor_pb2.Finished:
        """What the client is told at the end; before the end, as if it were now."""
        return self._finished or self._finished_proto()

    def _finished_proto(self) -> conductor_pb2.Finished:
        return conductor_pb2.Finished(
            reason=self.finish,
            usage=conductor_pb2.Usage(
                prompt_tokens=len(self.request.prompt),
                cached_tokens=self.history.cached_tokens,
                completion_tokens=self.tokens,
                loaded_tokens=self.history.loaded_tokens,
            ),
            timing=conductor_pb2.Timing(
                ttft_s=self.ttft_s,
                tpot_s=self.tpot_s,
                e2e_s=self.history.since_arrival_s,
                queue_s=self.history.queue_s,
                prefill_s=self.history.prefill_s,
            ),
            placement=self.placement,
            choices=[choice.finished_proto() for choice in self.choices],
        )

    # --- what engines get ---------------------------------------------------------------------------------------------

    @property
    def reusable_keys(self) -> tuple[BlockKey, ...]:
        """Keys of the blocks that are not computed where they are held: none if the prompt is to be scored."""
        unscored = self.prompt_unscored and self.request.sampling.prompt_logprobs is not None
        return () if unscored else tuple(self.keys)

    def sequence_spec(self, sequence: str) -> kv_pb2.SequenceSpec:
        """Return the sequence that engines see under this id."""
        if self._sequence_spec is None or self._sequence_spec.request_id != sequence:
            generated = self._continued[: self._placed_tokens]
            self._sequence_spec = self.request.sequence(sequence, generated, self.keys, scored=self.prompt_unscored)
            self._sequence_spec.transient, self._sequence_spec.traceparent = self._transient, self._traceparent
        return self._sequence_spec

    def rehash(self) -> int:
        """Compute `keys` again, with the answer so far; return how many tokens of the answer prefill computes."""
        self._sequence_spec = None
        self._placed_tokens = len(self._continued)
        self.untold = 0 if self._placed_tokens else self.untold  # the core hears of these with the keys
        self.keys = self.request.keys_with(self._continued)
        return self._placed_tokens

    def kv_deleted(self, selection: KVSelection, namespace: bytes) -> None:
        """If the deleted KV may be this request's, engines keep no block."""
        named = self.spec.tenant in selection.tenants or namespace in selection.namespaces
        if named or not selection.keys.isdisjoint(self.keys):
            self._transient, self._sequence_spec = True, None

    @property
    def opening_tokens(self) -> list[int]:
        """Tokens with which decode begins: each choice's token after the placed tokens, or the candidates.

        A choice may have more tokens by then (`known_tokens`).
        """
        if self.candidates is not None:
            return [self.candidates.token_id, *self.candidates.further_token_ids]
        return [choice.tokens[self._placed_tokens] for choice in self.choices]

    @property
    def known_tokens(self) -> Sequence[Sequence[int]]:
        """For each choice, the known tokens after the opening token; empty if they are few, or for deferred answers.

        A single choice has some when the request is moved, several choices also when they are placed again.
        """
        if self.spec.deferred:
            return ()
        known = [choice.tokens[self._placed_tokens + 1 :] for choice in self.choices]
        return known if max(map(len, known)) >= MIN_KNOWN_TOKENS else ()

    # --- events of the core -------------------------------------------------------------------------------------------

    def admit(self, number: int) -> RequestSpec:
        """Take the request's number at the core; return the spec with that number.

        A resuming client gets the missing text.
        """
        self.number = number
        self._change_spec(replace(self.spec, number=number))
        resume = self.request.resume
        if resume is not None:
            self.resumes = resume.state.fence
            self.placement.CopyFrom(resume.point.placement)
            self.rehash()
            for choice in self.choices:
                self.outgoing.delta(choice.text_delta() if choice.finish else None)
        return self.spec

    def placed(self, attempt: conductor_pb2.Attempt, sequence: str, target: DecodeReservation | None) -> None:
        """Tell the client where the request goes, and how to resume the request.

        A second placement under the same sequence corrects the first: a prefill instance has not taken the request.
        `attempt` tells the place, and why.
        """
        placement, corrected = attempt.placement, sequence == self.sequence
        self.placement, self.sequence, self.started = placement, sequence, False
        self.placements += not corrected
        self.history.placed(attempt, sequence, self._placed_tokens, corrects=corrected)
        self._placed = conductor_pb2.Placed(
            request_id=self.spec.id,
            placement=placement,
            prompt_tokens=len(self.request.prompt),
            seed=self.request.sampling.seed or 0,
            resume=resume_point(self.secret, placement, sequence, target),
            corrected=corrected,
        )
        self.outgoing.placed(self._placed)

    def taken_over(self, sequence: str) -> None:
        """The sequence continues at the instance where another conductor placed the sequence."""
        attempt = conductor_pb2.Attempt(placement=self.placement)
        self.history.taken_over(attempt, sequence, self._placed_tokens)

    def complete(self, finish: CompletionReason) -> None:
        for choice in self.choices:
            self.outgoing.delta(choice.end(FINISH_REASONS[finish]))
        if not self.started:
            self.placement.decode = ""
        self._finished = self._finished_proto()
        self.outgoing.finished(self._finished)

    # --- clients that resume ------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Start from the tokens of a client that resumes the request. Slow: the whole text is spelled again."""
        assert self.request.resume is not None
        for choice, progress in zip(self.choices, self.request.resume.choices, strict=True):
            choice.restore(progress)

    def finish_restored(self) -> None:
        """The client has all tokens: tell the rest of the text and the end, without the core."""
        assert self.request.resume is not None
        self.placement.CopyFrom(self.request.resume.point.placement)
        for choice in self.choices:
            self.outgoing.delta(choice.text_delta())
        finished = self._finished_proto()
        finished.timing.e2e_s = 0.0
        self.outgoing.finished(finished)

    def rejoin(self, resume: ResumeRequest) -> None:
        """Send everything to another call of the same client; the earlier call ends.

        Raises:
            InvalidRequest: the client's tokens are not this request's.
            Unavailable: the client has more tokens, as another conductor went on meanwhile. Either they come here too,
                or the sequence is found to be the other conductor's and the request ends here.
        """
        pairs = list(zip(self.choices, resume.choices, strict=True))
        if not all(choice.has(progress) or choice.is_behind(progress) for choice, progress in pairs):
            raise InvalidRequest("resume.token_ids", "are not those that were sent")
        if any(choice.is_behind(progress) for choice, progress in pairs):
            raise Unavailable("the client has tokens that have not come here yet")
        self.outgoing.drop()
        self.outgoing, self.resumes = OutputQueue(whole=self.request.whole), resume.state.fence
        placed = self._placed
        if placed is not None and placed.resume != resume.point:
            placed.corrected = placed.resume.sequence == resume.point.sequence
            self.outgoing.placed(placed)
        if resume.unscored and self._prompt_logprobs is not None:
            self.outgoing.prompt_results(self._prompt_logprobs)
        if resume.unscored and self._embedding is not None:
            self.outgoing.prompt_results(self._embedding)
        for choice, progress in pairs:
            self.outgoing.delta(choice.delta_after(progress))

    def take_back(self, number: int) -> bool:
        """Prepare to take back a sequence that another conductor has taken over.

        The other conductor did so for a call that the client made before the last call here. The request is then a new
        one for the core, with this number.

        Returns:
            False if the client has made no later call here.
        """
        resumed = self.spec.resumed
        if self.resumes <= (resumed.fence if resumed is not None else 0):
            return False
        if self._placed is not None:
            point = self._placed.resume
            sequence, target = point.sequence, target_of(point)
        else:
            assert resumed is not None, "a request that was not placed here was resumed here"
            sequence, target = resumed.sequence, resumed.target
        target = None if self.prompt_unscored else target  # as for a client that resumes without them
        state = ResumeState(self.rehash(), self.resumes, sequence, target)
        self._change_spec(replace(self.spec, number=number, resumed=state))
        return True

    def _change_spec(self, spec: RequestSpec) -> None:
        self.request = replace(self.request, spec=spec)

    # --- output of engines --------------------------------------------------------------------------------------------

    def add_first_tokens(self, first: prefill_pb2.FirstToken, sequence: str) -> kv_pb2.FinishReason.ValueType:
        """Take prefill's token of each choice, for a sequence; return the reason if they end the request.

        A deferred answer's tokens are candidates, and end nothing.

        Raises:
            StreamBroken: there is not one per choice, known tokens were different, or log probabilities are missing.
        """
        self.history.prefilled(first, sequence, begun=bool(self.tokens))
        token_ids = [first.token_id, *first.further_token_ids]
        if self.spec.deferred:
            if len(first.log_probabilities) != len(token_ids):
                raise StreamBroken(f"{len(first.log_probabilities)} log probabilities came for {len(token_ids)} tokens")
            self._note_opened(first)
            self.candidates = first
            return UNFINISHED
        if len(token_ids) != len(self.choices):
            raise StreamBroken(f"{len(token_ids)} first tokens came for {len(self.choices)} answers")
        self._note_opened(first)
        self._add_prompt_results(first)
        found = logprobs_from_proto(first.logprobs) if first.HasField("logprobs") else None
        self._check_logprobs(found, len(token_ids))
        for choice, token_id in enumerate(token_ids):
            logprobs = found.part(choice, choice + 1) if found is not None else None
            self.add_tokens(NewTokens(choice, self._placed_tokens, [token_id], logprobs=logprobs), sequence)
        self.opening_logprobs = found
        return self.finish

    def add_prompt(self, first: prefill_pb2.FirstToken, sequence: str) -> None:
        """Take what an instance in the role both says of a sequence's prompt; the tokens come by `add_tokens`.

        Raises:
            StreamBroken: the prompt's log probabilities or embedding are wanted and missing.
        """
        self.history.prefilled(first, sequence, begun=bool(self.tokens))
        self._note_opened(first)
        if not self.spec.deferred:
            self._add_prompt_results(first)

    def add_tokens(self, new: NewTokens, sequence: str) -> int:
        """Take tokens of a choice from a sequence, without those that are known already; return how many were new.

        Raises:
            StreamBroken: tokens are missing, or known tokens were different.
        """
        if not 0 <= new.choice < len(self.choices):
            raise StreamBroken(f"there is no answer {new.choice}")
        choice, token_ids = self.choices[new.choice], new.token_ids
        before = len(choice.tokens)
        if token_ids:
            self._check_logprobs(new.logprobs, len(token_ids))
        known = choice.count_known(new.position, token_ids)
        choice.score = new.score
        logprobs = new.logprobs.part(known) if new.logprobs is not None else None
        now = self._clock()
        if len(token_ids) > known:
            self.history.tokens_came(now)
        first = before == choice.resumed_at and not self._new_tokens
        delta = choice.extend(token_ids[known:], logprobs)
        if delta is not None:
            self.history.tokens_sent(now, first=first)
            self.outgoing.delta(delta)
        if new.reason:
            self.outgoing.delta(choice.end(new.reason))
        count = len(choice.tokens) - before
        if count:
            self.history.grew(sequence, count, now)
            if not before and self.tokens == count:
                self._on_first_token(self)
        return count

    def kv_delivered(self, finished: prefill_pb2.PrefillFinished, sequence: str) -> None:
        """The KV of a sequence has arrived at decode."""
        self.history.kv_delivered(finished, sequence)
        self._on_delivered(self)

    def computed_at_decode(self, held_blocks: int) -> None:
        """Decode computes the prompt after the blocks already held there."""
        self.history.computed_at_decode(held_blocks, begun=bool(self.tokens))

    def _note_opened(self, first: prefill_pb2.FirstToken) -> None:
        if not self.tokens:  # later prefills only continue the answer
            self.history.opened(first)

    def _add_prompt_results(self, first: prefill_pb2.FirstToken) -> None:
        """Send the prompt's log probabilities or embedding if the client lacks them.

        They are sent once, however often the request is placed.

        Raises:
            StreamBroken: the values did not come, or a prompt token other than the first has none.
        """
        if not self.prompt_unscored:
            return
        if self.request.sampling.embedding:
            if not first.embedding or len(first.embedding) % 4:
                raise StreamBroken(f"{len(first.embedding)} bytes came for the prompt's embedding")
            self.prompt_unscored = False
            embedding = conductor_pb2.PromptEmbedding(values=first.embedding)
            self._embedding = conductor_pb2.GenerateResponse(embedding=embedding)
            self.outgoing.prompt_results(self._embedding)
            return
        scores, prompt = first.prompt_logprobs, self.request.prompt
        if not are_logprobs_of(scores, len(prompt) - 1):
            raise StreamBroken(f"{len(scores.logprobs)} log probabilities came for a prompt of {len(prompt)} tokens")
        self.prompt_unscored = False
        self._prompt_logprobs = conductor_pb2.GenerateResponse()
        self._prompt_logprobs.prompt_logprobs.token_ids.extend(prompt)
        copy_logprobs(self._prompt_logprobs.prompt_logprobs.logprobs, scores)
        self.outgoing.prompt_results(self._prompt_logprobs)

    def _check_logprobs(self, found: Logprobs | None, tokens: int) -> None:
        """Check that there is a log probability per token if the client wants them.

        Raises:
            StreamBroken: there is not.
        """
        wanted = self.request.sampling.logprobs is not None
        if found is None and not wanted:
            return
        if wanted != (found is not None) or (found is not None and (len(found) != tokens or not found.consistent)):
            raise StreamBroken(f"the log probabilities are not those of {tokens} tokens")
