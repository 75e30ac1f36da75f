"""Models from the Hugging Face hub: the local cache, and fetching missing files.

Fetches configuration, tokenizer, chat template and safetensors only, never pickle files or code.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, scan_cache_dir, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import tqdm

from moonpool.base.checkpoint.fetching import cause_of, chain_text, check_room
from moonpool.base.checkpoint.folder_tokenizer import has_tokenizer
from moonpool.base.checkpoint.huggingface import folder_weights
from moonpool.base.checkpoint.tiktoken_vocabulary import TIKTOKEN
from moonpool.base.errors import CheckpointError

_REPORT_S = 10.0
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__mro__[1]
"""What the hub library's HTTP client raises, whichever client the library has."""
#: What is fetched from a hub repository: files of the top folder only (see `_IGNORE`).
ALLOW_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", TIKTOKEN, "LICENSE*", "README.md")
_IGNORE = ("*/*", "consolidated*.safetensors")


def cached(name: str, revision: str | None) -> Path | None:
    """Return the cached snapshot if complete for loading, without any network; else None.

    Raises:
        CheckpointError: `name` is no hub id.
    """
    try:
        config = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError as error:
        raise CheckpointError(f"{name}: no such folder, and no hub id: {error}") from None
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    try:
        folder_weights(folder)
    except CheckpointError:
        return None
    return folder if has_tokenizer(folder) else None


def complete_models() -> dict[str, Path]:
    """Return the local cache's snapshots that can be loaded, by hub id."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return {}
    ids = sorted(repo.repo_id for repo in repos if repo.repo_type == "model")
    return {name: folder for name in ids if (folder := cached(name, None)) is not None}


def remove(name: str) -> int:
    """Remove a repository from the cache; return the bytes that are free again, 0 if it was not there.

    Raises:
        CheckpointError: the cache cannot be written.
    """
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return 0
    found = [repo for repo in cache.repos if repo.repo_type == "model" and repo.repo_id == name]
    plan = cache.delete_revisions(*(revision.commit_hash for repo in found for revision in repo.revisions))
    if found:
        plan.execute()
    if any(repo.repo_path.exists() for repo in found):
        raise CheckpointError(f"{name}: {found[0].repo_path} cannot be removed")
    return plan.expected_freed_size


def fetch(name: str, revision: str | None) -> Path:
    """Fetch a hub repository's permitted files; return the snapshot folder.

    Raises:
        CheckpointError: no such model, or the model cannot be fetched.
    """
    try:
        _check_room(name, revision)
        return _downloaded(name, revision)
    except GatedRepoError:
        raise CheckpointError(f"{name}: the hub asks for a login that has access to this model") from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{name}: neither a folder here nor a model on {constants.ENDPOINT}") from None
    except OfflineModeIsEnabled:
        raise CheckpointError(f"{name}: no such folder, not in the local cache, and HF_HUB_OFFLINE is set") from None
    except (LocalEntryNotFoundError, _HTTP_ERROR, OSError) as error:
        reason = cause_of(chain_text(error), constants.ENDPOINT, Path(constants.HF_HUB_CACHE))
        reason = reason or (str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise CheckpointError(f"{name}: no such folder, not in the local cache, and not fetched: {reason}") from None


def _check_room(name: str, revision: str | None) -> None:
    """See that the cache's disk has room for what is fetched.

    Raises:
        CheckpointError: there is less room.
        Exception: as `snapshot_download`.
    """
    info = HfApi().model_info(name, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = filter_repo_objects(sizes, allow_patterns=list(ALLOW_PATTERNS), ignore_patterns=list(_IGNORE))
    came = sum(blob.stat().st_size for blob in _blobs(name).glob("*"))
    check_room(name, sum(sizes[file] for file in wanted) - came, Path(constants.HF_HUB_CACHE), "HF_HOME")


def _blobs(name: str) -> Path:
    """Folder of the files of a repository in the cache."""
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs"


def _downloaded(name: str, revision: str | None) -> Path:
    """Return the snapshot, downloaded on separate threads, so that signals are handled meanwhile.

    A terminal gets the hub library's bars; elsewhere, a line now and then says how much has come.
    """
    bars = sys.stderr.isatty()
    found: Future[str] = Future()

    def download() -> None:
        try:
            found.set_result(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=list(ALLOW_PATTERNS),
                    ignore_patterns=list(_IGNORE),
                    tqdm_class=tqdm if bars else _NoBars,
                )
            )
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=download, name="hub", daemon=True).start()
    blobs = _blobs(name)
    while True:
        try:
            return Path(found.result(_REPORT_S))
        except TimeoutError:
            if found.done():
                raise
            if not bars:
                came = sum(blob.stat().st_size for blob in blobs.glob("*"))
                print(f"fetching {name}: {came / 1e6:,.0f} MB", file=sys.stderr, flush=True)  # noqa: T201


class _NoBars(tqdm):
    """Where bars would be lines without end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]
