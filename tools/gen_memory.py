"""Writes docs/memory.md from what `moonpool model inspect` computes: `python -m tools.gen_memory`. A test compares.

A model's folder is written with its shape and a file of weights that has a head and no bytes, which is all that the
arithmetic reads.
"""

import json
import math
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.base.checkpoint import inspect_checkpoint, kv_layout, load_config
from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE
from moonpool.base.quantization import Quantization
from moonpool.engine.memory_estimate import MemoryEstimate, estimated_memory
from moonpool.engine.messages import EngineSpec
from moonpool.engine.models.random_checkpoint import SHAPES
from moonpool.engine.models.tensors import layer_tensors, outer_tensors

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
THREADS = 8
"""Of the engine that is computed: each thread has work space of its own."""
CONTEXT = 8192
_QWEN3 = SHAPES["qwen3-0.6b"]
MODELS: Mapping[str, Mapping[str, Any]] = {
    "SmolLM2 135M": SHAPES["smollm2-135m"],
    "Qwen2.5 0.5B": SHAPES["qwen2.5-0.5b"],
    "Qwen3 0.6B": _QWEN3,
    "Llama 3.2 1B": SHAPES["llama-3.2-1b"],
    "Qwen3 4B": {
        **_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    },
    "Mistral 7B": SHAPES["mistral-7b"],
    "Llama 3 8B": SHAPES["llama-3-8b"],
    "Qwen3 14B": {
        **_QWEN3, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "Qwen3 32B": {
        **_QWEN3, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Name -> fields of its config.json."""
TYPES: Mapping[str, Quantization] = {"bfloat16": "none", "int8": "int8", "int4": "int4"}
"""Name -> `quantization` of an engine, for weights that are stored in bfloat16."""
HEAD = f"""# Memory by model

`python -m tools.gen_memory` writes this page. The arithmetic is that of `moonpool model inspect`, which computes your
own model's figures from its files' heads, before anything is loaded:

```sh
moonpool model inspect bundled --max-model-len 8192
moonpool model inspect bundled --max-model-len 8192 --quantization int8
```

## One engine

GB of memory that one engine takes between steps, with KV for one sequence of {CONTEXT:,} tokens: program, weights,
KV. A step adds work space. `--set engine.quantization=int8` and `int4` pack weights at load
([models.md](models.md#how-layers-are-computed)).

"""
TAIL = """
- **KV grows with tokens, not with requests.** Blocks of one prefix are shared. Each further sequence of 8,192 tokens
  that shares nothing takes the last column again. An engine's pool has 256 MiB by default; `--set
  engine.kv_cache_memory_bytes=4GiB` of `moonpool serve` sets the pool.
- **Longer sequences** take KV in proportion. A model's longest sequence is in the file `config.json`; to serve less,
  limit `max_model_len` (`--set engine.max_model_len=8192`). A prompt that is longer is refused.
- **Two engines** of one machine (`moonpool serve`) share the weights, and each has program, KV and work space
  ([one_engine.md](one_engine.md)).
- **Other processes**: conductor, kvstore and gateway take about 0.4 GB together, the kvstore's DRAM tier aside
  ([kvstore.md](kvstore.md)).
- **A GGUF file** keeps its codes: weights take what the file takes.
- **Too little memory** is told before anything is loaded. Weights are then read from a mapped file: right, and slow.
"""


def page() -> str:
    """Return the text of docs/memory.md."""
    head = [*(f"{name}" for name in TYPES), "work space", f"KV of {CONTEXT:,} tokens"]
    lines = [f"| model | {' | '.join(head)} |", "|---|" + "--:|" * len(head)]
    for name, fields in MODELS.items():
        engines = {kind: _engine(fields, quantization) for kind, quantization in TYPES.items()}
        plain = engines["bfloat16"]
        sizes = [*(engine.idle for engine in engines.values()), plain.work, plain.kv]
        lines.append(f"| {name} | {' | '.join(_gigabytes(size) for size in sizes)} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


def _gigabytes(size: int) -> str:
    value = size / 1e9
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"


def _engine(fields: Mapping[str, Any], quantization: Quantization) -> MemoryEstimate:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_head(folder, fields)
        found = inspect_checkpoint(folder, "auto", max_model_len=CONTEXT, quantization=quantization)
        layout = kv_layout(found.config, found.dtype, DEFAULT_BLOCK_SIZE)
        blocks, longest = layout.blocks_for(CONTEXT), found.config.max_position_embeddings
        spec = EngineSpec(
            name,
            found.dtype,
            layout,
            blocks,
            quantization=quantization,
            threads=THREADS,
            int8_head=True,
            max_tokens=longest,
        )
        return estimated_memory(found, spec)


def _write_head(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write a folder as of a checkpoint in bfloat16, whose weights are a hole in a file."""
    (folder / "config.json").write_text(json.dumps({**fields, "torch_dtype": "bfloat16"}))
    config = load_config(folder)
    slots = [outer_tensors(config), *(layer_tensors(config, layer) for layer in range(config.num_layers))]
    head: dict[str, Any] = {}
    end = 0
    for stored in (each for part in slots for each in part.values()):
        begin, end = end, end + 2 * math.prod(stored.shape)
        head[stored.name] = {"dtype": "BF16", "shape": list(stored.shape), "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
