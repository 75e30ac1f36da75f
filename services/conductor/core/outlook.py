"""Forecast of the load of a decode instance: what will run there later, by what was placed and how long answers become.

The Mooncake paper refuses early by the load that decode will have when the prefill has ended, not by that of now:
prompts that are being computed are no load yet, and many of the answers of now will have ended by then.
"""

from moonpool.core.spread import spread
from moonpool.cost import decode_step_seconds
from moonpool.frozen import frozen
from services.conductor.core.decodes import Answer, Decode, Decodes
from services.conductor.core.lengths import Lengths, Stratum


@frozen
class Outlook:
    """Sequences and their context that are expected to run; means, so they are no whole numbers."""

    sequences: float
    context_tokens: float


NOTHING = Outlook(0.0, 0.0)
LOOKS = 8
"""Later times at which a forecast looks at most."""


def running_now(instance: Decode) -> Outlook:
    """What runs now, without what was promised room and is still being prefilled."""
    to_come = [answer for answer in instance.answers.values() if not answer.made]
    sequences = instance.sequences - sum([answer.sequences for answer in to_come])
    context = instance.context_tokens - sum([answer.context_tokens for answer in to_come])
    return Outlook(max(sequences, 0), max(context, 0))


def running_at(instance: Decode, lengths: Lengths, now: float, at: float) -> Outlook:
    """What is expected to run at the time `at`.

    An answer of ours counts by the probability that it is still running then. What others have placed there is known
    from reports only, and is taken to stay. Tokens are made with the mean of the step of now and the one of then.
    """
    now_s = step_seconds(instance, running_now(instance)) or 1.0
    then_s = step_seconds(instance, _running_at(instance, lengths, now, at, now_s)) or 1.0
    return _running_at(instance, lengths, now, at, (now_s + then_s) / 2)


def _running_at(instance: Decode, lengths: Lengths, now: float, at: float, step_s: float) -> Outlook:
    sequences = float(instance.sequences - instance.own_sequences)
    context = float(max(instance.context_tokens - instance.own_context_tokens, 0))
    for answer in instance.answers.values():
        tokens, share = _then(answer, lengths, now, at, step_s)
        sequences += share * answer.sequences
        context += share * (answer.context_tokens + answer.sequences * tokens)
    return Outlook(sequences, context)


def _then(answer: Answer, lengths: Lengths, now: float, at: float, step_s: float) -> tuple[float, float]:
    """Tokens that an answer will have, and the probability that it runs then."""
    since = answer.told_at if answer.made else max(answer.told_at, now)  # it cannot have begun without our knowing
    if at < since:
        return 0.0, 0.0
    tokens = answer.made + (at - since) / step_s
    so_far = answer.made + (now - since) / step_s if answer.made else 0.0
    return tokens, lengths.outlives(answer.stratum, tokens, so_far)


def step_seconds(instance: Decode, outlook: Outlook, joining: Outlook = NOTHING) -> float:
    """Seconds of a step over what is expected and what joins it."""
    return decode_step_seconds(
        instance.speeds,
        outlook.sequences + joining.sequences,
        outlook.context_tokens + joining.context_tokens,
    )


class Forecasts:
    """Forecasts for all decode instances.

    Args:
        decodes: the instances.
        assumed: mean length of answers that is believed before any was seen.
    """

    def __init__(self, decodes: Decodes, assumed: int) -> None:
        self.lengths = Lengths(assumed)
        """How long answers become."""
        self._decodes = decodes

    def tbt_now(self, decode: str, joining: Outlook = NOTHING) -> float:
        """Seconds between tokens on a decode instance if something joined what runs there now."""
        instance = self._decodes.get(decode)
        return step_seconds(instance, running_now(instance), joining) if instance is not None else 0.0

    def tbt_at(self, decode: str, joining: Outlook, stratum: Stratum, now: float, at: float) -> float:
        """Seconds between tokens if something joins what is expected to run there at the time `at`.

        The longest of then and of when others begin that were promised room before and come later: they would be too
        slow by a sequence that only looks at its own beginning. What joins counts there by the probability that it
        still runs, as an answer of the stratum.
        """
        instance = self._decodes.get(decode)
        if instance is None:
            return 0.0
        then = running_at(instance, self.lengths, now, at)
        step_s = step_seconds(instance, then, joining)
        later = [it.told_at for it in instance.answers.values() if not it.made and it.told_at > at]
        for time in spread(later, LOOKS) if step_s else ():
            share = self.lengths.outlives(stratum, (time - at) / step_s)
            left = Outlook(share * joining.sequences, share * joining.context_tokens)
            step_s = max(step_s, step_seconds(instance, running_at(instance, self.lengths, now, time), left))
        return step_s

    def digest(self) -> bytes:
        """Hash of what was learnt."""
        return self.lengths.digest()

    def check_invariants(self) -> None:
        """Asserts that what was learnt agrees with itself."""
        self.lengths.check_invariants()
