"""Moonpool on a Ray cluster: `python deploy/ray/moonpool_on_ray.py --model MODEL --prefill 2 --decode 2 --gpus 1`.

Each service is an actor that runs `moonpool SERVICE`, which all nodes need on the PATH; Ray chooses the nodes of
engines and starts again what ends. Conductor, kvstore and gateway run on this node. SIGTERM or Ctrl-C drains: running
answers end.
"""

import argparse
import os
import queue
import signal
import subprocess
import threading

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(max_restarts=-1, max_concurrency=4, num_cpus=1)
class Service:
    """One of Moonpool's services, on the node where Ray puts the actor."""

    def __init__(self, service: str, *flags: str) -> None:
        here = ray.util.get_node_ip_address()
        command = ["moonpool", service, "--advertise", here, *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._address = next((line.split()[1] for line in self._process.stdout if line.startswith("ready: ")), "")
        if not self._address:
            raise RuntimeError(f"{' '.join(command)} ended with status {self._process.wait()}")
        self._drains = False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self._process.wait()
        if not self._drains:
            os._exit(1)  # Ray starts the actor again

    def address(self) -> str:
        """HOST:PORT at which others reach the service."""
        return self._address

    def drain(self) -> int:
        """Let what runs end; returns the exit status."""
        self._drains = True
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait()


def main() -> None:
    """Start all services, say where, and drain them at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder that all nodes share, or a name")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0.0, help="of each engine")
    parser.add_argument("--data-dir", default="moonpool-data", help="of the kvstore")
    parser.add_argument("--port", type=int, default=50051, help="of the conductor")
    parser.add_argument("--http-port", type=int, default=8000)
    given = parser.parse_args()
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # unlike an event, safe in a signal handler
    ray.init(ignore_reinit_error=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.put(None))
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    model, any_port = ("--model", given.model), ("--listen", "0.0.0.0:0")
    on_this_node = Service.options(scheduling_strategy=here)
    running = [on_this_node.remote("conductor", *model, "--listen", f"0.0.0.0:{given.port}")]
    conductor = ("--conductor", ray.get(running[0].address.remote()))
    running.append(
        on_this_node.remote("kvstore", "--id", "kvstore-0", *any_port, *conductor, "--data-dir", given.data_dir)
    )
    engine = Service.options(num_gpus=given.gpus, scheduling_strategy="SPREAD")
    for kind, count in (("prefill", given.prefill), ("decode", given.decode)):
        for number in range(count):
            name = ("--id", f"{kind}-{number}")
            running.append(engine.remote(kind, *name, *model, *any_port, *conductor, "--kv-transports", "local,tcp"))
    gateway = on_this_node.remote("gateway", *model, "--listen", f"0.0.0.0:{given.http_port}", *conductor)
    ray.get([service.address.remote() for service in running])
    print(f"ready: http://{ray.get(gateway.address.remote())}", flush=True)
    ended.get()
    statuses = ray.get([service.drain.remote() for service in (gateway, *running)])
    print(f"drained: {statuses}", flush=True)
    raise SystemExit(max(statuses))


if __name__ == "__main__":
    main()
