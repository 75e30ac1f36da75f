"""Scores of a classifier's raw values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moonpool.base.checkpoint import load_config, resolve
from moonpool.base.checkpoint.pooling import Pooling, ScoreActivation
from moonpool.base.errors import MoonpoolError


def pooling_of(model: str) -> Pooling | None:
    """What a checkpoint makes of whole prompts; None: it answers with text, or cannot be read."""
    try:
        return load_config(resolve(model)).pooling
    except MoonpoolError:  # whoever reads the weights says what is wrong
        return None


def label_scores(values: Sequence[float], activation: ScoreActivation) -> list[float]:
    """Scores of the raw values, one for each label."""
    match activation:
        case "none":
            return list(values)
        case "sigmoid":
            return [_sigmoid(value) for value in values]
        case "softmax":
            most = max(values)
            powers = [math.exp(value - most) for value in values]
            return [power / math.fsum(powers) for power in powers]


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    power = math.exp(value)
    return power / (1 + power)
