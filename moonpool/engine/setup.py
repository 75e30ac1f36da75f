"""From an engine instance's flags to the served setup: dtype, layout, pool, namespace. Torch-free."""

import dataclasses
import importlib.util
import zlib
from pathlib import Path
from typing import Any

from blake3 import blake3

from moonpool.base.checkpoint import (
    ModelConfig,
    Tokenizer,
    config_hash,
    held_quantization,
    inspect_checkpoint,
    kv_layout,
    load_config,
    model_name,
    resolve,
    resolve_dtype,
    weights_fingerprint,
)
from moonpool.base.checkpoint.named_models import cache_folder
from moonpool.base.checkpoint.picture_rule import engine_rule, read_rule
from moonpool.base.checkpoint.weight_file import in_use
from moonpool.base.config import ENGINE_PACKAGES, EXTRA_ADVICE
from moonpool.base.errors import ConfigError, InvalidRequest
from moonpool.base.families.ranks import SETTING, check_ranks
from moonpool.base.kv.keys import namespace
from moonpool.base.kv.layout import ELEMENT_BYTES, KVLayout
from moonpool.base.kv.memory import available_bytes
from moonpool.base.pictures.base import PictureRule
from moonpool.base.quantization import Quantization
from moonpool.base.scheduling.latency import Speeds
from moonpool.base.scheduling.state_machine import draw_bits
from moonpool.base.scheduling.steps import STEP_TOKENS
from moonpool.engine.config import EngineConfig
from moonpool.engine.cpu_sharing import default_core_page
from moonpool.engine.emulated.profile import SCHEME, EmulatedCompute, Noise, emulated_profile, load_profile
from moonpool.engine.memory_estimate import estimated_memory
from moonpool.engine.messages import EngineSpec
from moonpool.engine.platforms.registry import engine_devices
from moonpool.engine.request import IncomingRequest
from moonpool.engine.stage_costs import layer_costs
from moonpool.v1 import conductor_pb2, kv_pb2

WEIGHTS_NAME = 32
"""Characters of a fingerprint in the name of a file with mapped weights."""
DEFAULT_KV_BYTES = 256 << 20
"""Bytes of the KV pool, by default."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an instance serves, known before anything is allocated.

    Attributes:
        spec: sent to the engine processes.
        model: sent to the conductor; carries the namespace.
        vocab_size: tokens the model knows.
        max_tokens: longest sequence, tokens.
        link_rate: bytes of KV sent per second at most; None = unlimited.
        pictures: what the model makes of pictures; a text says why none are taken.
        row_bytes: bytes of an encoded picture's row, those for later layers included; 0 = nothing is encoded.
    """

    spec: EngineSpec
    model: conductor_pb2.ModelInfo
    vocab_size: int
    max_tokens: int
    link_rate: float | None = None
    pictures: PictureRule | str = "the checkpoint has no encoder of pictures"
    row_bytes: int = 0

    @property
    def layout(self) -> KVLayout:
        """Arrangement of the KV."""
        return self.spec.layout

    def incoming(self, spec: kv_pb2.SequenceSpec) -> IncomingRequest:
        """Check a request against what is served; raises as `IncomingRequest.from_proto`."""
        if self.spec.emulated is not None:
            _check_emulated(spec.sampling)
        incoming = IncomingRequest.from_proto(
            spec,
            namespace=self.namespace,
            block_size=self.layout.block_size,
            vocab_size=self.vocab_size,
            max_tokens=self.max_tokens,
            takes_media=not isinstance(self.pictures, str),
        )
        return incoming if isinstance(self.pictures, str) else incoming.with_checked_pictures(self.pictures)

    @property
    def namespace(self) -> bytes:
        """32 bytes; equal namespaces mean interchangeable KV."""
        return self.model.namespace


def engine_setup(config: EngineConfig, *, stages: int = 1, decode: bool = False) -> EngineSetup:
    """Read the checkpoint's description and decide dtype, layout, pool and namespace.

    Blocks as long as hashing the weights takes: call this in a thread.

    Args:
        config: the flags.
        stages: the pipeline's stages.
        decode: whether this is a decode instance at first: emulated compute takes decode times.

    Raises:
        ConfigError: the pool would hold no block, or the profile of emulated compute is wrong.
        CheckpointError: the checkpoint is missing, broken or not supported.
    """
    folder: Path = resolve(config.model)
    declared = load_config(folder)
    emulated = emulated_profile(config.engine, config.time_scale)
    if emulated is not None:
        ends = _end_tokens(declared)
        compute = EmulatedCompute(*emulated, decode, declared.vocab_size, ends, _emulation_noise(config))
        return _emulated_setup(config, folder, declared, stages, compute)
    check_engine_installed()
    model = load_config(folder, config.model_impl, config.max_model_len)
    for name in ("emulated_jitter", "emulated_speed_error", "emulated_slowdown"):
        if getattr(config, name):
            raise ConfigError(name, f"only an emulated engine has it; add --engine {SCHEME}PROFILE")
    if model.decoder.other and config.max_loras:
        raise ConfigError("max_loras", f"not for {model.architecture}, which transformers' own code computes")
    if model.pooling is not None and model.pooling.whole and config.kv_cache_dtype != "auto":
        raise ConfigError("kv_cache_dtype", f"must be auto: {model.architecture} sees whole prompts and has no KV")
    platform = engine_devices(config.device, stages, config.tensor_parallel_size)[0][0].platform
    check_ranks(model.decoder, config.tensor_parallel_size, model.architecture)
    on_cpu = platform.uses_host_cores
    # A rank that gave its cores away would hold all others up in the next sum.
    lends = config.core_share and on_cpu and config.tensor_parallel_size == 1
    by_memory = platform.sized_by_memory
    dtype = resolve_dtype(model, config.dtype)
    layout = kv_layout(model, dtype, config.block_size, config.kv_cache_dtype)
    longest = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    spec = EngineSpec(
        checkpoint=str(folder),
        dtype=dtype,
        layout=layout,
        model_impl=config.model_impl,
        imatrix=_imatrix(config),
        quantization=_quantization(config, folder, model, on_cpu=on_cpu),
        blocks=_blocks(config, layout, 0 if by_memory else DEFAULT_KV_BYTES, longest),
        max_num_batched_tokens=0 if by_memory and not config.most_step_tokens else _step_tokens(config),
        memory_share=config.gpu_memory_utilization,
        stages=stages,
        layer_costs=_layer_costs(config, model, on_cpu=on_cpu) if stages > 1 else (),
        joined=model.decoder.joined,
        ranks=config.tensor_parallel_size,
        threads=config.threads,
        core_page=(config.core_page or str(default_core_page())) if lends else "",
        core_share=config.core_share,
        device=config.device,
        graph_rows=config.most_decoded if config.cuda_graphs == "auto" else 0,
        graph_prompts=config.takes_prompts and config.cuda_graphs == "auto",
        int8_head=(decode or config.either_role)
        and stages == config.tensor_parallel_size == 1
        and config.int8_head == "auto",
        deterministic=config.deterministic,
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank if config.max_loras else 0,
        max_tokens=longest,
        speeds=_calibrated_speeds(config.profile, layout),
    )
    fingerprint = weights_fingerprint(folder)
    spec = dataclasses.replace(spec, weights=fingerprint)
    if model != declared:
        fingerprint = blake3(b"moonpool model_impl v1\0" + config_hash(model) + fingerprint).digest()
    fingerprint = _compute_fingerprint(fingerprint, spec)
    weights_file = weights_folder() / fingerprint.hex()[:WEIGHTS_NAME]
    if platform.in_host_pool and _in_file(config, folder, spec, weights_file):
        spec = dataclasses.replace(spec, weights_file=str(weights_file))
    pictures = engine_rule(folder) if not model.decoder.other else f"not with model_impl={config.model_impl}"
    if not isinstance(pictures, str) and pictures.added_layers > (first := spec.stage_layers[0][1]):
        pictures = (
            f"not with {stages} stages: the encoder adds to {pictures.added_layers} layers, the first has {first}"
        )
    row_bytes = 0
    if not isinstance(pictures, str):
        row_bytes = (1 + pictures.added_layers) * model.hidden_size * ELEMENT_BYTES[dtype]
    setup = _instance_setup(config, declared, spec, fingerprint)
    return dataclasses.replace(setup, pictures=pictures, row_bytes=row_bytes)


def weights_folder() -> Path:
    """Return the folder for files that hold mapped weights."""
    return cache_folder().parent / "weights"


def _in_file(config: EngineConfig, folder: Path, spec: EngineSpec, file: Path) -> bool:
    """Tell whether the weights lie in a `file` that is mapped: others use the file, or memory is too short."""
    if config.mmap_weights != "auto":
        return config.mmap_weights == "on"
    if in_use(file.parent, file.name):
        return True
    how: Any = {"quantization": spec.quantization, "model_impl": spec.model_impl}
    held = estimated_memory(inspect_checkpoint(folder, spec.dtype, **how), spec)
    return not held.fits(available_bytes())


def check_engine_installed() -> None:
    """Check that the packages with which engines compute are installed.

    Raises:
        ConfigError: a package is missing; says how to install the package.
    """
    for package in ENGINE_PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                "engine",
                f"computing needs {package}, which is not installed: {EXTRA_ADVICE.format('engine')}; or emulate the "
                f"compute with --engine {SCHEME}PROFILE",
            )


def _quantization(config: EngineConfig, folder: Path, model: ModelConfig, *, on_cpu: bool) -> Quantization:
    """Return how weights are held; "auto" is for CPUs, as GPUs dequantise packed weights for each product."""
    if config.quantization == "auto" and not on_cpu:
        return "none"
    return held_quantization(folder, model, config.quantization)


def _imatrix(config: EngineConfig) -> str:
    """Return the importance matrix's path, or "".

    Raises:
        ConfigError: there is no such file, or weights are not packed by importance.
    """
    if config.imatrix and config.quantization != "int4":
        raise ConfigError("imatrix", f"only for quantization=int4, not {config.quantization}")
    if config.imatrix and not Path(config.imatrix).is_file():
        raise ConfigError("imatrix", f"there is no file {config.imatrix}")
    return str(Path(config.imatrix).absolute()) if config.imatrix else ""


def _compute_fingerprint(fingerprint: bytes, spec: EngineSpec) -> bytes:
    """Return the fingerprint of what computes KV: weights, their packing, and their type if the layout is silent."""
    if spec.quantization != "none":
        importance = blake3(Path(spec.imatrix).read_bytes()).digest() if spec.imatrix else b""
        kind = "auto" if spec.quantization == "file" else spec.quantization
        parts = (b"moonpool packed weights v3", kind.encode(), importance, fingerprint)
        fingerprint = blake3(b"\0".join(parts)).digest()
    if not spec.layout.scaled:
        return fingerprint
    return blake3(b"moonpool quantised kv v1\0" + spec.dtype.encode() + b"\0" + fingerprint).digest()


def _calibrated_speeds(profile: str, layout: KVLayout) -> Speeds | None:
    """Return the speeds of a calibration; None without a profile.

    Raises:
        ConfigError: the profile is missing, or belongs to another model or another KV type.
    """
    if not profile:
        return None
    found = load_profile(profile)
    if found.token_bytes != layout.token_bytes:
        theirs, ours = found.token_bytes, layout.token_bytes
        raise ConfigError(
            "profile", f"{found.name} is of a model with {theirs} bytes of KV per token, this one has {ours}"
        )
    if found.kv_dtype not in ("", layout.dtype):
        raise ConfigError(
            "profile", f"{found.name} is of KV in {found.kv_dtype}, this instance has it in {layout.dtype}"
        )
    return found.speeds


def _emulated_setup(
    config: EngineConfig, folder: Path, model: ModelConfig, stages: int, emulated: EmulatedCompute
) -> EngineSetup:
    """Take name and tokens from the checkpoint, KV and lengths from the profile."""
    profile = emulated.profile
    if config.profile:
        raise ConfigError("profile", f"emulated compute has its own, {profile.name}; leave it out")
    if config.dtype != "auto":
        raise ConfigError("dtype", f"emulated compute has none of its own; leave it 'auto', not {config.dtype!r}")
    if config.quantization != "auto":
        raise ConfigError(
            "quantization", f"emulated compute has no weights; leave it 'auto', not {config.quantization!r}"
        )
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            "kv_cache_dtype", f"emulated compute has none of its own; leave it 'auto', not {config.kv_cache_dtype!r}"
        )
    if config.device != "cpu":
        raise ConfigError("device", f"emulated compute is on none; leave it out, not {config.device!r}")
    if config.deterministic:
        raise ConfigError("deterministic", "emulated compute is so always; leave it out")
    if config.tensor_parallel_size > 1:
        raise ConfigError(SETTING, f"emulated compute has no ranks; leave it 1, not {config.tensor_parallel_size}")
    layout = profile.layout(config.block_size)
    spec = EngineSpec(
        checkpoint=str(folder),
        dtype=layout.dtype,
        layout=layout,
        blocks=_blocks(config, layout, int((profile.pool_bytes or DEFAULT_KV_BYTES) * profile.kv_scale), 0),
        stages=stages,
        max_loras=config.max_loras,
        max_tokens=min(config.max_model_len or profile.max_tokens, profile.max_tokens),
        emulated=emulated,
    )
    # Never the fingerprint of real weights; the same for all instances that emulate the same, at any time scale.
    fingerprint = blake3(b"moonpool emulated kv v1\0" + profile.name.encode()).digest()
    pictures = read_rule(folder, lambda: Tokenizer.load(folder))
    return dataclasses.replace(_instance_setup(config, model, spec, fingerprint), pictures=pictures)


def _emulation_noise(config: EngineConfig) -> Noise:
    seed = draw_bits(config.emulated_seed, zlib.crc32(config.id.encode()))
    return Noise(seed, config.emulated_jitter, config.emulated_speed_error, config.emulated_slowdown)


def _instance_setup(config: EngineConfig, model: ModelConfig, spec: EngineSpec, fingerprint: bytes) -> EngineSetup:
    info = conductor_pb2.ModelInfo(
        name=model_name(config.model),
        namespace=namespace(fingerprint, spec.layout),
        layout=spec.layout.to_proto(),
        config_hash=config_hash(model),
        vocab_size=model.vocab_size,
        max_tokens=spec.max_tokens,
        emulated=spec.emulated.profile.name if spec.emulated is not None else "",
    )
    rate = config.link_rate
    if spec.emulated is not None:
        rate = rate or spec.emulated.speeds.transfer_bytes_per_s or None
    return EngineSetup(spec, info, model.vocab_size, spec.max_tokens, rate)


def _blocks(config: EngineConfig, layout: KVLayout, default_bytes: int, longest: int) -> int:
    """Return the pool's blocks; with `default_bytes` 0, none where no setting says how many."""
    kv_bytes = config.kv_cache_memory_bytes or default_bytes
    blocks = config.blocks or layout.blocks_in(kv_bytes, _step_tokens(config), longest)
    if blocks < 1 and kv_bytes:
        raise ConfigError("kv_cache_memory_bytes", f"{kv_bytes} bytes hold no block of {layout.block_bytes} bytes")
    return blocks


def _layer_costs(config: EngineConfig, model: ModelConfig, *, on_cpu: bool) -> tuple[int, ...]:
    trimmed = on_cpu and config.takes_prompts and config.tensor_parallel_size == 1
    return layer_costs(model, config.most_step_tokens or STEP_TOKENS, on_cpu=on_cpu, trimmed=trimmed)


def _step_tokens(config: EngineConfig) -> int:
    """Return the tokens of the largest step, where the device's memory does not decide."""
    return config.most_step_tokens or max(STEP_TOKENS, config.least_step_tokens)


def _check_emulated(sampling: kv_pb2.Sampling) -> None:
    wanted = {
        "beam_width": bool(sampling.beam_width),
        "logprobs": sampling.HasField("logprobs"),
        "prompt_logprobs": sampling.HasField("prompt_logprobs"),
        "embedding": sampling.embedding,
        "response_format": bool(sampling.response_format),
    }
    for name, given in wanted.items():
        if given:
            raise InvalidRequest(f"sequence.sampling.{name}", "emulated engines have no probabilities")


def _end_tokens(model: ModelConfig) -> frozenset[int]:
    return frozenset(model.eos_token_ids)
