"""Finds a model: a folder, or a Hugging Face hub id."""

from __future__ import annotations

import re
from pathlib import Path

from moonpool.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")


def model_name(model: str) -> str:
    """The name under which a folder or hub id is served: the folder's name, the hub id's last part.

    Conductor and engines must say the same, so both ask here.
    """
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model.partition("@")[0].rpartition("/")[2]


def resolve(model: str) -> Path:
    """Return the folder of `model`: a path to a folder, or a hub id "owner/name", optionally "@revision".

    A hub id is looked up in the local cache first; only what is missing is fetched, from `HF_ENDPOINT`, unless
    `HF_HUB_OFFLINE` forbids it.

    Raises:
        CheckpointError: there is no such folder or model, or it cannot be fetched.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise CheckpointError(f"{model}: a model is a folder, this is a file")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model}: no such folder")
    name, _, revision = model.partition("@")
    # Only here: huggingface_hub takes half a second to import, and every service and engine process imports this.
    from moonpool.checkpoint import hub

    return hub.cached(name, revision or None) or hub.fetch(name, revision or None)
