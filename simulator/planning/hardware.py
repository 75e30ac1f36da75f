"""Hardware that plans choose from: profiles of models on it, and what an instance costs. From YAML files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from moonpool.engine.emulated.profile import Profile, load_profile
from moonpool.errors import ConfigError

_FOLDER = Path(__file__).resolve().parent / "hardware"
_SUFFIX = ".yaml"
KINDS = ("prefill", "decode", "kvstore")
_SECTIONS = {"name", "models", "cost_per_hour", "kvstore"}
_STORE = ("dram_bytes", "disk_bytes")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A class of machines.

    Attributes:
        name: for people.
        models: the profile of each model on it, by name or path.
        cost_per_hour: of one instance of each kind, in any unit.
        dram_bytes, disk_bytes: of a kvstore.
    """

    name: str
    models: Mapping[str, str]
    cost_per_hour: Mapping[str, float]
    dram_bytes: int
    disk_bytes: int

    def profile(self, model: str) -> Profile:
        """Speeds and sizes of a model here.

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
    """Names of what comes with Moonpool."""
    return sorted(path.stem for path in _FOLDER.glob(f"*{_SUFFIX}"))


def load_hardware(name: str) -> Hardware:
    """Reads a bundled file by its name, or any by its path.

    Raises:
        ConfigError: there is none, or it is wrong; names the field.
    """
    path = _FOLDER / f"{name}{_SUFFIX}" if name in bundled_hardware() else Path(name)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(bundled_hardware())
        raise ConfigError("hardware", f"no {name!r}: neither bundled ({known}) nor a readable file") from error
    except yaml.YAMLError as error:
        raise ConfigError("hardware", f"{name} is no YAML: {error}") from error
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
