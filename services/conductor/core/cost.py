"""What a placement is predicted to take: Algorithm 1 of the Mooncake paper, with a choice of loading or recomputing.

As in Algorithm 1 the prefix of another instance (a kvstore, or the pool of an engine) is considered only when it is
longer than the instance's own by a factor (`threshold`); unlike there it is used only when loading it is predicted to
be quicker than recomputing it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from moonpool.cost import (
    PrefillWork,
    Speeds,
    decode_step_seconds,
    overlapped_seconds,
    pipelined_seconds,
    transfer_seconds,
    work_of,
    work_seconds,
)
from services.conductor.core.facts import Demand, Shape
from services.conductor.core.parts import Parts
from services.conductor.core.reads import Read, Source


class PrefillChoice(NamedTuple):
    """The prediction for one prefill instance, seconds; `excluded` says why it cannot be used.

    `load_s` is what computing does not hide of loading. `source` is whom it would load from, whose link is busy with it
    for `read_s`; it has `cold_blocks` of what is read on SSD only. `busy_s` is how much later the next prompt begins
    for this one: less than its own time where stages overlap. `later_s` is what prompts that come later are expected to
    take of the step in which this one ends, if it waits. `overhead_s` is what calls take; `factors` are those by which
    the parts are corrected; `fixed_s` are seconds of `prefill_s` that do not grow with tokens.
    `shared`: share of its work there beside which other engines of its host compute; None = there are none. `others`:
    requests that its host has as it is placed.
    """

    id: str
    local_blocks: int
    used_blocks: int
    queue_s: float
    load_s: float
    prefill_s: float
    busy_s: float
    source: str = ""
    excluded: str = ""
    overhead_s: float = 0.0
    factors: Parts = Parts()
    shared: float | None = None
    others: int = 0
    read_s: float = 0.0
    later_s: float = 0.0
    fixed_s: float = 0.0
    cold_blocks: int = 0

    @property
    def read(self) -> Read:
        """What it would read."""
        return Read(self.read_s, self.cold_blocks / max(1, self.used_blocks - self.local_blocks))

    @property
    def parts(self) -> Parts:
        """Its time at the instance."""
        return Parts(self.queue_s, self.load_s, self.fixed_s, self.prefill_s - self.fixed_s, self.later_s)

    @property
    def alone_s(self) -> float:
        """Predicted time to first token on an idle instance."""
        return self.overhead_s + self.load_s + self.prefill_s

    @property
    def known_s(self) -> float:
        """Predicted time to first token by what is known now: places are compared by it."""
        return self.queue_s + self.alone_s

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token, with what is expected to come later."""
        return self.known_s + self.later_s


class DecodeChoice(NamedTuple):
    """The prediction for one decode instance.

    `tbt_s`: seconds between tokens. `finish_s`: seconds until the request is done there. `blocks`: room that it is
    expected to need there.
    """

    id: str
    tbt_s: float
    finish_s: float
    blocks: int = 0


class PrefillCost(NamedTuple):
    """Seconds of one prompt on an idle instance, and what it uses of its prefix; see `PrefillChoice`."""

    load_s: float
    prefill_s: float
    busy_s: float
    used_blocks: int
    source: str
    read_s: float = 0.0
    fixed_s: float = 0.0
    cold_blocks: int = 0

    @property
    def alone_s(self) -> float:
        """Time to first token."""
        return self.load_s + self.prefill_s


_Rest = tuple[Source, int, PrefillWork]
"""A prefix that may be loaded, its blocks, and the work behind it."""
_Load = tuple[Source, int, PrefillWork, float, float]
"""The same at some speeds: also the work's seconds, and bytes per second of reading."""


class PrefillModel:
    """Predicts one request's prompt on any instance.

    Args:
        demand: of the request.
        shape: of the KV.
        sources: whom a prefix may be loaded from; few.
        threshold: a prefix elsewhere must be so many times longer than the instance's own.
    """

    def __init__(self, demand: Demand, shape: Shape, sources: Sequence[Source], threshold: float) -> None:
        self._tokens = demand.prompt_tokens
        self._shape = shape
        self._sources = sources
        self._block_bytes = shape.block_tokens * shape.token_bytes
        self._threshold = threshold
        self._works: dict[tuple[int, int], PrefillWork] = {}
        self._asked: tuple[Speeds | None, int] = None, 0
        self._loads: list[_Load] = []
        self._rests: dict[int, list[_Rest]] = {}

    def cost(self, speeds: Speeds, stages: int, step_tokens: int, local_blocks: int) -> PrefillCost:
        """The prediction for an instance of these speeds that holds `local_blocks` leading blocks itself."""
        if self._asked[0] is not speeds or self._asked[1] != step_tokens:  # those of a class are asked about in a row
            self._asked, self._loads = (speeds, step_tokens), self._loads_at(speeds, step_tokens)
        local = self._works.get((local_blocks, step_tokens)) or self._work(local_blocks, step_tokens)
        compute_s = least_s = work_seconds(speeds, *local)
        best, least_blocks, shape = None, max(local_blocks, self._threshold * local_blocks), self._shape
        for load in self._loads:
            source, blocks, rest, rest_s, rate = load
            if blocks > least_blocks:
                nbytes = (rest.prefix_tokens - local.prefix_tokens) * shape.token_bytes
                load_s = source.read_s(rate, nbytes, source.cold_blocks(local_blocks) * self._block_bytes)
                both_s = overlapped_seconds(source.wait_s + load_s, rest_s, shape.layers)
                if both_s < least_s and load_s:
                    best, least_s, read_s = load, both_s, load_s
        if best is None:
            own_s = compute_s if stages == 1 else pipelined_seconds(compute_s, steps=local.steps, stages=stages)
            fixed_s = fixed_seconds(speeds, local, compute_s, own_s)
            return PrefillCost(0.0, own_s, compute_s / stages, local_blocks, "", 0.0, fixed_s)
        source, blocks, rest, compute_s, _ = best
        own_s, busy_s = compute_s, max(compute_s / stages, read_s)
        if stages > 1:
            own_s = pipelined_seconds(own_s, steps=rest.steps, stages=stages)
            least_s = overlapped_seconds(source.wait_s + read_s, own_s, shape.layers)
        fixed_s, cold = fixed_seconds(speeds, rest, compute_s, own_s), source.cold_blocks(local_blocks)
        return PrefillCost(least_s - own_s, own_s, busy_s, blocks, source.id, read_s, fixed_s, cold)

    def alone_s(self, speeds: Speeds, stages: int, step_tokens: int, blocks: int) -> float:
        """Seconds until the first token on an idle instance that holds so many leading blocks and loads nothing."""
        work = self._works.get((blocks, step_tokens)) or self._work(blocks, step_tokens)
        compute_s = work_seconds(speeds, *work)
        return compute_s if stages == 1 else pipelined_seconds(compute_s, steps=work.steps, stages=stages)

    def _loads_at(self, speeds: Speeds, step_tokens: int) -> list[_Load]:
        """What an instance of these speeds could load."""
        rests = self._rests.get(step_tokens)
        if rests is None:
            rests = [(it, it.blocks, self._work(it.blocks, step_tokens)) for it in self._sources]
            self._rests[step_tokens] = rests
        return [
            (source, blocks, rest, work_seconds(speeds, *rest), source.rate(speeds)) for source, blocks, rest in rests
        ]

    def _work(self, blocks: int, step_tokens: int) -> PrefillWork:
        """What is to be computed behind so many leading blocks."""
        prefix = self._shape.reused_tokens(self._tokens, blocks)
        new = self._tokens - prefix
        work = self._works[blocks, step_tokens] = work_of(new, prefix, steps_of(new, step_tokens))
        return work


def fixed_seconds(speeds: Speeds, work: PrefillWork, compute_s: float, own_s: float) -> float:
    """Of the time that work takes in a pipeline, as of the `compute_s` one stage after the other, what is fixed."""
    return work.steps * speeds.prefill_base_s * (own_s / compute_s) if compute_s else 0.0


def steps_of(tokens: int, step_tokens: int) -> int:
    """Steps that so many tokens take; 0 tokens a step = all in one."""
    return -(-tokens // step_tokens) if step_tokens else 1


class DecodeModel:
    """Predicts one request's answer on any decode instance."""

    def __init__(self, demand: Demand, shape: Shape) -> None:
        self._prompt_tokens = demand.prompt_tokens
        self._tokens = demand.decode_tokens
        self._choices = demand.choices
        self._context_tokens = demand.prompt_tokens * demand.choices
        self._total_blocks = demand.total_blocks
        self._shape = shape
        self._lacking: dict[int, int] = {}
        self._needs: dict[int, int] = {}

    def blocks(self, answer_tokens: int) -> int:
        """Room that the request is expected to need where answers are expected to have so many tokens."""
        blocks = self._needs.get(answer_tokens)
        if blocks is None:
            need = Need(self._prompt_tokens, self._total_blocks, self._choices)
            blocks = expected_blocks(self._shape, need, answer_tokens)
            self._needs[answer_tokens] = blocks
        return blocks

    def fixed_s(self, speeds: Speeds, held_blocks: int) -> float:
        """Seconds of the request on an idle instance: receiving the KV it lacks, and its own share of steps."""
        receive_s = transfer_seconds(speeds, self._lacking_bytes(held_blocks))
        return receive_s + self._tokens * decode_step_seconds(speeds, self._choices, self._context_tokens)

    def load_s(self, step_load_s: float) -> float:
        """Seconds added by what runs there already, which makes each step longer by `step_load_s`."""
        return self._tokens * step_load_s

    def choice(
        self, name: str, speeds: Speeds, sequences: int, context_tokens: int, held_blocks: int, blocks: int
    ) -> DecodeChoice:
        """The prediction for an instance with this load, where the request is expected to need so many blocks."""
        tbt_s = decode_step_seconds(speeds, sequences + self._choices, context_tokens + self._context_tokens)
        receive_s = transfer_seconds(speeds, self._lacking_bytes(held_blocks))
        return DecodeChoice(name, tbt_s, receive_s + self._tokens * tbt_s, blocks)

    def _lacking_bytes(self, held_blocks: int) -> int:
        nbytes = self._lacking.get(held_blocks)
        if nbytes is None:
            held = min(held_blocks * self._shape.block_tokens, self._prompt_tokens)
            nbytes = self._lacking[held_blocks] = (self._prompt_tokens - held) * self._shape.token_bytes
        return nbytes


class Need(NamedTuple):
    """What room depends on: tokens of the request now, blocks with its longest answers, and how many these are."""

    tokens: int
    longest: int
    choices: int = 1


def expected_blocks(shape: Shape, need: Need, answer_tokens: int) -> int:
    """Blocks that a request is expected to need.

    Args:
        shape: of the KV.
        need: of the request.
        answer_tokens: that the decode instance expects an answer to have; 0 = not told: the longest is assumed.
    """
    if not answer_tokens:
        return need.longest
    return min(shape.blocks_for_choices(need.tokens, answer_tokens, need.choices), need.longest)


def step_load_s(speeds: Speeds, sequences: int, context_tokens: int) -> float:
    """Seconds that what runs on a decode instance adds to each step."""
    return speeds.decode_per_sequence_s * sequences + speeds.decode_per_context_token_s * context_tokens
