"""Settings of a stack's services for `moonpool serve`: `--set SECTION.NAME=VALUE`, and a YAML file with sections."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from moonpool.base.config import RENAMED, SERVICES, assignments, config_class, suggestion
from moonpool.base.errors import ConfigError
from moonpool.base.json_parts import parse_yaml

KINDS = SERVICES
SECTIONS = {"all": KINDS, "engine": ("prefill", "decode"), **{kind: (kind,) for kind in KINDS}}
"""Services that a section is for; a narrower section goes before a wider one."""
OWN_NAMES = ("id", "listen", "advertise", "conductor", "model")
"""Settings that only `moonpool serve` decides."""


class ServeCommand(TyperCommand):
    """`moonpool serve`, which says how to set a setting without a flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {flag for parameter in self.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        for argument in args:
            flag = argument.partition("=")[0]
            if flag.startswith("--") and flag not in own and (now := _setting_of(flag)):
                raise ConfigError("serve", f"{flag} is a setting of services: {now}")
        return super().parse_args(ctx, args)


def _setting_of(flag: str) -> str:
    """How a service setting is given, by the setting's flag or former flag; "" for none."""
    name = flag.removeprefix("--no-").lstrip("-").replace("-", "_")
    for section, kinds in SECTIONS.items():
        for now in RENAMED.get(name, (name,)):
            if now not in OWN_NAMES and all(now in config_class(kind).model_fields for kind in kinds):
                return f"--set {section}.{now}=VALUE"
    return ""


def stack_settings(config: Path | None, given: Iterable[str]) -> dict[str, list[str]]:
    """For each service kind, the flags for these settings.

    Args:
        config: YAML file of `{SECTION: {NAME: VALUE}}`; None = no file.
        given: texts `SECTION.NAME=VALUE`, which go before the file.

    Raises:
        ConfigError: names section and setting: one is unknown, or the value is wrong.
    """
    sections = [] if config is None else [_read_sections(config)]
    sections.append(_parse_sections(given))
    values: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for found in sections:
        for section in SECTIONS:
            for name, value in found.get(section, {}).items():
                for kind in _takers(section, name):
                    values[kind][name] = value
    flags = {
        kind: [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        for kind, settings in values.items()
        if settings
    }
    for kind in flags:
        _check(kind, flags[kind])
    return flags


def lora_settings(modules: Sequence[str]) -> list[str]:
    """The settings, as texts, that give a stack these LoRA adapters, each NAME=FOLDER, and room for the adapters.

    Raises:
        ConfigError: an adapter is not of the form, or a name stands there twice.
    """
    if not modules:
        return []
    try:
        found = {name: Path(folder).resolve() for name, folder in assignments(modules).items()}
    except ValueError as error:
        raise ConfigError("lora_modules", str(error)) from None
    named = ",".join(f"{name}={folder}" for name, folder in found.items())
    return [f"conductor.lora_modules={named}", f"engine.max_loras={len(found)}"]


def _parse_sections(given: Iterable[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for text in given:
        key, equals, value = text.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot:
            raise ConfigError("set", f"must be SERVICE.NAME=VALUE, got {text!r}")
        found.setdefault(section, {})[name] = value
    for section in found:
        _check_section(section)
    return found


def _read_sections(path: Path) -> dict[str, dict[str, str]]:
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("config", f"cannot read {path}: {error}") from error
    found: dict[str, dict[str, str]] = {}
    for section, settings in ({} if data is None else _mapping(data, str(path))).items():
        _check_section(section)
        found[section] = {name: _text(value) for name, value in _mapping(settings, f"{section} in {path}").items()}
    return found


def _mapping(data: object, where: str) -> Mapping[str, object]:
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise ConfigError("config", f"{where} must hold a mapping by name")
    return data


def _text(value: object) -> str:
    """A YAML value in `--set` form."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "" if value is None else json.dumps(value)


def _check_section(section: str) -> None:
    if section not in SECTIONS:
        known = f"must be one of {', '.join(SECTIONS)}"
        raise ConfigError(section, f"no such service; {known}{suggestion(section, list(SECTIONS))}")


def _takers(section: str, name: str) -> list[str]:
    """The service kinds in a section that have the setting."""
    if name in OWN_NAMES:
        raise ConfigError(f"{section}.{name}", "`moonpool serve` decides this itself")
    takers = [kind for kind in SECTIONS[section] if name in config_class(kind).model_fields]
    if not takers:
        # The only or first kind names the setting that was meant, if there is one.
        _load(SECTIONS[section][0], section, ["--set", f"{name}="])
    return takers


def _check(kind: str, flags: list[str]) -> None:
    needed = [name for name in ("conductor", "model") if name in config_class(kind).model_fields]
    given = {"conductor": "127.0.0.1:1", "model": "model"}
    _load(kind, kind, [*flags, *(part for name in needed for part in (f"--{name}", given[name]))])


def _load(kind: str, section: str, flags: list[str]) -> None:
    try:
        config_class(kind).load(flags)
    except ConfigError as error:
        raise ConfigError(f"{section}.{error.field}", error.message) from None
