"""A request at a decode instance with what the core never sees: its tokens, its transfer, and whom to tell."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from moonpool.contracts import logprobs_from_proto
from moonpool.engine.incoming import IncomingRequest
from moonpool.kv.keys import BlockKey, block_keys, tokens_to_bytes
from moonpool.logprobs import Logprobs
from moonpool.sampling import SamplingParams
from moonpool.sched.sampling import SequenceSampling
from moonpool.sched.steps import History, SequenceStep, Several
from moonpool.streams.transfer import InboundTransfer, TransferState
from moonpool.v1 import decode_pb2, kv_pb2
from services.decode.core.actions import Ranked, Select
from services.decode.core.events import Beams, Candidates
from services.decode.said import Said, known_tokens
from services.decode.subscriber import Subscriber, identity

GATHERED_TOKENS = 16
"""Of an answer for which nobody waits token by token, so many are told together."""


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One answer to a request.

    Attributes:
        request: which.
        choice: which of its answers.
        keys: of its full blocks, the answer's too.
        sampling: how its tokens are chosen.
        table: its blocks, as the core has said.
        tokens: prompt and answer, once it was started; grows by each step.
        history: the same for engines that check what blocks hold.
        finish: why it has ended by itself.
        stopped: the conductor has all that it wants of it: it is told no more, and ends with its next token.
        logprobs: of its tokens from the output position `scored_from` on; None where they are not wanted.
        told: tokens generated that its conductor knows.
    """

    request: "LiveRequest"
    choice: int
    keys: list[BlockKey]
    sampling: SequenceSampling
    finish: kv_pb2.FinishReason.ValueType = kv_pb2.FINISH_REASON_UNSPECIFIED
    table: tuple[int, ...] = ()
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    history: History | None = None
    stopped: bool = False
    logprobs: Logprobs | None = None
    scored_from: int = 0
    told: int = 0

    @property
    def id(self) -> int:
        """The core's name for it."""
        return self.request.id + self.choice

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.sampling.prompt_tokens

    @property
    def said(self) -> Said:
        """What it has said so far."""
        answer = self.tokens[self.sampling.prompt_tokens :]
        return Said(answer, self.finish, None, self.logprobs, self.scored_from)

    def begin(self, *first_tokens: int) -> None:
        """Takes the first token, and those that are known behind it; a beam begins with the prompt alone."""
        self.tokens = array("i", [*self.request.incoming.token_ids, *first_tokens])
        self.history = self.request.incoming.history(self.tokens)
        self.scored_from = self.told = self.output_tokens
        self.logprobs = Logprobs() if self.sampling.params.logprobs is not None else None

    def take_first(self, logprobs: Logprobs) -> None:
        """Takes the log probabilities of its first token."""
        if self.logprobs is not None:
            self.logprobs, self.scored_from = logprobs, self.output_tokens - 1

    def append(self, token: int, logprobs: Logprobs | None = None) -> None:
        """Takes the next token."""
        self.tokens.append(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.extend(logprobs)

    def judge(self, max_tokens: int) -> kv_pb2.FinishReason.ValueType:
        """Why the answer ends with its last token, unspecified when it goes on; at the end of a run."""
        self.finish = kv_pb2.FINISH_REASON_STOP if self.stopped else self.sampling.finish(self.tokens, max_tokens)
        return self.finish

    def bound(self, blocks: tuple[int, ...]) -> None:
        """Has these blocks now."""
        self.table, transfer = blocks, self.request.transfer
        if transfer.state is TransferState.PROMISED:
            transfer.bind(blocks)

    def parent(self, index: int) -> BlockKey:
        """Key of the block before the one at `index`."""
        return self.keys[index - 1] if index else self.request.incoming.chain_root

    def steady(self, max_tokens: int) -> int:
        """Steps that it can take in one run."""
        return self.sampling.steady(len(self.tokens), max_tokens)

    def filled(self, block_tokens: int) -> list[tuple[int, BlockKey]]:
        """Its number and the key of the block that became full when all tokens so far were computed, if one did."""
        index, rest = divmod(len(self.tokens), block_tokens)
        if rest or index <= len(self.keys):
            return []
        [key] = block_keys(self.parent(index - 1), self.tokens[-block_tokens:], block_tokens)
        self.keys.append(key)
        return [(self.id, key)]

    def fill(self, block_tokens: int) -> tuple[BlockKey, ...]:
        """Notes the keys of all blocks that are full with the tokens before the last one; those that are new."""
        there, full = len(self.keys), (len(self.tokens) - 1) // block_tokens
        tokens = self.tokens[there * block_tokens : full * block_tokens]
        new = tuple(block_keys(self.parent(there), tokens, block_tokens))
        self.keys += new
        return new

    def step(
        self, start: int, count: int, block_tokens: int, *, sample: bool, steps: int = 1, full_hit: bool = False
    ) -> SequenceStep:
        """Its share of a step: `count` tokens from `start` on; the last ones of the sequence when it samples.

        With it may begin a run of `steps`.
        """
        return SequenceStep(
            token_ids=tokens_to_bytes(self.tokens[start : start + count]),
            start=start,
            block_table=self.table[: -(-(start + count + steps - 1) // block_tokens)],
            sample=self.sampling.at(self.tokens) if sample else None,
            full_hit=full_hit,
            end_token_ids=self.sampling.end_token_ids if steps > 1 else frozenset(),
            history=self.history,
        )

    def tell(self) -> None:
        """Tells the conductor of new tokens, and of the end if it has come, if it wants them now or never."""
        request, position = self.request, self.told
        if request.subscriber is None or self.stopped:
            return
        few = self.output_tokens - position < GATHERED_TOKENS
        if request.gather and few and position and not self.finish and not request.ending:
            return
        self.told = self.output_tokens
        tokens = self.tokens[self.sampling.prompt_tokens + position :].tolist()
        its = None if self.logprobs is None else self.logprobs.part(position - self.scored_from)
        request.subscriber.tokens(request.request_id, position, tokens, self.finish, self.choice, logprobs=its)
        request.subscriber.flush()


@dataclass(slots=True, eq=False)
class LiveBeams:
    """The tokens of a beam search: what may follow each beam, and what has ended.

    Attributes:
        sequences: the beams, the best first.
        hypotheses: prompt and answer of those that the core keeps, by number.
        answers: those that are wanted, the best first, when the search is over.
    """

    sequences: list[LiveSequence]
    hypotheses: "dict[int, array[int]]" = field(default_factory=dict)
    answers: list[Said] = field(default_factory=list)
    _following: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._following = [()] * len(self.sequences)

    def propose(self, beam: int, found: Several, max_tokens: int) -> Candidates:
        """Takes what may follow a beam; returns what the core is told of it."""
        sequence, self._following[beam] = self.sequences[beam], found.tokens
        ends = (sequence.sampling.ends_with(it, len(sequence.tokens) + 1, max_tokens) for it in found.tokens)
        return tuple(zip(found.log_probabilities, ends, strict=True))

    def select(self, chosen: Select) -> None:
        """Each beam takes the tokens of its parent and one more."""
        for number, parent, candidate in chosen.ended:
            self.hypotheses[number] = self._followed(parent, candidate)
        self.hypotheses = {number: self.hypotheses[number] for number in chosen.kept}
        tokens = [self._followed(parent, candidate) for parent, candidate in chosen.beams]
        keys = [list(self.sequences[parent].keys) for parent, _ in chosen.beams]
        for sequence, its_tokens, its_keys in zip(self.sequences, tokens, keys, strict=False):
            sequence.tokens, sequence.keys = its_tokens, its_keys
            sequence.history = sequence.request.incoming.history(its_tokens)

    def _followed(self, parent: int, candidate: int) -> "array[int]":
        return self.sequences[parent].tokens + array("i", [self._following[parent][candidate]])


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request.

    Attributes:
        beams: set when its sequences are beams.
        incoming: what was asked for.
        stores: kvstores for the answer's full blocks.
        transfer: the KV that comes.
        heard_at: when the core was last told that its transfer lives.
        secret: who knows it may resume the request; b"" = nobody.
        promised_to: the conductor that has asked for room; "" = it did not say.
        sequences: its answers.
        ending: the core lets it go: nothing is taken for it and nothing told any more.
        why: it ends early.
        subscriber: gets its tokens; set when it is started.
        known: of each answer, tokens behind the first one that it began with, and keys of the blocks that they fill.
        send_verdict: tells the sender of the KV how the transfer has ended; set when the blocks are bound.
        gather: nobody waits for single tokens.
    """

    incoming: IncomingRequest
    stores: Sequence[kv_pb2.Instance]
    transfer: InboundTransfer
    heard_at: float
    secret: bytes = b""
    promised_to: str = ""
    sequences: list[LiveSequence] = field(default_factory=list)
    beams: LiveBeams | None = None
    ending: bool = False
    why: str = ""
    subscriber: Subscriber | None = None
    send_verdict: Callable[[InboundTransfer], None] | None = None
    known: tuple[tuple[int, ...], tuple[tuple[BlockKey, ...], ...]] = ((), ())
    gather: bool = False

    def __post_init__(self) -> None:
        for choice in range(self.incoming.width):
            sampling = replace(self.incoming.sampling, sample_index=choice)
            self.sequences.append(LiveSequence(self, choice, list(self.incoming.keys), sampling))
        if self.incoming.sampling.params.beam_width:
            self.beams = LiveBeams(self.sequences)

    def begin(self, message: decode_pb2.StartSequence, max_tokens: int) -> tuple[tuple[int, ...], Candidates]:
        """Takes the first tokens, and those that are known behind them.

        Returns:
            Why each answer ends with them, 0 when it goes on; for beams, what may follow the prompt.
        """
        tokens = [message.first_token_id, *message.further_token_ids]
        if self.beams is not None:
            for sequence in self.sequences:
                sequence.begin()
            return (0,), self.beams.propose(0, Several(tuple(tokens), tuple(message.log_probabilities)), max_tokens)
        known, first = known_tokens(message, len(tokens)), logprobs_from_proto(message.logprobs)
        for sequence, token, behind in zip(self.sequences, tokens, known, strict=True):
            sequence.begin(token, *behind)
            if len(first):
                sequence.take_first(first.part(sequence.choice, sequence.choice + 1))
        if any(known):
            size = self.transfer.layout.block_tokens
            self.known = tuple(map(len, known)), tuple([sequence.fill(size) for sequence in self.sequences])
        return tuple(it.sampling.finish(it.tokens, max_tokens) for it in self.sequences), ()

    def compute(self) -> None:
        """Begins with the prompt alone, whose rest is computed here."""
        [sequence] = self.sequences
        sequence.begin()
        before_last = (len(sequence.tokens) - 1) // self.transfer.layout.block_tokens
        del sequence.keys[before_last:]  # as the core: a last block that is full has its key when it is computed

    def follow(self, action: Select | Ranked, max_tokens: int) -> None:
        """The core has chosen its beams, or their search is over: the conductor is told the answers, the best first."""
        assert self.beams is not None
        if isinstance(action, Select):
            self.beams.select(action)
            return
        sampling = self.incoming.sampling
        for number, score in action.hypotheses[: sampling.params.n]:
            tokens = self.beams.hypotheses[number]
            answer = tokens[sampling.prompt_tokens :]
            self.beams.answers.append(Said(answer, sampling.finish(tokens, max_tokens), score))
        if self.subscriber is not None:
            for choice, said in enumerate(self.beams.answers):
                said.tell(self.subscriber, self.request_id, choice, 0)
            self.subscriber.flush()

    @property
    def id(self) -> int:
        """The core's name for it."""
        return self.transfer.transfer_id

    @property
    def request_id(self) -> str:
        """The conductor's name for it."""
        return self.incoming.request_id

    @property
    def table(self) -> tuple[int, ...]:
        """The blocks that its prompt's KV goes to."""
        return self.sequences[0].table

    @property
    def complete(self) -> bool:
        """Whether all its KV has come."""
        return self.transfer.state is TransferState.COMPLETE

    @property
    def started(self) -> bool:
        """Whether its first tokens are known."""
        return bool(self.sequences[0].tokens)

    @property
    def said(self) -> list[Said]:
        """What each answer has said so far; beams say nothing before their search is over."""
        if self.beams is None:
            return [sequence.said for sequence in self.sequences]
        return self.beams.answers or [Said(array("i"))] * self.incoming.sampling.params.n

    def end(self, why: str) -> None:
        """Ends early, and tells whoever waits for it."""
        self.ending, self.why = True, why
        self.transfer.fail(why)
        if self.send_verdict is not None and not self.complete:
            self.send_verdict(self.transfer)
        if self.subscriber is not None:
            for sequence in self.sequences if self.beams is None else ():
                if sequence.output_tokens > sequence.told:  # gathered: others go on behind them
                    sequence.tell()
            self.subscriber.failed(self.request_id, why, transfer=not self.complete)
            self.subscriber = None


class LiveRequests:
    """The requests that run, and their sequences, by the core's names."""

    def __init__(self) -> None:
        self.requests: dict[int, LiveRequest] = {}
        self.sequences: dict[int, LiveSequence] = {}

    def add(self, live: LiveRequest) -> None:
        """One more."""
        self.requests[live.id] = live
        self.sequences |= {sequence.id: sequence for sequence in live.sequences}

    def take(self, number: int) -> LiveRequest:
        """One less."""
        live = self.requests.pop(number)
        for sequence in live.sequences:
            del self.sequences[sequence.id]
        return live

    def promised(self, message: decode_pb2.CancelSequence, subscriber: Subscriber) -> LiveRequest | None:
        """The promise that a conductor means which does not know its transfer."""
        who = identity(subscriber.conductor)
        for live in self.requests.values() if not message.transfer_id else ():
            waits = live.transfer.state is TransferState.PROMISED and not live.started
            if live.request_id == message.request_id and live.promised_to == who and waits:
                return live
        return None

    def misfit(self, live: LiveRequest, message: decode_pb2.StartSequence, subscriber: Subscriber) -> str | None:
        """Why a request cannot begin by this message of a conductor; None when it can."""
        if live.started:
            return f"transfer {message.transfer_id} was started before"
        others = self.requests.values()
        if any(other.subscriber is subscriber and other.request_id == message.request_id for other in others):
            return "a sequence of this id is running already"
        return _first_misfit(live, message)


def rules_of(params: SamplingParams) -> Beams | None:
    """How a request's beams are chosen; None when it has none."""
    return Beams(params.length_penalty, params.early_stopping) if params.beam_width else None


def _first_misfit(live: LiveRequest, message: decode_pb2.StartSequence) -> str | None:
    """Why a request cannot begin with these first tokens, or without; None when it can."""
    params = live.incoming.sampling.params
    if message.compute_prompt:
        if params.prompt_logprobs is not None:
            return "a prompt whose log probabilities are wanted (sampling.prompt_logprobs) is not computed here"
        alone = len(live.sequences) == 1 and live.beams is None
        return None if alone else "a prompt is computed here for one answer only, without beams"
    tokens, scores, wanted = 1 + len(message.further_token_ids), len(message.log_probabilities), len(live.sequences)
    known = message.known_token_ids or message.further_known
    if known and (live.beams or message.HasField("logprobs")):
        return "tokens behind the first ones may be known without beams and log probabilities"
    longest = max(map(len, known_tokens(message, tokens)))
    if len(live.incoming.token_ids) + 1 + longest > live.incoming.sampling.prompt_tokens + params.max_tokens:
        return f"{longest} tokens are known behind a first one: the answer has at most {params.max_tokens}"
    if message.further_known and len(message.further_known) != wanted - 1:
        return f"{wanted} answers are wanted, of each tokens may be known"
    if live.beams is None:
        first = logprobs_from_proto(message.logprobs)
        if not first.consistent or len(first) != tokens * message.HasField("logprobs"):
            return f"the log probabilities are not those of {tokens} tokens"
        return None if tokens == wanted else f"{wanted} answers are wanted, each has a first token"
    enough = wanted <= tokens == scores
    return None if enough else f"{wanted} beams are wanted, of at least as many tokens with their log probabilities"
