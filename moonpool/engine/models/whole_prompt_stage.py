"""Models that see a whole prompt at a time: encoders, and decoders whose attention or pooling does.

transformers' own code computes them. No KV is kept, because every token's state depends on all tokens. What lies in the
pool, in the place of KV, are the prompt's token ids: a chunk of a prompt writes its ids, and the prompt is computed in
one piece once the last chunk is there. So chunks, cached prefixes and stored KV work as for any other model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.checkpoint.pooling import WHOLE_PROMPT_TOKENS
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.base.families.fields import read_json
from moonpool.base.families.other import ROBERTA_KIND, WHOLE_PROMPT_BASE, WHOLE_PROMPT_DIGITS
from moonpool.engine.kernels.choice import prepare
from moonpool.engine.models.batch import BatchLoras, LayersKV, LayersScales, PackedBatch
from moonpool.engine.models.inference_mode import in_inference_mode
from moonpool.engine.models.native_loop import NativeLoop
from moonpool.engine.models.native_step import Progress, StepSignals
from moonpool.engine.models.recurrent import StateUndo
from moonpool.engine.models.stage import StageModel


class WholePromptStage(StageModel):
    """A whole model as one stage; see `StageModel` for the methods.

    `has_types`: the model was trained with the second text of a pair in token types of its own, as BERT's.
    """

    by_layers = False

    def __init__(
        self, config: ModelConfig, model: Any, dtype: torch.dtype, device: torch.device, *, has_types: bool
    ) -> None:
        self.config = self.whole = config
        self.ranks = None
        self.layer_begin, self.layer_end = 0, config.num_layers
        self.layers = []  # transformers has them
        self.head = None
        self.dtype, self.device = dtype, device
        self.deterministic = False
        self.undo = StateUndo()
        self.kernels = prepare(device, dtype)
        self.not_native = [config.decoder.not_plain] * config.num_layers
        self.changed_weights, self.mapped_bytes = "", 0
        self._model = model
        self._has_types = has_types
        self._kv: Tensor | None = None

    @property
    def native(self) -> bool:
        """Whether layers run in one native call."""
        return False

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights, bytes."""
        return sum(weight.nbytes for weight in self._model.parameters())

    def progress(self, loras: BatchLoras | None = None) -> Progress | None:
        del loras
        return None

    @in_inference_mode
    def embed(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return states without meaning, [T, 1]: the batch has the token ids."""
        del positions
        return torch.zeros(token_ids.shape[0], 1, dtype=self.dtype, device=self.device)

    @in_inference_mode
    def run(
        self,
        hidden: Tensor,
        batch: PackedBatch,
        kv: LayersKV,
        first: int,
        last: int,
        *,
        scales: LayersScales | None = None,
        last_rows: Sequence[int] | None = None,
        signals: StepSignals | None = None,
        progress: Progress | None = None,
    ) -> tuple[int, Tensor]:
        """Write the batch's token ids into the pool; see `StageModel.run`."""
        assert (first, last) == (self.layer_begin, self.layer_end)
        assert signals is None
        assert progress is None
        assert scales is None
        del last_rows
        self._kv = kv[0]
        written = batch.block_ids >= 0
        tokens = batch.token_ids[written]
        powers = WHOLE_PROMPT_BASE ** torch.arange(WHOLE_PROMPT_DIGITS, device=self.device)
        digits = (tokens[:, None] // powers) % WHOLE_PROMPT_BASE
        self._kv[batch.block_ids[written], 0, :, batch.offsets[written]] = digits[:, None].to(self.dtype)
        return last, hidden

    def normed(self, rows: Tensor) -> Tensor:
        """See `StageModel.normed`: states without meaning stay as they are."""
        return rows

    @in_inference_mode
    def pooled(self, hidden: Tensor, batch: PackedBatch, indices: Sequence[int]) -> Tensor:
        """See `StageModel.pooled`: the whole prompts are computed here."""
        del hidden
        prompts = [self.prompt_tokens(batch, index) for index in indices]
        by_length: dict[int, list[int]] = {}
        for at, prompt in enumerate(prompts):
            by_length.setdefault(prompt.shape[0], []).append(at)
        found: dict[int, Tensor] = {}
        for length, places in by_length.items():
            most = max(1, WHOLE_PROMPT_TOKENS // length)
            for begin in range(0, len(places), most):
                part = places[begin : begin + most]
                values = self._computed(torch.stack([prompts[at] for at in part]))
                found.update(zip(part, values, strict=True))
        return torch.stack([found[at] for at in range(len(prompts))])

    def prompt_tokens(self, batch: PackedBatch, index: int) -> Tensor:
        """Return a sequence's token ids [n] int64, from the pool."""
        assert self._kv is not None
        length = int(batch.host.context_lens[index])
        blocks = batch.block_tables[index, : -(-length // batch.block_size)].long()
        digits = self._kv[blocks, 0, 0].flatten(0, 1)[:length].to(torch.int64)
        return (digits * WHOLE_PROMPT_BASE ** torch.arange(WHOLE_PROMPT_DIGITS, device=self.device)).sum(-1)

    def _computed(self, prompts: Tensor) -> Tensor:
        """Return the values [R, n] of prompts of one length [R, length]."""
        pooling = self.config.pooling
        assert pooling is not None
        given = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
        if self._has_types:
            given["token_type_ids"] = token_types(prompts)
        if pooling.task == "classify":
            return self.pooling_head(self._model(**given).logits)
        states = self._model(**given).last_hidden_state
        match pooling.kind:
            case "cls":
                rows = states[:, 0]
            case "last":
                rows = states[:, -1]
            case "mean":
                rows = states.float().mean(1)
            case "max":
                rows = states.amax(1)
        return self.pooling_head(rows)

    @in_inference_mode
    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Return zeros: the model answers every prompt with the first token."""
        del out
        return torch.zeros(rows.shape[0], self.config.vocab_size, device=self.device)

    def native_run(self, *args: Any, **kwargs: Any) -> NativeLoop | None:
        del args, kwargs
        return None


def token_types(prompts: Tensor) -> Tensor:
    """Return BERT's token types [R, length]: 1 behind the first separator, which is the token that ends the prompt.

    Of a single text the first separator is the last token, and all types are 0.
    """
    separators = (prompts == prompts[:, -1:]).to(torch.int64)
    return (separators.cumsum(1) - separators).clamp(max=1)


def load_whole_prompt_stage(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> WholePromptStage:
    """Load a model that sees whole prompts. No code of the checkpoint is run.

    Raises:
        UnsupportedModel: transformers is not installed or does not know the architecture.
        CheckpointError: the weights cannot be loaded, or some are missing.
    """
    try:
        import transformers
    except ImportError:
        raise UnsupportedModel(
            "architectures", f"{config.architecture} sees whole prompts; install transformers to serve it"
        ) from None
    assert config.pooling is not None
    if not hasattr(transformers, config.architecture):
        raise UnsupportedModel("architectures", f"{config.architecture} is unknown to transformers too")
    classifies = config.pooling.task == "classify"
    kind: Any = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModel
    try:
        model, notes = kind.from_pretrained(
            path,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,  # pickle files are not read, even where no other weights are there
            local_files_only=True,  # a folder that names another model does not fetch it
            output_loading_info=True,
        )
        model.to(device)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    missing = sorted(name for name in notes["missing_keys"] if classifies or not name.startswith("pooler."))
    if missing:
        raise CheckpointError(f"{path}: tensor {missing[0]} is missing")
    model.train(False)
    return WholePromptStage(config, model, dtype, device, has_types=_has_types(path, model.config))


def _has_types(path: Path, config: Any) -> bool:
    """Whether a model takes token types: transformers' config can have them, and the tokenizer gives them.

    A tokenizer names what it gives in `model_input_names`. Without, those of a class for any model give no types.
    """
    if int(getattr(config, "type_vocab_size", None) or 0) < 2 or config.model_type in ROBERTA_KIND:
        return False
    file = path / "tokenizer_config.json"
    told = read_json(file) if file.exists() else {}
    names = told.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return bool(told.get("tokenizer_class") != "TokenizersBackend")
