"""How a model's layers are divided among stages."""

from moonpool.errors import ConfigError


def stage_ranges(layers: int, stages: int) -> list[tuple[int, int]]:
    """Half-open layer ranges of the stages, as even as can be; earlier stages take the odd layers.

    The last stage has the vocabulary projection besides, so it should never be the longer one.

    Raises:
        ConfigError: `stages` is not between 1 and `layers`.
    """
    if not 1 <= stages <= layers:
        raise ConfigError("stages", f"must be between 1 and the model's {layers} layers, not {stages}")
    short, longer = divmod(layers, stages)
    ends = [short * (i + 1) + min(i + 1, longer) for i in range(stages)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
