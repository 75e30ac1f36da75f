"""Speculative decoding: guesses how answers go on, and decides which guesses a step checks.

Prompt look-up: find the answer's last tokens at their last earlier place, in the prompt or in the answer, and guess the
tokens that followed there. Suffix decoding: find them in recent answers of the tenant
(`moonpool.engine.decode.recent_answers`). Where both find something, the source that is right more often guesses.

A step checks a guess by computing a row for each guessed token beside the rows of all answers. An answer goes on with
the guesses that equal the sampled tokens.

Guesses are also compared with the tokens that come anyway. So the share of right guesses is known before a step checks
any guess, and text that does not repeat costs nothing.

If the text does not repeat, a small model may guess (`moonpool.engine.decode.draft_model`). The small model's guesses
take time before a step checks them, so the small model is asked only if the guesses are expected to pay.
"""

from array import array
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Self

import numpy as np

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey
from moonpool.base.scheduling.latency import Speeds, decode_step_seconds
from moonpool.engine.decode.recent_answers import MOST_MATCHED, RecentAnswer, RecentAnswers, agreeing

GRAM = 3
"""Tokens that must agree before a guess begins."""
MOST_PLACES = 1 << 16
"""Places that are remembered for an answer, at most."""
READ_SINGLY = 64
"""More new tokens than this number are read together, for example a prompt's tokens."""
FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
LOW_BITS = 0xFFFFFFFF
FIRST_RATES = (0.3, 0.3, 0.5, 0.6, 0.8, 0.9)
"""Assumed shares of right guesses, by class (`RightGuesses`)."""
FIRST_WEIGHT = 4.0
"""Guesses that an assumed share counts as."""
KEPT, KEPT_IN_COMMON = 0.95, 0.99
"""Factor by which an earlier guess counts less after each guess in the class: for one answer, for all answers."""
LEAST_GAIN = 1.1
"""Guesses are checked if tokens a second are predicted to grow by this factor at least."""
OVERHEAD_WEIGHT = 0.1
FIRST_MODEL_RATE = 0.7
"""Assumed share of right guesses by a small model, each behind right guesses."""
FORGOTTEN = 0.98
"""Factor by which a small model's earlier guesses count less after a run without any, so the model is tried again."""


class DraftSource(Enum):
    """Where guesses come from."""

    TEXT = "text"
    """Prompt and answer."""
    ANSWERS = "answers"
    """Recent answers of the tenant."""
    MODEL = "model"
    """A small model."""


class RightGuesses:
    """Share of right guesses, in classes by the number of agreeing tokens before (0, 1, 2 and 3, 4 to 7, ...).

    Args:
        kept: factor by which an earlier guess counts less after each further guess.
        common: rates over all answers, where a class without guesses begins; None: begins at `FIRST_RATES`.
    """

    def __init__(self, kept: float, common: Self | None = None) -> None:
        self._kept, self._common = kept, common
        self._guesses, self._right = [0.0] * len(FIRST_RATES), [0.0] * len(FIRST_RATES)

    def observe(self, matched: int, *, right: bool) -> None:
        """Count a guess behind `matched` agreeing tokens."""
        at = _class_of(matched)
        self._guesses[at] = self._guesses[at] * self._kept + 1.0
        self._right[at] = self._right[at] * self._kept + right
        if self._common is not None:
            self._common.observe(matched, right=right)

    def rate(self, matched: int) -> float:
        """Expected share of right guesses behind `matched` agreeing tokens."""
        at = _class_of(matched)
        first = FIRST_RATES[at] if self._common is None else self._common.rate(matched)
        return (self._right[at] + FIRST_WEIGHT * first) / (self._guesses[at] + FIRST_WEIGHT)


def _class_of(matched: int) -> int:
    return min(matched.bit_length(), len(FIRST_RATES) - 1)


class FollowedText:
    """A text that an answer repeats: its next token is the guess for the answer's next one.

    Args:
        right: share of right guesses, for one answer.

    Attributes:
        matched: agreeing tokens before the guessed one.
    """

    def __init__(self, right: RightGuesses) -> None:
        self._tokens, self._place = array("i"), 0
        self._right, self.matched = right, 0

    def begin(self, tokens: "array[int]", place: int, matched: int) -> None:
        """Follow `tokens` from a place on, behind so many agreeing tokens."""
        self._tokens, self._place, self.matched = tokens, place, matched

    def stop(self) -> None:
        """Guess nothing until the next beginning."""
        self.begin(array("i"), 0, 0)

    def compare(self, token: int) -> None:
        """Take the answer's next token."""
        if self._place >= len(self._tokens):
            self.stop()
            return
        right = self._tokens[self._place] == token
        self._right.observe(self.matched, right=right)
        # Behind a wrong guess the text may go on as if one token had been replaced.
        self._place, self.matched = self._place + 1, min(self.matched + 1, MOST_MATCHED) if right else 0

    @property
    def rate(self) -> float:
        """Expected share of right guesses for the next token; 0 = nothing is guessed."""
        return self._right.rate(self.matched) if self._place < len(self._tokens) else 0.0

    def guess(self, most: int, *, loops: bool, media: Sequence[tuple[int, int]] = ()) -> list[tuple[int, float]]:
        """Up to `most` next tokens, each with the probability that this token and all before are right.

        Args:
            most: tokens.
            loops: the text is the answer's own: behind the end come the guesses.
            media: where pictures stand in the text, [begin, end): no answer repeats their tokens.
        """
        for begin, end in media:
            if self._place < end:
                most = min(most, max(begin - self._place, 0))
                break
        tokens, count, found, likely = self._tokens, len(self._tokens), list[tuple[int, float]](), 1.0
        for number in range(most if loops and self._place < count else min(most, count - self._place)):
            place = self._place + number
            token = tokens[place] if place < count else found[place - count][0]
            likely *= self._right.rate(self.matched + number)
            found.append((token, likely))
        return found


class LookupDrafter:
    """Guesses an answer's next tokens from texts. Each new token costs the same, however long the texts are.

    Args:
        tokens: prompt and answer; the answer's owner appends new tokens.
        most_tokens: greatest length of `tokens`.
        common: share of right guesses over all answers, from the own text.
        recent: recent answers, the answer there, and the share of right guesses from there over all answers; None =
            only the own text guesses.
        media: where pictures stand in the prompt, [begin, end).

    Attributes:
        source: what made the last guesses.
    """

    def __init__(
        self,
        tokens: "array[int]",
        most_tokens: int,
        common: RightGuesses,
        recent: tuple[RecentAnswers, RecentAnswer, RightGuesses] | None = None,
        media: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._tokens, self._read, self._media = tokens, 0, media
        self._bits = (min(2 * most_tokens, MOST_PLACES) - 1).bit_length()
        self._places = np.zeros(1 << self._bits, np.int32)
        """By the hash of `GRAM` tokens: the place behind their last occurrence."""
        self._place_at = self._places.data
        self._own = FollowedText(RightGuesses(KEPT, common))
        self._recent, self._other = recent, FollowedText(RightGuesses(KEPT, recent[2] if recent else None))
        self.source = DraftSource.TEXT

    def guess(self, most: int) -> list[tuple[int, float]]:
        """Up to `most` next tokens, each with the probability that this token and all before are right."""
        self._read_new()
        if self._other.rate > self._own.rate:
            self.source = DraftSource.ANSWERS
            return self._other.guess(most, loops=False)
        self.source = DraftSource.TEXT
        return self._own.guess(most, loops=True, media=self._media)

    def end(self) -> None:
        """The answer has ended: other answers may still repeat it."""
        if self._recent is not None:
            recent, answer, _ = self._recent
            recent.end(answer)

    def _read_new(self) -> None:
        """Read the tokens that came since the last call, and compare guesses with them."""
        if len(self._tokens) - self._read > READ_SINGLY:
            self._read_together(len(self._tokens) - 1)
        for place in range(self._read, len(self._tokens)):
            self._read_one(place)
        self._read = len(self._tokens)

    def _read_one(self, place: int) -> None:
        tokens = self._tokens
        self._own.compare(tokens[place])
        if self._recent is not None:
            self._find_in_others(*self._recent, place)
        if place + 1 < GRAM:
            return
        at = self._hash(*tokens[place + 1 - GRAM : place + 1])
        if self._own.matched < GRAM and (earlier := self._place_at[at]):
            matched = agreeing(tokens, earlier, tokens, place + 1)
            if matched >= GRAM:
                self._own.begin(tokens, earlier, matched)
        self._place_at[at] = place + 1

    def _find_in_others(self, recent: RecentAnswers, answer: RecentAnswer, _: RightGuesses, place: int) -> None:
        self._other.compare(self._tokens[place])
        rows = recent.read(answer, place + 1)
        if (found := recent.find(answer, rows, place + 1, self._other.matched)) is not None:
            self._other.begin(*found)

    def _read_together(self, end: int) -> None:
        """Remember the places up to `end`, without guesses."""
        first = max(self._read - GRAM + 1, 0)
        new = np.frombuffer(self._tokens, np.int32)[first:end].astype(np.uint64)
        hashes = np.zeros(len(new) - GRAM + 1, np.uint64)
        for at, factor in enumerate(FACTORS):
            hashes += new[at : at + len(hashes)] * np.uint64(factor)
        rows = (hashes & np.uint64(LOW_BITS)) >> np.uint64(32 - self._bits)
        self._places[rows] = np.arange(first + GRAM, end + 1)
        self._own.stop()
        self._other.stop()
        self._read = end

    def _hash(self, first: int, second: int, third: int) -> int:
        mixed = first * FACTORS[0] + second * FACTORS[1] + third * FACTORS[2]
        return (mixed & LOW_BITS) >> (32 - self._bits)


class _ModelGuesses:
    """Share of a small model's guesses that are right, and how much longer guesses take than the model's speeds say."""

    def __init__(self) -> None:
        self._guesses = self._right = 0.0
        self.dearer = 1.0

    @property
    def rate(self) -> float:
        """Expected share of right guesses, each behind right guesses."""
        return (self._right + FIRST_WEIGHT * FIRST_MODEL_RATE) / (self._guesses + FIRST_WEIGHT)

    def observe(self, checked: int, right: int, dearer: float) -> None:
        kept = KEPT_IN_COMMON**checked
        self._guesses, self._right = self._guesses * kept + checked, self._right * kept + right
        self.dearer += OVERHEAD_WEIGHT * (dearer - self.dearer)

    def forget(self) -> None:
        """A run goes without guesses."""
        self._guesses, self._right = self._guesses * FORGOTTEN, self._right * FORGOTTEN


@frozen
class DraftingSequence:
    """One sequence in a step, for `DraftPlanner`.

    Attributes:
        drafter: guesses for the sequence; None = no guesses.
        context: tokens in the sequence.
        most: guesses that the sequence has blocks for, and may take.
    """

    drafter: LookupDrafter | None
    context: int
    most: int


class DraftPlanner:
    """Decides which guesses a step checks: the number that makes tokens per second grow most, by the engine's speeds.

    A guess costs as much as one more sequence. Steps that check guesses are ordered one by one; the planner learns what
    ordering costs (`observe_overhead`).

    Args:
        most: most guesses for one sequence.
        always: guesses are checked whatever they cost.
        ngram: guesses are looked up in prompt and answer.
        recent: guesses are also looked up in recent answers; None = they are not.
        speeds: the engine's.
    """

    def __init__(
        self,
        most: int,
        speeds: Callable[[], Speeds],
        *,
        always: bool = False,
        ngram: bool = True,
        recent: RecentAnswers | None = None,
    ) -> None:
        self._most, self._speeds, self._always, self._ngram = most, speeds, always, ngram
        self._recent, self._common_recent = recent, RightGuesses(KEPT_IN_COMMON)
        self._overhead_s = 0.0
        self._model = _ModelGuesses()
        self._common = RightGuesses(KEPT_IN_COMMON)

    def drafter(
        self,
        tokens: "array[int]",
        most_tokens: int,
        root: BlockKey,
        tenant: str,
        first: int,
        *,
        transient: bool,
        media: Sequence[tuple[int, int]] = (),
    ) -> LookupDrafter:
        """Return a drafter for one answer; see `LookupDrafter` and `RecentAnswers.add`.

        `transient`: nothing of the answer is kept, so no other answer gives to it, or gets from it.
        """
        if self._recent is None or transient:
            return LookupDrafter(tokens, most_tokens, self._common, media=media)
        answer = self._recent.add(root, tenant, tokens, first)
        return LookupDrafter(
            tokens, most_tokens, self._common, (self._recent, answer, self._common_recent), media=media
        )

    def observe_overhead(self, seconds: float) -> None:
        """Learn how many seconds a step with guesses takes besides the engine's own seconds."""
        self._overhead_s += OVERHEAD_WEIGHT * (max(seconds, 0.0) - self._overhead_s)

    def model_guesses(self, sequences: int, context: int, draft: Speeds) -> int:
        """Return how many guesses per sequence to ask a small model for; 0 = guesses would not pay.

        Args:
            sequences: number of sequences in the step.
            context: tokens of all sequences together.
            draft: the small model's speeds.
        """
        if self._always:
            return self._most
        speeds, rate = self._speeds(), self._model.rate
        plain_s = decode_step_seconds(speeds, sequences, context)
        each_s = plain_s - speeds.decode_base_s + self._model.dearer * decode_step_seconds(draft, sequences, context)
        best, gain, right = 0, LEAST_GAIN, 1.0
        tokens, seconds = 1.0, plain_s + self._overhead_s
        for count in range(1, self._most + 1):
            right *= rate
            tokens, seconds = tokens + right, seconds + each_s
            if tokens * plain_s >= gain * seconds:
                best, gain = count, tokens * plain_s / seconds
        if not best:
            self._model.forget()
        return best

    def observe_model(self, checked: int, right: int, seconds: float, expected_s: float) -> None:
        """Learn from a small model's guesses for a step.

        Args:
            checked: guesses up to each sequence's first wrong guess, that guess included.
            right: checked guesses that were right.
            seconds: time that the small model took.
            expected_s: time predicted by the small model's speeds.
        """
        self._model.observe(checked, right, seconds / expected_s if expected_s > 0 else 1.0)

    def may_pay(self, sequences: int, context: int) -> bool:
        """Return whether looked-up guesses would pay if all were right, in a step with so many sequences and tokens."""
        if not self._ngram:
            return False
        speeds = self._speeds()
        plain_s = decode_step_seconds(speeds, sequences, context)
        rows_s = plain_s - speeds.decode_base_s
        best = (1 + self._most) * plain_s
        return self._always or best >= LEAST_GAIN * (plain_s + self._overhead_s + self._most * rows_s)

    def plan(self, sequences: Sequence[DraftingSequence], most: int) -> list[list[int]]:
        """Return the guesses to check for each sequence in the next step; `most`: limit for all sequences together."""
        speeds = self._speeds()
        costs = [decode_step_seconds(speeds, 1, sequence.context) - speeds.decode_base_s for sequence in sequences]
        plain_s = speeds.decode_base_s + sum(costs)
        guesses = [
            []
            if sequence.drafter is None or sequence.most < 1
            else sequence.drafter.guess(min(sequence.most, self._most))
            for sequence in sequences
        ]
        counts = self._counts(guesses, costs, plain_s, most)
        return [[token for token, _ in guess[:count]] for guess, count in zip(guesses, counts, strict=True)]

    def _counts(
        self, guesses: Sequence[Sequence[tuple[int, float]]], costs: Sequence[float], plain_s: float, most: int
    ) -> list[int]:
        """Return how many guesses are checked for each sequence."""
        tokens, seconds, counts = float(len(guesses)), plain_s + self._overhead_s, [0] * len(guesses)
        each = [(likely, index) for index, guess in enumerate(guesses) for _, likely in guess]
        each.sort(key=lambda guess: -guess[0] / costs[guess[1]] if costs[guess[1]] else -guess[0])
        for likely, index in each[:most]:
            if not self._always and likely * seconds <= tokens * costs[index]:
                break
            tokens, seconds = tokens + likely, seconds + costs[index]
            counts[index] += 1
        pays = tokens * plain_s >= LEAST_GAIN * len(guesses) * seconds
        return counts if self._always or pays else [0] * len(guesses)
