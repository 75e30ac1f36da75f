"""What measured times to first token teach of a prefill instance, beside the speeds that it tells."""

from dataclasses import replace

from moonpool.cost import DEFAULT_BYTES_PER_S, Regression, Speeds

OVERHEAD_S = 0.02
"""How uncertain the fixed part is before anything was measured."""
OVERHEAD_DRIFT = 5e-3
"""About the last five count: it follows how busy the machine is."""
SPREAD = 0.2
"""The same of the factors of waiting, loading and computing."""
CHANGE = 16
"""An instance learns from each of its steps and tells what it has learnt. The factors are about what it cannot see, and
are in no hurry: otherwise both would learn one slow moment, and it would count twice."""
LEAST_S = 0.005
"""Errors of predictions shorter than this count as those of one so long."""


class Corrections:
    """Speeds of a prefill instance: those that it tells, corrected by what its prompts took.

    What a prompt takes at its instance, from coming to its first token, is `queue * waiting + load * loading + compute
    * computing`; the factors begin with 1: what the instance says is believed first. Prompts that found it idle teach
    the last two. Those that waited teach the first, which has in it what later prompts take that share their steps.
    What is left of the time that the conductor measures is overhead: calls, tokenising, tokens on their way, and all
    else that does not grow with the prompt.
    """

    __slots__ = ("_overhead", "_parts", "_speeds", "_told", "_waiting")

    def __init__(self, told: Speeds) -> None:
        self._told = told
        self._overhead = Regression((0.0,), (OVERHEAD_S,), drift=OVERHEAD_DRIFT, least_s=LEAST_S)
        self._waiting = Regression((1.0,), (SPREAD,), change=CHANGE, least_s=LEAST_S)
        self._parts = Regression((1.0, 1.0), (SPREAD, SPREAD), change=CHANGE, least_s=LEAST_S)
        self._speeds: Speeds | None = None

    @property
    def speeds(self) -> Speeds:
        """The corrected speeds; the same object as long as nothing changes."""
        if self._speeds is None:
            load, compute = self._parts.coefficients
            speeds = self._told if compute == 1.0 else self._told.slowed_prefill(compute)
            rate = (speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S) / load
            self._speeds = speeds if load == 1.0 else replace(speeds, load_bytes_per_s=rate)
        return self._speeds

    @property
    def overhead_s(self) -> float:
        """Seconds that each prompt takes beside waiting, loading and computing."""
        return self._overhead.coefficients[0]

    @property
    def queue(self) -> float:
        """Factor of waiting."""
        return self._waiting.coefficients[0]

    @property
    def compute(self) -> float:
        """Factor of computing."""
        return self._parts.coefficients[1]

    def told(self, speeds: Speeds) -> None:
        """The instance tells its speeds. What was learnt stays true until it is measured anew."""
        if speeds != self._told:
            self._told, self._speeds = speeds, None

    def sizes(self, waits_s: float, load_s: float, compute_s: float) -> tuple[float, float, float]:
        """What a measurement is compared with: predictions without these corrections.

        Args:
            waits_s: without correction.
            load_s: with it, as speeds are corrected.
            compute_s: likewise.
        """
        load, compute = self._parts.coefficients
        return waits_s, load_s / load, compute_s / compute

    def observe(self, sizes: tuple[float, ...], there_s: float, overhead_s: float) -> None:
        """Learns from a prompt that has its first token.

        Args:
            sizes: with which it was placed; empty = these are not known, or not what was computed.
            there_s: measured by the instance, from the prompt's coming.
            overhead_s: what was measured beside that.
        """
        self._overhead.observe((1.0,), overhead_s)
        if not sizes:
            return
        waits_s, *rest = sizes
        if waits_s > 0.0:
            self._waiting.observe((waits_s,), there_s, known_s=self._parts.seconds(rest))
        else:
            self._parts.observe(rest, there_s)
            self._speeds = None

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._told, *self._overhead.state, *self._waiting.state, *self._parts.state
