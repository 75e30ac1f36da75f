"""Refuses requests early, with the reason, the prediction and when to try again.

Pure. The Mooncake paper refuses with HTTP 429 when the predicted time to first token or between tokens exceeds its SLO.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.errors import Overloaded
from services.conductor.core.cost import PrefillChoice

NO_DECODE_ROOM = "no_decode_room"
"""Reason of a refusal for want of room at decode."""
HOPELESS_RETRY_S = 60.0
"""Retry time told when even an idle instance would be too slow."""
MIN_RETRY_S = 0.1
QUEUE_FULL_RETRY_S = 1.0
NO_ROOM_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request expects, seconds; None = no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None


def check_queue(running: int, limit: int) -> None:
    """Refuse when as many requests run as may.

    Raises:
        Overloaded: reason "queue_full".
    """
    if running >= limit:
        raise Overloaded(
            f"{running} requests are running, as many as this conductor takes",
            reason="queue_full",
            retry_after_s=QUEUE_FULL_RETRY_S,
        )


def check_ttft(slo: Slo, best: PrefillChoice, elapsed_s: float = 0.0) -> None:
    """Refuse when the best placement's first token would come too late.

    Args:
        slo: what is expected.
        best: prediction of the best prefill instance.
        elapsed_s: seconds since the request arrived.

    Raises:
        Overloaded: reason "ttft_slo". The retry time is when the queue will have shrunk enough, by the prediction.
    """
    predicted = elapsed_s + best.ttft_s
    if slo.ttft_s is None or predicted <= slo.ttft_s:
        return
    excess = predicted - slo.ttft_s
    retry = max(excess, MIN_RETRY_S) if best.alone_s <= slo.ttft_s else HOPELESS_RETRY_S
    raise Overloaded(
        f"predicted time to first token {predicted:.3f} s exceeds the limit of {slo.ttft_s:.3f} s",
        reason="ttft_slo",
        predicted_ttft_s=predicted,
        slo_s=slo.ttft_s,
        retry_after_s=retry,
    )


def no_room(message: str) -> Overloaded:
    """The refusal for want of room at decode."""
    return Overloaded(message, reason=NO_DECODE_ROOM, retry_after_s=NO_ROOM_RETRY_S)


def check_tbt(slo: Slo, best_tbt_s: float) -> None:
    """Refuse when tokens would come too slowly at every decode instance.

    Raises:
        Overloaded: reason "tbt_slo".
    """
    if slo.tbt_s is None or best_tbt_s <= slo.tbt_s:
        return
    raise Overloaded(
        f"predicted time between tokens {best_tbt_s:.4f} s exceeds the limit of {slo.tbt_s:.4f} s",
        reason="tbt_slo",
        predicted_tbt_s=best_tbt_s,
        slo_s=slo.tbt_s,
        retry_after_s=QUEUE_FULL_RETRY_S,
    )
