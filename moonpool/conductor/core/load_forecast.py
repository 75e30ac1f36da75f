"""What will run on decode instances later, and how long their steps will take."""

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import decode_step_seconds
from moonpool.base.scheduling.state_machine import thin_out
from moonpool.conductor.core.decode_instance import DecodeInstanceState, PlacedAnswer
from moonpool.conductor.core.decode_pool import DecodePool
from moonpool.conductor.core.output_lengths import OutputLengthModel, Stratum

FORECAST_POINTS = 8
"""Later times at which a forecast looks at most."""


@frozen
class LoadForecast:
    """Sequences and context tokens expected to run; means, so not whole."""

    sequences: float
    context_tokens: float


NO_LOAD = LoadForecast(0.0, 0.0)


class LoadForecaster:
    """Forecasts for all decode instances.

    Args:
        decodes: the instances.
        assumed: mean length of answers before any has ended.
    """

    def __init__(self, decodes: DecodePool, assumed: int) -> None:
        self.lengths = OutputLengthModel(assumed)
        """How long answers become."""
        self._decodes = decodes

    def tbt_now(self, decode: str, joining: LoadForecast = NO_LOAD) -> float:
        """Return the seconds between tokens if `joining` joined what runs there now."""
        instance = self._decodes.get(decode)
        return forecast_step_seconds(instance, load_now(instance), joining) if instance is not None else 0.0

    def tbt_at(self, decode: str, joining: LoadForecast, stratum: Stratum, now: float, at: float) -> float:
        """Return the seconds between tokens if `joining` joins what is expected to run there at the time `at`.

        The longest over `at` and the later times at which sequences with a reservation begin: these would become too
        slow if only the time `at` counted. `joining` counts there by the probability that the load still runs, as an
        answer from the stratum.
        """
        instance = self._decodes.get(decode)
        if instance is None:
            return 0.0
        then = load_at(instance, self.lengths, now, at)
        step_s = forecast_step_seconds(instance, then, joining)
        later = [
            answer.reported_at
            for answer in instance.answers.values()
            if not answer.generated and answer.reported_at > at
        ]
        for time in thin_out(later, FORECAST_POINTS) if step_s else ():
            share = self.lengths.outlives(stratum, (time - at) / step_s)
            left = LoadForecast(share * joining.sequences, share * joining.context_tokens)
            step_s = max(step_s, forecast_step_seconds(instance, load_at(instance, self.lengths, now, time), left))
        return step_s

    def digest(self) -> bytes:
        """Return the hash of the learned lengths."""
        return self.lengths.digest()

    def check_invariants(self) -> None:
        """Assert that the learned lengths are consistent."""
        self.lengths.check_invariants()


def load_now(instance: DecodeInstanceState) -> LoadForecast:
    """Return what runs now, without sequences that are still being prefilled."""
    to_come = [answer for answer in instance.answers.values() if not answer.generated]
    sequences = instance.sequences - sum([answer.sequences for answer in to_come])
    context = instance.context_tokens - sum([answer.context_tokens for answer in to_come])
    return LoadForecast(max(sequences, 0), max(context, 0))


def load_at(instance: DecodeInstanceState, lengths: OutputLengthModel, now: float, at: float) -> LoadForecast:
    """Return what is expected to run at the time `at`.

    An answer from this conductor counts by the probability that the answer still runs then. Answers of other conductors
    are known from reports only, and are taken to stay. Tokens come at the mean of the step time now and the step time
    then.
    """
    # How far answers get depends on the step time, and that on who still runs: the mean of now and then is taken
    # (docs/adr/0013).
    now_s = forecast_step_seconds(instance, load_now(instance)) or 1.0
    then_s = forecast_step_seconds(instance, _load_at(instance, lengths, now, at, now_s)) or 1.0
    return _load_at(instance, lengths, now, at, (now_s + then_s) / 2)


def _load_at(
    instance: DecodeInstanceState, lengths: OutputLengthModel, now: float, at: float, step_s: float
) -> LoadForecast:
    sequences = float(instance.sequences - instance.own_sequences)  # other conductors' answers: careful, they stay
    context = float(max(instance.context_tokens - instance.own_context_tokens, 0))
    for answer in instance.answers.values():
        tokens, share = _answer_at(answer, lengths, now, at, step_s)
        sequences += share * answer.sequences
        context += share * (answer.context_tokens + answer.sequences * tokens)
    return LoadForecast(sequences, context)


def _answer_at(
    answer: PlacedAnswer, lengths: OutputLengthModel, now: float, at: float, step_s: float
) -> tuple[float, float]:
    """Return the tokens that an answer will have, and the probability that the answer runs then."""
    since = (
        answer.reported_at if answer.generated else max(answer.reported_at, now)
    )  # the answer cannot have begun without our knowing
    if at < since:
        return 0.0, 0.0
    tokens = answer.generated + (at - since) / step_s
    so_far = answer.generated + (now - since) / step_s if answer.generated else 0.0
    return tokens, lengths.outlives(answer.stratum, tokens, so_far)


def forecast_step_seconds(
    instance: DecodeInstanceState, forecast: LoadForecast, joining: LoadForecast = NO_LOAD
) -> float:
    """Return the seconds for a step over the forecast and the joining load, and over a part of prompts that wait."""
    step_s = decode_step_seconds(
        instance.speeds,
        forecast.sequences + joining.sequences,
        forecast.context_tokens + joining.context_tokens,
    )
    return step_s + instance.least_chunk_s
