"""Where a request goes: Algorithm 1 of the Mooncake paper, with a choice between loading and recomputing. Pure.

For each prefill instance the time to first token is predicted as waiting + loading + computing. As in Algorithm 1 a
prefix in a kvstore is considered only when it is longer than the instance's own by a factor (`balancing_threshold`);
unlike there it is used only when loading it is predicted to be quicker than recomputing it. The least prediction wins;
ties go to the instance with the fewest requests so far, so that equals take turns.

A decode instance is chosen by the predicted time of receiving the KV it lacks and generating the expected tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.cost import (
    Speeds,
    decode_step_seconds,
    load_is_cheaper,
    load_seconds,
    overlapped_seconds,
    prefill_seconds,
    transfer_seconds,
)
from services.conductor.stores import StoreView, by_reading

SPEED_NOISE = 1.5
"""Factor by which measured speeds of identical instances differ on noisy machines."""

DOUBT = 0.95
"""Factor on an instance's distance to the best prediction each time a request goes elsewhere. Only use corrects an
estimate, so a bad measurement must not keep an instance idle for ever."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs.

    `prompt_blocks` is room for the prompt at prefill, `total_blocks` for prompt and answer at decode; `decode_tokens`
    are the tokens that decode is expected to make.
    """

    prompt_tokens: int
    prompt_blocks: int
    total_blocks: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the KV that is served."""

    block_tokens: int
    token_bytes: int
    layers: int


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill instance as the request sees it."""

    id: str
    speeds: Speeds
    queue_s: float
    local_blocks: int
    total_blocks: int
    placed: int = 0
    draining: bool = False
    suspect: bool = False  # failed this request before: used only when no other is left


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode instance as the request sees it."""

    id: str
    speeds: Speeds
    sequences: int
    context_tokens: int
    room_blocks: int
    total_blocks: int
    held_blocks: int = 0
    placed: int = 0
    passed_over: int = 0  # requests placed elsewhere since the last one here
    draining: bool = False
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """The prediction for one prefill instance, seconds; `excluded` says why it cannot be used."""

    id: str
    local_blocks: int
    used_blocks: int
    queue_s: float
    load_s: float
    prefill_s: float
    kvstore: str = ""
    excluded: str = ""

    @property
    def busy_s(self) -> float:
        """Seconds the request keeps the instance busy."""
        return self.load_s + self.prefill_s

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.queue_s + self.busy_s


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """The prediction for one decode instance: seconds between tokens, and seconds until the request is done there."""

    id: str
    tbt_s: float
    finish_s: float


def rank_prefills(
    demand: Demand, shape: Shape, prefills: Sequence[PrefillView], stores: Sequence[StoreView], threshold: float
) -> list[PrefillChoice]:
    """Return a prediction per prefill instance: the usable ones first, best first, then the excluded ones."""
    best = next(iter(by_reading(stores)), None)
    choices = {view.id: predict_prefill(demand, shape, view, best, threshold) for view in prefills}
    views = {view.id: view for view in prefills}

    def order(choice: PrefillChoice) -> tuple[bool, bool, float, int, str]:
        view = views[choice.id]
        return bool(choice.excluded), view.suspect, choice.ttft_s, view.placed, view.id

    return sorted(choices.values(), key=order)


def predict_prefill(
    demand: Demand, shape: Shape, view: PrefillView, best: StoreView | None, threshold: float
) -> PrefillChoice:
    """Predict one prefill instance's time to first token (lines 5 to 14 of Algorithm 1)."""
    local = min(view.local_blocks * shape.block_tokens, demand.prompt_tokens - 1)  # the last token is always computed
    used_blocks, used, kvstore, load_s = view.local_blocks, local, "", 0.0
    if best is not None and best.blocks > view.local_blocks and best.blocks > threshold * view.local_blocks:
        stored = min(best.blocks * shape.block_tokens, demand.prompt_tokens - 1)
        if load_is_cheaper(
            view.speeds,
            total_tokens=demand.prompt_tokens,
            local_tokens=local,
            stored_tokens=stored,
            token_bytes=shape.token_bytes,
            layers=shape.layers,
        ):
            used_blocks, used, kvstore = best.blocks, stored, best.id
            load_s = load_seconds(view.speeds, (stored - local) * shape.token_bytes)
    prefill_s = prefill_seconds(view.speeds, demand.prompt_tokens - used, used)
    if kvstore:  # report as loading only what computing does not hide
        load_s = overlapped_seconds(load_s, prefill_s, shape.layers) - prefill_s
    return PrefillChoice(
        id=view.id,
        local_blocks=view.local_blocks,
        used_blocks=used_blocks,
        queue_s=view.queue_s,
        load_s=load_s,
        prefill_s=prefill_s,
        kvstore=kvstore,
        excluded=_prefill_exclusion(demand, view),
    )


def _prefill_exclusion(demand: Demand, view: PrefillView) -> str:
    if view.draining:
        return "draining"
    if view.total_blocks < demand.prompt_blocks:
        return f"too small: {view.total_blocks} blocks, the prompt needs {demand.prompt_blocks}"
    return ""


def rank_decodes(demand: Demand, shape: Shape, decodes: Sequence[DecodeView]) -> list[DecodeChoice]:
    """Return the decode instances that could take the request, best first.

    Those without room by their last report come last: the report may be stale, and Reserve decides.
    """

    def predict(view: DecodeView) -> DecodeChoice:
        tbt_s = decode_step_seconds(view.speeds, view.sequences + 1, view.context_tokens + demand.prompt_tokens)
        held = min(view.held_blocks * shape.block_tokens, demand.prompt_tokens)
        missing = (demand.prompt_tokens - held) * shape.token_bytes
        finish_s = transfer_seconds(view.speeds, missing) + tbt_s * demand.decode_tokens
        return DecodeChoice(view.id, tbt_s, finish_s)

    able = [view for view in decodes if not view.draining and view.total_blocks >= demand.total_blocks]
    choices = [(view, predict(view)) for view in able]
    best_s = min((choice.finish_s for _, choice in choices), default=0.0)

    def rank(view: DecodeView, choice: DecodeChoice) -> tuple[bool, bool, int, float, int, str]:
        # Where predictions differ by less than noise, the one with fewer sequences: otherwise the luckiest start-up
        # measurement draws all light load to one instance.
        doubted_s = best_s + (choice.finish_s - best_s) * DOUBT**view.passed_over
        sequences = view.sequences if doubted_s <= SPEED_NOISE * best_s else sys.maxsize
        crowded = view.room_blocks < demand.total_blocks
        return (view.suspect, crowded, sequences, choice.finish_s, view.placed, view.id)

    return [choice for _, choice in sorted(choices, key=lambda pair: rank(*pair))]
