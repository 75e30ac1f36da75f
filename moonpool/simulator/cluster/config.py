"""What a simulated cluster consists of, and the settings that the services' cores get."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from moonpool.base.errors import ConfigError
from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import DEFAULT_BYTES_PER_S
from moonpool.base.settings import complete, default_of
from moonpool.conductor.core.roles import RoleLimits
from moonpool.conductor.core.routing import RoutingConfig
from moonpool.conductor.core.scheduler import SchedulerLimits
from moonpool.conductor.placement.decode_policies import DEFAULT_DECODE_POLICY
from moonpool.conductor.placement.policies import DEFAULT_POLICY
from moonpool.engine.decode.core.settings import WATERMARK, DecodeSettings, Preemption
from moonpool.engine.emulated.profile import Profile
from moonpool.engine.prefill.core.settings import PrefillSettings
from moonpool.simulator.network import CallDelays
from moonpool.simulator.traces.mooncake import BLOCK_SIZE

GB = 10**9
_ALL_ALIKE = "all layers of a simulated model have full attention"
_WINDOWS_LEFT_OUT = {
    "window_blocks": _ALL_ALIKE,
    "window_slots": _ALL_ALIKE,
    "window_bytes": _ALL_ALIKE,
    "recurrent": _ALL_ALIKE,
    "states_alone": _ALL_ALIKE,
}
PREFILL_LEFT_OUT = {
    **_WINDOWS_LEFT_OUT,
    "max_started": "no service sets the number, either",
    "load_timeout_s": "simulated loads end, or their source is lost, which the simulator tells",
    "verdict_timeout_s": "simulated verdicts come, or decode is lost, which the simulator tells",
    "windowed_layers": _ALL_ALIKE,
}
"""Fields of `PrefillSettings` that keep their defaults, and why."""
DECODE_LEFT_OUT = {
    **_WINDOWS_LEFT_OUT,
    "promise_s": "no simulated conductor renews a promise for so long",
    "grace_s": "conductors and instances are lost and found as real ones are; no run varies the wait",
    "log_ttl_s": "conductors and instances are lost and found as real ones are; no run varies the wait",
    "log_bytes": "simulated answers have no tokens",
    "preempt_every": "for diagnosis of real engines",
    "patience_steps": "no service sets the number, either",
    "grant_steps": "no service sets the number, either",
    "load_timeout_s": "simulated loads come, or their source is lost, which the simulator tells",
    "draft_tokens": "simulated tokens cannot be guessed",
}
"""Fields of `DecodeSettings` that keep their defaults, and why."""


class ChunkSteps(StrEnum):
    """Fixed time of a decode instance's step with tokens of prompts, from the profile."""

    EMULATED = "emulated"
    """A decode step's, as emulated engines take."""
    CAPTURED = "captured"
    """On a GPU with graphs for mixed steps: a decode step's beside answers, a prefill step's without."""
    EAGER = "eager"
    """On a GPU without such graphs: a prefill step's."""

    def eager(self, answers: int) -> bool:
        """Whether such a step beside so many answers takes a prefill step's fixed time."""
        return self is ChunkSteps.EAGER or (self is ChunkSteps.CAPTURED and not answers)


@frozen
class SloTargets:
    """Limits for a good request, seconds. TBT is the mean over a request's longest 10 % of intervals (FAST'25)."""

    ttft_s: float = 30.0
    tbt_s: float = 0.1


@frozen
class DecodeMemory:
    """How a decode instance fills the pool; as the service's own flags.

    Attributes:
        watermark: pool share that is left free when a sequence is let in.
        preemption: how sequences give their blocks up.
        swap_bytes: DRAM for KV that is copied out of the pool.
        chunked_prefill_size: most tokens of prompts, or computed again, in one step beside answers.
        num_continuous_decode_steps: steps of answers between two steps that compute prompts beside answers.
        assumed_answer_tokens: expected answer length until some answers have ended.
        lease_s: seconds without news after which a promise or transfer ends.
    """

    watermark: float = WATERMARK
    preemption: Preemption = default_of(DecodeSettings, "preemption")
    swap_bytes: int = 256 * GB  # a server of the paper has a terabyte of DRAM; a service's default suits a laptop
    chunked_prefill_size: int = default_of(DecodeSettings, "chunked_prefill_size")
    num_continuous_decode_steps: int = default_of(DecodeSettings, "num_continuous_decode_steps")
    assumed_answer_tokens: int = default_of(DecodeSettings, "assumed_answer_tokens")
    lease_s: float = default_of(DecodeSettings, "lease_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A cluster of equal instances.

    Attributes:
        profile: an instance's speeds and sizes.
        prefill, decode, kvstore: numbers of instances.
        both: number of instances in the role both, beside these: decode that computes whole prompts.
        spare: further prefill and further decode instances that may be started; not there at first.
        chunk_steps: the fixed time of decode's steps that compute tokens of prompts.
        conductors: number of conductors side by side.
        widths: stages in each prefill instance's pipeline, each stage on a separate machine; empty = one each.
        roles: when engines change between prefill and decode; as the conductor's flags.
        role_change_s: seconds from an engine's leaving to its return in the other role.
        host_slowdown: factor by which steps take longer while another instance computes, if all share one machine's
            cores; 1 = separate cores.
        policy: how prefill instances are chosen, as the conductor's flag.
        decode_policy: how decode instances are chosen, likewise.
        decode_prompt_tokens: longest prompt suffix that decode may compute, tokens; 0 = none.
        threshold: Algorithm 1's balancing threshold.
        peers: prefixes are loaded from other engine instances too.
        copy_share: link share that copies of hot prefixes may take; 0 = no copies.
        prefetch_share: link share that prefetches into instances may take; 0 = no prefetches.
        block_size: tokens in a KV block.
        max_num_batched_tokens: most tokens in a prefill step.
        max_queue: prompts at a prefill instance at most.
        max_num_seqs: most sequences in a decode step.
        pool_blocks: blocks in an instance's KV pool; 0 = what the profile's memory holds.
        store_bytes: a kvstore's DRAM.
        disk_bytes: a kvstore's SSD; 0 = none.
        disk_bytes_per_s: read rate.
        eviction: the kvstores' policy.
        rate: factor by which requests come faster than in the trace.
        slo: for goodput, and for refusing.
        admission: which requests are admitted, see `moonpool.simulator.cluster.admission`.
        by_pool: the whole decode pool's load decides admission, see `moonpool.simulator.cluster.admission`.
        keep_tbt: requests give decode the TBT limit even if no other check refuses them.
        delays: delays for calls between services.
        seed: for delays, and for the policy's draws.
        report_s: least seconds between an instance's load reports. The services' agents wait 0.05; with 0.2 latencies
            differ by a hundredth, and a run takes less time.
        deadline_s: a request without an end after so long fails; 0 = never.
        retries, recovery_s, room_wait_s, reserve_timeout_s, slow_factor: as the conductor's flags; room_wait_s 0 = any
            time.
    """

    profile: Profile
    prefill: int = 8
    decode: int = 8
    kvstore: int = 1
    both: int = 0
    spare: int = 0
    chunk_steps: ChunkSteps = ChunkSteps.EMULATED
    conductors: int = 1
    widths: tuple[int, ...] = ()
    roles: RoleLimits = field(default_factory=RoleLimits)
    role_change_s: float = 1.0
    host_slowdown: float = 1.0
    policy: str = DEFAULT_POLICY
    decode_policy: str = DEFAULT_DECODE_POLICY
    decode_prompt_tokens: int = default_of(RoutingConfig, "decode_prompt_tokens")
    threshold: float = default_of(RoutingConfig, "balancing_threshold")
    peers: bool = default_of(RoutingConfig, "peers")
    copy_share: float = default_of(RoutingConfig, "copy_share")
    prefetch_share: float = default_of(RoutingConfig, "prefetch_share")
    block_size: int = BLOCK_SIZE
    max_num_batched_tokens: int = 4096
    max_queue: int = default_of(PrefillSettings, "max_queue")
    max_num_seqs: int = 256
    pool_blocks: int = 0
    store_bytes: int = 1000 * GB
    disk_bytes: int = 0
    disk_bytes_per_s: float = 6.0 * GB
    eviction: str = "lru"
    rate: float = 1.0
    slo: SloTargets = field(default_factory=SloTargets)
    admission: str = "all"
    by_pool: bool = False
    keep_tbt: bool = False
    memory: DecodeMemory = field(default_factory=DecodeMemory)
    delays: CallDelays = field(default_factory=CallDelays)
    seed: int = 0
    report_s: float = 0.2
    deadline_s: float = 0.0
    retries: int = default_of(SchedulerLimits, "retries")
    recovery_s: float = default_of(SchedulerLimits, "recovery_s")
    room_wait_s: float = 0.0
    reserve_timeout_s: float = default_of(SchedulerLimits, "reserve_timeout_s")
    slow_factor: float = default_of(RoutingConfig, "slow_factor")

    def __post_init__(self) -> None:
        sizes = "conductors", "block_size", "max_num_batched_tokens", "max_queue", "max_num_seqs"
        least = dict.fromkeys(("prefill", "decode"), 0 if self.both else 1) | {"both": 0} | dict.fromkeys(sizes, 1)
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(name, f"must be at least {low}, is {getattr(self, name)}")
        if self.both and self.roles.swap:
            raise ConfigError("both", "instances in the role both do not change their roles: leave out roles")
        if self.widths and self.roles.swap:
            raise ConfigError("widths", "machines of a pipeline do not change their roles")
        if self.widths and (len(self.widths) != self.prefill or min(self.widths) < 1):
            raise ConfigError("widths", f"must be {self.prefill} positive numbers, are {self.widths}")
        if not self.host_slowdown >= 1.0:
            raise ConfigError("host_slowdown", f"must be at least 1, is {self.host_slowdown}")
        for name in ("rate", "disk_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, f"must be positive, is {getattr(self, name)}")

    @property
    def prefill_numbers(self) -> range:
        """Numbers for prefill instances that exist or, if roles change, can exist: every machine can be prefill."""
        return range(self.prefill + self.decode if self.roles.swap else self.prefill + self.spare)

    @property
    def decode_numbers(self) -> range:
        """Of the decode instances, likewise; the last ones are in the role both."""
        return range(self.prefill + self.decode if self.roles.swap else self.decode + self.both + self.spare)

    def is_both(self, name: str) -> bool:
        """Whether an instance, for example "d1", is in the role both."""
        return name[0] == "d" and self.both > 0 and int(name[1:]) >= self.decode

    @property
    def division(self) -> str:
        """The instances, for people."""
        parts = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        return ", ".join(f"{count} {role}" for role, count in parts.items() if count)

    def stages_of(self, prefill: str) -> int:
        """A prefill instance's stages, given the instance's name, for example "p3"."""
        return self.widths[int(prefill[1:])] if self.widths else 1

    @property
    def block_bytes(self) -> int:
        """KV bytes per block."""
        return self.block_size * self.profile.token_bytes

    @property
    def blocks(self) -> int:
        """Blocks in an instance's pool."""
        return self.pool_blocks or max(1, self.profile.pool_bytes // self.block_bytes)

    @property
    def load_bytes_per_s(self) -> float:
        """Of the link from a kvstore to an instance."""
        return self.profile.speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S

    @property
    def transfer_bytes_per_s(self) -> float:
        """Of the link from prefill to decode."""
        return self.profile.speeds.transfer_bytes_per_s or DEFAULT_BYTES_PER_S

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


@frozen
class Runs:
    """Decode steps that an engine takes alone."""

    longest: int = 1 << 40
    """So many at once at most."""
    ahead: int = 0
    """Steps ahead for which sequences get blocks, if free; 0 = a run ends where a sequence needs a block."""


LEAPS = Runs()
"""As many steps at once as need no decision."""


def prefill_core_settings(config: ClusterConfig, stages: int = 1) -> PrefillSettings:
    """Settings for a prefill instance's core. Each stage holds the stage's own layers from all blocks."""
    given = partial(
        PrefillSettings,
        num_blocks=stages * config.blocks,
        block_size=config.block_size,
        block_bytes=config.block_bytes,
        layers=config.profile.layers,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.block_size),
        stages=stages,
        max_queue=config.max_queue,
    )
    return complete(given, PREFILL_LEFT_OUT)


def decode_core_settings(config: ClusterConfig, runs: Runs, *, both: bool = False) -> DecodeSettings:
    """Settings for a decode instance's core; `both`: the instance is in the role both."""
    memory, step_tokens = config.memory, max(config.max_num_batched_tokens, config.block_size)
    given = partial(
        DecodeSettings,
        computes_prompts=both,
        max_num_batched_tokens=step_tokens if both else default_of(DecodeSettings, "max_num_batched_tokens"),
        num_continuous_decode_steps=memory.num_continuous_decode_steps,
        num_blocks=config.blocks,
        block_size=config.block_size,
        block_bytes=config.block_bytes,
        max_num_seqs=config.max_num_seqs,
        lease_s=memory.lease_s,
        speeds=config.profile.speeds,
        preemption=memory.preemption,
        watermark_blocks=int(memory.watermark * config.blocks),
        chunked_prefill_size=memory.chunked_prefill_size,
        swap_blocks=memory.swap_bytes // config.block_bytes,
        assumed_answer_tokens=memory.assumed_answer_tokens,
        run_steps=runs.longest,
        ahead_steps=runs.ahead,
    )
    return complete(given, DECODE_LEFT_OUT)
