"""A worker without torch, for tests of the I/O side: speaks the protocol and misbehaves when told to by token ids.

A step whose first token is 1 makes it die, 2 hangs it, 3 makes it report a failure, 4 waits for gates 0 and 1; anything
else is answered with its layers and, on the last stage, with the sum of each sequence's tokens.
"""

import argparse
import os
import signal
import socket
import struct
import threading
from dataclasses import replace
from pathlib import Path

from moonpool.base.scheduling.steps import LayerDone, Step
from moonpool.engine.channel import BlockingChannel
from moonpool.engine.kv_gate import KVGates
from moonpool.engine.messages import Footprint, Shutdown, StageDone, StageSpec, WorkerFailed, WorkerReady
from moonpool.engine.worker import OrderReceiver


def run(step: Step, spec: StageSpec, gates: KVGates, channel: BlockingChannel) -> Step | None:
    sums = tuple(sum(struct.unpack(f"<{len(s.token_ids) // 4}i", s.token_ids)) for s in step.sequences)
    order = struct.unpack_from("<i", step.sequences[0].token_ids)[0]
    last = spec.stage == spec.engine.stages - 1
    if order == 1 and last:
        os.kill(os.getpid(), signal.SIGKILL)
    if order == 2:
        threading.Event().wait()
    if order == 3:
        channel.send(WorkerFailed("no more"))
    aborted = False
    for layer in range(spec.layer_begin, spec.layer_end):
        if step.gated and not gates.wait(step.step_id, layer, spec.engine.gate_timeout_s):
            aborted = True
            break
        if step.layer_events and not spec.rank:
            channel.send(LayerDone(step.step_id, layer, 0, 1))
    ended = any(token in share.end_token_ids for token, share in zip(sums, step.sequences, strict=True))
    over = aborted or ended or step.steps == 1 or gates.is_stopped(step.step_id)
    following = None if over else replace(step, steps=step.steps - 1)
    if over:
        gates.done(step.step_id)
    sampled = sums if last and not aborted and not spec.rank else ()
    if over or not spec.rank:
        channel.send(StageDone(step.step_id, spec.stage, sampled, aborted, spec.stage, 10, over=over))
    return following


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int)
    parser.add_argument("--pool", type=int)
    parser.add_argument("--page", type=int)
    args = parser.parse_args()
    channel = BlockingChannel(socket.socket(fileno=args.channel))
    spec: StageSpec = channel.receive()
    checkpoint = spec.engine.checkpoint
    if checkpoint == "dies":
        os._exit(9)
    if checkpoint == "mute" and spec.stage == 0:
        threading.Event().wait()
    if checkpoint == "refuses" and spec.stage == spec.engine.stages - 1:
        channel.send(WorkerFailed("not this one", "UnsupportedModel", "rope"))
        return
    if checkpoint == "refuses":
        threading.Event().wait()  # the other stage waits for it in vain
    if spec.rendezvous:
        assert Path(spec.rendezvous).is_dir()
    gates = KVGates()
    receiver = OrderReceiver(channel, gates, spec)
    receiver.start()
    channel.send(WorkerReady(0.0, 0, Footprint(4, 3, 2, 1, 0), "nothing"))
    following: Step | None = None
    while not isinstance(order := receiver.next_order(wait=following is None) or following, Shutdown):
        if isinstance(order, Step):
            following = run(order, spec, gates, channel)


if __name__ == "__main__":
    main()
