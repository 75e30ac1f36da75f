"""Capacity planning.

Finds the cheapest mix of prefill, decode and kvstore instances that keeps the latency limits.

More prefill or decode instances are taken to be never worse, so each number is found by bisection; every mix that is
compared is simulated. Hardware comes from YAML files.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.base.json_parts import parse_yaml
from moonpool.base.scheduling.latency import decode_step_seconds, prefill_seconds
from moonpool.engine.emulated.profile import Profile, load_profile
from moonpool.simulator.cluster.config import ClusterConfig, SloTargets
from moonpool.simulator.experiments.report import Summary

_FOLDER = Path(__file__).resolve().parent / "hardware"
_SUFFIX = ".yaml"
KINDS = ("prefill", "decode", "kvstore")
_SECTIONS = {"name", "models", "cost_per_hour", "kvstore"}
_STORE = ("dram_bytes", "disk_bytes")
MOST_S = {"ttft": 3600.0, "tbt": 60.0}
"""A longer limit is none."""
STORES = (0, 1, 2, 4)
"""Numbers of kvstores that are always tried, within the bound."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A class of machines.

    Attributes:
        name: for people.
        models: each model's profile on this machine, by name or path.
        cost_per_hour: cost per instance by kind, in any unit.
        dram_bytes, disk_bytes: a kvstore's.
    """

    name: str
    models: Mapping[str, str]
    cost_per_hour: Mapping[str, float]
    dram_bytes: int
    disk_bytes: int

    def profile(self, model: str) -> Profile:
        """A model's speeds and sizes on this hardware.

        Raises:
            ConfigError: this hardware has no such model.
        """
        if model not in self.models:
            raise ConfigError("model", f"no {model!r} on {self.name}; there are {', '.join(self.models)}")
        return load_profile(self.models[model])

    def cost(self, prefill: int, decode: int, kvstore: int) -> float:
        """Of a mix for an hour."""
        return sum(self.cost_per_hour[kind] * n for kind, n in zip(KINDS, (prefill, decode, kvstore), strict=True))


def bundled_hardware() -> list[str]:
    """Names of the hardware files that come with Moonpool."""
    return sorted(path.stem for path in _FOLDER.glob(f"*{_SUFFIX}"))


def load_hardware(name: str) -> Hardware:
    """Read a bundled file by name, or any file by path.

    Raises:
        ConfigError: the file is missing or wrong; names the field.
    """
    path = _FOLDER / f"{name}{_SUFFIX}" if name in bundled_hardware() else Path(name)
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(bundled_hardware())
        raise ConfigError("hardware", f"no {name!r}: neither bundled ({known}) nor a readable file") from error
    except ValueError as error:
        raise ConfigError("hardware", f"{name} {error}") from error
    return _hardware(data, name)


def _hardware(data: object, source: str) -> Hardware:
    top = _mapping(data, "hardware", source)
    for wrong in sorted(_SECTIONS ^ top.keys()):
        raise ConfigError(wrong, f"{'no such field' if wrong in top else 'is missing'} (hardware {source})")
    models = _mapping(top["models"], "models", source)
    store = _numbers(top["kvstore"], "kvstore", _STORE, source)
    return Hardware(
        name=str(top["name"]),
        models={str(model): str(profile) for model, profile in models.items()},
        cost_per_hour=_numbers(top["cost_per_hour"], "cost_per_hour", KINDS, source),
        dram_bytes=int(store["dram_bytes"]),
        disk_bytes=int(store["disk_bytes"]),
    )


def _mapping(value: object, field: str, source: str) -> dict[str, object]:
    if not isinstance(value, dict) or not value:
        raise ConfigError(field, f"must be a mapping of names to values (hardware {source})")
    return value


def _numbers(value: object, field: str, names: tuple[str, ...], source: str) -> dict[str, float]:
    given = _mapping(value, field, source)
    for wrong in sorted(set(names) ^ given.keys()):
        raise ConfigError(f"{field}.{wrong}", f"{'no such field' if wrong in given else 'is missing'} ({source})")
    return {name: _number(given[name], f"{field}.{name}", source) for name in names}


def _number(value: object, field: str, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(field, f"must be a number of at least 0, is {value!r} (hardware {source})")
    return float(value)


def parse_slo(text: str) -> SloTargets:
    """Read "ttft=30,tbt=0.1", seconds.

    Raises:
        ConfigError: a part is unknown, missing, twice there, or no sensible time.
    """
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in MOST_S or name in given:
            raise ConfigError("slo", f"wants ttft=SECONDS,tbt=SECONDS, has {part.strip()!r} in {text!r}")
        given[name] = _seconds(name, value)
    for name in MOST_S:
        if name not in given:
            raise ConfigError("slo", f"{name} is missing in {text!r}; it wants ttft=SECONDS,tbt=SECONDS")
    return SloTargets(given["ttft"], given["tbt"])


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST_S[name]:
        raise ConfigError("slo", f"{name} must be between 0 and {MOST_S[name]:g} seconds, is {text!r}")
    return value


def check_possible(profile: Profile, slo: SloTargets) -> None:
    """Refuse limits that no number of instances can keep.

    Raises:
        ConfigError: a single token on an idle instance takes longer.
    """
    fastest = {
        "ttft": (prefill_seconds(profile.speeds, 1, 0) + profile.speeds.prefill_base_s, slo.ttft_s),
        "tbt": (decode_step_seconds(profile.speeds, 1, 1), slo.tbt_s),
    }
    for name, (least, limit) in fastest.items():
        if least > limit:
            raise ConfigError(
                "slo", f"{name}={limit:g} cannot be kept: on {profile.hardware} one token alone takes {least:.3g} s"
            )


class NoPlan(MoonpoolError):  # noqa: N818 - it is an answer, not a defect
    """No mix within the bound keeps the limits; says what came nearest."""


@dataclass(frozen=True, slots=True, order=True)
class InstanceMix:
    """Numbers of instances."""

    prefill: int
    decode: int
    kvstore: int

    def __str__(self) -> str:
        return f"{self.prefill} prefill, {self.decode} decode, {self.kvstore} kvstore"


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What was found.

    Attributes:
        best: the mix of least cost.
        summary: the mix's run.
        tried: the goodput share of every mix that was simulated.
        sensitivity: what changes (in words) -> goodput share.
    """

    best: InstanceMix
    cost_per_hour: float
    summary: Summary
    tried: dict[InstanceMix, float]
    sensitivity: dict[str, float]


class PlanSearch:
    """One search.

    Args:
        base: the cluster, except for the numbers of instances.
        hardware: what instances cost.
        serve: serves the trace with a cluster.
        goal: share of requests that must be good.
        bound: most instances of a kind.
        progress: takes a line per mix.
    """

    def __init__(
        self,
        base: ClusterConfig,
        hardware: Hardware,
        serve: Callable[[ClusterConfig], Summary],
        goal: float,
        bound: int,
        progress: Callable[[str], None],
    ) -> None:
        self._base, self._hardware, self._serve = base, hardware, serve
        self._goal, self._bound, self._progress = goal, bound, progress
        self._runs: dict[InstanceMix, Summary] = {}
        self._looked: set[int] = set()
        self._best: InstanceMix | None = None

    def plan(self) -> CapacityPlan:
        """The best mix, and what the mix is sensitive to.

        Raises:
            NoPlan: none within the bound is good enough.
        """
        best = self._search()
        if best is None:
            mix, nearest = max(self._runs.items(), key=lambda run: run[1].goodput_share)
            raise NoPlan(
                f"no mix of at most {self._bound} instances of a kind reaches a goodput of {self._goal:.1%}; "
                f"{mix} reach {nearest.goodput_share:.1%}"
            )
        tried = {mix: summary.goodput_share for mix, summary in sorted(self._runs.items())}
        return CapacityPlan(best, self._cost(best), self._runs[best], tried, self._sensitivity(best))

    def _search(self) -> InstanceMix | None:
        for kvstore in STORES:
            self._look(kvstore)
        while self._best is not None and self._best.kvstore >= STORES[-1] and self._look(2 * self._best.kvstore):
            pass
        while self._best is not None and any(self._look(self._best.kvstore + step) for step in (-1, 1)):
            pass
        return self._best

    def _look(self, kvstore: int) -> bool:
        """Look for a better mix than the best, with so many kvstores; return whether there is a better mix."""
        before = self._best
        if kvstore in self._looked or not 0 <= kvstore <= self._bound or not self._better(InstanceMix(1, 1, kvstore)):
            return False
        self._looked.add(kvstore)
        start = self._start(kvstore)
        if start is not None:
            self._offer(start)
            self._walk(start, "decode", "prefill")
            self._walk(start, "prefill", "decode")
        return self._best != before

    def _cost(self, mix: InstanceMix) -> float:
        return self._hardware.cost(mix.prefill, mix.decode, mix.kvstore)

    def _run(self, mix: InstanceMix) -> Summary:
        if mix not in self._runs:
            self._runs[mix] = summary = self._simulate(mix, self._base)
            self._progress(f"{mix}: goodput {summary.goodput_share:.1%}, cost {self._cost(mix):g} an hour")
        return self._runs[mix]

    def _simulate(self, mix: InstanceMix, base: ClusterConfig) -> Summary:
        return self._serve(replace(base, prefill=mix.prefill, decode=mix.decode, kvstore=mix.kvstore))

    def _good(self, mix: InstanceMix) -> bool:
        return self._run(mix).goodput_share >= self._goal

    def _least(self, low: int, high: int, mix: Callable[[int], InstanceMix]) -> int:
        """The least number from `low` on with which the mix is good, `high` being so, by bisection."""
        while low < high:
            middle = (low + high) // 2
            if self._good(mix(middle)):
                high = middle
            else:
                low = middle + 1
        return high

    def _better(self, mix: InstanceMix) -> bool:
        """Whether a good `mix` would be better than the best so far."""
        return self._best is None or (self._cost(mix), mix) < (self._cost(self._best), self._best)

    def _offer(self, mix: InstanceMix) -> None:
        """A mix that is good."""
        if self._better(mix):
            self._best = mix

    def _start(self, kvstore: int) -> InstanceMix | None:
        """A mix with so many kvstores that can spare no instance; None: no mix within the bound is good."""
        enough = next((n for n in _doubled(self._bound) if self._good(InstanceMix(n, n, kvstore))), None)
        if enough is None:
            return None
        prefill = self._least(1, enough, lambda n: InstanceMix(n, enough, kvstore))
        return InstanceMix(prefill, self._least(1, enough, lambda n: InstanceMix(prefill, n, kvstore)), kvstore)

    def _walk(self, start: InstanceMix, fewer: str, more: str) -> None:
        """Mixes with fewer instances for one kind and more for the other, as long as a mix can be better.

        Fewer instances in one kind need more in the other. So a bad mix with hardly better cost rules out all mixes
        with as many of that kind and fewer of the other.
        """

        def mix(few: int, many: int) -> InstanceMix:
            return replace(start, **{fewer: few, more: many})

        def most(few: int) -> int:
            return max((n for n in range(1, self._bound + 1) if self._better(mix(few, n))), default=0)

        few, low = getattr(start, fewer) - 1, getattr(start, more) + 1
        widest = most(1)
        if few < 1 or widest < low or not self._good(mix(few, widest)):
            return
        fewest = self._least(1, few, lambda n: mix(n, widest))
        for n in range(few, fewest - 1, -1):
            many = most(n)
            if many >= low and self._good(mix(n, many)):
                low = self._least(low, many, partial(mix, n))
                self._offer(mix(n, low))
            else:
                low = max(low, many + 1)

    def _sensitivity(self, best: InstanceMix) -> dict[str, float]:
        found = {"as planned": self._run(best).goodput_share}
        for name, mix in _neighbours(best):
            found[name] = self._run(mix).goodput_share
        slo, rate = self._base.slo, self._base.rate
        for name, base in (
            ("20 % more requests a second", replace(self._base, rate=rate * 1.2)),
            ("20 % fewer requests a second", replace(self._base, rate=rate / 1.2)),
            ("half the TTFT limit", replace(self._base, slo=SloTargets(slo.ttft_s / 2, slo.tbt_s))),
            ("three quarters of the TBT limit", replace(self._base, slo=SloTargets(slo.ttft_s, slo.tbt_s * 0.75))),
        ):
            found[name] = self._simulate(best, base).goodput_share
            self._progress(f"{name}: goodput {found[name]:.1%}")
        return found


def _neighbours(mix: InstanceMix) -> Iterator[tuple[str, InstanceMix]]:
    for kind in ("prefill", "decode", "kvstore"):
        count = getattr(mix, kind)
        if count > (kind != "kvstore"):
            yield f"one {kind} fewer", replace(mix, **{kind: count - 1})
        yield f"one {kind} more", replace(mix, **{kind: count + 1})


def _doubled(bound: int) -> Iterable[int]:
    """1, 2, 4, ... and the bound."""
    number = 1
    while number < bound:
        yield number
        number *= 2
    yield bound
