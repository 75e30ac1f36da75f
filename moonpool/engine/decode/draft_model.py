"""Drafting by a small model: a second engine guesses how answers go on, for the answers' own model to check.

The small model draws with the seed and the position of the answer's token, so models that nearly agree mostly draw the
same token. A wrong guess costs time alone. The second engine has a separate pool, whose KV has no keys: no kvstore and
no other instance sees this KV. KV for wrong guesses is computed over.
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import tokens_to_bytes
from moonpool.base.sampling_params import SampleSpec, SamplingParams
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.steps import SequenceStep, Step, StepResult
from moonpool.engine.interface import Engine


@frozen
class DraftRequest:
    """An answer that wants guesses.

    Attributes:
        id: the sequence's id.
        tokens: prompt and answer.
        sample: how the next token is chosen.
        most: guesses, at least one.
    """

    id: int
    tokens: "array[int]"
    sample: SampleSpec
    most: int


@dataclass(slots=True, eq=False)
class _Drafted:
    """One answer in the small model's pool: the blocks, and the tokens with KV there."""

    table: list[int] = field(default_factory=list)
    computed: "array[int]" = field(default_factory=lambda: array("i"))
    agreed: int = 0
    """Leading tokens in `computed` that the answer has."""


class DraftModel:
    """Guesses next tokens with a small model that has the same vocabulary.

    Args:
        engine: runs the small model only.
        max_tokens: longest sequence that the small model takes.
    """

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self._engine, self._max_tokens = engine, max_tokens
        self._size, self._chunk = engine.layout.block_size, engine.max_num_batched_tokens
        self._free = list(range(engine.blocks))
        self._answers: dict[int, _Drafted] = {}
        """Least recently guessed first."""
        self._numbers = itertools.count(1)

    @property
    def speeds(self) -> Speeds:
        """The small model's speeds, as measured at start."""
        return self._engine.speeds

    @property
    def free_blocks(self) -> int:
        """Blocks in the small model's pool that no answer has."""
        return len(self._free)

    def forget(self, number: int) -> None:
        """Drop an answer that has ended."""
        if (answer := self._answers.pop(number, None)) is not None:
            self._free += answer.table

    async def guess(self, wanted: Sequence[DraftRequest]) -> list[list[int]]:
        """Guess for each answer, in order; none for an answer that the pool or the small model cannot hold.

        Raises:
            Unavailable: the engine has failed.
        """
        steps, kept = max(asked.most for asked in wanted), {asked.id for asked in wanted}
        # An answer may end meanwhile. An ended answer's blocks are free, and given away by the next call.
        held = [(asked, answer) for asked in wanted if (answer := self._hold(asked, steps, kept)) is not None]
        if not held:
            return [[] for _ in wanted]
        for request, answer in held:
            await self._catch_up(request.tokens, answer)
        results = list[StepResult]()
        step = Step(next(self._numbers), tuple(_part(request, answer) for request, answer in held), steps=steps)
        last = await self._engine.run(step, on_step=results.append)
        rounds = [step_result.sampled for result in (*results, last) for step_result in (*result.earlier, result)]
        found = {}
        for index, (request, answer) in enumerate(held):
            guesses = [token for sampled in rounds if sampled and (token := sampled[index]) is not None]
            answer.computed = request.tokens + array("i", guesses[:-1])  # the last guess has no KV
            answer.agreed = len(request.tokens)
            found[request.id] = guesses[: request.most]
        return [found.get(asked.id, []) for asked in wanted]

    def _hold(self, request: DraftRequest, steps: int, kept: set[int]) -> _Drafted | None:
        """Give an answer blocks for tokens and guesses, or drop it; answers that are not `kept` make room."""
        count = len(request.tokens)
        answer = self._answers.pop(request.id, None) or _Drafted()
        self._answers[request.id] = answer
        missing = -(-(count + steps) // self._size) - len(answer.table)
        for number in [other for other in self._answers if other not in kept]:
            if len(self._free) >= missing:
                break
            self.forget(number)
        if len(self._free) < missing or count + steps > self._max_tokens:
            self.forget(request.id)
            return None
        answer.table += [self._free.pop() for _ in range(missing)]
        most = min(len(answer.computed), count - 1)  # the last token is computed in any case
        answer.agreed = min(answer.agreed, most)
        while answer.agreed < most and answer.computed[answer.agreed] == request.tokens[answer.agreed]:
            answer.agreed += 1
        return answer

    async def _catch_up(self, tokens: "array[int]", answer: _Drafted) -> None:
        """Compute an answer's tokens beyond one step's tokens."""
        while len(tokens) - answer.agreed > self._chunk:
            end = answer.agreed + self._chunk
            part = SequenceStep(tokens_to_bytes(tokens[answer.agreed : end]), answer.agreed, tuple(answer.table))
            await self._engine.run(Step(next(self._numbers), (part,)))
            answer.computed, answer.agreed = tokens[:end], end


def _part(request: DraftRequest, answer: _Drafted) -> SequenceStep:
    tokens = tokens_to_bytes(request.tokens[answer.agreed :])
    return SequenceStep(tokens, answer.agreed, tuple(answer.table), sample=_plainly(request.sample))


def _plainly(sample: SampleSpec) -> SampleSpec:
    """Return the same draw without penalties, bans, format and log probabilities, which guesses do without."""
    asked = sample.params
    params = SamplingParams(temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, min_p=asked.min_p)
    return SampleSpec(params, seed=sample.seed, position=sample.position)
