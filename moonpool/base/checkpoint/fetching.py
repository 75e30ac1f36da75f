"""What fetching a model needs and meets: room on the disk, and the causes of failures in a person's words."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from moonpool.base.errors import CheckpointError

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")
_WITHOUT = "Without a network: the model `bundled`, or a folder or GGUF file of your own."
_CAUSES = (
    (r"No space left on device|Disk quota exceeded|ENOSPC", "the disk is full{folder}: make room, and try again"),
    (
        r"DO NOT MATCH THE HASHES|Consistency check failed|not the file that it should be",
        "what came from {source} is not the file that it should be (wrong hash), and was not kept: try again, or "
        "another network",
    ),
    (
        r"ProxyError|[Cc]annot connect to proxy|Tunnel connection failed|407 Proxy",
        "the proxy{proxy} cannot be reached, or refuses: set HTTPS_PROXY anew, or unset it",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError|SSL: ",
        "{source} shows a certificate that is not trusted here: SSL_CERT_FILE names your network's authority",
    ),
    (
        r"NewConnectionError|ConnectError|ConnectionError|ConnectTimeout|ReadTimeout|TimeoutException|[Tt]imed out"
        r"|Name or service not known|Temporary failure in name resolution|Network is unreachable|No route to host"
        r"|Connection refused|Connection reset",
        "no network: {source} cannot be reached. " + _WITHOUT,
    ),
)


def check_room(what: str, needed: int, folder: Path, variable: str) -> None:
    """See that a disk has room before anything is fetched.

    Args:
        what: the model, for the message.
        needed: bytes.
        folder: where the files will lie; need not exist yet.
        variable: environment variable that names another folder.

    Raises:
        CheckpointError: there is less room.
    """
    free = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free
    if free < needed:
        raise CheckpointError(
            f"{what}: needs {needed / 1e6:,.0f} MB, and {folder} has {free / 1e6:,.0f} MB of room: make room, or name "
            f"another folder by {variable}"
        )


def cause_of(text: str, source: str, folder: Path | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """Why a fetch failed, and what to do; "" for no known cause.

    Args:
        text: what a program or an exception says.
        source: where the files come from.
        folder: where the files were to lie.
        environment: variables, of which some name proxies.
    """
    proxy = next((f" {environment[name]}" for name in _PROXIES if environment.get(name)), "")
    where = f" ({folder})" if folder is not None else ""
    found = (told for pattern, told in _CAUSES if re.search(pattern, text))
    return next(found, "").format(source=source, proxy=_without_password(proxy), folder=where)


def chain_text(error: BaseException | None) -> str:
    """Kinds and messages of an error and of its causes, a line each."""
    return "\n".join(f"{type(each).__name__}: {each}" for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
