"""Memory of an engine process: reported at start, and an upper bound from then on. Torch-free.

Weights are held once and the pool is mapped whole, so only the work space depends on what is computed. The bound is
worked out from the largest step (`EngineSpec.max_num_batched_tokens`): what kernels and sampling allocate for such a
step, each at its largest. The allocator keeps memory once used (`moonpool.engine.worker_process`), so the bound is also
what stays.

A device with separate memory holds the weights, a pool as large as the host's, a work space, which is worked out too,
and captured graphs. A pool that leaves the others no room is refused.

Answers with a given format (`moonpool.engine.structured_output`) bring in the tokenizer, and grammars and parsers,
whose library does not tell their size: when the whole process comes near the bound, they are dropped and made anew.
"""

from collections.abc import Iterator
from pathlib import Path

from moonpool.base.checkpoint import ModelConfig
from moonpool.base.checkpoint.pooling import WHOLE_PROMPT_TOKENS
from moonpool.base.checkpoint.weight_formats import DEQUANTISED_OUTPUTS
from moonpool.base.families.spec import LayerSpec
from moonpool.engine.calibration import LONG_TOKENS
from moonpool.engine.messages import DeviceFootprint, EngineSpec

MAX_GRAPH_BYTES = 512 << 20
"""Device memory for all a stage's graphs."""
MAX_PROMPT_GRAPH_BYTES = 512 << 20
"""Device memory for all graphs of prompts' layers, which share their work space."""
EXACT_GRAPH_TOKENS = 1024
"""Tokens of a prompt step in deterministic mode that has graphs: these have a launch for each product of 32 rows."""
EXACT_GRAPH_ROWS = 8
"""Sequences of a decode step in deterministic mode with graphs, for recurrent layers, which compute each by itself."""
LOGIT_ROWS = 64
"""Logits rows held at once: a row with 152k tokens has 0.6 MB."""
_LOGIT_COPIES, _TORCH_COPIES = 10, 16
"""Copies of these rows, in float32, that sampling makes natively and in torch (weights, their order, their sums)."""
_ARRANGED_BYTES = 48 << 20
"""Keys and values that native prefill attention arranges at a time (`kernels/engine/prefill.cpp`)."""
_WIDENED_ROWS, _PANEL = 448, 32
"""Rows that native products widen at a time at most, and outputs that one task has (`kernels/engine/multiply.cpp`)."""
_SPLIT_TOKENS = 512
"""Context part whose result native decode attention holds separately (`kernels/engine/decode.cpp`)."""
_PROCESSORS = 256
"""Multiprocessors that a GPU has at most."""
_TILE_ROWS = 128
"""Query rows that a program of the GPU's attention has at most (`moonpool/engine/kernels/triton/tiles.py`)."""
_SEQUENCES = 64
"""Sequences of a step whose recurrent states are held apart, where no size says how many decode together."""
_STATE_COPIES = 5
"""Of one layer's states, while they are computed (`moonpool.engine.models.recurrent`)."""
_SCORE_BYTES = 32 << 20
"""An indexer's scores of some rows, and keys that are gathered for some rows (`moonpool.engine.kernels.sparse`)."""
_STATES = 3
"""Copies of a row's states in a layer, at most, where torch computes."""
_SPLIT_PROGRAMS, _EXACT_TOKENS = 9, 1024
"""Programs per multiprocessor whose results are held separately; tokens of a part in deterministic mode."""
_DEVICE_SLACK_BYTES = 256 << 20
"""Kernel code, library work space, the graphs' static batch."""
_SLACK_BYTES = 48 << 20
"""Code and tables that are touched later, thread stacks, messages."""
_FRAGMENTS = 4
"""The allocator's holes are at most this fraction of the allocated memory."""
GRAMMAR_BYTES = 256 << 20
"""Of grammars and parsers. Most grammars take less than 1 MB, the worst that are allowed 100 MB
(`moonpool.base.grammar.LIMITS`)."""
_MARGIN_BYTES = 128 << 20
"""Part by which grammars may grow until the process is checked again: at least the worst grammar."""
_TOKENIZER_BYTES = 1280
"""For each token of the vocabulary: of 49,152 tokens 57 MiB stay, and 12 more while the tokenizer is made."""


def work_bytes(model: ModelConfig, engine: EngineSpec, *, native: bool, threads: int) -> int:
    """Return the work space of the largest step; `native`: layers run in one native call."""
    rows, element = max_rows(engine), 4 if engine.dtype == "float32" else 2
    longest = max_sequence_tokens(model, engine)
    parts = [
        rows * _row_elements(model) * element * (1 if native else _STATES),
        rows * model.head_dim * 3 * 4 * 2,  # rotations
        _attention_bytes(model, engine, longest) if native else _gathered_bytes(model, engine, longest),
        _widened_bytes(model, rows, threads) if native else 0,
        _packed_bytes(model, rows, native=native) if engine.quantization != "none" else 0,
        _experts_bytes(model, rows, element) if native else 0,
        _recurrent_bytes(model, engine),
        rows * sum(layer.per_layer for layer in model.decoder.every) * 4 * 3,  # tokens' embeddings for each layer
        min(rows, LOGIT_ROWS) * model.vocab_size * 4 * (_LOGIT_COPIES if native else _TORCH_COPIES),
        _whole_prompt_bytes(model, element, longest),
        _chosen_bytes(model, rows, longest),
        threads << 20,
    ]
    return sum(parts) * (_FRAGMENTS + 1) // _FRAGMENTS + _SLACK_BYTES


def device_footprint(
    model: ModelConfig, engine: EngineSpec, *, weights: int, pool: int, loras: int = 0
) -> DeviceFootprint:
    """Return the bytes that one stage holds in device memory. `weights`, `pool`, `loras`: bytes, as they are held."""
    graphs = MAX_GRAPH_BYTES if engine.graph_rows else 0
    graphs += MAX_PROMPT_GRAPH_BYTES if prompt_graph_tokens(model, engine) else 0
    return DeviceFootprint(weights, pool, device_work_bytes(model, engine), graphs, loras)


def decode_graph_rows(model: ModelConfig, engine: EngineSpec) -> int:
    """Return the most sequences of a decode step that may be a graph; 0 where none is."""
    if model.decoder.not_captured:
        return 0
    alone = engine.deterministic and model.decoder.recurrent
    return min(engine.graph_rows, EXACT_GRAPH_ROWS) if alone else engine.graph_rows


def prompt_graph_tokens(model: ModelConfig, engine: EngineSpec) -> int:
    """Return the most tokens of a prompt step whose layers may be graphs; 0 where none are."""
    if not engine.graph_prompts or model.decoder.not_captured:
        return 0
    element, most = 4 if engine.dtype == "float32" else 2, max_rows(engine)
    if engine.deterministic:
        if model.decoder.recurrent:
            return 0  # each sequence is computed by itself, at places that only the host knows
        most = min(most, EXACT_GRAPH_TOKENS)
    return min(most, MAX_PROMPT_GRAPH_BYTES // (_row_elements(model) * element * _STATES))


def lora_bytes(model: ModelConfig, engine: EngineSpec, layer_begin: int, layer_end: int) -> int:
    """Return the bytes of all LoRA adapters that some layers may hold: each of the largest rank, on all projections."""
    element, rank = 4 if engine.dtype == "float32" else 2, engine.max_lora_rank
    elements = 0
    for layer in model.decoder.layers[layer_begin:layer_end]:
        for inputs, outputs, parts in layer_products(model, layer):
            ranks = _filled(parts * rank)
            elements += ranks * inputs + ranks * _filled(outputs)
    return engine.max_loras * elements * element


def layer_products(model: ModelConfig, layer: LayerSpec) -> Iterator[tuple[int, int, int]]:
    """Yield inputs, outputs and number of projections of each product that takes adapters; at least what there is."""
    hidden, attention, latent = model.hidden_size, layer.attention, layer.attention.latent
    heads = attention.num_heads * attention.head_dim
    if (recurrent := layer.recurrent) is not None:
        values, keys = recurrent.heads * recurrent.value_dim, recurrent.key_heads * recurrent.key_dim
        yield hidden, 3 * recurrent.channels + values + 2 * recurrent.heads + 2 * recurrent.width, 6
        yield max(values, recurrent.width), hidden, 1
        yield recurrent.width, keys + values, 2
    elif (indexer := layer.indexer) is not None:
        yield hidden, indexer.q_rank, 1
    elif latent is not None:
        wide = attention.num_heads * (latent.key_width + latent.rope_width)
        yield hidden, 0 if layer.beside else latent.q_rank or 0, 1
        yield latent.q_rank or hidden, wide, 1
        yield hidden, latent.kv_rank + latent.rope_width, 1
        yield attention.num_heads * latent.value_width, hidden, 1
    else:
        yield hidden, (1 + attention.output_gate) * heads + 2 * attention.num_kv_heads * attention.head_dim, 4
        yield heads, hidden, 1
    experts = layer.feed_forward.experts
    inner = layer.feed_forward.inner if experts is None else experts.shared_inner
    yield hidden, (1 + layer.feed_forward.gated) * inner, 2
    yield inner, hidden, 1


def _filled(outputs: int) -> int:
    """Return the outputs as panels hold them."""
    return -(-outputs // _PANEL) * _PANEL


def device_work_bytes(model: ModelConfig, engine: EngineSpec) -> int:
    """Return the work space of the largest step on a device."""
    rows, element = max_rows(engine), 4 if engine.dtype == "float32" else 2
    longest = max_sequence_tokens(model, engine)
    splits = 2 * (longest // _EXACT_TOKENS + 1) if engine.deterministic else _SPLIT_PROGRAMS
    parts = [
        rows * _row_elements(model) * element * _STATES,
        rows * model.head_dim * 3 * 4 * 2,  # rotations
        splits * _PROCESSORS * _TILE_ROWS * (model.head_dim + 2) * 4,
        _recurrent_bytes(model, engine),
        min(rows, LOGIT_ROWS) * model.vocab_size * 4 * _TORCH_COPIES,
        _whole_prompt_bytes(model, element, longest),
        _chosen_bytes(model, rows, longest),
    ]
    return sum(parts) * (_FRAGMENTS + 1) // _FRAGMENTS + _DEVICE_SLACK_BYTES


def _whole_prompt_bytes(model: ModelConfig, element: int, longest: int) -> int:
    """Return what whole prompts take that are computed together: states of a layer, and a mask over the longest."""
    if model.pooling is None or not model.pooling.whole:
        return 0
    states = 16 * model.hidden_size + 4 * model.intermediate_size
    return max(WHOLE_PROMPT_TOKENS, longest) * states * element + 2 * longest * longest * 4


def _chosen_bytes(model: ModelConfig, rows: int, longest: int) -> int:
    """Return the places of the keys that rows choose, and an indexer's scores and keys (`kernels.sparse`)."""
    indexers = [layer for layer in model.decoder.layers if layer.indexer is not None]
    places = max((layer.indexer.topk for layer in indexers if layer.indexer), default=0) * rows * 8 * 4
    scores = max((layer.attention.num_heads for layer in indexers), default=0) * longest * 4
    keys = max((layer.attention.head_dim for layer in indexers), default=0) * longest * 4 * 2
    return places + 3 * max(scores, _SCORE_BYTES) + keys if indexers else 0


def max_sequence_tokens(model: ModelConfig, engine: EngineSpec) -> int:
    """Return the tokens of the longest sequence that a step has."""
    return min(engine.max_tokens or model.max_position_embeddings, engine.blocks * engine.layout.block_size)


def max_rows(engine: EngineSpec) -> int:
    """Return the tokens of the largest step, those that are timed at start included."""
    return max(engine.max_num_batched_tokens, LONG_TOKENS if engine.measure else 0)


def _row_elements(model: ModelConfig) -> int:
    """Return what a token takes in a layer: hidden states, projections, attention's result, the inner layer's."""
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    channels = max(layer.recurrent.channels if layer.recurrent else 0 for layer in model.decoder.layers)
    return 5 * model.hidden_size + 3 * heads + 2 * kv_heads + 2 * model.intermediate_size + 4 * channels


def _experts_bytes(model: ModelConfig, rows: int, element: int) -> int:
    """Return the rows gathered by expert, their inner layer, results; scores (`kernels/engine/experts.cpp`)."""
    found = [layer.feed_forward.experts for layer in model.decoder.layers if layer.feed_forward.experts is not None]
    most = max(
        (spec.chosen * (model.hidden_size + max(spec.inner, spec.shared_inner)) for spec in found),
        default=0,
    )
    scores = max((6 * spec.count + 6 * spec.chosen for spec in found), default=0)
    return rows * (element * (most + 2 * model.hidden_size) + 4 * (model.hidden_size + scores)) if found else 0


def _recurrent_bytes(model: ModelConfig, engine: EngineSpec) -> int:
    """Return the bytes of recurrent states: kept until the step is over, of one layer, and of what a block takes."""
    layers = [layer.recurrent for layer in model.decoder.layers if layer.recurrent is not None]
    if not layers:
        return 0
    size = engine.layout.block_size
    sequences = min(engine.graph_rows or _SEQUENCES, engine.blocks or _SEQUENCES)
    largest = max(layer.state_elements for layer in layers) * 4
    pairs = max(layer.heads * size * max(size, 16 * layer.key_dim) for layer in layers) * 4
    return sequences * (engine.layout.state_bytes + _STATE_COPIES * largest) + _STATE_COPIES * pairs


def _attention_bytes(model: ModelConfig, engine: EngineSpec, longest: int) -> int:
    """Return the bytes of keys and values as prefill arranges them, and of unfinished results of decode's splits."""
    arranged = _ARRANGED_BYTES + longest * model.head_dim * 2 * 4
    splits = max_rows(engine) * (longest // _SPLIT_TOKENS + 1)
    return arranged + splits * model.num_heads * (model.head_dim + 64) * 4


def _widened_bytes(model: ModelConfig, rows: int, threads: int) -> int:
    """Return the bytes of the widest product's input rows; more where one lot is too few tasks for the threads."""
    fewest = min(model.hidden_size, 2 * model.num_kv_heads * model.head_dim)
    lots = max(1, 4 * threads * _PANEL // fewest)
    widest = max(model.hidden_size, model.num_heads * model.head_dim, model.intermediate_size)
    return min(rows, lots * _WIDENED_ROWS) * (widest + 32) * 4


def _packed_bytes(model: ModelConfig, rows: int, *, native: bool) -> int:
    """Return the rows of the widest product (`kernels/engine/packed_floats.cpp`); in torch also what is dequantised."""
    widest = max(model.hidden_size, model.num_heads * model.head_dim, model.intermediate_size)
    return rows * widest * 4 if native else (rows + 3 * DEQUANTISED_OUTPUTS) * widest * 4


def _gathered_bytes(model: ModelConfig, engine: EngineSpec, longest: int) -> int:
    """Return copies of the longest context in float32 and in the weights' type, and scores (`kernels.torch_ops`)."""
    context = longest * model.num_kv_heads * model.head_dim * 2
    return context * 8 + max_rows(engine) * longest * 4 + (64 << 20)


def grammar_bytes(model: ModelConfig) -> int:
    """Return what answers of a given format may take."""
    return GRAMMAR_BYTES + tokenizer_bytes(model)


def tokenizer_bytes(model: ModelConfig) -> int:
    """Return what the tokenizer for these answers takes."""
    return model.vocab_size * _TOKENIZER_BYTES


def near_memory_limit(bound: int) -> bool:
    """Tell whether this process comes near the memory bound, by the grammars' possible growth."""
    return resident_bytes() > bound - _MARGIN_BYTES


def resident_bytes(pid: int | str = "self", *, peak: bool = False) -> int:
    """Return the bytes that a process holds now, or held at most, shared parts included; 0 if the system is silent."""
    name = "VmHWM:" if peak else "VmRSS:"
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0
