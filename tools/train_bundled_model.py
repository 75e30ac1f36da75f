#!/usr/bin/env python3
"""Make the bundled model: tokenizer, weights, evaluation and model card, in one command.

    python tools/train_bundled_model.py

Everything the run needs is on the machine: the text is the Python standard library's own source (and the language
reference topics that ``pydoc`` carries), and the libraries are torch, tokenizers and safetensors. Steps:

1. collect the library's modules, drop duplicates and data tables, and hold out about 5 % of the files, chosen by a
   hash of the file's relative name;
2. train a byte-level BPE tokenizer on the rest;
3. train a small Llama on 1k windows, then 2k, then 8k, with Muon for the matrices and AdamW for embedding and norms;
4. round the weights to bfloat16, save, load the saved file again and measure held-out bits per byte at token positions
   0-1023 and 7168-8191 of 8k windows, then print samples;
5. write the Hugging Face folder and its model card.

The folder is also written early and now and then during training, so that an interrupted run leaves a usable model.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import importlib
import json
import math
import os
import pathlib
import platform
import random
import shutil
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator, Sequence

import safetensors.torch
import tokenizers
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULT_OUT = ROOT / "moonpool" / "bundled" / "tiny"
SIZE_LIMIT = 10_000_000
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
CONTEXT = 8192
BLOCK = 1024

#: The conversation format. Words of the user are comments, and a reply is plain source text that ends with ``</s>``.
#: A finished conversation is a prefix of its continuation, so a KV cache of earlier turns stays valid.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- set content = message['content'] -%}"
    "{%- if content is none -%}{%- set content = '' -%}{%- endif -%}"
    "{%- if content is not string -%}"
    "{%- set parts = namespace(text='') -%}"
    "{%- for part in content if part['type'] == 'text' -%}{%- set parts.text = parts.text + part['text'] -%}"
    "{%- endfor -%}"
    "{%- set content = parts.text -%}"
    "{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '# assistant:\\n' + content + eos_token + '\\n' }}"
    "{%- else -%}"
    "{{ '# ' + message['role'] + ': ' + content.replace('\\n', '\\n# ') + '\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '# assistant:\\n' }}{%- endif -%}"
)

#: Prompts of the samples in the model card: two documents and one conversation.
SAMPLE_PROMPTS = (
    '"""Utilities for reading and writing configuration files.',
    "class Queue:\n    def __init__(self, maxsize=0):",
)
SAMPLE_QUESTION = "Return the absolute path of a file."
SAMPLE_TEMPERATURE, SAMPLE_TOP_P = 0.7, 0.9


# ---------------------------------------------------------------------------------------------------------------------
# Text


@dataclasses.dataclass(frozen=True)
class Document:
    """One text: its name relative to the standard library (POSIX form) and its content."""

    name: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether the text belongs to CPython's test suite."""
        return self.name.startswith("test/") or "/test/" in self.name or "/tests/" in self.name


def is_held_out(name: str, percent: float) -> bool:
    """Decide by a hash of ``name`` alone whether a document is held out, so that the split never moves."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return number < percent / 100 * 2**64


def is_readable(text: str) -> bool:
    """Reject data tables: text that is mostly digits, escapes and punctuation, or has very long lines."""
    letters = sum(c.isascii() and (c.isalpha() or c.isspace()) for c in text)
    return letters >= 0.7 * len(text) and max(map(len, text.splitlines()), default=0) <= 1000


def collect_documents() -> list[Document]:
    """Return the readable, distinct texts of this interpreter's standard library, sorted by name."""
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__", "data"}
    documents: list[Document] = []
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if skipped & set(relative.parts) or relative.name.startswith(("bad", "_sysconfigdata")):
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        documents.append(Document(relative.as_posix(), text))
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    documents += [Document(f"pydoc_data/topics/{name}", topics[name]) for name in sorted(topics)]
    seen: set[str] = set()
    kept = []
    for document in documents:
        key = hashlib.sha256(document.text.strip().encode()).hexdigest()
        if key not in seen and len(document.text) >= 200 and is_readable(document.text):
            kept.append(document)
        seen.add(key)
    return kept


def chat_header(question: str) -> str:
    """Render one user turn and the opening of the reply, as ``CHAT_TEMPLATE`` does."""
    return "# user: " + question.replace("\n", "\n# ") + "\n# assistant:\n"


def conversations(document: Document) -> list[list[tuple[str, str]]]:
    """Derive short conversations from a document: the summary line of a docstring asks for its function.

    Each conversation is a list of (question, reply) turns, one to three of them, from one file.
    """
    if document.name.startswith("pydoc_data/"):
        topic = document.name.rsplit("/", 1)[1]
        reply = document.text.strip()
        return [[(f"Explain {topic}.", reply)]] if len(reply) <= 6000 else []
    if document.is_test:
        return []
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return []
    lines = document.text.splitlines()
    turns: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.end_lineno is None:
            continue
        summary = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        if not 12 <= len(summary) <= 160 or not 3 <= node.end_lineno - first + 1 <= 50:
            continue
        reply = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
        if not reply[:1].isspace():
            turns.append((summary, reply))
    result = []
    start = 0
    while start < len(turns):
        length = 1 + (len(turns[start][0]) + len(turns[start][1])) % 3
        result.append(turns[start : start + length])
        start += length
    return result


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train the byte-level BPE tokenizer; every byte is in its alphabet, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    if [tokenizer.token_to_id(t) for t in (BOS, EOS, PAD)] != [BOS_ID, EOS_ID, PAD_ID]:
        raise RuntimeError("the special tokens did not get the ids 0, 1, 2")
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode ``text`` without special tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def encode_conversation(tokenizer: Tokenizer, turns: Sequence[tuple[str, str]]) -> list[int]:
    """Encode a conversation: one ``<s>`` at the start and an ``</s>`` after each reply."""
    ids = [BOS_ID]
    for number, (question, reply) in enumerate(turns):
        ids += encode_text(tokenizer, ("\n" if number else "") + chat_header(question) + reply)
        ids.append(EOS_ID)
    return ids


class Corpus:
    """The training text as token lists, and the epochs drawn from it."""

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer, test_share: float) -> None:
        """Encode ``documents`` and their conversations; ``test_share`` is the part of the test suite per epoch."""
        self.test_share = test_share
        self.library: list[list[int]] = []
        self.tests: list[list[int]] = []
        self.chats: list[list[int]] = []
        for document in documents:
            ids = [BOS_ID, *encode_text(tokenizer, document.text), EOS_ID]
            (self.tests if document.is_test else self.library).append(ids)
            self.chats += [encode_conversation(tokenizer, turns) for turns in conversations(document)]

    def epoch(self, rng: random.Random) -> Tensor:
        """Return one shuffled epoch: the library, its conversations and a part of the test suite."""
        tests = list(self.tests)
        rng.shuffle(tests)
        parts = self.library + self.chats + tests[: round(len(tests) * self.test_share)]
        rng.shuffle(parts)
        return torch.tensor([token for ids in parts for token in ids], dtype=torch.int32)

    def rows(self, length: int, seed: int) -> Iterator[Tensor]:
        """Yield rows of ``length + 1`` tokens for ever; rows of one epoch come in random order."""
        rng = random.Random(seed)
        while True:
            stream = self.epoch(rng)
            count = (len(stream) - 1) // length
            shift = rng.randrange(len(stream) - count * length)
            order = list(range(count))
            rng.shuffle(order)
            for index in order:
                start = shift + index * length
                yield stream[start : start + length + 1].long()


# ---------------------------------------------------------------------------------------------------------------------
# Model


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of the model, under the names of a Hugging Face Llama configuration."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    rope_theta: float = 100_000.0
    rms_norm_eps: float = 1e-5

    def config(self) -> dict[str, object]:
        """Return the content of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **dataclasses.asdict(self),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": CONTEXT,
            "mlp_bias": False,
            "pad_token_id": PAD_ID,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


def rope_table(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines of rotary embedding, each ``[length, head_dim]``."""
    inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class Norm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        """Make the norm over the last axis of ``size``."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        """Make the four projections."""
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend causally within ``x`` (``[batch, length, hidden]``)."""
        batch, length, _ = x.shape
        shape = self.shape

        def rotate(y: Tensor) -> Tensor:
            swapped = y.roll(shape.head_dim // 2, -1)
            return (y * cos + swapped * sin).transpose(1, 2)

        q = rotate(self.q_proj(x).view(batch, length, shape.num_attention_heads, shape.head_dim))
        k = rotate(self.k_proj(x).view(batch, length, shape.num_key_value_heads, shape.head_dim))
        v = self.v_proj(x).view(batch, length, shape.num_key_value_heads, shape.head_dim).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class Feedforward(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        """Make the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape) -> None:
        """Make attention, feed-forward block and their norms."""
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Feedforward(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The model, with parameter names as in ``LlamaForCausalLM.model`` and a tied output head."""

    def __init__(self, shape: Shape) -> None:
        """Make and initialise the model from torch's current random state."""
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 if name.startswith("embed") else parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * shape.num_hidden_layers)
                nn.init.normal_(parameter, std=std)
        self.tables = rope_table(shape, CONTEXT)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the final hidden states of ``ids`` (``[batch, length]``)."""
        length = ids.shape[1]
        x: Tensor = self.embed_tokens(ids)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        cos, sin = (table[:length, None, :].to(dtype) for table in self.tables)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def losses(self, ids: Tensor, targets: Tensor, piece: int = 2048) -> Iterator[Tensor]:
        """Yield the losses (nats, flat) of pieces of the batch, so that the logits never exist all at once."""
        hidden, wanted = self(ids).flatten(0, 1), targets.flatten()
        for start in range(0, len(wanted), piece):
            logits = functional.linear(hidden[start : start + piece], self.embed_tokens.weight).float()
            yield functional.cross_entropy(logits, wanted[start : start + piece], reduction="none")


# ---------------------------------------------------------------------------------------------------------------------
# Training


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of training: its share of the tokens and the length of its windows."""

    share: float
    length: int


STAGES = (Stage(0.80, 1024), Stage(0.10, 2048), Stage(0.10, 8192))


@dataclasses.dataclass
class Report:
    """What the model card tells about a run."""

    seed: int
    threads: int
    documents: int
    train_bytes: int
    epoch_tokens: int
    held_out_files: int
    held_out_bytes: int
    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0
    cpu_minutes: float = 0.0
    final_loss: float = float("nan")


def learning_rate(progress: float, warmup: float = 0.02) -> float:
    """Return the factor of the learning rates at ``progress`` (0 to 1): warm-up, plateau, then linear decay."""
    if progress < warmup:
        return max(progress / warmup, 0.02)
    return min(1.0, (1.0 - progress) / 0.6)


@torch.no_grad()
def head_gradient(model: Llama, hidden: Tensor, targets: Tensor, piece: int = 512) -> tuple[float, Tensor]:
    """Return the mean loss and its gradient for ``hidden``, and set the gradient of the tied embedding.

    This is cross-entropy written out by hand: piece by piece, so that logits stay in the processor's cache, and with
    one softmax for loss and gradient. It is markedly faster on a CPU than the same by automatic differentiation.
    """
    weight = model.embed_tokens.weight
    half = weight.to(torch.bfloat16)
    flat, wanted = hidden.flatten(0, 1).to(torch.bfloat16), targets.flatten()
    gradient = torch.empty_like(flat)
    weight_gradient = torch.zeros_like(weight)
    total = torch.zeros(())
    for start in range(0, len(wanted), piece):
        h, t = flat[start : start + piece], wanted[start : start + piece, None]
        probabilities = torch.mm(h, half.T).float().softmax(-1)
        chosen = probabilities.gather(1, t)
        total -= chosen.clamp_min(1e-20).log().sum()
        probabilities.scatter_(1, t, chosen - 1.0)
        difference = probabilities.to(torch.bfloat16)
        torch.mm(difference, half, out=gradient[start : start + piece])
        weight_gradient += torch.mm(difference.T, h)
    count = len(wanted)
    weight.grad = weight_gradient / count
    return total.item() / count, (gradient / count).view_as(hidden).to(hidden.dtype)


def train(model: Llama, corpus: Corpus, args: argparse.Namespace, report: Report, out: Folder) -> None:
    """Train ``model`` for the token budget, with a progress line now and then and early copies of the folder."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith("embed")]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or n.startswith("embed")]
    muon = torch.optim.Muon(
        matrices, lr=args.muon_lr, weight_decay=args.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)
    optimizers: list[tuple[torch.optim.Optimizer, float]] = [(muon, args.muon_lr), (adamw, args.adam_lr)]
    began, cpu_began = time.monotonic(), time.process_time()
    last_line = last_copy = began
    copies = 0
    tokens = 0
    smooth = float("nan")
    ends = [sum(stage.share for stage in STAGES[: i + 1]) for i in range(len(STAGES))]
    rows: Iterator[Tensor] = iter(())
    current = -1
    while tokens < args.tokens:
        progress = tokens / args.tokens
        index = next(i for i, end in enumerate(ends) if progress < end or i == len(ends) - 1)
        if index != current:
            current = index
            rows = corpus.rows(STAGES[index].length, args.seed + index)
            print(f"stage {index + 1}: windows of {STAGES[index].length} tokens", flush=True)
        length = STAGES[current].length
        batch = torch.stack([next(rows) for _ in range(max(1, args.batch_tokens // length))])
        factor = learning_rate(progress)
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model(batch[:, :-1])
        value, gradient = head_gradient(model, hidden, batch[:, 1:])
        hidden.backward(gradient)  # adds the embedding's own part to the tied gradient
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tokens += batch[:, 1:].numel()
        report.steps += 1
        smooth = value if math.isnan(smooth) else 0.97 * smooth + 0.03 * value
        now = time.monotonic()
        if now - last_line >= args.every or tokens >= args.tokens:
            last_line = now
            spent = now - began
            left = spent / tokens * (args.tokens - tokens) / 60
            print(
                f"step {report.steps:5d}  tokens {tokens / 1e6:6.2f}M/{args.tokens / 1e6:.2f}M  loss {smooth:.4f}"
                f"  lr {factor:.3f}  {tokens / spent:7.0f} tok/s  {spent / 60:5.1f} min, {left:5.1f} left",
                flush=True,
            )
        if now - last_copy >= 60 * args.copy_minutes * (0.2 if copies == 0 else 1.0):
            last_copy, copies = now, copies + 1
            out.write(model, "This copy was written in the middle of training; the finished card replaces it.\n")
    report.tokens = tokens
    report.minutes = (time.monotonic() - began) / 60
    report.cpu_minutes = (time.process_time() - cpu_began) / 60
    report.final_loss = smooth


# ---------------------------------------------------------------------------------------------------------------------
# The folder


class Folder:
    """The Hugging Face folder that the run writes."""

    def __init__(self, path: pathlib.Path, shape: Shape, tokenizer: Tokenizer) -> None:
        """Prepare to write to ``path``."""
        self.path = path
        self.shape = shape
        self.tokenizer = tokenizer

    def write(self, model: Llama, card: str) -> None:
        """Write all files beside the folder, then put the new folder in the old one's place."""
        fresh = self.path.with_name(f".{self.path.name}.new")
        stale = self.path.with_name(f".{self.path.name}.old")
        for folder in (fresh, stale):
            shutil.rmtree(folder, ignore_errors=True)
        fresh.mkdir(parents=True)
        state = {f"model.{k}": v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
        safetensors.torch.save_file(state, fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "model.safetensors").chmod(0o644)
        self.tokenizer.save(str(fresh / "tokenizer.json"))
        self._json(fresh / "config.json", self.shape.config())
        self._json(
            fresh / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "pad_token": PAD,
                "add_bos_token": True,
                "add_eos_token": False,
                "clean_up_tokenization_spaces": False,
                "model_max_length": CONTEXT,
                "padding_side": "left",
                "chat_template": CHAT_TEMPLATE,
            },
        )
        self._json(
            fresh / "generation_config.json",
            {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False},
        )
        (fresh / "README.md").write_text(card, encoding="utf-8")
        size = (fresh / "model.safetensors").stat().st_size
        if size > SIZE_LIMIT:
            raise RuntimeError(f"model.safetensors has {size} bytes, more than {SIZE_LIMIT}")
        if self.path.exists():
            os.rename(self.path, stale)
        os.rename(fresh, self.path)
        shutil.rmtree(stale, ignore_errors=True)

    @staticmethod
    def _json(path: pathlib.Path, content: dict[str, object]) -> None:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def load(self) -> Llama:
        """Return the saved model, its bfloat16 weights widened to float32."""
        model = Llama(self.shape)
        state = safetensors.torch.load_file(self.path / "model.safetensors")
        model.load_state_dict({k.removeprefix("model."): v.float() for k, v in state.items()})
        return model.eval()


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


@dataclasses.dataclass
class Evaluation:
    """Held-out bits per byte."""

    windows: int
    files: int
    first: float
    last: float
    same_text_first: float
    same_text_last: float
    by_block: list[float]
    whole: float


@torch.inference_mode()
def evaluate(model: Llama, documents: Sequence[Document], tokenizer: Tokenizer, stride: int) -> Evaluation:
    """Measure bits per byte by position in 8k windows, each within one held-out file.

    ``first`` and ``last`` are over positions 0-1023 and 7168-8191 of all windows. ``same_text_*`` score exactly the
    same tokens at both ranges: those that are at 7168-8191 in one window and at 0-1023 in another. ``whole`` is over
    all held-out files, each read from its start (with ``<s>``) in chunks of at most 8k tokens.
    """
    sizes = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.int64)
    for token, index in tokenizer.get_vocab().items():
        sizes[index] = len(token) if index > PAD_ID else 0  # one character of the byte-level alphabet is one byte
    blocks = CONTEXT // BLOCK
    nats, byte_counts = torch.zeros(blocks, dtype=torch.float64), torch.zeros(blocks, dtype=torch.float64)
    by_start: dict[tuple[str, int], dict[int, tuple[float, int]]] = {}
    windows = 0
    long_files = 0
    whole_nats = whole_bytes = 0.0
    began = last_line = time.monotonic()
    for number, document in enumerate(documents):
        ids = [BOS_ID, *encode_text(tokenizer, document.text), EOS_ID]
        for start in range(0, len(ids) - 1, CONTEXT):
            part = torch.tensor(ids[start : start + CONTEXT + 1])
            whole_nats += sum(x.sum().item() for x in model.losses(part[None, :-1], part[1:]))
        whole_bytes += len(document.text.encode())
        starts = range(0, len(ids) - CONTEXT, stride)
        long_files += bool(starts)
        for start in starts:
            part = torch.tensor(ids[start : start + CONTEXT + 1])
            losses = torch.cat(list(model.losses(part[None, :-1], part[1:]))).double().view(blocks, BLOCK).sum(1)
            counts = sizes[part[1:]].view(blocks, BLOCK).sum(1)
            nats += losses
            byte_counts += counts
            windows += 1
            for block in (0, blocks - 1):
                spot = by_start.setdefault((document.name, start + block * BLOCK), {})
                spot[block] = (losses[block].item(), int(counts[block]))
        if time.monotonic() - last_line > 15:
            last_line = time.monotonic()
            print(f"evaluation: {number + 1}/{len(documents)} files, {last_line - began:.0f} s", flush=True)
    if not windows:
        raise RuntimeError("no held-out file is as long as the context")
    matched = [spot for spot in by_start.values() if len(spot) == 2]
    same = [
        sum(s[b][0] for s in matched) / max(sum(s[b][1] for s in matched), 1) / math.log(2) for b in (0, blocks - 1)
    ]
    curve = (nats / byte_counts / math.log(2)).tolist()
    whole = whole_nats / whole_bytes / math.log(2)
    return Evaluation(windows, long_files, curve[0], curve[-1], same[0], same[1], curve, whole)


@torch.inference_mode()
def continue_text(model: Llama, ids: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """Return up to ``count`` tokens after ``ids``, ending with ``</s>`` if the model ends; greedy at temperature 0."""
    ids = list(ids)
    produced: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    while len(produced) < count and (not produced or produced[-1] != EOS_ID):
        logits = functional.linear(model(torch.tensor([ids]))[0, -1], model.embed_tokens.weight)
        if temperature > 0:
            ranked, order = (logits / temperature).softmax(-1).sort(descending=True)
            ranked[ranked.cumsum(0) - ranked > SAMPLE_TOP_P] = 0.0
            token = int(order[torch.multinomial(ranked, 1, generator=generator)])
        else:
            token = int(logits.argmax())
        produced.append(token)
        ids.append(token)
    return produced


@dataclasses.dataclass(frozen=True)
class Sample:
    """A continuation for the card."""

    prompt: str
    temperature: float
    text: str
    ended: bool


def make_samples(model: Llama, tokenizer: Tokenizer, count: int, seed: int) -> list[Sample]:
    """Return the continuations of the card's prompts: each greedy, then each drawn."""
    samples = []
    for temperature in (0.0, SAMPLE_TEMPERATURE):
        for prompt in (*SAMPLE_PROMPTS, chat_header(SAMPLE_QUESTION)):
            ids = [BOS_ID, *encode_text(tokenizer, prompt)]
            produced = continue_text(model, ids, count, temperature, seed)
            samples.append(Sample(prompt, temperature, tokenizer.decode(produced), produced[-1] == EOS_ID))
    return samples


# ---------------------------------------------------------------------------------------------------------------------
# Card


def make_card(
    shape: Shape,
    args: argparse.Namespace,
    report: Report,
    result: Evaluation,
    samples: list[Sample],
    parameters: int,
    size: int,
) -> str:
    """Return the text of the model card."""
    stages = ", then ".join(f"{stage.share:.0%} on windows of {stage.length}" for stage in STAGES)
    curve = " ".join(f"| {value:.3f}" for value in result.by_block)
    heads = " ".join(f"| {i}k-{i + 1}k" for i in range(len(result.by_block)))
    shown = "\n".join(
        f"Prompt:\n\n```text\n{sample.prompt.rstrip()}\n```\n\n"
        f"{f'Drawn at temperature {sample.temperature:g}' if sample.temperature else 'Greedy'}"
        f"{', ended by `</s>`' if sample.ended else f', cut at {args.sample_tokens} tokens'}:\n\n"
        f"```text\n{sample.text.strip(chr(10))}\n```\n"
        for sample in samples
    )
    verdict = (
        "so what stands far back does help the model."
        if result.same_text_last < result.same_text_first
        else "so the difference in the table comes from the text at\nthose positions: this model does not profit from"
        " what stands far back, it only about keeps its level up to 8k."
    )
    note = f"\n{args.note}\n" if args.note else ""
    return f"""---
license: apache-2.0
language:
- en
tags:
- code
- python
---

# Moonpool's bundled model

A Llama of {parameters / 1e6:.2f} million parameters ({size:,} bytes as bfloat16) that writes text in the manner of the
Python standard library. It exists so that Moonpool's demos and tests run with no download. It is not a useful
assistant: it knows no facts to rely on, and its code looks like code but is seldom right.

## Figures

Held-out bits per byte of the saved bfloat16 weights, computed in float32, lower is better:

| positions in the window | bits per byte |
|---|---|
| 0-1k (0 to 1023) | {result.first:.3f} |
| 7-8k (7168 to 8191) | {result.last:.3f} |

These are over {result.windows} windows of {CONTEXT} tokens, each within one of the {result.files} held-out files that
are long enough, with a window every {args.stride} tokens. The two rows above average over slightly different text.
Over exactly the same tokens, the figures are {result.same_text_first:.3f} when they stand at 0-1k and
{result.same_text_last:.3f} when they stand at 7-8k, {verdict} By position:

{heads} |
{"|---" * len(result.by_block)}|
{curve} |

Over all {report.held_out_files} held-out files (short ones too, each from its start) it is {result.whole:.3f}.

## How it was made

`python tools/train_bundled_model.py` (in Moonpool's repository) makes all files of this folder from the Python
installation it runs on.

- Text: the source of CPython {platform.python_version()}'s standard library and the language reference topics that
  `pydoc` carries, {report.train_bytes / 1e6:.1f} MB in {report.documents} texts, after dropping duplicates, data
  tables, codecs and files that are not UTF-8. {report.held_out_files} more texts
  ({report.held_out_bytes / 1e6:.2f} MB), {args.held_out_percent:g} % by a hash of the name, were held out from both
  tokenizer and model. Copies in part (a test that repeats another's lines) can still be on both sides.
- Each epoch ({report.epoch_tokens / 1e6:.2f} million tokens) has the library, {args.test_share:.0%} of its test suite,
  and conversations derived from the library: the summary line of a docstring as the user's words, the function or
  class as the reply.
- Tokenizer: byte-level BPE with {shape.vocab_size} entries, trained on the same text. A text begins with `{BOS}` and
  ends with `{EOS}`.
- Model: {shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, {shape.num_attention_heads} query heads and
  {shape.num_key_value_heads} key/value heads of {shape.head_dim}, feed-forward {shape.intermediate_size}, tied
  embeddings, rotary base {shape.rope_theta:g}, context {CONTEXT}.
- Training: {report.tokens / 1e6:.2f} million tokens ({report.tokens / max(report.epoch_tokens, 1):.1f} epochs) in
  {report.steps} steps of {args.batch_tokens} tokens (or one longer window):
  {stages}.
  Muon (rate {args.muon_lr:g}) for the matrices and AdamW (rate {args.adam_lr:g}) for embedding and norms, warm-up,
  plateau and linear decay to zero, bfloat16 autocast, seed {report.seed}. Last training loss
  {report.final_loss:.3f} nats per token.
- Time: {report.minutes:.1f} minutes for the training loop with {report.threads} threads
  ({report.cpu_minutes / report.threads:.1f} minutes of processor time per thread), torch {torch.__version__},
  tokenizers {tokenizers.__version__}.
{note}
The same command with another Python version sees other text and gives other figures; on another processor the last
digits differ.

## Prompts

Plain prompts are Python source or reference prose. The chat template writes the words of `user` and `system` as
comment lines and the reply as plain text after `# assistant:`; a reply ends with `{EOS}`. Earlier turns keep their
exact text when a conversation goes on, so their KV cache can be reused.

## Samples

From the saved weights in float32: greedy, then drawn at temperature {SAMPLE_TEMPERATURE:g} with top-p {SAMPLE_TOP_P:g}
(seed {report.seed}), unedited. Trained this briefly, the model repeats itself, above all when it is decoded greedily.

{shown}
## Licences

The weights, tokenizer and this card are under Apache-2.0. The training text is CPython's, under the Python Software
Foundation licence (PSF-2.0); the model can repeat passages of it.
"""


# ---------------------------------------------------------------------------------------------------------------------
# Command


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train Moonpool's bundled model.")
    parser.add_argument("--out", type=pathlib.Path, default=DEFAULT_OUT, help="the folder to write")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--tokens", type=int, default=7_500_000, help="tokens to train on (default %(default)s)")
    budget.add_argument("--minutes", type=float, help="instead: measure the speed, then train for about this long")
    parser.add_argument("--seed", type=int, default=20240607, help="seed of weights and order (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default %(default)s)")
    parser.add_argument(
        "--batch-tokens", type=int, default=4096, help="tokens of a step, or one window where that is longer"
    )
    parser.add_argument("--muon-lr", type=float, default=1e-2, help="peak rate of Muon (matrices)")
    parser.add_argument("--adam-lr", type=float, default=6e-3, help="peak rate of AdamW (embedding and norms)")
    parser.add_argument("--weight-decay", type=float, default=0.05, help="weight decay of the matrices")
    parser.add_argument("--test-share", type=float, default=0.35, help="part of the test suite in each epoch")
    parser.add_argument("--held-out-percent", type=float, default=5.0, help="part of the files that is held out")
    parser.add_argument("--stride", type=int, default=1024, help="tokens from one evaluation window to the next")
    parser.add_argument("--sample-tokens", type=int, default=160, help="length of the samples in the card")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between progress lines")
    parser.add_argument("--copy-minutes", type=float, default=10.0, help="minutes between copies of the folder")
    parser.add_argument("--note", default="", help="a remark for the model card, such as how busy the machine was")
    return parser.parse_args(argv)


def measure_speed(model: Llama, batch_tokens: int) -> float:
    """Return the tokens per second of a few throw-away steps at 1k windows."""
    ids = torch.randint(PAD_ID + 1, model.shape.vocab_size, (batch_tokens // 1024, 1025))
    began = time.monotonic()
    for step in range(5):
        if step == 1:
            began = time.monotonic()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.cat(list(model.losses(ids[:, :-1], ids[:, 1:]))).mean().backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    return 4 * ids.shape[0] * 1024 / (time.monotonic() - began)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all steps."""
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    print(f"seed {args.seed}, {args.threads} threads, torch {torch.__version__}", flush=True)

    documents = collect_documents()
    held_out = [d for d in documents if is_held_out(d.name, args.held_out_percent)]
    training = [d for d in documents if not is_held_out(d.name, args.held_out_percent)]
    train_bytes = sum(len(d.text.encode()) for d in training)
    held_out_bytes = sum(len(d.text.encode()) for d in held_out)
    print(
        f"text: {len(training)} files, {train_bytes / 1e6:.2f} MB; held out: {len(held_out)}, "
        f"{held_out_bytes / 1e6:.2f} MB",
        flush=True,
    )

    shape = Shape()
    began = time.monotonic()
    rng = random.Random(args.seed)
    vocabulary_text = [d.text for d in training if not d.is_test or rng.random() < args.test_share]
    tokenizer = train_tokenizer(vocabulary_text, shape.vocab_size)
    corpus = Corpus(training, tokenizer, args.test_share)
    epoch_tokens = len(corpus.epoch(random.Random(args.seed)))
    print(
        f"tokenizer: {tokenizer.get_vocab_size()} entries, {time.monotonic() - began:.0f} s; library "
        f"{sum(map(len, corpus.library)) / 1e6:.2f}M tokens, conversations {len(corpus.chats)} with "
        f"{sum(map(len, corpus.chats)) / 1e6:.2f}M, tests {sum(map(len, corpus.tests)) / 1e6:.2f}M, "
        f"epoch {epoch_tokens / 1e6:.2f}M",
        flush=True,
    )

    model = Llama(shape)
    parameters = sum(p.numel() for p in model.parameters())
    if args.minutes is not None:
        args.tokens = int(measure_speed(model, args.batch_tokens) * 0.9 * 60 * args.minutes)
    print(f"model: {parameters:,} parameters; {args.tokens:,} tokens", flush=True)
    folder = Folder(args.out, shape, tokenizer)
    report = Report(args.seed, args.threads, len(training), train_bytes, epoch_tokens, len(held_out), held_out_bytes)
    train(model, corpus, args, report, folder)

    folder.write(model, "Training has ended; evaluation is under way.\n")
    saved = folder.load()
    result = evaluate(saved, held_out, tokenizer, args.stride)
    print(
        f"held-out bits per byte: {result.first:.4f} at 0-1k, {result.last:.4f} at 7-8k over {result.windows} windows "
        f"of {result.files} files; same text {result.same_text_first:.4f}, {result.same_text_last:.4f}; "
        f"all files {result.whole:.4f}\nby 1k block: {' '.join(f'{x:.4f}' for x in result.by_block)}",
        flush=True,
    )
    samples = make_samples(saved, tokenizer, args.sample_tokens, args.seed)
    for sample in samples:
        print(
            f"--- prompt (temperature {sample.temperature:g})\n{sample.prompt}\n--- continuation\n{sample.text}",
            flush=True,
        )
    size = (folder.path / "model.safetensors").stat().st_size
    folder.write(saved, make_card(shape, args, report, result, samples, parameters, size))
    print(f"wrote {args.out.name}: {size:,} bytes of weights, {report.minutes:.1f} minutes of training", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
