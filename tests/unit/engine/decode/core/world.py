"""A world for the decode core: performs its actions on a memory whose slices remember which KV they hold.

Each step checks all that it reads, so a wrong block is found at once. After each event, each block with a key must hold
the key's KV. `FULL` stands for layers without a window, `WINDOWED` for those with a window or a recurrent state.
"""

import pickle
from array import array
from collections.abc import Callable

from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.block_lending import BlocksLent, LendBlocks, ReturnBlocks
from moonpool.base.scheduling.block_manager import MoveSlots
from moonpool.base.scheduling.latency import Speeds, decode_step_seconds, prefill_seconds
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.state_machine import CancelIo, IoEnded, Tick, digest_of
from moonpool.engine.decode.core.actions import (
    Action,
    AnswersRanked,
    AppendBlock,
    DropOutputLog,
    FenceConductor,
    FinishSequence,
    ForkSequences,
    RequestAborted,
    RequestAdopted,
    RequestFreed,
    RequestParked,
    ReservationGranted,
    ReservationRefused,
    SetBlockTable,
    StartRun,
    StopReceiving,
    StopRun,
    StoreBlock,
    SwapDrop,
    SwapIn,
    SwapOut,
)
from moonpool.engine.decode.core.events import (
    AbortRequest,
    AdoptRequest,
    Candidates,
    CheckedDraft,
    ComputePrompt,
    Event,
    FirstTokens,
    QueuePrompt,
    ReceiveEnd,
    ReserveBlocks,
    RunDone,
    RunProgress,
    SearchRules,
    StartDecoding,
    StoreEnd,
    StreamClosed,
    StreamOpened,
    SwapEnd,  # fmt: skip
    TransferComplete,
    TransferOpened,
)
from moonpool.engine.decode.core.request import DecodeRequest, RequestStatus
from moonpool.engine.decode.core.scheduler import DecodeScheduler
from moonpool.engine.decode.core.settings import DecodeSettings, Preemption
from moonpool.engine.scheduler.prefix_sources import LoadBlocks, LoadEnded
from tests.unit.engine.decode.core.plain_beams import candidates, plain_search
from tests.unit.engine.decode.core.sequence import BT, Sequence, follow_beams
from tests.unit.engine.kv_memory import TokenMemory

STOP = 1
FULL, WINDOWED = LAYERS = range(2)
WRONG_GUESS = b"a wrong guess"
SPEEDS = Speeds(prefill_per_token_s=1e-4, decode_base_s=1e-3, decode_per_sequence_s=1e-3)


def config(blocks: int, **settings: object) -> DecodeSettings:
    usual: dict[str, object] = {"block_size": BT, "block_bytes": 1 << 10, "max_num_seqs": 8, "lease_s": 10.0}
    return DecodeSettings(num_blocks=blocks, **{**usual, "speeds": SPEEDS, **settings})  # type: ignore[arg-type]


def preemptible(
    number: int, rank: float = 0.0, preemptions: int = 0, *, tenant: str = "", weight: float = 1.0
) -> DecodeRequest:
    """A request for `choose_victim`."""
    spec = EngineRequest((), 10, 10, tenant=tenant, weight=weight)
    request = DecodeRequest.of(ReserveBlocks(number, spec, 20), rank, rank)
    request.preemption.count = preemptions
    return request


class World:
    """The core, a pool, an engine that ends its step when told to, and I/O that ends when told to."""

    def __init__(
        self, config: DecodeSettings, check: Callable[[DecodeScheduler], None] = DecodeScheduler.check_invariants
    ) -> None:
        self.core = DecodeScheduler(config)
        self.now, self.begun = 0.0, pickle.dumps(self.core)
        windowed = (WINDOWED,) if config.window_blocks else ()
        self.memory = TokenMemory(len(LAYERS), BT, windowed, recurrent=config.states_alone)
        self.chains: dict[BlockKey, list[bytes]] = {}
        """What full blocks hold, by key."""
        self.lent: dict[int, tuple[LendBlocks, tuple[int, ...]]] = {}
        self.sequences: dict[int, Sequence] = {}
        self.answers: dict[int, list[int]] = {}
        self.actions: list[Action] = []
        self.events: list[tuple[float, Event, bytes]] = []
        self.run: StartRun | None = None
        self.left = 0  # steps of the run that are not over
        self.ios: dict[int, SwapOut | SwapIn | StoreBlock | StopReceiving | LoadBlocks] = {}
        self.cancelled: set[int] = set()
        self.stored: dict[tuple[int, BlockKey], dict[int, bytes]] = {}  # what each kvstore has
        self.asked: dict[int, ReserveBlocks] = {}
        self.held: dict[int, int] = {}  # leading blocks of promised requests that are here: nothing comes there
        self.whole: dict[int, int] = {}  # leading blocks of torn transfers: nothing comes there any more
        self.hypotheses: dict[int, dict[int, array[int]]] = {}
        self.searched: dict[int, list[tuple[list[int], float]]] = {}
        """Answers and scores of the searches that are over."""
        self.known: dict[int, int] = {}
        """Tokens known behind each first one, of prompts computed here."""
        self.refused: list[ReservationRefused] = []
        self.failed: dict[int, str] = {}
        self.started: set[int] = set()
        self.followers: dict[int, int] = {}  # the stream that gets a started sequence's tokens
        self.heard: dict[int, list[int]] = {}
        """What each client has got, by whatever stream."""
        self.logged: dict[int, dict[int, Sequence] | None] = {}
        """What is kept; the request's sequences when they could go on."""
        self.lost: list[int] = []
        """Sequences that could have gone on, and nobody came."""
        self.fenced: list[FenceConductor] = []
        self._check = check
        self._writing: dict[int, BlockKey] = {}
        self._copied = False  # the run's copies are made
        self._next = 1
        self.post(StreamOpened(1, "conductor"))

    def post(self, event: Event) -> list[Action]:
        out: list[Action] = []
        self.core.handle(self.now, event, out)
        self.events.append((self.now, event, digest_of(*out)))
        self._check(self.core)
        for action in out:
            self._perform(action)
        self.actions += out
        self.memory.check_keys(self.core.blocks, self._of_key)
        return out

    def _of_key(self, key: BlockKey, layer: int) -> dict[int, bytes] | None:
        """What a full block's slice must hold."""
        chain = self.chains.get(key)
        return None if chain is None else self.memory.of_chain(layer, chain)

    def _know(self, sequence: Sequence) -> tuple[BlockKey, ...]:
        """Note what the full blocks of a sequence's tokens must hold; return their keys."""
        keys = sequence.keys()
        for index, key in enumerate(keys):
            if key not in self.chains:
                self.chains[key] = [sequence.content(index * BT + at) for at in range(BT)]
        return tuple(keys)

    def reserve(
        self,
        prompt: list[int],
        answer: int | tuple[int, ...] = 4,
        *,
        total: int = 0,
        slo: float = 0.0,
        conductor: str = "",
        stores: int = 0,
        starts_in_s: float = 0.0,
        search: SearchRules | None = None,
        resumable: bool = False,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        logprob_bytes: int = 0,
        whole: bool = False,
        reuse: bool = True,
        token_cost: int = 1,
        max_queue_s: float | None = None,
        expected_tokens: int = 0,
    ) -> int | None:
        """Asks for room for one answer or several; the request's id, None when it was refused."""
        answers = (answer,) if isinstance(answer, int) else answer
        number, self._next = self._next, self._next + len(answers)
        total_tokens = total or len(prompt) + max(answers)
        for index, length in enumerate(answers):
            self.sequences[number + index] = Sequence(array("i", prompt), length, len(prompt), number, index)
        keys = self._know(self.sequences[number])
        spec = EngineRequest(
            keys,
            len(prompt),
            len(prompt),
            len(answers),
            logprob_bytes,
            tenant,
            priority,
            weight,
            token_cost=token_cost,
            expected_tokens=expected_tokens,
        )
        asked = spec, total_tokens, slo, conductor, stores, starts_in_s, search, resumable
        prompt_here = {"computes_prompt": whole, "reuse": reuse, "max_queue_s": max_queue_s}
        self.asked[number] = ReserveBlocks(number, *asked, **prompt_here)  # type: ignore[arg-type]
        self.post(self.asked[number])
        if number not in self.core.requests:
            for index in range(len(answers)):
                del self.sequences[number + index]
            return None
        return number

    def group(self, number: int) -> "list[tuple[int, Sequence]]":
        """The sequences of a request, with their numbers."""
        return [(other, sequence) for other, sequence in self.sequences.items() if sequence.request == number]

    def arrive(self, number: int) -> None:
        """The prompt's KV comes; prefill has written it to the kvstores as well."""
        self.post(TransferOpened(number))
        sequence = self.sequences[number]
        self._receive(sequence, len(sequence.tokens))
        for store in range(self.core.requests[number].stores):
            for index, key in enumerate(sequence.keys()):
                content = {at: sequence.content(index * BT + at) for at in range(BT)}
                self.stored[store, key] = content | {~at: value for at, value in content.items()}
        self.post(TransferComplete(number))

    def start(self, number: int, stream: int = 1, known: int = 0) -> None:
        """Tells the first tokens; perhaps so many more of each sequence, which it would have generated."""
        self.started.add(number)
        if self.core.requests[number].search is not None:
            self.followers[number] = stream
            self.post(StartDecoding(number, stream, 0, candidates=self._candidates(self.sequences[number])))
            return
        finishes, more, keys = [], [], []
        for other, sequence in self.group(number):
            self.answers[other] = sequence.go_on(1 + min(known, sequence.answer - 1))
            self.followers[other], self.heard[other] = stream, list(self.answers[other])
            finishes.append(STOP if len(self.answers[other]) == sequence.answer else 0)
            more.append(len(self.answers[other]) - 1)
            self._know(sequence)
            keys.append(tuple(sequence.keys()[len(self.asked[number].request.keys) : (len(sequence.tokens) - 1) // BT]))
        finish, *others = finishes
        behind = (tuple(more), tuple(keys)) if known else ((), ())
        self.post(StartDecoding(number, stream, finish, tuple(others), (), *behind))

    def compute(self, number: int, stream: int = 1, known: int = 0, **fields: object) -> list[Action]:
        """The prompt is computed here; so many tokens are known behind each first one."""
        self.known[number] = known
        self.followers |= {other: stream for other, _ in self.group(number)[:1]}
        for other, _ in self.group(number) if not self.asked[number].search else ():
            self.answers[other], self.heard[other], self.followers[other] = [], [], stream
        kind = QueuePrompt if self.asked[number].computes_prompt else ComputePrompt
        return self.post(kind(number, stream, **fields))  # type: ignore[arg-type]

    def adopt(self, number: int, stream: int, fence: int) -> list[Action]:
        """A conductor resumes for a client that has what it has heard."""
        return self.post(AdoptRequest(number, stream, fence, self.positions(number)))

    def positions(self, number: int) -> tuple[int, ...]:
        """Behind what a client has heard of each answer; of beams nothing comes before their end."""
        asked = self.asked[number]
        numbers = range(number, number + asked.request.width)
        return tuple([0 if asked.search else len(self.heard[other]) for other in numbers])

    def close(self, stream: int) -> None:
        """A conductor's stream ends: nobody hears its sequences any more."""
        self.followers = {number: follower for number, follower in self.followers.items() if follower != stream}
        self.post(StreamClosed(stream))

    def go(self, prompt: list[int], answer: int | tuple[int, ...] = 4, stream: int = 1, **options: object) -> int:
        """A request up to its start."""
        number = self.reserve(prompt, answer, **options)  # type: ignore[arg-type]
        assert number is not None, self.refused[-1]
        self.arrive(number)
        self.start(number, stream)
        return number

    def step(self) -> None:
        """The running step is done, and the run with it if it was the last one or somebody has ended."""
        assert self.run is not None
        run = self.run
        ended, filled, candidates, drafts, first_tokens = [], [], [], list[CheckedDraft](), list[FirstTokens]()
        context = sum(len(self.sequences[number].tokens) for number in run.batch)
        for source, block in () if self._copied else run.copies:
            self.memory.restore(block, self.memory.save(source))
        self._copied = True
        for number, start, count, sample, full_hit in [
            *((number, len(self.sequences[number].tokens) - 1, 1, True, False) for number in run.batch),
            *((chunk.id, chunk.start, chunk.count, chunk.sample, chunk.full_hit) for chunk in run.chunks),
        ]:
            sequence, ahead = self.sequences[number], self.core.settings.ahead_steps
            assert 0 <= len(sequence.table) - -(-len(sequence.tokens) // BT) <= -(-ahead // BT), "blocks for the tokens"
            for layer in LAYERS:
                for position in self._reads(layer, start, start + count * full_hit):
                    held = self.memory.read(layer, sequence.table[position // BT], position % BT)
                    assert held == sequence.content(position), (
                        f"wrong KV at {position} of sequence {number} in layer {layer}, read at {start}"
                    )
            for position in () if full_hit else range(start, start + count):
                assert self.core.blocks.key_of(sequence.table[position // BT]) is None, "a full block is written again"
                self._write(sequence, position)
            if not sample or self.core.requests[sequence.request].status is RequestStatus.FINISHING:
                continue
            assert start + count == len(sequence.tokens)
            filled += self._filled(number)
            if self.core.requests[sequence.request].lacks_first_token:
                first_tokens.append(self._first_tokens(sequence.request))
                continue
            if self.core.requests[sequence.request].search is not None:
                candidates.append((number, self._candidates(sequence)))
                continue
            self._append(number)
            if number in run.batch:
                guesses = self._guesses(number, run.drafts - sum(draft.tokens for draft in drafts))
                drafts += guesses
                filled += self._check_guesses(number, *guesses)
            if len(self.answers[number]) >= sequence.answer:
                ended.append((number, STOP))
        speeds = self.core.settings.speeds
        seconds = decode_step_seconds(speeds, len(run.batch), context) if run.batch else 0.0
        seconds += sum(prefill_seconds(speeds, chunk.count, chunk.start, begins=False) for chunk in run.chunks)
        self.left = 0 if drafts else self.left - 1
        if self.left and not ended:
            self.post(RunProgress(run.step, 1, seconds, tuple(filled)))
            return
        self.run = None
        told = tuple(ended), tuple(filled), 1, tuple(candidates)
        rest = {"drafts": tuple(drafts), "first_tokens": tuple(first_tokens)}
        self.post(RunDone(run.step, False, seconds, *told, **rest))  # type: ignore[arg-type]

    def _first_tokens(self, number: int) -> FirstTokens:
        """The first token of each answer to a prompt that is computed, and those known behind."""
        if self.core.requests[number].search is not None:
            return FirstTokens(number, (0,), self._candidates(self.sequences[number]))
        known, finishes, more, keys = self.known[number], [], [], []
        for other, sequence in self.group(number):
            self.answers[other] = sequence.go_on(1 + min(known, sequence.answer - 1))
            if other in self.followers:
                self.heard[other] = list(self.answers[other])
            finishes.append(STOP if len(self.answers[other]) == sequence.answer else 0)
            more.append(len(self.answers[other]) - 1)
            self._know(sequence)
            full = len(self.asked[number].request.keys)
            keys.append(tuple(sequence.keys()[full : (len(sequence.tokens) - 1) // BT]))
        behind = (tuple(more), tuple(keys)) if known else ((), ())
        return FirstTokens(number, tuple(finishes), (), *behind)

    def _append(self, number: int) -> None:
        """A sequence gets its next token."""
        sequence = self.sequences[number]
        sequence.tokens.append(sequence.token_after(len(sequence.tokens)))
        self.answers[number].append(sequence.tokens[-1])
        if number in self.followers:
            self.heard[number].append(sequence.tokens[-1])

    def _filled(self, number: int) -> list[tuple[int, BlockKey]]:
        """The block that became full with a sequence's tokens so far, all computed."""
        sequence = self.sequences[number]
        member = self.core.requests[sequence.request].find(number)
        assert member is not None
        is_new = len(sequence.tokens) % BT == 0 and len(sequence.tokens) // BT > len(member.keys)
        return [(number, self._know(sequence)[-1])] if is_new else []

    def _guesses(self, number: int, most: int) -> list[CheckedDraft]:
        """Guesses of a sequence that the step checks; how many, and how many are right, depends on its length."""
        sequence = self.sequences[number]
        room, left = len(sequence.table) * BT - len(sequence.tokens) + 1, sequence.answer - len(self.answers[number])
        count = min(most, room, left, self.core.settings.draft_tokens, (len(sequence.tokens) + number) % 7)
        return [CheckedDraft(number, count, len(sequence.tokens) % (count + 1))] if count > 0 else []

    def _check_guesses(self, number: int, draft: CheckedDraft | None = None) -> list[tuple[int, BlockKey]]:
        """The step has computed guesses behind a sequence's token; returns the blocks that became full."""
        if draft is None:
            return []
        sequence, filled = self.sequences[number], list[tuple[int, BlockKey]]()
        end = len(sequence.tokens) - 1 + draft.tokens
        for block in sequence.table[(len(sequence.tokens) - 1) // BT : -(-end // BT)]:
            assert self.core.blocks.ref_count(block) == 1, "guesses are written to a shared block"
            assert self.core.blocks.key_of(block) is None, "guesses are written to a full block"
            assert self.memory.has(WINDOWED, block), "no slot for a guess"
        for _ in range(draft.accepted):
            self._write(sequence, len(sequence.tokens) - 1)
            filled += self._filled(number)
            self._append(number)
        for position in range(len(sequence.tokens) - 1, end):
            for layer in LAYERS:
                self.memory.write(layer, sequence.table[position // BT], position % BT, WRONG_GUESS)
        return filled

    def _reads(self, layer: int, start: int, end: int) -> range:
        """Positions that a layer reads for tokens from `start` on, of which those before `end` have KV."""
        if layer in self.memory.states:
            return range(max(0, start - 1), start)
        if layer in self.memory.windowed:
            return range(max(0, start + 1 - self.core.settings.window_blocks * BT), end)
        return range(end)

    def abort(self) -> None:
        """The running step is given up: nothing was copied or computed."""
        assert self.run is not None
        run, self.run = self.run, None
        self.post(RunDone(run.step, True, 0.0))

    def tear(self, number: int, leading: int) -> None:
        """A transfer ends when so many leading blocks have come, and a part of the next one."""
        self.post(TransferOpened(number))
        sequence = self.sequences[number]
        self._receive(sequence, min(leading * BT + BT // 2, len(sequence.tokens)))
        self.whole[number] = min(leading, len(sequence.table))
        self.post(AbortRequest(number, "the sender gave up", self.whole[number]))

    def lend(self, keys: tuple[BlockKey, ...], windows_from: int = 0) -> int:
        """Another instance begins to read blocks; returns the read's number."""
        order = LendBlocks(len(self.events), keys, windows_from)
        [found] = [action for action in self.post(order) if isinstance(action, BlocksLent)]
        self.lent[order.number] = order, found.blocks
        self._look_at_lent(order.number)
        return order.number

    def take_back(self, number: int) -> None:
        """The read ends: what was lent has not changed meanwhile."""
        self._look_at_lent(number)
        del self.lent[number]
        self.post(ReturnBlocks(number))

    def _look_at_lent(self, number: int) -> None:
        order, blocks = self.lent[number]
        for index, (block, key) in enumerate(zip(blocks, order.keys, strict=False)):
            self._look(block, key, windowed=index >= order.windows_from or len(blocks) < len(order.keys))

    def _look(self, block: int, key: BlockKey, *, windowed: bool) -> None:
        """Somebody reads a block for a key."""
        for layer in LAYERS:
            if windowed or layer not in self.memory.windowed:
                assert self.memory[layer, block] == self._of_key(key, layer), f"block {block} has other KV than read"

    def end_io(self, io: int, *, ok: bool = True, blocks: int | None = None, failed: bool = False) -> None:
        """A copy, a write or a load ends. `blocks`: those of a load that came; None = all, or none if not `ok`."""
        action = self.ios.pop(io)
        if isinstance(action, LoadBlocks):
            came = blocks if blocks is not None else len(action.blocks) * ok
            self._load(action, came)
            missing = None if came == len(action.blocks) or failed else came
            self.post(IoEnded(io, LoadEnded(came, missing, failed, 1e-3)))
            return
        match action:
            case StoreBlock():
                key = self._writing.pop(io)
                self._look(action.block, key, windowed=action.windowed)
                if ok:
                    there = self.stored.setdefault((action.store, key), {})
                    there.update(self.memory[FULL, action.block])
                    if action.windowed:
                        there.update({~at: content for at, content in self.memory[WINDOWED, action.block].items()})
                self.post(IoEnded(io, StoreEnd(ok)))
            case StopReceiving():
                first = max(self.whole.pop(action.id, 0), self.held[action.id])
                for block in self.sequences[action.id].table[first:]:
                    self.memory.clear(block)  # what came late
                self.post(IoEnded(io, ReceiveEnd()))
            case _:
                self.sequences[action.id].copy(action, self.memory, ok=ok)
                self.post(IoEnded(io, SwapEnd(ok, 1e-6)))

    def work(self, limit: int = 10_000) -> None:
        """Ends I/O and steps until there are none."""
        for _ in range(limit):
            if self.ios:
                self.end_io(min(self.ios))
            elif self.run is not None:
                self.step()
            else:
                return
        raise AssertionError("it does not come to rest")

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.post(Tick())

    def assert_at_rest(self) -> None:
        assert (len((core := self.core).requests), core.budget.promised, core.budget.expected) == (0, 0, 0)
        assert (core.preempted.swapped_blocks, core.preempted.blocks_being_freed, core.blocks.num_used) == (0, 0, 0)

    def assert_reruns(self) -> None:
        """The same events lead to the same actions and the same state."""
        core: DecodeScheduler = pickle.loads(self.begun)
        for now, event, digest in self.events:
            out: list[Action] = []
            core.handle(now, event, out)
            assert digest_of(*out) == digest
        assert core.digest() == self.core.digest()

    def _adopted(self, number: int, stream: int, positions: tuple[int, ...]) -> None:
        if (kept := self.logged.get(number)) is not None:
            self.sequences |= kept
            del self.logged[number]
        assert positions == self.positions(number)
        for other, position in enumerate(positions, number):
            self.followers[other] = stream
            self.heard.setdefault(other, []).extend(self.answers.get(other, [])[position:])

    def _candidates(self, sequence: Sequence) -> Candidates:
        """What may follow a beam."""
        search = self.core.requests[sequence.request].search
        assert search is not None
        return candidates(
            sequence.tokens, search.width, last=len(sequence.tokens) + 1 - sequence.prompt == search.longest
        )

    def _select(self, chosen: ForkSequences) -> None:
        beams, kept = [sequence for _, sequence in self.group(chosen.id)], self.hypotheses.get(chosen.id, {})
        self.hypotheses[chosen.id] = follow_beams(beams, chosen, kept)

    def _ranked(self, ranked: AnswersRanked) -> None:
        """A search is over: its hypotheses are those of the plain one, which knows no blocks."""
        sequence, asked = self.sequences[ranked.id], self.asked[ranked.id]
        assert asked.search is not None
        found = [
            (self.hypotheses[ranked.id][number].tolist()[sequence.prompt :], score)
            for number, score in ranked.hypotheses
        ]
        start = sequence.tokens[: sequence.prompt].tolist()
        assert found == plain_search(start, asked.request.width, asked.total_tokens - sequence.prompt, asked.search)
        self.searched[ranked.id] = found

    def _receive(self, sequence: Sequence, end: int) -> None:
        """The KV of all positions before `end` comes; that of blocks which are held here is not sent."""
        first = self.core.settings.first_windowed_block(self.asked[sequence.request].request.tokens)
        for position in range(self.held[sequence.request] * BT, end):
            layers = LAYERS if position // BT >= first else range(WINDOWED)
            self._write(sequence, position, layers)

    def _load(self, action: LoadBlocks, came: int) -> None:
        """So many leading blocks of a load come whole, the others torn; those before the window come without it."""
        sequence, window = self.sequences.get(action.id), self.core.settings.window_blocks
        for index, block in enumerate(action.blocks):
            assert self.core.blocks.ref_count(block) == 1, "a load writes to a shared block"
            assert self.core.blocks.key_of(block) is None, "a load writes to a full block"
            for layer in LAYERS:
                self.memory[layer, block] = dict.fromkeys(range(BT), b"torn")
            if sequence is None or index >= came:
                continue
            layers = LAYERS if not window or index >= len(action.blocks) - window else range(WINDOWED)
            for position in range((action.first + index) * BT, (action.first + index + 1) * BT):
                self._write(sequence, position, layers)

    def _write(self, sequence: Sequence, position: int, layers: range = LAYERS) -> None:
        for layer in layers:
            self.memory.write(layer, sequence.table[position // BT], position % BT, sequence.content(position))

    def _perform(self, action: Action) -> None:
        match action:
            case MoveSlots(moves):
                self.memory.move(moves)
            case SetBlockTable(number, blocks):
                self.sequences[number].table = list(blocks)
            case AppendBlock(number, block):
                self.sequences[number].table.append(block)
            case StartRun():
                assert self.run is None
                self.run, self.left, self._copied = action, action.steps, False
            case StopRun():
                self.left = 1
            case CancelIo(io):
                self.cancelled.add(io)
            case SwapOut() | SwapIn() | StoreBlock() | StopReceiving() | LoadBlocks():
                assert action.io not in self.ios
                self.ios[action.io] = action
                if isinstance(action, StoreBlock):
                    key = self._writing[action.io] = self.sequences[action.id].keys()[action.index]
                    self._look(action.block, key, windowed=action.windowed)
            case SwapDrop(number):
                self.sequences[number].saved = {}
            case ForkSequences():
                self._select(action)
            case AnswersRanked():
                self._ranked(action)
            case ReservationRefused():
                self.refused.append(action)
            case RequestAborted(number, why):
                self.failed[number] = why
            case RequestFreed(number, logged):
                for other, sequence in self.group(number):
                    assert not sequence.saved, "swapped out and forgotten"
                    del self.sequences[other]
                if logged:
                    self.logged[number] = None
            case RequestParked(number):
                kept = self.logged[number] = {other: self.sequences.pop(other) for other, _ in self.group(number)}
                for hypothesis in kept.values():
                    assert not hypothesis.saved, "swapped out and forgotten"
                    hypothesis.table = []
            case DropOutputLog(number):
                if self.logged.pop(number) is not None:
                    self.lost.append(number)
            case RequestAdopted(number, stream, positions):
                self._adopted(number, stream, positions)
            case FenceConductor():
                self.fenced.append(action)
            case ReservationGranted(number, held):
                self.held[number] = held
            case FinishSequence():
                pass


WAYS = (Preemption.RECOMPUTE, Preemption.SWAP)
