"""Requests with what the scheduler never sees: tokens, transfers, subscribed conductors."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from moonpool.base.contracts import logprobs_from_proto
from moonpool.base.kv.keys import BlockKey, block_keys, tokens_to_bytes
from moonpool.base.kv_transfer.inbound_transfer import InboundTransfer, TransferState
from moonpool.base.logprobs import Logprobs
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.steps import SampledCandidates, SequenceSampling, SequenceStep, TokenHistory
from moonpool.base.telemetry.spans import OpenSpan
from moonpool.engine.decode.core.actions import (
    AnswersRanked,
    ForkSequences,
)
from moonpool.engine.decode.core.events import Candidates, FirstTokens, ReserveBlocks, SearchRules
from moonpool.engine.decode.output import AnswerOutput, RequestOutput
from moonpool.engine.decode.prompt_progress import PromptProgress, prompt_error
from moonpool.engine.decode.speculation import LookupDrafter
from moonpool.engine.request import IncomingRequest
from moonpool.engine.subscriber import Subscriber, conductor_identity, known_tokens
from moonpool.v1 import decode_pb2, kv_pb2

TOKEN_BYTES = 4
STOPPED = kv_pb2.FINISH_REASON_STOP
GATHERED_TOKENS = 16
"""Tokens sent together if the client does not wait for single tokens."""


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One answer to a request.

    Attributes:
        choice: the answer's index.
        keys: the full blocks' keys, prompt and answer.
        output: tokens, end and log probabilities.
        table: block table.
        history: tokens, for engines that check the blocks' content.
        drafter: guesses the next tokens; None = not yet, or never.
        stopped: the conductor wants no more of the answer: no more tokens are sent, and the answer ends with the next
            token.
        sent_tokens: generated tokens sent to the conductor.
    """

    request: "LiveRequest"
    choice: int
    keys: list[BlockKey]
    output: AnswerOutput
    table: tuple[int, ...] = ()
    history: TokenHistory | None = None
    drafter: LookupDrafter | None = None
    stopped: bool = False
    sent_tokens: int = 0

    @property
    def id(self) -> int:
        """The sequence's id in the scheduler."""
        return self.request.id + self.choice

    @property
    def sampling(self) -> SequenceSampling:
        """How the sequence's tokens are chosen."""
        return self.request.incoming.sampling

    @property
    def tokens(self) -> "array[int]":
        """Prompt and answer, once started."""
        return self.output.tokens

    def begin(self, *first_tokens: int) -> None:
        """Take the first token, and the known tokens behind; a search's sequence begins with the prompt alone."""
        output = self.output
        output.tokens = array("i", [*self.request.incoming.token_ids, *first_tokens])
        self.history = self.request.incoming.history(output.tokens)
        output.scored_from = self.sent_tokens = output.length
        output.logprobs = Logprobs() if self.sampling.params.logprobs is not None else None

    def take_first(self, logprobs: Logprobs) -> None:
        """Take the first token's log probabilities."""
        if self.output.logprobs is not None:
            self.output.logprobs, self.output.scored_from = logprobs, self.output.length - 1

    def append(self, token: int, logprobs: Logprobs | None = None) -> None:
        """Take the next token."""
        self.output.tokens.append(token)
        if self.output.logprobs is not None and logprobs is not None:
            self.output.logprobs.extend(logprobs)

    def check_finish(self, max_tokens: int) -> kv_pb2.FinishReason.ValueType:
        """Return why the answer ends with the last token; unspecified if it continues. Called at a run's end."""
        stopped, tokens = self.stopped, self.output.tokens
        self.output.finish = STOPPED if stopped else self.sampling.finish(tokens, max_tokens)
        return self.output.finish

    def set_table(self, blocks: tuple[int, ...]) -> None:
        """Set the block table; the first block table also binds the transfer."""
        self.table, transfer = blocks, self.request.transfer
        if transfer.state is TransferState.PROMISED:
            transfer.bind(blocks)

    def parent(self, index: int) -> BlockKey:
        """Key of the block before `index`."""
        return self.keys[index - 1] if index else self.request.incoming.chain_root

    def room_for_guesses(self, block_size: int, max_tokens: int) -> int:
        """Guessed tokens that the sequence has blocks for, and may take in one step."""
        room = len(self.table) * block_size - len(self.tokens)
        return 0 if self.stopped or self.request.search is not None else min(room, self.most_steps(max_tokens) - 1)

    def most_steps(self, max_tokens: int) -> int:
        """Return most steps that the sequence can take in one run."""
        return self.sampling.steady(self.tokens, max_tokens)

    def take_filled(self, block_size: int) -> list[tuple[int, BlockKey]]:
        """Return the id, and the key of the block that became full with the tokens computed so far, if any."""
        index, rest = divmod(len(self.tokens), block_size)
        if rest or index <= len(self.keys):
            return []
        media, first = self.request.incoming.media, (index - 1) * block_size
        [key] = block_keys(self.parent(index - 1), self.tokens[-block_size:], block_size, media, first)
        self.keys.append(key)
        return [(self.id, key)]

    def add_keys(self, block_size: int) -> tuple[BlockKey, ...]:
        """Add the keys of all blocks that are full without the last token; return the new keys."""
        there, full = len(self.keys), (len(self.tokens) - 1) // block_size
        tokens = self.tokens[there * block_size : full * block_size]
        first = there * block_size
        new = tuple(block_keys(self.parent(there), tokens, block_size, self.request.incoming.media, first))
        self.keys += new
        return new

    def step(
        self,
        start: int,
        count: int,
        block_size: int,
        *,
        sample: bool,
        steps: int = 1,
        full_hit: bool = False,
        may_skip: bool = False,
        scores: bool = False,
    ) -> SequenceStep:
        """Return the sequence's part in a step: `count` tokens from `start` on.

        If the part samples, these are the sequence's last tokens. The step may begin a run of `steps`. `may_skip`: the
        sequence may go without a token in a step. `scores`: the prompt's tokens get log probabilities, if wanted.
        """
        media = self.request.incoming.media_in(start, start + count)
        return SequenceStep(
            token_ids=tokens_to_bytes(self.tokens[start : start + count]),
            start=start,
            block_table=self.table[: -(-(start + count + steps - 1) // block_size)],
            sample=self.sampling.at(self.tokens, self.choice) if sample else None,
            scored=self.sampling.scored(self.tokens, start, start + count) if scores else None,
            full_hit=full_hit,
            end_token_ids=self.sampling.end_token_ids if steps > 1 else frozenset(),
            may_skip=may_skip,
            lora=self.request.incoming.lora,
            history=self.history,
            media=media,
            picture_rows=self.request.incoming.rows_for(media),
            rope_shift=self.request.incoming.rope_shift(start),
        )

    def draft_steps(self, guess: Sequence[int], block_size: int) -> list[SequenceStep]:
        """Return the parts in a step that checks guessed next tokens: one for the last token, one for each guess.

        Each part samples the token behind, as if all guesses before were right.
        """
        first = self.step(len(self.tokens) - 1, 1, block_size, sample=True, steps=1 + len(guess), may_skip=True)
        parts = [replace(first, end_token_ids=frozenset())]
        for token in guess:
            last = parts[-1]
            assert last.sample is not None
            encoded = token.to_bytes(TOKEN_BYTES, "little")
            parts.append(replace(last, token_ids=encoded, start=last.start + 1, sample=last.sample.after(token)))
        return parts

    def send_new(self) -> None:
        """Send new tokens and the end, unless more tokens are to be gathered first."""
        request, position = self.request, self.sent_tokens
        if request.subscriber is None or self.stopped:
            return
        few = self.output.length - position < GATHERED_TOKENS
        if request.gather and few and position and not self.output.finish and not request.ending:
            return
        self.sent_tokens = self.output.length
        self.output.send(request.subscriber, request.request_id, self.choice, position)
        request.subscriber.flush()


@dataclass(slots=True, eq=False)
class LiveSearch:
    """A search's tokens: each sequence's candidates, and hypotheses.

    Attributes:
        sequences: continuing sequences, best first.
        hypotheses: prompt and answer for each hypothesis that the scheduler keeps, by number.
    """

    sequences: list[LiveSequence]
    hypotheses: "dict[int, array[int]]" = field(default_factory=dict)
    _following: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._following = [()] * len(self.sequences)

    def propose(self, index: int, found: SampledCandidates, max_tokens: int) -> Candidates:
        """Take a sequence's candidates; return what the scheduler needs to know."""
        sequence, self._following[index] = self.sequences[index], found.tokens
        ends = (sequence.sampling.ends_with(token, len(sequence.tokens) + 1, max_tokens) for token in found.tokens)
        return tuple(zip(found.log_probabilities, ends, strict=True))

    def select(self, chosen: ForkSequences) -> None:
        """Each sequence takes the parent's tokens and a further token."""
        for number, parent, candidate in chosen.ended:
            self.hypotheses[number] = self._followed(parent, candidate)
        self.hypotheses = {number: self.hypotheses[number] for number in chosen.kept}
        tokens = [self._followed(parent, candidate) for parent, candidate in chosen.forks]
        keys = [list(self.sequences[parent].keys) for parent, _ in chosen.forks]
        for sequence, its_tokens, its_keys in zip(self.sequences, tokens, keys, strict=False):
            sequence.output.tokens, sequence.keys = its_tokens, its_keys
            sequence.history = sequence.request.incoming.history(its_tokens)

    def _followed(self, parent: int, candidate: int) -> "array[int]":
        return self.sequences[parent].tokens + array("i", [self._following[parent][candidate]])


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request: the order, the transfer, the answers and the conductor.

    Attributes:
        incoming: the request's record.
        asked: what the scheduler was asked for.
        stores: kvstores for the answer's full blocks.
        transfer: the transfer with the prompt's KV.
        output: all answers' output, and the takeover secret.
        progress_at: last time when transfer progress was reported to the scheduler, seconds.
        sequences: the request's answers.
        search: set if the sequences fork by their candidates.
        ending: the request ends: no more KV is received and no more tokens are sent.
        subscriber: gets the request's tokens; set at the start.
        send_verdict: tells the sender of the KV how the transfer has ended; set when the blocks are bound.
        known: for each answer, tokens known behind the first token, and keys of the blocks that these fill.
        gather: the client does not wait for single tokens.
        prompt: the whole prompt that is computed here; None = its KV comes, or a remainder is computed.
        span: from the promise to the end.
    """

    incoming: IncomingRequest
    asked: ReserveBlocks
    stores: Sequence[kv_pb2.Instance]
    transfer: InboundTransfer
    output: RequestOutput
    progress_at: float
    sequences: list[LiveSequence] = field(default_factory=list)
    search: LiveSearch | None = None
    ending: bool = False
    subscriber: Subscriber | None = None
    send_verdict: Callable[[InboundTransfer], None] | None = None
    known: tuple[tuple[int, ...], tuple[tuple[BlockKey, ...], ...]] = ((), ())
    gather: bool = False
    prompt: PromptProgress | None = None
    span: OpenSpan | None = None

    def __post_init__(self) -> None:
        prompt_tokens = self.incoming.sampling.prompt_tokens
        for choice in range(self.incoming.spec.width):
            output = AnswerOutput(prompt_tokens=prompt_tokens)
            self.sequences.append(LiveSequence(self, choice, list(self.incoming.spec.keys), output))
        if self.incoming.sampling.params.deferred:
            self.search = LiveSearch(self.sequences)
            self.output.answers = [AnswerOutput() for _ in range(self.incoming.sampling.params.n)]
        else:
            self.output.answers = [sequence.output for sequence in self.sequences]

    def begin(self, message: decode_pb2.StartSequence, max_tokens: int) -> tuple[tuple[int, ...], Candidates]:
        """Take the first tokens, and the known tokens behind.

        Returns:
            Why each answer ends with these tokens, 0 if the answer continues; for a search, what may follow the prompt.
        """
        tokens = [message.first_token_id, *message.further_token_ids]
        if self.search is not None:
            for sequence in self.sequences:
                sequence.begin()
            return (0,), self.search.propose(
                0, SampledCandidates(tuple(tokens), tuple(message.log_probabilities)), max_tokens
            )
        known, first = known_tokens(message, len(tokens)), logprobs_from_proto(message.logprobs)
        for sequence, token, behind in zip(self.sequences, tokens, known, strict=True):
            sequence.begin(token, *behind)
            if len(first):
                sequence.take_first(first.part(sequence.choice, sequence.choice + 1))
        if any(known):
            size = self.transfer.layout.block_size
            self.known = tuple(map(len, known)), tuple([sequence.add_keys(size) for sequence in self.sequences])
        return tuple(other.sampling.finish(other.tokens, max_tokens) for other in self.sequences), ()

    def compute(self, message: decode_pb2.StartSequence, now: float) -> None:
        """Begin with the prompt alone; the missing part is computed here."""
        before_last = (len(self.incoming.token_ids) - 1) // self.transfer.layout.block_size
        for sequence in self.sequences:
            sequence.begin()
            del sequence.keys[before_last:]  # as the core: a full last block gets a key on being computed
        if self.asked.computes_prompt:
            self.prompt = PromptProgress(message, now, len(self.incoming.token_ids), self.incoming.rows)

    def take_first_tokens(self, found: SampledCandidates, logprobs: Logprobs | None, max_tokens: int) -> FirstTokens:
        """Take the first tokens behind the prompt computed here, and send those of answers that continue.

        Args:
            found: a token for each answer; for a search, the most likely tokens.
            logprobs: the tokens' log probabilities, if wanted.
            max_tokens: longest sequence the model takes.
        """
        prompt, first = self.prompt, self.sequences[0]
        assert prompt is not None
        prompt.over = True
        told = prompt.first_token(found, logprobs)
        self.output.answers[0].prompt = told
        if self.search is not None:
            return FirstTokens(self.id, (0,), self.search.propose(0, found, max_tokens))
        known, size = prompt.known(len(self.sequences)), self.transfer.layout.block_size
        reasons: list[kv_pb2.FinishReason.ValueType] = []
        for sequence, token, behind in zip(self.sequences, found.tokens, known, strict=True):
            sequence.keys = list(first.keys)
            sequence.begin(token, *behind)
            if logprobs is not None:
                sequence.take_first(logprobs.part(sequence.choice, sequence.choice + 1))
            if not behind:
                sequence.sent_tokens -= 1  # the token is told here first
            reasons.append(STOPPED if sequence.stopped else sequence.sampling.finish(sequence.tokens, max_tokens))
        first.output.told_from = first.sent_tokens
        if any(known):
            self.known = tuple(map(len, known)), tuple([sequence.add_keys(size) for sequence in self.sequences])
        for sequence, reason in zip(self.sequences, reasons, strict=True):
            if not reason and sequence.sent_tokens < sequence.output.length:
                sequence.send_new()
        return FirstTokens(self.id, tuple(map(int, reasons)), (), *self.known)

    def advance_search(self, action: ForkSequences | AnswersRanked, max_tokens: int) -> None:
        """Fork the sequences as chosen, or send the answers, best first, if the search is over."""
        assert self.search is not None
        if isinstance(action, ForkSequences):
            self.search.select(action)
            return
        sampling, answers = self.incoming.sampling, list[AnswerOutput]()
        for number, score in action.hypotheses[: sampling.params.n]:
            tokens = self.search.hypotheses[number]
            answers.append(AnswerOutput(tokens, sampling.prompt_tokens, sampling.finish(tokens, max_tokens), score))
        if self.prompt is not None:
            answers[0].prompt = self.output.answers[0].prompt
        self.output.answers = answers
        if self.subscriber is not None:
            for choice, answer in enumerate(answers):
                answer.send(self.subscriber, self.request_id, choice, 0)
            self.subscriber.flush()

    @property
    def id(self) -> int:
        """The request's id in the scheduler."""
        return self.transfer.transfer_id

    @property
    def request_id(self) -> str:
        """The request's id at the conductor."""
        return self.incoming.request_id

    @property
    def table(self) -> tuple[int, ...]:
        """The prompt's blocks."""
        return self.sequences[0].table

    @property
    def complete(self) -> bool:
        """Whether all KV has arrived."""
        return self.transfer.state is TransferState.COMPLETE

    @property
    def started(self) -> bool:
        """Whether the first tokens are known."""
        return bool(self.sequences[0].tokens)

    def end(self, why: str) -> None:
        """End early; tell the KV's sender and the conductor."""
        self.ending, self.output.why = True, why
        self.transfer.fail(why)
        if self.send_verdict is not None and not self.complete:
            self.send_verdict(self.transfer)
        if self.subscriber is not None:
            for sequence in self.sequences if self.search is None else ():
                if sequence.output.length > sequence.sent_tokens:  # gathered: another instance continues behind them
                    sequence.send_new()
            self.subscriber.failed(self.request_id, why, transfer=self.prompt is None and not self.complete)
            self.subscriber = None


class LiveRequestTable:
    """The requests of the scheduler, and their sequences, by id."""

    def __init__(self) -> None:
        self.requests: dict[int, LiveRequest] = {}
        self.sequences: dict[int, LiveSequence] = {}

    def add(self, live: LiveRequest) -> None:
        self.requests[live.id] = live
        self.sequences |= {sequence.id: sequence for sequence in live.sequences}

    def take(self, number: int) -> LiveRequest:
        """Take a request out."""
        live = self.requests.pop(number)
        for sequence in live.sequences:
            del self.sequences[sequence.id]
        return live

    def promised(self, message: decode_pb2.CancelSequence, subscriber: Subscriber) -> LiveRequest | None:
        """Return the promise that a conductor cancels without knowing the transfer."""
        who = conductor_identity(subscriber.conductor)
        for live in self.requests.values() if not message.transfer_id else ():
            waits = live.transfer.state is TransferState.PROMISED and not live.started
            if live.request_id == message.request_id and live.asked.conductor == who and waits:
                return live
        return None

    def start_error(self, live: LiveRequest, message: decode_pb2.StartSequence, subscriber: Subscriber) -> str | None:
        """Return why a request cannot begin with this message; None if the request can."""
        if live.started:
            return f"transfer {message.transfer_id} was started before"
        others = self.requests.values()
        if any(other.subscriber is subscriber and other.request_id == message.request_id for other in others):
            return "a sequence of this id is running already"
        return _start_error(live, message)


def stores_of(asked: decode_pb2.ReserveRequest) -> list[kv_pb2.Instance]:
    """Return the kvstores that the answer goes to."""
    return [*([asked.write_back] if asked.HasField("write_back") else []), *asked.replicas]


def search_rules_of(params: SamplingParams) -> SearchRules | None:
    """Return a request's search rules; None without a search."""
    return SearchRules(params.length_penalty, params.early_stopping) if params.deferred else None


def _start_error(live: LiveRequest, message: decode_pb2.StartSequence) -> str | None:
    """Return why a request cannot begin with these first tokens, or none; None if the request can."""
    params = live.incoming.sampling.params
    if message.compute_prompt and live.asked.computes_prompt:
        return prompt_error(message, len(live.stores)) or _known_error(live, message, len(live.sequences))
    if message.compute_prompt:
        if params.scores_prompt:
            return "a prompt whose log probabilities or embedding are wanted is not computed here"
        alone = len(live.sequences) == 1 and live.search is None
        return None if alone else "a prompt is computed here for one answer only, without beams"
    tokens, scores, wanted = 1 + len(message.further_token_ids), len(message.log_probabilities), len(live.sequences)
    if (error := _known_error(live, message, tokens)) is not None:
        return error
    if live.search is None:
        first = logprobs_from_proto(message.logprobs)
        if not first.consistent or len(first) != tokens * message.HasField("logprobs"):
            return f"the log probabilities are not those of {tokens} tokens"
        return None if tokens == wanted else f"{wanted} answers are wanted, each has a first token"
    enough = wanted <= tokens == scores
    return None if enough else f"{wanted} beams are wanted, of at least as many tokens with their log probabilities"


def _known_error(live: LiveRequest, message: decode_pb2.StartSequence, answers: int) -> str | None:
    """Return why tokens cannot be known behind the first ones of so many answers; None if they can."""
    params, wanted = live.incoming.sampling.params, len(live.sequences)
    known = message.known_token_ids or message.further_known
    if known and (live.search or message.HasField("logprobs")):
        return "tokens behind the first ones may be known without beams and log probabilities"
    longest = max(map(len, known_tokens(message, answers)))
    if len(live.incoming.token_ids) + 1 + longest > live.incoming.sampling.prompt_tokens + params.max_tokens:
        if message.compute_prompt and not known:
            return None  # a prompt as long as the model allows: its one token ends the answer
        return f"{longest} tokens are known behind a first one: the answer has at most {params.max_tokens}"
    if message.further_known and len(message.further_known) != wanted - 1:
        return f"{wanted} answers are wanted, of each tokens may be known"
    return None
