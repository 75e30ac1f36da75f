"""Flags that prefill and decode instances share."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from moonpool.base.checkpoint import ModelImpl
from moonpool.base.config import ByteRate, ByteSize, OptionalAddress, PeerAddresses
from moonpool.base.errors import ConfigError
from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE
from moonpool.base.quantization import Quantization
from moonpool.base.runtime.driver import CoreServiceConfig
from moonpool.base.scheduling.steps import STEP_TOKENS
from moonpool.base.transport.config import TransportConfig
from moonpool.engine.emulated.profile import SCHEME
from moonpool.engine.messages import WRITE_BACK_SHARE
from moonpool.engine.platforms.registry import DEVICE_USAGE, MEMORY_SHARE


class EngineConfig(CoreServiceConfig, TransportConfig):
    """Flags that prefill and decode share."""

    flag_groups: ClassVar = {
        "cluster": ("conductor",),
        "model": ("model", "dtype", "max_model_len", "max_loras"),
        "KV cache": ("block_size", "kv_cache_dtype", "kv_cache_memory_bytes"),
        "compute": ("device", "threads", "engine"),
    }
    conductor: PeerAddresses = Field(
        min_length=1, description="HOST:PORT of the conductor to join; of several conductors, all are joined"
    )
    engine: str = Field(
        "real",
        description=f"'real', or '{SCHEME}PROFILE' to emulate compute: steps take the time that a profile (bundled "
        "name or path of a YAML file) gives, everything else is real; see docs/emulation.md",
    )
    time_scale: float = Field(
        0.0, ge=0.0, description="seconds of the emulated profile that pass in one second; 0 = the profile's own"
    )
    emulated_jitter: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="largest share by which an emulated step is longer or shorter, drawn at random",
    )
    emulated_speed_error: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description=(
            "largest share by which this emulated instance is slower or quicker than the profile, drawn once; the "
            "conductor does not know"
        ),
    )
    emulated_slowdown: float = Field(
        0.0,
        ge=0.0,
        description="factor by which emulated steps take longer between the signals SIGUSR1 and SIGUSR2; the "
        "conductor does not know. 0 = these signals are not handled",
    )
    emulated_seed: int = Field(0, ge=0, description="seed of these draws; instances with other ids draw differently")
    profile: str = Field(
        "",
        description=(
            "profile that `moonpool calibrate` wrote for this machine and model; at join, the profile's speeds are "
            "reported instead of those of a few steps timed at start, and then follow measurements"
        ),
    )
    model: str = Field(description="the checkpoint's folder, GGUF file, or Hugging Face hub id")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="element type of weights, and of KV unless --kv-cache-dtype says otherwise; "
        "auto = the checkpoint's own",
    )
    model_impl: ModelImpl = Field(
        "auto",
        description="what computes the model: moonpool = a family of Moonpool, and refuse other architectures; "
        "transformers = transformers' own code, slowly; auto = a family if there is one, else transformers "
        "(docs/models.md); the same on all instances",
    )
    quantization: Quantization = Field(
        "auto",
        description="auto = quantised weights keep the file's codes if the numbers stay the same, on a CPU; file = "
        "also on a GPU; int8 or int4 = weights are packed so at load, the output head in "
        "8 bits: less memory, more tokens a second, slightly other answers (docs/models.md); none = all weights in "
        "--dtype; the same on all instances",
    )
    imatrix: str = Field(
        "",
        description="file of llama.cpp's llama-imatrix for this model: quantization=int4 errs least where inputs are "
        "large; the same on all instances",
    )
    mmap_weights: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on = weights lie in a file in the cache folder that is mapped: engines of a host that load the "
        "same layers hold them once, and the system drops parts of them where memory is short, and reads them again: "
        "a model larger than memory runs, slowly; auto = on if another engine of the host has the file open, or if the "
        "engine does not fit into the free memory; `moonpool serve` sets on where that costs no speed; CPUs only",
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="element type of KV; int8 and fp8 (e4m3) take about half of bfloat16's memory and transfers, and "
        "change answers a little (docs/kernels.md); the same on all instances; auto = as the weights",
    )
    block_size: int = Field(
        DEFAULT_BLOCK_SIZE, ge=16, multiple_of=16, description="tokens per KV block; the same on all instances"
    )
    kv_cache_memory_bytes: ByteSize = Field(
        0,
        ge=0,
        description=(
            "bytes of the KV pool; 0 = on a GPU the memory that gpu_memory_utilization leaves beside weights and "
            "steps, on a CPU 256 MiB, emulated the memory that the profile's hardware holds beside the weights"
        ),
    )
    gpu_memory_utilization: float = Field(
        MEMORY_SHARE,
        gt=0,
        le=1,
        description=(
            "share of a GPU's memory that this engine takes, and of the host's free memory for KV, if "
            "kv_cache_memory_bytes and blocks are 0; engines that share a GPU need shares that add up to less than "
            "1"
        ),
    )
    blocks: int = Field(0, ge=0, description="blocks of the KV pool; 0 = as many as --kv-cache-memory-bytes hold")
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        description="pipeline stages, an engine process each; they compute different steps of prompts at the same "
        "time, but a decode step goes from one to the next",
    )
    nnodes: int = Field(
        1,
        ge=1,
        description="hosts of this instance: the last nnodes - 1 pipeline stages are on other hosts, where "
        "`moonpool stage` runs one each (docs/deploy.md)",
    )
    stages_listen: OptionalAddress = Field(
        "", description="HOST:PORT at which the stages of other hosts join; needed with nnodes"
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="engine processes of each stage, which share heads and inner states of its layers; prefill and "
        "decode may differ (docs/extend/tensor_parallelism.md)",
    )
    threads: int = Field(
        0,
        ge=0,
        description="compute threads of each engine process at most; 0 = all cores where engines lend them to each "
        "other, else an equal part for each process",
    )
    core_share: int = Field(
        1,
        ge=0,
        description="share of the host's cores while other engines compute too, relative to theirs; an engine that "
        "computes alone has all cores; 0 = cores are not lent",
    )
    core_page: str = Field(
        "", description="file by which this host's engines lend each other cores; empty = one in memory"
    )
    deterministic: bool = Field(
        False,
        description="results of a sequence do not depend on what else is in a step: fixed shapes and tiles, slower "
        "(docs/kernels.md)",
    )
    device: str = Field(
        "cpu",
        description=f"where the engine computes: {DEVICE_USAGE}. Further stages use the next devices, or those "
        "that you name: cuda:0,cuda:0",
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        "auto",
        description="auto = on a GPU, decode steps and the layers of prompts are captured as CUDA graphs and replayed; "
        "off = kernels are launched one by one",
    )
    int8_head: Literal["auto", "off"] = Field(
        "auto",
        description=(
            "auto = a decode engine on a CPU also holds the output head as bytes, which finds the same greedy "
            "tokens for up to three sequences with fewer memory reads; off = the head is held once"
        ),
    )
    max_loras: int = Field(
        0,
        ge=0,
        description="LoRA adapters that the engine holds at the same time, and that requests may ask for; memory is "
        "counted for so many of the largest rank; 0 = none (docs/lora.md)",
    )
    max_lora_rank: int = Field(16, ge=1, description="largest rank of a LoRA adapter")
    max_model_len: int = Field(
        0,
        ge=0,
        description="tokens of the longest sequence served; 0 = the model's own limit; with LongRoPE, beyond the "
        "original length: the long factors, for all sequences",
    )
    link_bytes_per_s: ByteRate = Field(
        0.0, ge=0.0, description="bytes of KV sent per second at most; 0 = unlimited, or the emulated profile's rate"
    )
    write_back_blocks: int = Field(
        0, ge=0, description="blocks held for write-back to the kvstore at most; 0 = a quarter of the pool"
    )
    either_role: bool = Field(
        False,
        description=(
            "a conductor may order this instance to change between prefill and decode: the engine is set up for "
            "both, the instance drains and goes on in the other role, and settings of both roles are taken; "
            "docs/roles.md"
        ),
    )
    start_timeout_s: float = Field(
        180.0,
        gt=0.0,
        description="seconds in which the engine's start must go on: a file compiled, a layer loaded, a step measured",
    )

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        if self.nnodes == 1:
            return self
        if self.engine != "real":
            raise ConfigError("nnodes", f"must be 1 with engine={self.engine}: emulated compute is on one host")
        if not self.stages_listen:
            raise ConfigError("stages_listen", f"must be given with nnodes={self.nnodes}: HOST:PORT for other hosts")
        if self.pipeline_parallel_size < self.nnodes:
            raise ConfigError(
                "pipeline_parallel_size",
                f"must be at least nnodes ({self.nnodes}), a stage for each host, not {self.pipeline_parallel_size}",
            )
        if self.imatrix:  # nothing would tell that another host has another file, and other KV
            raise ConfigError("imatrix", f"not with nnodes={self.nnodes}: stages of other hosts have no such file")
        return self

    @property
    def most_step_tokens(self) -> int:
        """Tokens of the largest step that the engine is given; 0 = as many as suit the device."""
        return STEP_TOKENS

    @property
    def least_step_tokens(self) -> int:
        """Tokens that the largest step must have room for, whatever suits the device."""
        return 0

    @property
    def most_decoded(self) -> int:
        """Sequences of the largest decode step; 0 where there are no such steps."""
        return 0

    @property
    def takes_prompts(self) -> bool:
        """Whether whole prompts are computed, rather than the last tokens of prompts alone."""
        return True

    @property
    def link_rate(self) -> float | None:
        """The link's rate in `Link`'s form: None = unlimited, or the emulated profile's."""
        return self.link_bytes_per_s or None

    def write_back_limit(self, blocks: int) -> int:
        """Most blocks held for write-back, in a pool with `blocks` blocks."""
        return self.write_back_blocks or max(1, blocks // WRITE_BACK_SHARE)
