"""Counter-based randomness: a draw is a function of a seed and of what it is for, not of how many came before.

So a core's choices do not depend on the order of unrelated events, and a replay draws the same.
"""

_MASK = (1 << 64) - 1


def draw_bits(seed: int, *counters: int) -> int:
    """64 random bits for these counters. The mixing is SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    state = seed & _MASK
    for counter in (*counters, len(counters)):
        state = (state + 0x9E3779B97F4A7C15 + counter * 0xD1342543DE82EF95) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def draw_unit(seed: int, *counters: int) -> float:
    """A number in [0, 1), uniform, for these counters."""
    return (draw_bits(seed, *counters) >> 11) * 2.0**-53


def draw_below(limit: int, seed: int, *counters: int) -> int:
    """An integer in [0, limit) for these counters; the bias is below limit / 2^64."""
    return (draw_bits(seed, *counters) * limit) >> 64
