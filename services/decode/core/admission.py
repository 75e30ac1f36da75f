"""Which requests are promised room: their expected blocks must fit, and the promised time between tokens must hold."""

from collections.abc import Collection

from moonpool.core.spread import spread
from moonpool.cost import SpeedTracker, decode_step_seconds
from services.decode.core.config import CoreConfig
from services.decode.core.events import Reserve
from services.decode.core.lengths import TYPICAL, AnswerLengths
from services.decode.core.lives import Life, worst_moments
from services.decode.core.planner import Planner
from services.decode.core.request import Request, State
from services.decode.core.room import Room

LOOKS = 8
"""Times at which a forecast looks at most, beside the start of what is asked about."""


class Admission:
    """Admits requests, or says why not.

    Args:
        config: of the core.
        room: counts blocks.
        planner: knows the batch and those who wait.
        tracker: predicts the engine's times.
        lengths: says how long answers become.
    """

    def __init__(
        self, config: CoreConfig, room: Room, planner: Planner, tracker: SpeedTracker, lengths: AnswerLengths
    ) -> None:
        self._config = config
        self._room = room
        self._planner = planner
        self._tracker = tracker
        self._lengths = lengths

    def predicted_tbt_s(self, event: Reserve, others: Collection[Request], now: float) -> float:
        """Seconds per step with this request in the batch, and all that are here or were promised room.

        Where it is told when the request starts: with those that are expected to be here then; or the longest, while
        this one is expected to be here, when others start that were promised room before and come later.
        """
        batch = self._planner.batch
        running = State.RUNNING  # a local name: there are many, and few are not in the batch
        apart = [request for request in others if request.state is not running and request not in batch]
        context = batch.context + event.tokens * event.width + sum(map(batch.context_of, apart))
        sequences = len(batch) + event.width + sum(request.places for request in apart)
        step_s = self._step_s(sequences, context)
        if not event.starts_in_s or not step_s:
            return step_s
        starts_at, most = now + event.starts_in_s, event.total_tokens - event.tokens
        later = [request.starts_at for request in apart if not request.is_started and request.starts_at > starts_at]
        times = [at for at in spread(later, LOOKS) if not self._has_ended(0, most, (at - starts_at) / step_s)]
        return max([self._step_at(at, others, (sequences, context), now, step_s) for at in (starts_at, *times)])

    def _step_at(
        self, at: float, others: Collection[Request], everybody: tuple[int, int], now: float, step_s: float
    ) -> float:
        """Seconds per step at a time over those of everybody who are expected to be here then."""
        batch, (sequences, context) = self._planner.batch, everybody
        away = [request for request in others if self._is_away(request, at, now, step_s)]
        sequences -= sum([request.places for request in away])
        return self._step_s(sequences, context - sum(map(batch.context_of, away)))

    def _step_s(self, sequences: int, context: int) -> float:
        return decode_step_seconds(self._tracker.speeds, min(sequences, self._config.max_batch), context)

    def _is_away(self, request: Request, at: float, now: float, step_s: float) -> bool:
        """Whether a request has not started by a time, or its only sequence is expected to have ended by then."""
        starts_at = now if request.is_started else max(request.starts_at, now)
        if at < starts_at or request.width > 1:
            return at < starts_at
        tokens = self._planner.batch.context_of(request)
        made = max(0, tokens - request.prompt_tokens)
        return self._has_ended(made, request.total_tokens - tokens, (at - starts_at) / step_s)

    def _has_ended(self, made: int, most: int, steps: float) -> bool:
        """Whether an answer is expected to end within some steps, of which `most` more tokens are wanted at most."""
        return min(most, self._lengths.expected(made, TYPICAL) - made) <= steps

    def refuse(
        self, event: Reserve, request: Request, tbt_s: float, others: Collection[Request], now: float
    ) -> tuple[str, str] | None:
        """Promises blocks for the prompt; or returns why not, as a reason and in words."""
        breaks = self._breaks_tbt(event, tbt_s, others, now) if event.tbt_slo_s else None
        return breaks or self._admit(request, alone=not others)

    def _breaks_tbt(
        self, event: Reserve, tbt_s: float, others: Collection[Request], now: float
    ) -> tuple[str, str] | None:
        """Why a promised time between tokens could not be kept: the new request's, or an earlier one's."""
        taken, places = self._planner.places_taken + sum(self._planner.seats_kept.values()), self._config.max_batch
        if taken + event.width > places:
            return "tbt_slo", f"{taken} of the {places} places of a step are taken, {event.width} are needed"
        limit = min([event.tbt_slo_s, *(request.tbt_slo_s for request in others if request.tbt_slo_s)])
        if tbt_s <= limit:
            tbt_s = self._longest_step_s(event, tbt_s, others, now)
        if tbt_s > limit:
            return "tbt_slo", f"a token every {tbt_s:.4g} s is predicted, {limit:.4g} s is wanted or promised to others"
        return None

    def _longest_step_s(self, event: Reserve, step_s: float, others: Collection[Request], now: float) -> float:
        """Seconds of the longest step while a request is here, if all grow and end as is expected."""
        planner = self._planner
        steps_in = event.starts_in_s / step_s if step_s else 0.0
        growth = self._growth(event.tokens - event.prompt_tokens, event.total_tokens - event.tokens)
        asked = Life(steps_in, steps_in + growth, event.width, event.tokens * event.width)
        lives = [asked]
        for request in others:
            tokens, context = max(map(planner.batch.tokens_of, request.members)), planner.batch.context_of(request)
            waits = 0.0 if request.is_started or not step_s else max(0.0, request.starts_at - now) / step_s
            growth = self._growth(tokens - request.prompt_tokens, request.total_tokens - tokens)
            lives.append(Life(waits, waits + growth, request.places, context))
        worst = max([self._step_s(*size) for size in worst_moments(lives, asked)])
        return worst + planner.least_chunk_s

    def _growth(self, made: int, most: int) -> int:
        """Steps that an answer is expected to be here for, of which `most` more tokens are wanted at most."""
        made = max(0, made)
        return max(0, min(most, self._lengths.expected(made) - made) - 1)

    def _admit(self, request: Request, *, alone: bool) -> tuple[str, str] | None:
        """Promises blocks for the prompt if what is expected to be needed later fits as well; else says why not."""
        [member], room = request.members, self._room
        held = room.blocks.match(member.keys)
        new = self._config.blocks_for(member.tokens) - len(held)
        cost = room.cost(held, new)
        member.table, request.promised = held, new
        self._planner.expect(request)
        reserve = 0 if alone else room.watermark + room.claims
        if room.spare < cost + reserve:
            needed = cost + request.claim
            room.claim(request, 0)
            return "no_decode_room", (
                f"no room for {needed} blocks, {room.spare} are free and not promised, "
                f"{max(0, reserve - request.claim)} of them expected to be needed"
            )
        room.promise(request, held, new)
        return None
