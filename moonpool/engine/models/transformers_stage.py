"""A model that transformers' own modelling code computes, over the paged pool: for architectures without a family.

transformers calls a registered attention function with the queries, keys and values of each layer; this one stores keys
and values in the pool and attends to what is there. All layers run in one call. When the model is loaded, a prompt in
two chunks is compared with transformers' own attention, and a differing model is refused: a model that keeps state
elsewhere, has other masks, or does not attend through this interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moonpool.base.checkpoint.config import ModelConfig
from moonpool.base.errors import CheckpointError, UnsupportedModel
from moonpool.engine.kernels.attention import paged_attention, write_kv
from moonpool.engine.kernels.choice import prepare
from moonpool.engine.kernels.kind import AttentionKind
from moonpool.engine.kernels.plan import make_plan
from moonpool.engine.models.batch import BatchLoras, LayersKV, LayersScales, PackedBatch
from moonpool.engine.models.inference_mode import in_inference_mode
from moonpool.engine.models.native_loop import NativeLoop
from moonpool.engine.models.native_step import Progress, StepSignals
from moonpool.engine.models.recurrent import StateUndo
from moonpool.engine.models.stage import StageModel

_CHECKED_TOKENS, _BLOCK = 40, 16
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Of logits, in their largest magnitude."""


class _Given(nn.Module):
    """Stands in for the decoder when only the head is wanted: returns given hidden states.

    All else that a head reads is the decoder's own, a factor for example.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        self._bodies = (body,)  # not a part of this module

    def __getattr__(self, name: str) -> Any:
        """Return what this module lacks."""
        return getattr(self.__dict__["_bodies"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the states as transformers' decoders do."""
        del args, kwargs
        return _Output(self.hidden)


class _Output(tuple[Any, ...]):
    """A decoder's output with hidden states alone, by number and by name; all else is None."""

    def __new__(cls, hidden: Tensor | None) -> _Output:
        """Return the output with `hidden`."""
        return super().__new__(cls, (hidden,))

    def __getattr__(self, name: str) -> Any:
        """Return an output by name."""
        return self[0] if name == "last_hidden_state" else None


class TransformersStage(StageModel):
    """All a model's layers as one stage; see `StageModel` for the methods."""

    by_layers = False

    def __init__(self, config: ModelConfig, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.layer_begin, self.layer_end = 0, config.num_layers
        self.layers = []  # transformers has them
        self.dtype, self.device = dtype, device
        self.deterministic = False
        self.undo = StateUndo()
        self.kernels = prepare(device, dtype)
        self.not_native = [config.decoder.not_plain] * config.num_layers
        self.changed_weights, self.mapped_bytes = "", 0
        self._model, self._body = model, getattr(model, model.base_model_prefix)
        self._given = _Given(self._body)
        self._batch: PackedBatch | None = None
        self._kv: tuple[LayersKV, LayersScales | None] | None = None
        self._seen: set[int] = set()
        self._windows: set[int | None] = set()
        # Of this stage alone: transformers keeps attention functions by name, for the whole process.
        self._name = f"moonpool_paged_{id(self)}"

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
        del positions
        embedded: Tensor = self._body.get_input_embeddings()(token_ids)
        return embedded

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
        """Run all layers; see `StageModel.run`."""
        assert (first, last) == (self.layer_begin, self.layer_end)
        assert signals is None
        assert progress is None
        del last_rows
        self._batch, self._kv = batch, (kv, scales)
        self._seen.clear()
        try:
            states = self._body(inputs_embeds=hidden[None], position_ids=batch.positions[None], use_cache=False)
        finally:
            self._batch = self._kv = None
        return last, states.last_hidden_state[0]

    def normed(self, rows: Tensor) -> Tensor:
        """See `StageModel.normed`: the model's own code includes the last norm."""
        return rows

    @in_inference_mode
    def logits(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        del out
        prefix = self._model.base_model_prefix
        self._given.hidden = rows[None]
        setattr(self._model, prefix, self._given)
        try:
            logits: Tensor = self._model(inputs_embeds=rows[None], use_cache=False).logits[0]
        finally:
            setattr(self._model, prefix, self._body)
        return logits.float()

    def native_run(self, *args: Any, **kwargs: Any) -> NativeLoop | None:
        del args, kwargs
        return None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float | None, **how: Any
    ) -> Tensor:
        """Store and attend for one layer: `query` [1, heads, T, D], the others [1, kv_heads, T, D]; [1, T, heads, D].

        Raises:
            UnsupportedModel: KV has another shape than the pool.
        """
        assert self._batch is not None
        assert self._kv is not None
        layer = getattr(module, "layer_idx", None)
        kv, scales = self._kv
        for part in (key, value):
            if not isinstance(layer, int) or (part.shape[1], part.shape[3]) != (kv[layer].shape[1], kv[layer].shape[4]):
                raise UnsupportedModel(
                    "architectures", f"{self.config.architecture} has KV of {part.shape[1]} heads of {part.shape[3]}"
                )
        assert isinstance(layer, int)
        self._seen.add(layer)
        batch, window = self._batch, how.get("sliding_window")
        self._windows.add(window)
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        layer_scales = None if scales is None else scales[layer]
        write_kv(k, v, kv[layer], batch.block_ids, batch.offsets, scales=layer_scales)
        tables, starts, lengths = batch.block_tables, batch.query_start, batch.context_lens
        plan = batch.plans.get(("other", window))
        if plan is None:
            plan = batch.plans[("other", window)] = make_plan(
                kv[layer], batch.host.block_tables, batch.host.query_start, batch.host.context_lens, window=window
            )
        kind = AttentionKind(window, how.get("softcap"), how.get("s_aux"))
        scale = self.config.head_dim**-0.5 if scale is None else scale
        attended = paged_attention(
            q, kv[layer], tables, starts, lengths, scale, kind=kind, scales=layer_scales, plan=plan
        )
        return attended[None]

    def check(self) -> None:
        """Compare a prompt, in two chunks over a pool, with transformers' own attention.

        Raises:
            UnsupportedModel: they differ, not every layer attends through the interface, or a mask may hide something
                unknown to the interface.
        """
        import transformers

        if getattr(self._model, "_is_stateful", False):
            raise self._refused("its layers have a recurrent state")
        transformers.AttentionInterface.register(self._name, self._answer)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, self.config.vocab_size, (_CHECKED_TOKENS,), generator=generator)
        with torch.inference_mode():
            self._model.set_attn_implementation("eager")
            expected = self._model(tokens[None].to(self.device), use_cache=False).logits[0].float()
            self._model.set_attn_implementation(self._name)
            blocks = -(-_CHECKED_TOKENS // _BLOCK)
            shape = (self.config.num_layers, blocks, self.config.num_kv_heads, 2, _BLOCK, self.config.head_dim)
            pool, found = torch.zeros(shape, dtype=self.dtype, device=self.device), []
            for begin, end in ((0, 23), (23, _CHECKED_TOKENS)):
                part = tokens[begin:end].to(torch.int32).numpy().tobytes()
                batch = PackedBatch.build([(part, begin, range(blocks))], _BLOCK, self.device)
                found.append(self.logits(self.run(self.embed(batch.token_ids), batch, pool, 0, self.layer_end)[1]))
                if len(self._seen) != self.config.num_layers:
                    raise self._refused(f"{len(self._seen)} of {self.config.num_layers} layers attend")
        worst = float((torch.cat(found) - expected).abs().max() / expected.abs().max())
        if not worst <= _TOLERANCE[self.dtype]:
            raise self._refused(f"paged attention gives other logits, by {worst:.1e} of the largest")
        self._check_masks()

    def _check_masks(self) -> None:
        """Refuse masks that a short prompt cannot show: chunks, and windows that attention is not told of."""
        config = self._model.config
        kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if getattr(config, "attention_chunk_size", None):
            raise self._refused("attention in chunks is not supported")
        if others := set(kinds or ()) - {"full_attention", "sliding_attention"}:
            raise self._refused(f"layers of the kinds {sorted(others)} are not supported")
        windowed = kinds is None or "sliding_attention" in kinds
        if window and windowed and window < self.config.max_position_embeddings and window not in self._windows:
            raise self._refused(f"its attention is not told of the window of {window} tokens")

    def _answer(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
    ) -> tuple[Tensor, None]:
        """Attend as transformers calls attention functions; masks come from the batch."""
        del attention_mask
        return self.attend(module, query, key, value, how.pop("scaling", None), **how), None

    def _refused(self, why: str) -> UnsupportedModel:
        return UnsupportedModel("architectures", f"{self.config.architecture} cannot be served: {why}")


def load_transformers_stage(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> TransformersStage:
    """Load a model that transformers' own modelling code computes. No code of the checkpoint is run.

    Raises:
        UnsupportedModel: transformers is not installed or does not know the architecture; or `TransformersStage.check`
            refuses the model.
        CheckpointError: the weights cannot be loaded.
    """
    try:
        import transformers
    except ImportError:
        raise UnsupportedModel(
            "architectures", f"{config.architecture} has no family of its own; install transformers to serve it"
        ) from None
    if not hasattr(transformers, config.architecture):
        raise UnsupportedModel("architectures", f"{config.architecture} is unknown to transformers too")
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="eager",
            trust_remote_code=False,
            use_safetensors=True,  # pickle files are not read, even where no other weights are there
            local_files_only=True,  # a folder that names another model does not fetch it
        )
        model.to(device)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    model.train(False)
    stage = TransformersStage(config, model, dtype, device)
    try:
        stage.check()
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError, KeyError) as error:
        raise UnsupportedModel("architectures", f"{config.architecture} cannot be served: {error}") from None
    return stage
