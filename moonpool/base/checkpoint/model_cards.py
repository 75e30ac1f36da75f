"""Sampling that a model's card recommends, for models with files that suggest no sampling."""

import re
from pathlib import Path

from moonpool.base.checkpoint.config import DefaultSampling

CARDS = ((re.compile(r"smollm2-[\w.]+-instruct\b", re.IGNORECASE), DefaultSampling(temperature=0.2, top_p=0.9)),)
"""Models' names, and the sampling in their cards' examples."""
_SNAPSHOTS = "snapshots"
"""Folder in the hub's cache; the folder's parent has the model's name."""


def card_sampling(path: Path) -> DefaultSampling:
    """Return what the model's card recommends. The folder's or file's name tells the model."""
    hub = path.parent.name == _SNAPSHOTS
    name = path.parent.parent.name if hub else path.name
    return next((sampling for pattern, sampling in CARDS if pattern.search(name)), DefaultSampling())
