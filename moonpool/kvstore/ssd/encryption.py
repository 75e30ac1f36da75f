"""Encryption on SSD: keys by tenant from a file, the cipher of one block's record, and encrypted values.

The file is JSON, and only its owner may read it:

    {"*": [{"id": "2026-11-27-5f2a91", "key": "BASE64 of 32 bytes"}], "research": [{...}, {...}]}

A tenant's first key encrypts new records; the others, and all keys of all tenants, decrypt. "*" stands for each tenant
without a row, and for blocks without a tenant.

Each record has a key of its own, derived (HKDF-SHA256) from the tenant's key, 32 random bytes that the record keeps,
and the block's identity. The slices are encrypted by AES-256-GCM, with the layer's number as nonce. So no pair of key
and nonce is used twice, and a record decrypts only under its own identity.
"""

import base64
import binascii
import datetime
import functools
import json
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from moonpool.base import world
from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.base.json_parts import parse_json
from moonpool.base.kv.blocks import MAX_TENANT_BYTES, BlockInfo
from moonpool.base.kv.layout import KVLayout
from moonpool.base.rpc.watched_files import WatchedFiles
from moonpool.base.telemetry.logs import get_logger

log = get_logger(__name__)
SETTING = "encryption_keys"
EVERY_OTHER = "*"
"""Row of tenants without a row."""
KEY_ID_BYTES = 32
"""Longest id of a key."""
SALT_BYTES = 32
TAG_BYTES = 16
_SECRET_BYTES = 32
_HASH_BYTES = 8
_ID = re.compile(rf"[A-Za-z0-9._-]{{1,{KEY_ID_BYTES}}}")
_BLOCK_PURPOSE = b"moonpool kvstore record 1"
_VALUE_PURPOSE = b"moonpool kvstore value 1"
_VALUE_MAGIC = b"MPKVSEAL"
_HASHES_NONCE = b"\xff" * 12
_NONCE = struct.Struct("<I8x")
_ONLY_NONCE = bytes(12)


class EncryptionKey(NamedTuple):
    """A key of a tenant."""

    id: str
    secret: bytes


class KeysGone(NamedTuple):
    """Ids of keys that have left the file, and the tenants that have no row any more."""

    ids: frozenset[str]
    tenants: frozenset[str]


_Rows = Mapping[str, Sequence[EncryptionKey]]


class Keyring:
    """The keys in a file. Any thread may ask for a key."""

    def __init__(self, path: Path, clock: Callable[[], float] = world.monotonic) -> None:
        """Read the file; `clock` says when to look again.

        Raises:
            ConfigError: the file cannot be read, others may read it, or it is wrong; names `encryption_keys`.
        """
        self._path = path
        self._watched = WatchedFiles([path], clock)
        self._rows = read_key_file(path)
        self._by_id = _by_id(self._rows)

    def newest(self, tenant: str) -> EncryptionKey:
        """The key that encrypts a tenant's new records."""
        return (self._rows.get(tenant) or self._rows[EVERY_OTHER])[0]

    def find(self, key_id: str) -> EncryptionKey | None:
        return self._by_id.get(key_id)

    def renew(self) -> KeysGone | None:
        """Read the file again if changed; return what has gone, if anything.

        A wrong or missing file leaves the keys as they were.
        """
        if not self._watched.changed():
            return None
        try:
            rows = read_key_file(self._path)
        except ConfigError as error:
            log.warning("encryption keys not read again", reason=str(error))
            return None
        before, ids = self._rows, self._by_id
        self._rows, self._by_id = rows, _by_id(rows)
        log.info("encryption keys read again", keys=len(self._by_id))
        gone = KeysGone(frozenset(ids.keys() - self._by_id.keys()), frozenset(before.keys() - rows.keys()))
        return gone if gone.ids else None


def _by_id(rows: _Rows) -> dict[str, EncryptionKey]:
    return {key.id: key for keys in rows.values() for key in keys}


def read_key_file(path: Path) -> dict[str, list[EncryptionKey]]:
    """Keys by tenant, the newest first. Raises ConfigError as `Keyring`."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigError(SETTING, f"{path} must be this user's, and nobody else may read it: chmod 600 {path}")
            return _parse_rows(parse_json(file.read()))
    except OSError as error:
        raise ConfigError(SETTING, f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(SETTING, f"{path}: {error}") from error


def _parse_rows(read: object) -> dict[str, list[EncryptionKey]]:
    """Raises ValueError, which never shows a key."""
    if not isinstance(read, dict):
        raise ValueError("must be an object: tenant -> list of keys")
    if EVERY_OTHER not in read:
        raise ValueError(f"lacks {EVERY_OTHER!r}, whose keys are for tenants without a row")
    rows, ids = dict[str, list[EncryptionKey]](), set[str]()
    for tenant, keys in read.items():
        if not tenant or len(tenant.encode()) > MAX_TENANT_BYTES:
            raise ValueError(f"a tenant's name has 1 to {MAX_TENANT_BYTES} bytes")
        if not isinstance(keys, list) or not keys:
            raise ValueError(f"tenant {tenant!r}: must be a list of keys, the newest first")
        rows[tenant] = [_parse_key(tenant, number, key) for number, key in enumerate(keys, 1)]
        for key in rows[tenant]:
            if key.id in ids:
                raise ValueError(f"tenant {tenant!r}: there are two keys with id {key.id!r}")
            ids.add(key.id)
    return rows


def _parse_key(tenant: str, number: int, key: object) -> EncryptionKey:
    where = f"tenant {tenant!r}, key {number}"
    if not isinstance(key, dict) or key.keys() != {"id", "key"}:
        raise ValueError(f"{where}: must be {{id, key}}")
    name, text = key["id"], key["key"]
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise ValueError(f"{where}: id must be 1 to {KEY_ID_BYTES} letters, digits, '.', '_' or '-'")
    try:
        secret = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        secret = b""
    if len(secret) != _SECRET_BYTES:
        raise ValueError(f"{where}: key must be {_SECRET_BYTES} bytes in base64")
    return EncryptionKey(name, secret)


def add_key(path: Path, tenant: str) -> str:
    """Put a new key before a tenant's others; make the file if there is none. Returns the key's id.

    Raises:
        ConfigError: as `Keyring`, or the file cannot be written.
    """
    rows = read_key_file(path) if path.exists() else {EVERY_OTHER: [_new_key()]}
    if path.exists() or tenant != EVERY_OTHER:
        rows[tenant] = [_new_key(), *rows.get(tenant, [])]
    _write(path, rows)
    return rows[tenant][0].id


def drop_keys(path: Path, tenant: str) -> list[str]:
    """Remove a tenant's keys: what is encrypted with them can never be read again. Returns their ids.

    Raises:
        ConfigError: as `add_key`; or the tenant has no keys, or is "*".
    """
    rows = read_key_file(path)
    if tenant == EVERY_OTHER or tenant not in rows:
        raise ConfigError("tenant", f"{tenant!r} has no row that may go")
    gone = [key.id for key in rows.pop(tenant)]
    _write(path, rows)
    return gone


def _new_key() -> EncryptionKey:
    today = datetime.datetime.now(datetime.UTC).date()
    return EncryptionKey(f"{today}-{secrets.token_hex(4)}", secrets.token_bytes(_SECRET_BYTES))


def _write(path: Path, rows: _Rows) -> None:
    """Replace the file at once, so that a store never reads half of it."""
    told = {
        tenant: [{"id": key.id, "key": base64.b64encode(key.secret).decode()} for key in keys]
        for tenant, keys in rows.items()
    }
    _parse_rows(told)
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.unlink(missing_ok=True)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(told, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise ConfigError(SETTING, f"cannot write {path}: {error.strerror}") from error


class Seal(NamedTuple):
    """What a header says about encryption.

    Attributes:
        key_id: id of the tenant's key.
        salt: random; the record's own key is derived with it.
        tags: one per layer, concatenated; each authenticates a slice.
        hashes: the encrypted hashes of the slices' plaintext, bound to the block, with a tag.
    """

    key_id: str
    salt: bytes
    tags: bytes
    hashes: bytes


class BrokenSealError(MoonpoolError):
    """Something encrypted is not what was encrypted under this identity."""


class RecordCipher:
    """The cipher of one record."""

    def __init__(self, key: EncryptionKey, info: BlockInfo, salt: bytes) -> None:
        """The cipher that the salt gives; a new record takes a new random salt."""
        self._key_id, self._salt = key.id, salt
        self._aead = _cipher_of(key, salt, _BLOCK_PURPOSE + _identity(info))

    @classmethod
    def new(cls, key: EncryptionKey, info: BlockInfo) -> "RecordCipher":
        return cls(key, info, world.random_bytes(SALT_BYTES))

    def seal(self, slices: Iterable[memoryview], hashes: Sequence[int]) -> tuple[Seal, list[memoryview]]:
        """Encrypt a block's slices and the hashes of their plaintext, once; return the slices' ciphertext."""
        tags, sealed = bytearray(), list[memoryview]()
        for layer, data in enumerate(slices):
            out = memoryview(bytearray(data.nbytes + TAG_BYTES))
            self._aead.encrypt_into(_NONCE.pack(layer), data, None, out)
            sealed.append(out[: data.nbytes])
            tags += out[data.nbytes :]
        packed = struct.pack(f"<{len(hashes)}Q", *hashes)
        return Seal(self._key_id, self._salt, bytes(tags), self._aead.encrypt(_HASHES_NONCE, packed, None)), sealed

    def open_hashes(self, seal: Seal) -> tuple[int, ...]:
        """The hashes of all slices' plaintext. Raises BrokenSealError."""
        try:
            packed = self._aead.decrypt(_HASHES_NONCE, seal.hashes, None)
        except InvalidTag as error:
            raise BrokenSealError("the hashes are not what was encrypted") from error
        return struct.unpack(f"<{len(packed) // _HASH_BYTES}Q", packed)

    def open_slice(self, layer: int, data: memoryview, tag: bytes) -> None:
        """Decrypt a slice in place. Raises BrokenSealError; what is in place then is undefined."""
        try:
            self._aead.decrypt_into(_NONCE.pack(layer), b"".join((data, tag)), None, data)
        except InvalidTag as error:
            raise BrokenSealError(f"layer {layer} is not what was encrypted") from error


def _identity(info: BlockInfo) -> bytes:
    """All that a header says about a block."""
    tenant, layout = info.tenant.encode(), _packed_layout(info.format.layout)
    lengths = struct.pack("<IIQ", len(tenant), len(layout), info.written_at)
    return b"".join((lengths, info.key, info.parent, info.format.namespace, tenant, layout))


@functools.lru_cache(maxsize=64)
def _packed_layout(layout: KVLayout) -> bytes:
    return layout.to_proto().SerializeToString(deterministic=True)


def _cipher_of(key: EncryptionKey, salt: bytes, identity: bytes) -> AESGCM:
    return AESGCM(HKDF(SHA256(), _SECRET_BYTES, salt, identity).derive(key.secret))


def seal_value(key: EncryptionKey, identity: bytes, value: bytes) -> bytes:
    """Encrypt a small value; `identity` is everything by which the value is found."""
    salt = world.random_bytes(SALT_BYTES)
    text = _cipher_of(key, salt, _VALUE_PURPOSE + identity).encrypt(_ONLY_NONCE, value, None)
    return b"".join((_VALUE_MAGIC, key.id.encode().ljust(KEY_ID_BYTES, b"\0"), salt, text))


def is_sealed(value: bytes) -> bool:
    """Whether `seal_value` has made a value."""
    return value.startswith(_VALUE_MAGIC)


def open_value(keyring: Keyring | None, identity: bytes, value: bytes) -> bytes:
    """The value that was encrypted. Raises BrokenSealError: the key lacks, or the value is not what was encrypted."""
    id_at = len(_VALUE_MAGIC)
    salt_at = id_at + KEY_ID_BYTES
    text_at = salt_at + SALT_BYTES
    key_id = value[id_at:salt_at].rstrip(b"\0").decode("ascii", "replace")
    key = None if keyring is None else keyring.find(key_id)
    if key is None:
        raise BrokenSealError(f"key {key_id!r} is not in {SETTING}")
    try:
        cipher = _cipher_of(key, value[salt_at:text_at], _VALUE_PURPOSE + identity)
        return cipher.decrypt(_ONLY_NONCE, value[text_at:], None)
    except InvalidTag as error:
        raise BrokenSealError("the value is not what was encrypted") from error
