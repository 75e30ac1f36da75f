"""A Hugging Face folder's tokenizer, as transformers builds the tokenizer from the folder's files.

Files: `tokenizer.json`, or `tiktoken.model`; `tokenizer_config.json` with special tokens, `added_tokens_decoder` and
the tokenizer's class; the older `special_tokens_map.json` and `added_tokens.json`; `config.json` for the model's type.
Source:
`tokenization_utils_base.py`, `tokenization_utils_tokenizers.py` and `tokenization_auto.py` of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from moonpool.base.checkpoint.config import TokenizerParts, ends_answer
from moonpool.base.checkpoint.tiktoken_vocabulary import TIKTOKEN, tiktoken_tokenizer
from moonpool.base.errors import CheckpointError, MoonpoolError, UnsupportedModel
from moonpool.base.families.fields import read_json

_TOKENIZER = "tokenizer.json"
_OF_TIKTOKEN = "TikTokenTokenizer"
"""The class that folders with tiktoken's vocabulary name, of their own code."""
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that every tokenizer class in transformers has."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text before merging."""
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
"""How Qwen 2 splits text before merging."""
_CLASS_TOKENS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
}
"""A class's special tokens that the folder may leave out."""


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What a folder says about the tokenizer beside the vocabulary.

    Attributes:
        special: special tokens by name, "bos_token" for example.
        extra: special tokens without a name.
        added: added tokens by id, in the order in which transformers adds them. Those of `tokenizer.json` are not
            among them if `tokenizer_config.json` lists all.
        fields: `tokenizer_config.json`, or older files' settings instead.
        tokenizer_class: transformers' class; "" if the class takes `tokenizer.json` unchanged.
    """

    special: Mapping[str, AddedToken]
    extra: tuple[AddedToken, ...]
    added: Mapping[int, AddedToken]
    fields: Mapping[str, Any]
    tokenizer_class: str


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder has a vocabulary that can be read."""
    return any((folder / name).exists() for name in (_TOKENIZER, TIKTOKEN))


def folder_tokenizer(folder: Path) -> TokenizerParts:
    """Read the tokenizer, the chat templates and the special tokens that a template may name.

    Raises:
        CheckpointError: the vocabulary is missing or damaged, or another file is malformed.
        UnsupportedModel: a tokenizer that is not built; names `tokenizer_class`.
    """
    with _named(folder):
        return _folder_tokenizer(folder)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turn what damaged files may raise into an error that names the folder.

    The readers take the files' shape as they should have it; what is missing or of another kind raises there.
    """
    try:
        yield
    except MoonpoolError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder}: the tokenizer's files are damaged: {type(error).__name__}: {error}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the tokenizers library, for what it did not expect
            raise
        raise CheckpointError(f"{folder}: the tokenizer's files are damaged: {error}") from None


def _folder_tokenizer(folder: Path) -> TokenizerParts:
    """See `folder_tokenizer`."""
    file = folder / _TOKENIZER
    content: Mapping[str, Any] = {}
    if file.exists():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"{file}: not a tokenizer: {error}") from None
        content = read_json(file)
        settings = _settings(folder, content)
    elif (folder / TIKTOKEN).exists():
        settings = _settings(folder, content)
        if settings.tokenizer_class != _OF_TIKTOKEN:
            raise UnsupportedModel("tokenizer_class", f"{settings.tokenizer_class!r} is not {_OF_TIKTOKEN}")
        backend = tiktoken_tokenizer(folder / TIKTOKEN, settings.added)
    else:
        raise CheckpointError(f"{folder}: no {_TOKENIZER} in this folder")
    rebuild = _REBUILT.get(settings.tokenizer_class)
    if rebuild is not None and isinstance(backend.model, models.BPE):
        backend = rebuild(content, settings.fields, backend)
    _add_tokens(backend, settings)
    backend.encode_special_tokens = settings.fields.get("split_special_tokens") is True
    special = {name: token.content for name, token in settings.special.items()}
    return TokenizerParts(backend, _chat_templates(folder, settings.fields), special)


def folder_end_tokens(folder: Path, *, by_text: bool = True) -> tuple[int, ...]:
    """Return the ids of tokens that end an answer, as the tokenizer says.

    These are `eos_token`, and with `by_text` special tokens whose text ends a turn in chat templates.

    Raises:
        CheckpointError: a file is malformed.
    """
    with _named(folder):
        return _folder_end_tokens(folder, by_text=by_text)


def _folder_end_tokens(folder: Path, *, by_text: bool) -> tuple[int, ...]:
    """See `folder_end_tokens`."""
    if not has_tokenizer(folder):
        return ()
    content = _optional(folder / _TOKENIZER)
    settings = _settings(folder, content)
    vocabulary = content.get("model", {}).get("vocab")
    ids = {str(token): index for token, index in vocabulary.items()} if isinstance(vocabulary, dict) else {}
    added = {**dict(_added_tokens(folder, content)), **settings.added}
    ids |= {token.content: index for index, token in added.items()}
    eos = settings.special.get("eos_token")
    texts = [eos.content] if eos is not None else []
    if by_text:
        ends = ends_answer([token.content for token in added.values() if token.special])
        texts += [token.content for token in added.values() if token.content in ends]
    return tuple(dict.fromkeys(ids[text] for text in texts if text in ids))


def _settings(folder: Path, content: Mapping[str, Any]) -> TokenizerSettings:
    fields = dict(_optional(folder / "tokenizer_config.json"))
    added: dict[int, AddedToken] = {}
    listed = fields.get("added_tokens_decoder")
    if listed is not None:
        if not isinstance(listed, Mapping):
            raise CheckpointError(f"{folder}: added_tokens_decoder must be an object")
        added = {_token_id(folder, index): _token(folder, token) for index, token in listed.items()}
    else:
        mapped = _optional(folder / "special_tokens_map.json")
        fields |= {name: _without_special(value) for name, value in mapped.items()}
        names = {_text(fields.get(name)) for name in _NAMED} | {_text(token) for token in _extra(fields)}
        for text, index in _optional(folder / "added_tokens.json").items():
            is_special = text in names
            added[_token_id(folder, index)] = AddedToken(text, normalized=not is_special, special=is_special)
        added |= dict(_added_tokens(folder, content))
    known = {token.content: token for token in added.values()}

    def special_token(value: Any) -> AddedToken:
        token = _token(folder, value, special=True)
        return known.get(token.content, token)

    tokenizer_class = _tokenizer_class(folder, fields, content)
    values = {**_CLASS_TOKENS.get(tokenizer_class, {}), **fields}
    named = [*_NAMED, *(name for name in fields if name.endswith("_token") and name not in _NAMED)]
    special = {name: special_token(values[name]) for name in named if _text(values.get(name))}
    more = fields.get("extra_special_tokens")
    if isinstance(more, Mapping):
        special |= {str(name): special_token(value) for name, value in more.items()}
    return TokenizerSettings(special, tuple(map(special_token, _extra(fields))), added, fields, tokenizer_class)


def _without_special(value: Any) -> Any:
    """Drop the flag from a token in `special_tokens_map.json`: all of these are special."""
    return {name: flag for name, flag in value.items() if name != "special"} if isinstance(value, dict) else value


def _optional(path: Path) -> Mapping[str, Any]:
    return read_json(path) if path.exists() else {}


def _added_tokens(folder: Path, content: Mapping[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    """Yield the added tokens of `tokenizer.json`."""
    for entry in content.get("added_tokens") or ():
        yield _token_id(folder, entry.get("id")), _token(folder, entry)


def _extra(fields: Mapping[str, Any]) -> list[Any]:
    found = fields.get("extra_special_tokens") or fields.get("additional_special_tokens") or []
    return found if isinstance(found, list) else []


def _text(value: Any) -> str | None:
    """Return a token's text: files have texts, or objects with the text as `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _token(folder: Path, value: Any, *, special: bool | None = None) -> AddedToken:
    text = _text(value)
    if text is None:
        raise CheckpointError(f"{folder}: a token must be a text or have content, not {value!r}")
    flags = {name: value[name] for name in _FLAGS if name in value} if isinstance(value, Mapping) else {}
    if special is not None and not (isinstance(value, Mapping) and "__type" in value):  # which tells all flags
        flags.setdefault("special", special)
    return AddedToken(text, **flags)


def _token_id(folder: Path, value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise CheckpointError(f"{folder}: an added token must have a number, not {value!r}") from None


def _add_tokens(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Add the tokens that the backend does not have, in transformers' order."""
    present = backend.get_added_tokens_decoder()
    known = {repr(token) for token in present.values()}
    tokens = [token for _, token in sorted(settings.added.items()) if repr(token) not in known]
    texts = {token.content for token in (*present.values(), *tokens)}
    for token in (*settings.special.values(), *settings.extra):
        if token.content not in texts:
            texts.add(token.content)
            tokens.append(token)
    named = {token.content for token in settings.special.values()}
    for token in tokens:
        token.special = token.special or token.content in named
    backend.add_tokens(tokens)
    if settings.tokenizer_class == "Qwen2Tokenizer":  # which adds the special tokens again, without flags
        every = (*settings.special.values(), *settings.extra)
        backend.add_tokens([AddedToken(token.content, special=True) for token in every])


def _tokenizer_class(folder: Path, fields: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Return the class with which transformers loads this folder's tokenizer.

    Qwen's models have their own class unless the folder names another class. A folder with Llama's class and a
    tokenizer that works on bytes is taken as the file says.
    """
    config = _optional(folder / "config.json")
    model_type = config.get("model_type")
    name = str(fields.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")
    if model_type == "qwen2" or (model_type == "qwen3" and not name):
        return "Qwen2Tokenizer"
    if model_type == "mistral" or (name == "LlamaTokenizer" and _is_byte_level(content)):
        return ""
    return name


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    parts = [content.get("pre_tokenizer") or {}, content.get("decoder") or {}]
    inner = [*parts[0].get("pretokenizers", ()), *parts[1].get("decoders", ())]
    return any(part.get("type") == "ByteLevel" for part in (*parts, *inner))


def _llama(content: Mapping[str, Any], fields: Mapping[str, Any], read: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer that transformers' `LlamaTokenizer` makes of a vocabulary."""
    backend = tokenizers.Tokenizer(models.BPE(**_vocabulary(content), fuse_unk=True, byte_fallback=True))
    prefix = fields.get("add_prefix_space") in (None, True)
    scheme = "never" if not prefix else "always" if fields.get("legacy") else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    backend.post_processor = read.post_processor
    return backend


def _qwen2(content: Mapping[str, Any], fields: Mapping[str, Any], read: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer that transformers' `Qwen2Tokenizer` makes of a vocabulary."""
    backend = tokenizers.Tokenizer(models.BPE(**_vocabulary(content)))
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated")
    prefix = fields.get("add_prefix_space") is True
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = read.post_processor
    return backend


_Rebuild = Callable[[Mapping[str, Any], Mapping[str, Any], tokenizers.Tokenizer], tokenizers.Tokenizer]
_REBUILT: Mapping[str, _Rebuild] = {"LlamaTokenizer": _llama, "Qwen2Tokenizer": _qwen2}
"""transformers' classes that take only vocabulary and merges from `tokenizer.json`."""


def _vocabulary(content: Mapping[str, Any]) -> dict[str, Any]:
    model = content["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    return {"vocab": model["vocab"], "merges": merges}


def _chat_templates(folder: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name.

    Template files come before `tokenizer_config.json`; `chat_template.json`, which older processors have, last.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.exists()}
    if found:
        return found
    template = fields.get("chat_template") or _optional(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
    elif isinstance(template, str):
        template = {"default": template}
    if not isinstance(template, Mapping | None) or not all(
        isinstance(text, str) for pair in (template or {}).items() for text in pair
    ):
        raise CheckpointError(f"{folder}: chat_template must be text, or a list of names and templates")
    return dict(template or {})
