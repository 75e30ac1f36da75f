"""Profiles of emulated compute.

How long steps take on some hardware, how much KV fits, and noise on these times.

The bundled profiles are in `profiles`; `docs/emulation.md` explains the fields.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from moonpool.base.errors import ConfigError
from moonpool.base.json_parts import parse_yaml
from moonpool.base.kv.layout import KVLayout
from moonpool.base.scheduling.latency import Speeds, decode_step_seconds, prefill_seconds
from moonpool.base.scheduling.state_machine import draw_unit
from moonpool.base.scheduling.steps import Step

_SPEED_DRAW, _STEP_DRAW = 0, 1
SCHEME = "emulated:"
"""Prefix of `--engine` that asks for emulated compute; the profile's name or path follows."""
_FORMER_SCHEME = "paced:"
SLOT_BYTES = 8
"""Bytes for one token's K (or V) in one head and layer of emulated KV."""
KV_DTYPE = "float16"
_SUFFIX = ".yaml"
_PREFILL = ("base_s", "per_token_s", "per_pair_s")
_OPTIONAL = ("per_prompt_s", "per_cached_token_s", "per_context_token_s")
_DECODE = ("base_s", "per_sequence_s", "per_context_token_s")
_FOLDER = Path(__file__).resolve().parent / "profiles"


@dataclass(frozen=True, slots=True)
class Noise:
    """How far an instance's steps are from the profile. The instance does not report the noise."""

    seed: int = 0
    """Of the draws; each instance has a separate seed."""
    jitter: float = 0.0
    """A step takes up to this share longer or shorter, uniformly drawn for each step; in [0, 1)."""
    speed_error: float = 0.0
    """All the instance's steps are slower or quicker by one factor, drawn from 1 ± this; in [0, 1)."""
    slowdown: float = 0.0
    """So many times longer all steps take from SIGUSR1 to SIGUSR2; 0 = these signals are not taken."""

    def factor(self, step_id: int, *, slowed: bool = False) -> float:
        """Return a step's seconds over the profile's; `slowed`: between the two signals."""
        slower = self.slowdown if slowed else 1.0
        return slower * self._around(self.speed_error, _SPEED_DRAW) * self._around(self.jitter, _STEP_DRAW, step_id)

    def _around(self, width: float, *counters: int) -> float:
        return 1.0 + width * (2.0 * draw_unit(self.seed, *counters) - 1.0) if width else 1.0


NO_NOISE = Noise()


@dataclass(frozen=True, slots=True)
class Profile:
    """Times and sizes of a model on some hardware. Seconds and bytes are the hardware's, unscaled."""

    name: str
    hardware: str
    """The class of machine, in words."""
    speeds: Speeds
    """A rate of 0 is not emulated: KV moves as fast as on this machine."""
    token_bytes: int
    """True bytes of KV per token over all layers."""
    max_tokens: int
    """Longest sequence."""
    layers: int
    """Layers of emulated KV: each may stand for several of the model's."""
    kv_heads: int = 1
    """Heads of the emulated KV."""
    time_scale: float = 1.0
    """Profile seconds that pass in one second, unless `time_scale` is set."""
    pool_bytes: int = 0
    """True bytes of KV that the hardware's memory holds beside the weights; 0 = not given."""
    kv_dtype: str = ""
    """Element type of the KV that was measured over; "" = not given."""

    def layout(self, block_size: int) -> KVLayout:
        """Arrangement of the emulated KV: 8 bytes per token, head, layer, and K or V."""
        return KVLayout.uniform(self.layers, self.kv_heads, SLOT_BYTES // 2, block_size, KV_DTYPE)

    @property
    def kv_scale(self) -> float:
        """Emulated bytes of KV per true byte."""
        return self.layers * self.kv_heads * 2 * SLOT_BYTES / self.token_bytes

    @classmethod
    def from_mapping(cls, data: object, source: str) -> Self:
        """From what a YAML file holds.

        Args:
            data: the file's content.
            source: the file, for messages.

        Raises:
            ConfigError: a field is unknown, missing or out of range; names the field.
        """
        top = _Fields(data, source, "")
        model, kv = top.section("model"), top.section("kv")
        prefill, decode = top.section("prefill"), top.section("decode")
        rates = top.section("rates", required=False)
        memory = top.section("memory", required=False)
        speeds = Speeds(
            **{f"prefill_{name}": prefill.number(name) for name in _PREFILL},
            **{f"prefill_{name}": prefill.number(name, 0.0) for name in _OPTIONAL},
            **{f"decode_{name}": decode.number(name) for name in _DECODE},
            load_bytes_per_s=rates.number("load_bytes_per_s", 0.0),
            transfer_bytes_per_s=rates.number("transfer_bytes_per_s", 0.0),
        )
        profile = cls(
            name=top.text("name"),
            hardware=top.text("hardware"),
            speeds=speeds,
            token_bytes=model.count("kv_bytes_per_token"),
            max_tokens=model.count("max_tokens"),
            layers=kv.count("layers"),
            kv_heads=kv.count("kv_heads"),
            time_scale=top.number("time_scale", 1.0),
            pool_bytes=_pool_bytes(memory) if memory else 0,
            kv_dtype=model.text("kv_dtype", ""),
        )
        for section in (top, model, kv, prefill, decode, rates, memory):
            section.finish()
        if profile.time_scale <= 0:
            raise ConfigError("time_scale", f"must be positive, is {profile.time_scale:g} ({source})")
        return profile


class _Fields:
    """A mapping in a profile: every field is taken once, and a leftover field is an error."""

    def __init__(self, data: object, source: str, prefix: str) -> None:
        if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
            raise ConfigError(prefix.rstrip(".") or "engine", f"must be a mapping of names to values ({source})")
        self._left: dict[str, Any] = dict(data)
        self._source = source
        self._prefix = prefix

    def __bool__(self) -> bool:
        return bool(self._left)

    def section(self, name: str, *, required: bool = True) -> "_Fields":
        return _Fields(self._take(name) if required else self._left.pop(name, {}), self._source, f"{name}.")

    def text(self, name: str, default: str | None = None) -> str:
        if default is not None and name not in self._left:
            return default
        value = self._take(name)
        if not isinstance(value, str) or not value or not value.isprintable():
            raise self.error(name, f"must be a line of text, is {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._take(name) if default is None else self._left.pop(name, default)
        try:  # YAML takes 1e-4, without a point, for a text
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not 0.0 <= number < math.inf:
            raise self.error(name, f"must be a number of at least 0, is {value!r}")
        return number

    def count(self, name: str) -> int:
        value = self._take(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"must be a whole number of at least 1, is {value!r}")
        return value

    def finish(self) -> None:
        for name in self._left:
            raise self.error(name, "no such field")

    def _take(self, name: str) -> Any:
        if name not in self._left:
            raise self.error(name, "is missing")
        return self._left.pop(name)

    def error(self, name: str, message: str) -> ConfigError:
        return ConfigError(self._prefix + name, f"{message} (profile {self._source})")


def _pool_bytes(memory: _Fields) -> int:
    """Return the bytes left for KV of a device's memory, without the reserve and the weights."""
    device, reserve = memory.number("device_bytes"), memory.number("reserve_share")
    left = device * (1.0 - reserve) - memory.number("weight_bytes")
    if left <= 0:
        raise memory.error("device_bytes", f"{device:g} bytes leave no room for KV beside reserve and weights")
    return int(left)


def bundled_profiles() -> list[str]:
    """Return the names of the profiles that come with Moonpool."""
    return sorted(path.stem for path in _FOLDER.glob(f"*{_SUFFIX}"))


def load_profile(name: str) -> Profile:
    """Read a bundled profile by name, or any profile by path.

    Raises:
        ConfigError: the profile is missing or wrong; names the field.
    """
    bundled = _FOLDER / f"{name}{_SUFFIX}"
    path = bundled if name in bundled_profiles() else Path(name)
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(bundled_profiles())
        raise ConfigError("engine", f"no profile {name!r}: neither bundled ({known}) nor a readable file") from error
    except ValueError as error:
        raise ConfigError("engine", f"profile {name} {error}") from error
    return Profile.from_mapping(data, name)


@dataclass(frozen=True, slots=True)
class EmulatedCompute:
    """One instance's emulated compute; part of `EngineSpec`."""

    profile: Profile
    time_scale: float
    """Profile seconds that pass in one second."""
    decode: bool
    """Whether steps are decode steps, one token per sequence."""
    vocab_size: int
    reserved: frozenset[int] = field(default_factory=frozenset)
    """Tokens that are never chosen: the end tokens, so that an answer is as long as `max_tokens`."""
    noise: Noise = NO_NOISE
    """How far the steps are from the profile."""

    @property
    def speeds(self) -> Speeds:
        """The profile's speeds in this machine's seconds and emulated bytes."""
        speeds, faster = self.profile.speeds, 1.0 / self.time_scale
        rate = self.time_scale * self.profile.kv_scale
        return Speeds(
            **{f"prefill_{name}": getattr(speeds, f"prefill_{name}") * faster for name in (*_PREFILL, *_OPTIONAL)},
            **{f"decode_{name}": getattr(speeds, f"decode_{name}") * faster for name in _DECODE},
            load_bytes_per_s=speeds.load_bytes_per_s * rate,
            transfer_bytes_per_s=speeds.transfer_bytes_per_s * rate,
        )

    def describe(self) -> Mapping[str, str | float]:
        """Return the fields of logs and spans."""
        return {"emulated": self.profile.name, "time_scale": self.time_scale, "hardware": self.profile.hardware}


def emulated_profile(engine: str, time_scale: float) -> tuple[Profile, float] | None:
    """Return the profile and time scale that `engine` and `time_scale` ask for; None for a real engine.

    Raises:
        ConfigError: `engine` is neither "real" nor "emulated:PROFILE", or a time scale is given for a real engine.
    """
    if engine.startswith(_FORMER_SCHEME):
        raise ConfigError("engine", f"'{_FORMER_SCHEME}PROFILE' is now called '{SCHEME}PROFILE'")
    if engine.startswith(SCHEME):
        profile = load_profile(engine.removeprefix(SCHEME))
        return profile, time_scale or profile.time_scale
    if engine != "real":
        raise ConfigError("engine", f"must be 'real' or '{SCHEME}PROFILE', is {engine!r}")
    if time_scale:
        raise ConfigError("time_scale", f"only an emulated engine has one; add --engine {SCHEME}PROFILE")
    return None


def step_seconds(speeds: Speeds, step: Step, *, decode: bool, begins: Sequence[bool] = ()) -> float:
    """Return the seconds that a step takes.

    Args:
        speeds: the emulated hardware's.
        step: sequences; prefill counts each chunk and prefix, decode the batch and the batch's context, and, as prefill
            does, recomputed tokens of preempted sequences.
        decode: whether the step is a decode step.
        begins: for each sequence, whether the sequence begins with this step, after a cached prefix; empty = none does.
    """
    sizes = [(len(sequence.token_ids) // 4, sequence.start) for sequence in step.sequences]
    if decode:
        again = sum(
            prefill_seconds(speeds, tokens, start, steps=0, begins=False) for tokens, start in sizes if tokens > 1
        )
        ones = [start + 1 for tokens, start in sizes if tokens == 1]
        return decode_step_seconds(speeds, len(ones), sum(ones)) + again
    return speeds.prefill_base_s + sum(  # the base is per step, however many prompts share the step
        prefill_seconds(speeds, tokens, start, steps=0, begins=first)
        for (tokens, start), first in zip(sizes, begins or [False] * len(sizes), strict=True)
    )


def copy_seconds(speeds: Speeds, tokens: int) -> float:
    """Return the seconds for copying `tokens` tokens' KV within the pool: a step's read, and a write."""
    return 2 * tokens * speeds.decode_per_context_token_s


def load_seconds(speeds: Speeds, nbytes: int) -> float:
    """Return the seconds that so many bytes of KV take to load; 0 if the profile has no rate."""
    return nbytes / speeds.load_bytes_per_s if speeds.load_bytes_per_s else 0.0
