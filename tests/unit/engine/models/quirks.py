"""Quirks of checkpoint folders, as fine-tuning tools and older releases leave them. Each changes one folder."""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

Quirk = Callable[[Path], None]
SPACE = "\u2581"
EMBEDDING = "model.embed_tokens.weight"
WORDS = ["th", "he", "the", f"{SPACE}the", f"{SPACE}t", "in", "ing", "thing", f"{SPACE}s", "so", "me", "some", SPACE]
TURNS = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
TOOL = {"content": "<tool>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


def read(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def change(name: str, **fields: Any) -> Quirk:
    """Set fields of a JSON file; `...` removes a field."""

    def apply(folder: Path) -> None:
        changed = {**read(folder, name), **fields}
        (folder / name).write_text(json.dumps({key: value for key, value in changed.items() if value is not ...}))

    return apply


def config(**fields: Any) -> Quirk:
    return change("config.json", **fields)


def generation(**fields: Any) -> Quirk:
    return change("generation_config.json", **fields)


def settings(**fields: Any) -> Quirk:
    return change("tokenizer_config.json", **fields)


def both(*quirks: Quirk) -> Quirk:
    def apply(folder: Path) -> None:
        for quirk in quirks:
            quirk(folder)

    return apply


def remove(*names: str) -> Quirk:
    def apply(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return apply


def write(name: str, text: str) -> Quirk:
    def apply(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return apply


def tokenizer_json(edit: Callable[[dict[str, Any]], None]) -> Quirk:
    def apply(folder: Path) -> None:
        content = read(folder, "tokenizer.json")
        edit(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return apply


def fewer_tokens(content: dict[str, Any]) -> None:
    """Free the last eight ids, for added tokens."""
    model = content["model"]
    for _ in range(8):
        model["merges"].pop()
    model["vocab"] = {token: index for token, index in model["vocab"].items() if index < len(model["vocab"]) - 8}


def end_of_turn(content: dict[str, Any]) -> None:
    fewer_tokens(content)
    entry = {**TOOL, "content": "<|im_end|>", "special": True, "id": len(content["model"]["vocab"])}
    content["added_tokens"].append(entry)


def sentencepiece(kind: str, **flags: Any) -> Quirk:
    """Put a tokenizer in place that works as SentencePiece does."""

    def apply(folder: Path) -> None:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokens += [*dict.fromkeys([*WORDS, *"abcdefghilmnorstuwy"])]
        if kind == "unigram":
            scores = [(token, 0.0 if i < 3 else -float(i)) for i, token in enumerate(tokens)]
            backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
        else:
            vocab = {token: i for i, token in enumerate(tokens)}
            merges = [(w[:i], w[i:]) for w in WORDS for i in range(1, len(w)) if w[:i] in vocab and w[i:] in vocab]
            backend = tokenizers.Tokenizer(
                models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
            )
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
        if kind == "prepend":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", kind == "unigram")
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        backend.add_special_tokens(["<unk>", "<s>", "</s>"])
        backend.save(str(folder / "tokenizer.json"))
        ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
        both(config(**ends), generation(**ends))(folder)
        settings(bos_token="<s>", eos_token="</s>", pad_token=..., unk_token="<unk>", chat_template=TURNS, **flags)(
            folder
        )

    return apply


def word_level(folder: Path) -> None:
    words = ["<unk>", "</s>", "<s>", "user", ":", "the", "thing", "some", "hello"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    settings(bos_token="<s>", eos_token="</s>", pad_token=..., unk_token="<unk>", chat_template=TURNS)(folder)


def stale_index(folder: Path) -> None:
    weight_map = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def one_named_file(folder: Path) -> None:
    """An index of one shard, though the weights would fit a whole file."""
    shutil.move(folder / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    with (folder / "model-00001-of-00001.safetensors").open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    names = [name for name in header if name != "__metadata__"]
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rewritten(edit: Callable[[dict[str, torch.Tensor]], None]) -> Quirk:
    """Change the weights of a folder with one file."""

    def apply(folder: Path) -> None:
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        edit(weights)
        safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return apply


def halved(weights: dict[str, torch.Tensor]) -> None:
    """Most weights in bfloat16, norms in float32."""
    weights |= {name: entries.bfloat16() for name, entries in weights.items() if "norm" not in name}


def ropes_of_old(weights: dict[str, torch.Tensor]) -> None:
    """The frequencies that older releases stored with each layer."""
    for layer in range(4):
        weights[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


def other_file(name: str) -> Quirk:
    """A second file of weights, which nobody reads."""

    def apply(folder: Path) -> None:
        safetensors.torch.save_file({"output.weight": torch.ones(4, 4)}, folder / name)

    return apply


def split_by_expression(content: dict[str, Any]) -> None:
    """As Llama 3: an expression that splits digits by three, then bytes without one."""
    expression = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_]}
    content["model"]["ignore_merges"] = True


def two_processors(content: dict[str, Any]) -> None:
    """As Llama 3: a processor of bytes before the one that adds tokens."""
    bytes_ = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    adding = [entries for entries in [content["post_processor"]] if entries is not None]
    content["post_processor"] = {"type": "Sequence", "processors": [bytes_, *adding]}


def normalised(*kinds: str) -> Quirk:
    steps = [{"type": kind} for kind in kinds]
    return tokenizer_json(lambda entries: entries.update(normalizer={"type": "Sequence", "normalizers": steps}))


def with_template(source: str) -> Quirk:
    return settings(chat_template=source)


ONLY_MAP = settings(bos_token=..., eos_token=..., pad_token=..., chat_template=TURNS)
NAMED = [{"name": "default", "template": TURNS}, {"name": "tool_use", "template": "T{{ tools | tojson }}" + TURNS}]

QUICK: Mapping[str, Quirk] = {
    "none": both(),
    "end token of the tokenizer only": both(config(eos_token_id=...), generation(eos_token_id=...)),
    "end token null": both(config(eos_token_id=None), remove("generation_config.json")),
    "end token absent": both(config(eos_token_id=...), remove("generation_config.json")),
    "end tokens differ": both(config(eos_token_id=[7, 8]), generation(eos_token_id=9)),
    "end of turn": tokenizer_json(end_of_turn),
    "special_tokens_map only": both(ONLY_MAP, change("special_tokens_map.json", bos_token="<s>", eos_token="</s>")),
    "special_tokens_map of objects": both(
        ONLY_MAP, change("special_tokens_map.json", bos_token={**TOOL, "content": "</s>"}, eos_token="</s>")
    ),
    "added_tokens_decoder": both(
        tokenizer_json(fewer_tokens), settings(added_tokens_decoder={"504": {**TOOL, "special": False}})
    ),
    "added_tokens.json": both(tokenizer_json(fewer_tokens), change("added_tokens.json", **{"<tool>": 504})),
    "additional special tokens": both(
        tokenizer_json(fewer_tokens), settings(additional_special_tokens=["<tool>", "<other>"])
    ),
    "named templates": settings(chat_template=NAMED),
    "template files": both(
        write("chat_template.jinja", "J" + TURNS), write("additional_chat_templates/tool_use.jinja", "U" + TURNS)
    ),
    "llama class over bytes": settings(tokenizer_class="LlamaTokenizerFast"),
    "sentencepiece": sentencepiece("bpe"),
    "sentencepiece with llama's class": sentencepiece("prepend", tokenizer_class="LlamaTokenizer", legacy=False),
    "unigram without a class": sentencepiece("unigram"),
    "stale index": stale_index,
    "an unknown activation is refused": config(hidden_act="mish-2"),
    "an unknown rope is refused": config(rope_scaling={"rope_type": "other", "factor": 4.0}),
}
"""Quirks that are tried in every run."""

SLOW: Mapping[str, Quirk] = {
    "end token list": both(config(eos_token_id=[1, 5]), remove("generation_config.json")),
    "generation_config without tokens": both(remove("generation_config.json"), generation(do_sample=True)),
    "end token as object": settings(eos_token={**TOOL, "__type": "AddedToken", "content": "</s>"}),
    "no tokenizer_config": remove("tokenizer_config.json"),
    "llama's class, legacy": sentencepiece("prepend", tokenizer_class="LlamaTokenizer", legacy=True),
    "llama's class, no prefix": sentencepiece("prepend", tokenizer_class="LlamaTokenizer", add_prefix_space=False),
    "prepended spaces": sentencepiece("prepend"),
    "words without a class": word_level,
    "qwen's class": settings(tokenizer_class="Qwen2Tokenizer"),
    "split special tokens": settings(split_special_tokens=True),
    "flags without a post processor": both(
        tokenizer_json(lambda entries: entries.update(post_processor=None)),
        settings(add_bos_token=True, add_eos_token=True),
    ),
    "truncation and padding": tokenizer_json(
        lambda entries: entries.update(
            truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        )
    ),
    "stripping token": both(
        tokenizer_json(fewer_tokens),
        settings(additional_special_tokens=[{**TOOL, "__type": "AddedToken", "lstrip": True, "rstrip": True}]),
    ),
    "extra tokens by name": both(tokenizer_json(fewer_tokens), settings(extra_special_tokens={"tool_token": "<tool>"})),
    "a token of its own": both(tokenizer_json(fewer_tokens), settings(tool_token="<tool>")),
    "one shard": one_named_file,
    "no generation_config": remove("generation_config.json"),
    "bos null": both(config(bos_token_id=None), settings(bos_token=None, chat_template="{{ messages[0].content }}")),
    "newer names": config(
        torch_dtype=..., dtype="float32", rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 5e4}
    ),
    "linear rope": config(rope_scaling={"type": "linear", "factor": 2.0}),
    "gelu": config(hidden_act="gelu"),
    "quantised is refused": config(quantization_config={"quant_method": "other"}),
    "end tokens in two forms": both(config(eos_token_id=[1]), generation(eos_token_id=[1, 6, 7])),
    "end token null in generation_config": generation(eos_token_id=None),
    "pad is the end": both(config(pad_token_id=1), settings(pad_token="</s>")),
    "code that is not needed": config(auto_map={"AutoConfig": "configuration_own.OwnConfig"}, use_cache=False),
    "another type of weights": config(torch_dtype="float16"),
    "types of weights mixed": rewritten(halved),
    "old frequencies": rewritten(ropes_of_old),
    "weights in another form beside": other_file("consolidated.safetensors"),
    "an adapter's folder beside": both(write("checkpoint-1/adapter_config.json", "{}"), write("optimizer.pt", "")),
    "tied in config only": config(tie_word_embeddings=True),
    "tied, and the head is stored": both(
        config(tie_word_embeddings=True),
        rewritten(lambda entries: entries.update({"lm_head.weight": 1 * entries[EMBEDDING]})),
    ),
    "template with a loop's break": with_template(
        "{% for m in messages %}{{ m.content }}{% if loop.index == 1 %}{% break %}{% endif %}{% endfor %}"
    ),
    "template with marks of answers": with_template(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
    "template of today": with_template("{{ strftime_now('%Y') }}{{ messages | tojson }}{{ eos_token }}"),
    "template with spaces": with_template("  {%- for m in messages %}\n  {{ m.content }}\n{% endfor %}\r\n "),
    "template of a processor": write("chat_template.json", json.dumps({"chat_template": "other"})),
    "huge length": settings(model_max_length=int(1e30)),
    "spaces are cleaned up": settings(clean_up_tokenization_spaces=True),
    "lower case": normalised("NFC", "Lowercase"),
    "compatible forms": normalised("NFKC"),
    "split by an expression": tokenizer_json(split_by_expression),
    "two post processors": tokenizer_json(two_processors),
    "whole words only": both(
        tokenizer_json(fewer_tokens),
        settings(additional_special_tokens=[{**TOOL, "__type": "AddedToken", "single_word": True}]),
    ),
    "backend's class": settings(tokenizer_class="TokenizersBackend"),
}
"""Further quirks."""

OF_LLAMA = frozenset(name for name in {**QUICK, **SLOW} if "class" in name or "refused" in name or "rope" in name) | {
    "gelu",
    "newer names",
    "old frequencies",
    "one shard",
    "tied in config only",
    "tied, and the head is stored",
}
"""Quirks of fields or tensors that not every family has."""
