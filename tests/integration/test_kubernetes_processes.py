"""The commands, variables, probes and preStop of deploy/kubernetes, as processes, each pod at an address of its own.

No cluster: what kubelet would do with a pod is done here. Volumes are folders, secrets are files of `moonpool certs`.
Compute is emulated, also where a GPU is asked for, but for engines of several hosts; stores are small. A server with
vLLM's HTTP and KV events stands for vLLM, at the ports that the manifest names.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.bundled import model_dir
from moonpool.base.native.build import cache_folder
from moonpool.cli.certs import create
from tests.integration.namespaces import Network, missing
from tests.unit.deploy.manifests import Manifest, environment, expanded, manifests, templates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = {
    "MOONPOOL_ENGINE": "emulated:llama-70b-a800",
    "MOONPOOL_TIME_SCALE": "20",
    "MOONPOOL_BLOCK_SIZE": "16",
    "MOONPOOL_DRAM_BYTES": str(16 << 20),
    "MOONPOOL_SSD_BYTES": str(64 << 20),
    "MOONPOOL_DEVICE": "cpu",
}
COMPUTED = {"MOONPOOL_THREADS": "1", "MOONPOOL_BLOCK_SIZE": "16", "MOONPOOL_DRAM_BYTES": str(16 << 20),
            "MOONPOOL_SSD_BYTES": str(64 << 20), "MOONPOOL_DEVICE": "cpu", "MOONPOOL_DTYPE": "float32"}  # fmt: skip
"""Of engines of several hosts, which are never emulated."""
BARE = {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}", "HOME": "/", "TERM": "dumb"}
START_S = 180.0
SECRET = {"tls.crt": "{role}.pem", "tls.key": "{role}.key", "ca.crt": "ca.pem"}
ASK = """
import json, sys, urllib.error, urllib.request
url, *body = sys.argv[1:]
asked = urllib.request.Request(url, body[0].encode() if body else None, {"content-type": "application/json"})
try:
    with urllib.request.urlopen(asked, timeout=60) as answer:
        print(answer.read().decode() if body else answer.status)
except (urllib.error.URLError, ConnectionError) as error:
    print(error)
"""
PROMPT = "the tide of a moon pool rises and falls with the sea below the ship " * 3


@dataclass(slots=True)
class Pod:
    """A pod of a workload, or one of the containers of a pod that has several.

    Attributes:
        name: the pod's name.
        host: name in DNS, or the pod's name where it has none.
        template: as the workload has it.
        container: one of the template's.
        group: what LeaderWorkerSet tells the pod.
    """

    name: str
    host: str
    template: Manifest
    container: Manifest
    group: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def kind(self) -> str:
        """The service, or `vllm`."""
        return "vllm" if self.container["name"] == "vllm" else str(self.container["args"][0])

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What the container runs."""
        if self.kind != "vllm":
            return ["moonpool", *arguments]
        given = dict(argument.partition("=")[::2] for argument in arguments)
        sources = json.loads(given["--kv-events-config"])
        emulated = [
            sys.executable,
            "-m",
            "benchmarks.emulated_vllm",
            "--engines=1",
            "--time-scale=20",
            "--host=0.0.0.0",
        ]
        ports = [
            f"--events={sources['endpoint']}",
            f"--replays={sources['replay_endpoint']}",
            f"--port={given['--port']}",
        ]
        return [*emulated, *ports]


def planned(overlay: str) -> list[Pod]:
    """The pods of all workloads of an overlay."""
    found = list[Pod]()
    for item in manifests(overlay):
        name, spec = item["metadata"]["name"], item.get("spec", {})
        for role in spec.get("roles", ()) if item["kind"] == "DisaggregatedSet" else ():
            for number in range(role["spec"]["replicas"]):
                found += of_group(f"{name}-{role['name']}-{number}", role["spec"]["leaderWorkerTemplate"])
        if item["kind"] in ("Deployment", "StatefulSet"):
            (template,) = templates(item)
            service = f".{spec['serviceName']}" if "serviceName" in spec else ""
            for number in range(spec["replicas"]):
                pod = f"{name}-{number}"
                found += [Pod(pod, f"{pod}{service}", template, each, {}) for each in template["spec"]["containers"]]
    return found


def of_group(name: str, group: Manifest) -> list[Pod]:
    """The pods of a group, the leader first."""
    found = list[Pod]()
    for index in range(group["size"]):
        template: Manifest = group["leaderTemplate" if not index and "leaderTemplate" in group else "workerTemplate"]
        told = {"LWS_GROUP_SIZE": str(group["size"]), "LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": name}
        pod = f"{name}-{index}" if index else name
        found += [Pod(pod, pod, template, container, told) for container in template["spec"]["containers"]]
    return found


class Cluster:
    """What kubelet does: starts pods, asks their probes, and ends them."""

    def __init__(self, overlay: str, network: Network, pods: list[Pod], checkpoint: Path, folder: Path) -> None:
        self.overlay, self.network, self.pods = overlay, network, pods
        self._model, self._folder = {"MOONPOOL_MODEL": str(checkpoint)}, folder

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """All pods, started at once."""
        with contextlib.ExitStack() as stack:
            for pod in self.pods:
                fields = {"metadata.name": pod.name, "status.podIP": self.network.address(pod.host)}
                variables = environment(self.overlay, pod.container, fields, pod.group)
                paths = self._volumes(pod)
                own = {name: _placed(value, paths) for name, value in variables.items()}
                small, engine = (
                    COMPUTED if self.overlay == "stages" else SMALL,
                    pod.kind in ("prefill", "decode", "stage"),
                )
                ours = {name: value for name, value in small.items() if name in own or engine}
                ours |= self._model | {"MOONPOOL_DIE_WITH_PARENT": str(os.getpid())}
                ours |= {"MOONPOOL_JOURNAL_DIR": os.environ["MOONPOOL_JOURNAL_DIR"]}
                ours |= {"MOONPOOL_KERNELS_CACHE": str(cache_folder())}  # images have theirs built
                command = pod.command([_placed(expanded(word, own), paths) for word in pod.container["args"]])
                process = self.network.process(pod.host, command, BARE | own | ours, self.log(pod))
                pod.process = stack.enter_context(process)
            yield

    def _volumes(self, pod: Pod) -> dict[str, str]:
        """Path in the container -> folder here, for each volume."""
        found = {}
        for mount in pod.container["volumeMounts"]:
            folder = self._folder / pod.name / mount["name"]
            folder.mkdir(parents=True, exist_ok=True)
            found[mount["mountPath"]] = str(folder)
            if mount["name"] == "tls":
                for file, source in SECRET.items():
                    shutil.copy(self._folder / "certs" / source.format(role=pod.kind), folder / file)
        return found

    def log(self, pod: Pod) -> Path:
        """What a pod prints."""
        return self._folder / f"{pod.name}-{pod.container['name']}.log"

    def ask(self, host: str, url: str, *body: str) -> str:
        """An answer as a process at a host gets it: the status of a GET, the body of a POST, or the error."""
        command = [sys.executable, "-S", "-E", "-c", ASK, url, *body]
        return self.network.run(host, command, BARE, timeout_s=120).stdout.strip()

    def wait_for(self, pod: Pod, probe: str) -> None:
        """Ask a probe until it succeeds, from another host, as kubelet does."""
        how = pod.container[probe]["httpGet"]
        (port,) = [port["containerPort"] for port in pod.container["ports"] if port["name"] == how["port"]]
        url = f"http://{self.network.address(pod.host)}:{port}{how['path']}"
        until, pause = time.monotonic() + START_S, threading.Event()
        while (said := self.ask("kubelet", url)) != "200":
            log = self.log(pod).read_text(errors="replace")[-3000:]
            assert pod.process is not None
            assert pod.process.poll() is None, f"{pod.name} ended\n{log}"
            assert time.monotonic() < until, f"{pod.name}, {probe}: {said}\n{log}"
            pause.wait(0.2)

    def end(self, pod: Pod) -> None:
        """Run preStop, then send SIGTERM; the process must end well within the pod's grace."""
        assert pod.process is not None
        if hook := pod.container.get("lifecycle", {}).get("preStop"):
            done = self.network.run(pod.host, hook["exec"]["command"], BARE, timeout_s=60)
            assert done.returncode == 0, done.stderr
        pod.process.send_signal(signal.SIGTERM)
        status = pod.process.wait(pod.template["spec"]["terminationGracePeriodSeconds"])
        assert status == 0, f"{pod.name} ended with {status}\n{self.log(pod).read_text()[-3000:]}"


def _placed(text: str, paths: dict[str, str]) -> str:
    """A word or value with this machine's folders in the volumes' places."""
    for inside, here in paths.items():
        text = re.sub(rf"(^|=){re.escape(inside)}(?=/|$)", rf"\g<1>{here}", text)
    return text


ENGINES = {"plain": ("prefill", "decode"), "tls": ("prefill", "decode"), "nvidia": ("prefill", "decode"),
           "stages": ("stage", "prefill", "decode"), "vllm": ("adapter", "vllm")}  # fmt: skip
"""Kinds of engines, the last one ends first."""


@pytest.mark.parametrize("overlay", ENGINES)
def test_pods_start_answer_their_probes_serve_and_end(overlay: str, checkpoint: Path, tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    pods = planned(overlay)
    assert {pod.kind for pod in pods} == {"conductor", "gateway", "kvstore", *ENGINES[overlay]}
    if overlay == "tls":
        create(tmp_path / "certs")
    model = model_dir() if overlay == "vllm" else checkpoint
    with Network(tmp_path, [*dict.fromkeys(pod.host for pod in pods), "kubelet"]) as network:
        cluster = Cluster(overlay, network, pods, model, tmp_path)
        with cluster.running():
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                for pod in pods:
                    if probe in pod.container:
                        cluster.wait_for(pod, probe)
            body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "temperature": 0})
            gateways = [pod for pod in pods if pod.kind == "gateway"]
            answers: list[dict[str, Any]] = [
                json.loads(cluster.ask("kubelet", f"http://{network.address(pod.host)}:8000/v1/completions", body))
                for pod in gateways * 2
            ]
            assert [answer["usage"]["completion_tokens"] for answer in answers] == [8] * len(answers), answers
            if overlay != "vllm":  # what stands for vLLM says something else each time
                assert len({answer["choices"][0]["text"] for answer in answers}) == 1, answers
            assert answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
            for kind in ("gateway", *reversed(ENGINES[overlay]), "kvstore", "conductor"):
                for pod in pods:
                    if pod.kind == kind:
                        cluster.end(pod)
