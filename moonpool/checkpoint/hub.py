"""Models of the Hugging Face hub: the local cache, and fetching files that it lacks.

Fetches configuration, tokenizer, chat template and safetensors only, never pickle files or code.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, scan_cache_dir, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from moonpool.checkpoint.huggingface import folder_weights
from moonpool.errors import CheckpointError

#: What is fetched from a hub repository: files of the top folder only (see `_IGNORE`).
ALLOW_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "LICENSE*", "README.md")
_IGNORE = ("*/*", "consolidated*.safetensors")


def cached(name: str, revision: str | None) -> Path | None:
    """Return the cached snapshot when it has all that loading needs, without any network; None when it has not.

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
    return folder if (folder / "tokenizer.json").exists() else None


def complete_models() -> dict[str, Path]:
    """Return the snapshots of the local cache that can be loaded, by hub id."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return {}
    ids = sorted(repo.repo_id for repo in repos if repo.repo_type == "model")
    return {name: folder for name in ids if (folder := cached(name, None)) is not None}


def fetch(name: str, revision: str | None) -> Path:
    """Fetch what may be fetched of a hub repository; returns its snapshot folder.

    Raises:
        CheckpointError: there is no such model, or it cannot be fetched.
    """
    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(ALLOW_PATTERNS), ignore_patterns=list(_IGNORE)
            )
        )
    except GatedRepoError:
        raise CheckpointError(f"{name}: the hub asks for a login that has access to this model") from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{name}: neither a folder here nor a model on {constants.ENDPOINT}") from None
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{name}: no such folder, not in the local cache, and not fetched from {constants.ENDPOINT}: {reason}"
        ) from None
