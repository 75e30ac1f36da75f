"""`moonpool keys`: API keys for a gateway's clients, in a file of hashes that `serve --api-keys` takes."""

import datetime
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from moonpool.base.errors import ConfigError, InvalidRequest, NotFound
from moonpool.base.rpc.api_keys import MAX_TENANT_CHARS, KeyFile, hash_key, parse_keys
from moonpool.cli.tables import RecordTable, stdout_console
from moonpool.cli.whole_words import say

PREFIX = "mp-"
"""Beginning of each key, by which a person and a scanner for secrets know the key."""
ID_CHARS = 12
"""Digits of a key's hash by which the key is listed and revoked."""
_MADE = re.compile(r"#\s*(\d{4}-\d\d-\d\d)\s*$")

File = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File of the keys. Default: ~/.config/moonpool/keys.", show_default=False),
]

app = typer.Typer()


def default_file() -> Path:
    """The user's file of keys."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "moonpool" / "keys"


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key as `list` shows it: `id` is the beginning of its hash, `made` a date, "" if the file has none."""

    id: str
    tenant: str
    rpm: int | None
    tpm: int | None
    made: str


@app.command()
def create(
    tenant: Annotated[str, typer.Argument(help="Whom the key is for; requests of a tenant share KV.")],
    file: File = None,
    rpm: Annotated[int | None, typer.Option(min=1, help="Requests a minute with this key at most.")] = None,
    tpm: Annotated[int | None, typer.Option(min=1, help="Tokens a minute with this key at most.")] = None,
) -> None:
    """Make a key and print it, this once: the file has its hash only."""
    path = file or default_file()
    if not tenant.strip() or "#" in tenant or "\n" in tenant or len(tenant) > MAX_TENANT_CHARS:
        raise InvalidRequest("tenant", f"must be 1 to {MAX_TENANT_CHARS} characters without # and line ends")
    if path.exists():
        _read(path)  # a key added to a file that the gateway refuses would not be taken
    key = PREFIX + secrets.token_urlsafe(24)
    limits = "".join(f" {name}={count}" for name, count in (("rpm", rpm), ("tpm", tpm)) if count is not None)
    line = f"sha256:{hash_key(key)}{limits} {tenant.strip()}  # {datetime.datetime.now(datetime.UTC).date()}"
    if _tenant_of(line) != tenant.strip():
        raise InvalidRequest("tenant", "must not begin as a limit does (rpm=, tpm=)")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    _write(path, [*lines, line])
    typer.echo(key)
    told = f"The key of {tenant.strip()!r}; nobody can show it again. `moonpool serve --api-keys {path}`"
    say(told, err=True)


@app.command("list")
def list_(
    file: File = None, as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False
) -> None:
    """List the keys of the file: whose they are, not what they are."""
    path = file or default_file()
    found = listed_keys(path) if path.exists() else []
    if as_json:
        typer.echo(json.dumps([asdict(key) for key in found]))
        return
    if not found:
        say(f"no keys in {path}: `moonpool keys create NAME` makes one", err=True)
        return
    table = RecordTable("key", "tenant", "requests/min", "tokens/min", "made", right=("requests/min", "tokens/min"))
    for key in found:
        table.add_row(key.id, key.tenant, *(str(count or "any") for count in (key.rpm, key.tpm)), key.made)
    stdout_console().print(table)


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The key as `list` shows it, the key itself, or a tenant: all its keys.")],
    file: File = None,
) -> None:
    """Take keys out of the file; a gateway that runs refuses them from its next request on."""
    path = file or default_file()
    known = listed_keys(path)
    hashed = hash_key(key)[:ID_CHARS]
    gone = {each.id for each in known if key == each.tenant or each.id == hashed or each.id == key}
    if not gone:
        raise NotFound(f"{path} has no such key and no such tenant; `moonpool keys list` shows what there is")
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not any(line.lower().startswith(f"sha256:{each}") for each in gone)]
    _write(path, kept)
    typer.echo(f"revoked: {', '.join(sorted(gone))}")


def listed_keys(path: Path) -> list[ListedKey]:
    """The keys of a file.

    Raises:
        ConfigError: naming `file`: the file cannot be read or is wrong.
    """
    known = _read(path)
    made = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := _MADE.search(line):
            made[line[7 : 7 + ID_CHARS].lower()] = found[1]
    return [
        ListedKey(
            digest[:ID_CHARS],
            tenant,
            known.limits[digest].requests if digest in known.limits else None,
            known.limits[digest].tokens if digest in known.limits else None,
            made.get(digest[:ID_CHARS], ""),
        )
        for digest, tenant in known.tenants.items()
    ]


def _tenant_of(line: str) -> str:
    """The tenant of a key file's line; "" if the line is wrong."""
    try:
        return next(iter(parse_keys(line).tenants.values()), "")
    except ValueError:
        return ""


def _read(path: Path) -> KeyFile:
    try:
        return parse_keys(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("file", f"{path}: {error}") from error


def _write(path: Path, lines: list[str]) -> None:
    """Replace the file at once, so that a gateway never reads half of it."""
    written = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        written.touch(mode=0o600)
        written.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        written.replace(path)
    except OSError as error:
        raise ConfigError("file", f"{path} cannot be written: {error.strerror}") from error
