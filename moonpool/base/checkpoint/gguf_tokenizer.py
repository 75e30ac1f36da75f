"""The tokenizer and the chat templates of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from moonpool.base.checkpoint.config import (
    TokenizerParts,
)
from moonpool.base.checkpoint.folder_tokenizer import LLAMA3_PATTERN, QWEN2_PATTERN
from moonpool.base.checkpoint.gguf import GgufFile
from moonpool.base.checkpoint.tiktoken_vocabulary import KIMI_PATTERN
from moonpool.base.errors import CheckpointError, UnsupportedModel

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""OpenAI's o200k: gpt-oss, Llama 4, MiniMax M2."""
_QWEN35 = QWEN2_PATTERN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_SEED = QWEN2_PATTERN.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_BAILING = QWEN2_PATTERN.replace(r"\s*[\r\n]+|", r"\s*[\r\n]|")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""One after the other."""
_FALCON = (
    r"[\p{P}\$\+<=>\^~\|`]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    "[0-9][0-9][0-9]",
)
"""One after the other."""
_GPT2_NAMES = (
    "gpt-2", "gpt2", "default", "olmo", "exaone4", "mellum", "phi-2", "jais", "mpt", "trillion", "granite-docling",
)  # fmt: skip
_DIGIT_NAMES = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_LLAMA3_NAMES = (
    "llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3", "falcon-h1", "pixtral", "lfm2",
)  # fmt: skip
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen", "megrez")
_PATTERNS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(_LLAMA3_NAMES, (LLAMA3_PATTERN,)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (LLAMA3_PATTERN,)),
    **dict.fromkeys((*_QWEN2_NAMES, "stablelm2", "hunyuan", "solar-open"), (QWEN2_PATTERN,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_O200K,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), (_BAILING,)),
    "falcon": _FALCON,
    "seed-coder": (_SEED,),
    "kimi-k2": (KIMI_PATTERN,),
    "tekken": (_TEKKEN,),
}
"""What splits text before merging, by `tokenizer.ggml.pre`, as llama.cpp's `llama-vocab.cpp` has it."""
_NORMALISED = (*_QWEN2_NAMES, "qwen35")
"""Names of vocabularies for text in Unicode's NFC."""
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_TEMPLATE_KEY = "tokenizer.chat_template"


def gguf_tokenizer(path: Path) -> TokenizerParts:
    """Read the tokenizer, the chat templates and the special tokens that the template may name.

    Raises:
        CheckpointError: the file or the tokenizer is damaged.
        UnsupportedModel: this tokenizer kind is not built; names the key.
    """
    metadata = GgufFile.read(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _MAKERS:
        raise UnsupportedModel("tokenizer.ggml.model", f"{kind!r} is none of {', '.join(_MAKERS)}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens must be a list of texts")
    special = _special_tokens(path, metadata, tokens)
    try:
        backend = _MAKERS[kind](metadata, tokens)
        _add_whole_tokens(backend, metadata, tokens)
        backend.post_processor = _post_processor(metadata, kind, special)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from None
    return TokenizerParts(backend, _chat_templates(path, metadata), special)


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in _listed(metadata, "merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # Where the text was cut by these expressions, a piece that is a token as a whole is that token.
    whole = name in (*_LLAMA3_NAMES, "tekken", "kimi-k2")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    backend.pre_tokenizer = _pre_tokenizer(name)
    if name in _NORMALISED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _listed(metadata: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list that this tokenizer kind needs."""
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list):
        raise ValueError(f"tokenizer.ggml.{key} is missing")
    return values


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Return what splits text before merging."""
    if name in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _DIGIT_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if name not in _PATTERNS:
        known = ", ".join((*_GPT2_NAMES, *_DIGIT_NAMES, *_PATTERNS))
        raise UnsupportedModel("tokenizer.ggml.pre", f"{name!r} is none of {known}")
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[name]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _spaced(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer by merges whose spaces are a letter, with byte tokens for what has none (Gemma 4)."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in _listed(metadata, "merges")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a SentencePiece BPE tokenizer; bytes without a separate token have byte tokens."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    scored = zip(tokens, _listed(metadata, "scores"), kinds, strict=True)
    merges = _merges(vocabulary, {token: score for token, score, kind in scored if kind == _NORMAL})
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    scheme = "first" if prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return backend


def _merges(vocabulary: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the merges that scores stand for: every way to join two tokens to a third token, best third first.

    In the order of transformers' `generate_merges`.
    """

    def ways() -> Iterator[tuple[str, str]]:
        for token in scores:
            cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
            found = (pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary)
            yield from sorted(found, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))

    return sorted(ways(), key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0]), -len(pair[1])))


_MAKERS: dict[str, Callable[[Mapping[str, Any], Sequence[str]], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _spaced,
}


def _add_whole_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Make tokens that the file marks match as a whole: control tokens, which are special, and user-defined tokens."""
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    marked = list(zip(tokens, kinds, strict=False))
    control = [token for token, kind in marked if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    defined = [token for token, kind in marked if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _post_processor(
    metadata: Mapping[str, Any], kind: str, special: Mapping[str, str]
) -> processors.PostProcessor | None:
    """Return what puts begin and end tokens around a text; without a flag, what llama.cpp does."""
    begins = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    asked = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", begins),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    used = {name: special[name] for name, wanted in asked.items() if wanted and name in special}
    if not used:
        return None
    around = [used.get("bos_token"), "$A", used.get("eos_token")]
    ids = {special[name]: metadata[f"tokenizer.ggml.{_SPECIAL[name]}"] for name in used}
    pieces = [f"{piece}:0" for piece in around if piece is not None]
    return processors.TemplateProcessing(single=pieces, special_tokens=list(ids.items()))


def _special_tokens(path: Path, metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    """Return `bos_token` and the like, as templates see them."""
    special = {}
    for name, key in _SPECIAL.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        if index is None:
            continue
        if type(index) is not int or not 0 <= index < len(tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.{key} must be one of {len(tokens)} tokens, not {index!r}")
        special[name] = tokens[index]
    return special


def _chat_templates(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name; a further template's key ends with the template's name."""
    keys = {key.removeprefix(_TEMPLATE_KEY).lstrip(".") or "default": key for key in metadata if _is_template(key)}
    for key in keys.values():
        if not isinstance(metadata[key], str):
            raise CheckpointError(f"{path}: {key} must be text")
    return {name: metadata[key] for name, key in keys.items()}


def _is_template(key: str) -> bool:
    return key == _TEMPLATE_KEY or key.startswith(f"{_TEMPLATE_KEY}.")
