"""The prompts of load tests, and what the programs need that talk to engine instances directly."""

import argparse
from array import array
from collections.abc import Sequence

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import load_config
from moonpool.base.kv.keys import block_keys, pack_keys, tokens_to_bytes
from moonpool.base.kv.keys import chain_root as root_of
from moonpool.cli.load_generator.prompts import PromptShape, PromptSource
from moonpool.engine.config import EngineConfig
from moonpool.engine.setup import EngineSetup, engine_setup
from moonpool.simulator.traces.mooncake import TraceRequest
from moonpool.v1 import kv_pb2


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of programs that send prompts."""
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of each prompt; at most so many of a trace's")
    parser.add_argument("--shared-tokens", type=int, default=384, help="of these, common to a conversation")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--output-tokens", type=int, default=24, help="of each answer; at most so many of a trace's")


def model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that must be those of the loaded engine instance, for programs that talk to it directly."""
    parser.add_argument("--model", default=str(model_dir()), help="default: the bundled model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--engine", default="real", help="real, or emulated:PROFILE to emulate compute")
    parser.add_argument("--engine-time-scale", type=float, default=0.0, help="emulated seconds per second")
    parser.add_argument("--kv-bytes", type=int, default=0, help="of its KV pool; 0 = its default")


def plan_of(options: argparse.Namespace, *, decode: bool) -> EngineSetup:
    """What an instance with these flags serves."""
    config = EngineConfig(
        id="load",
        conductor="127.0.0.1:1",
        model=options.model,
        dtype=options.dtype,
        block_size=options.block_size,
        engine=options.engine,
        time_scale=options.engine_time_scale,
        kv_cache_memory_bytes=options.kv_bytes,
    )
    return engine_setup(config, decode=decode)


def of(options: argparse.Namespace, trace: Sequence[TraceRequest], vocab_size: int = 0) -> PromptSource:
    """The prompts that the flags ask for; `vocab_size` 0 = the bundled model's."""
    shape = PromptShape(options.prompt_tokens, options.shared_tokens, options.conversations, options.output_tokens)
    return PromptSource(shape, trace, options.seed, vocab_size or load_config(model_dir()).vocab_size)


def sequence(request_id: str, tokens: "array[int]", output_tokens: int, plan: EngineSetup) -> kv_pb2.SequenceSpec:
    """A prompt as engine instances are told of it: greedy, as long an answer as asked for."""
    root = root_of(plan.namespace, "")
    return kv_pb2.SequenceSpec(
        request_id=request_id,
        token_ids=tokens_to_bytes(tokens),
        prompt_tokens=len(tokens),
        block_keys=pack_keys(block_keys(root, tokens, plan.layout.block_size)),
        chain_root=root,
        sampling=kv_pb2.Sampling(
            max_tokens=output_tokens, temperature=0.0, top_p=1.0, repetition_penalty=1.0, ignore_eos=True
        ),
    )
