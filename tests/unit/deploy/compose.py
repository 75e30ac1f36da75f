"""Compose files as an engine reads them: extended, merged, substituted, one `Service` each."""

import dataclasses
import posixpath
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
_SUBSTITUTION = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
REPLACED = ("command", "entrypoint", "test")
"""Lists that a service which extends another gives anew."""
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclasses.dataclass(frozen=True)
class Service:
    """One service of the file.

    Attributes:
        command: arguments to the image's entry point.
        environment: variables, substituted.
        raw_environment: the same as they stand in the file.
        health: arguments of its health check after "CMD"; empty when there is none or it is of another form.
        ports: (published, inside) each.
        volumes: (source, folder inside, "rw" or "ro") each.
        rest: everything, as YAML has it.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    raw_environment: dict[str, str]
    health: list[str]
    ports: list[tuple[str, int]]
    volumes: list[tuple[str, str, str]]
    rest: dict[str, Any]

    def seconds(self, *path: str) -> float:
        """A duration of the file in seconds, 0 when it is not set."""
        value: Any = self.rest
        for key in path:
            value = value.get(key, {})
        return duration_s(value) if value else 0.0


def duration_s(text: str) -> float:
    """Seconds of a duration such as "1m30s".

    Raises:
        ValueError: it is none.
    """
    if not re.fullmatch(r"(\d+(ms|s|m|h))+", str(text)):
        raise ValueError(f"no duration: {text!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)(ms|s|m|h)", str(text)))


def substituted(text: str, environment: Mapping[str, str]) -> str:
    """The text with `${NAME:-default}` and `${NAME}` replaced; empty counts as unset."""
    return _SUBSTITUTION.sub(lambda found: environment.get(found[1], "") or found[2] or "", text)


def substitutions(text: str) -> set[str]:
    """Names of the variables that a text asks for."""
    return {name for name, _ in _SUBSTITUTION.findall(text)}


def compose_files() -> dict[str, str]:
    """The texts of compose.yaml and of the services' own files, by path."""
    paths = [ROOT / "compose.yaml", *sorted((ROOT / "services").rglob("*.yaml"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def replaced(files: Mapping[str, str], old: str, new: str) -> dict[str, str]:
    """The files with a text replaced wherever the text stands."""
    assert any(old in text for text in files.values()), old
    return {path: text.replace(old, new) for path, text in files.items()}


def services(
    files: Mapping[str, str], environment: Mapping[str, str] | None = None, path: str = "compose.yaml"
) -> dict[str, Service]:
    """The services of one of the files by name, as they are with the variables of `environment`."""
    raw = _bodies(files, path)
    cooked = _bodies({name: substituted(text, environment or {}) for name, text in files.items()}, path)
    return {name: _service(name, body, raw[name]) for name, body in cooked.items()}


def _bodies(files: Mapping[str, str], path: str) -> dict[str, dict[str, Any]]:
    """The services of a file, each with what the file takes from others by `extends`."""
    found = {}
    for name, body in yaml.safe_load(files[path])["services"].items():
        build = body.get("build")
        if build is not None:
            context = posixpath.normpath(posixpath.join(posixpath.dirname(path), build["context"]))
            body["build"] = build | {"context": context}
        if "extends" in body:
            extended = body.pop("extends")
            source = posixpath.normpath(posixpath.join(posixpath.dirname(path), extended["file"]))
            body = _merged(_bodies(files, source)[extended["service"]], body)
        found[name] = body
    return found


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A service over the one that it extends: commands are replaced, other lists and mappings are joined."""
    merged = dict(base)
    for key, value in more.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merged(old, value)
        elif isinstance(old, list) and isinstance(value, list) and key not in REPLACED:
            merged[key] = [*old, *value]
        else:
            merged[key] = value
    return merged


def _service(name: str, body: dict[str, Any], raw: dict[str, Any]) -> Service:
    command = body.get("command", [])
    test = body.get("healthcheck", {}).get("test", [])
    return Service(
        name=name,
        command=shlex.split(command) if isinstance(command, str) else [str(word) for word in command],
        environment=_environment(body),
        raw_environment=_environment(raw),
        health=[str(word) for word in test[1:]] if test and test[0] == "CMD" else [],
        ports=[_port(str(port)) for port in body.get("ports", [])],
        volumes=[_volume(volume) for volume in body.get("volumes", [])],
        rest=body,
    )


def _environment(body: dict[str, Any]) -> dict[str, str]:
    return {name: "" if value is None else str(value) for name, value in body.get("environment", {}).items()}


def _port(text: str) -> tuple[str, int]:
    published, _, inside = text.rpartition(":")
    return published, int(inside)


def _volume(text: str) -> tuple[str, str, str]:
    source, folder, *mode = text.split(":")
    return source, folder, mode[0] if mode else "rw"
