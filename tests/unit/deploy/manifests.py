"""The objects of deploy/kubernetes as kubectl would apply them, and the containers in them."""

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from tests.unit.deploy.compose import ROOT

FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
POD = {"metadata.name": "moonpool-x-0", "status.podIP": "10.0.0.7"}
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "moonpool-x-0.moonpool-x.moonpool"}
"""What LeaderWorkerSet tells each container of a group of two hosts."""
Manifest = dict[str, Any]


@functools.cache
def manifests(overlay: str, folder: Path = FOLDER) -> tuple[Manifest, ...]:
    """All objects of an overlay, as kubectl would apply them."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", str(folder / "overlays" / overlay)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return tuple(yaml.safe_load_all(found.stdout))


def templates(manifest: Manifest) -> Iterator[Manifest]:
    """The pod templates of an object."""
    match manifest["kind"]:
        case "Deployment" | "StatefulSet":
            yield manifest["spec"]["template"]
        case "DisaggregatedSet":
            for role in manifest["spec"]["roles"]:
                yield from _of_group(role["spec"])
        case "LeaderWorkerSet":
            yield from _of_group(manifest["spec"])


def _of_group(spec: Manifest) -> Iterator[Manifest]:
    """The pod templates of a group: of the leader, if it has its own, and of the other hosts."""
    group = spec["leaderWorkerTemplate"]
    yield from (group[name] for name in ("leaderTemplate", "workerTemplate") if name in group)


def pods(overlay: str) -> list[Manifest]:
    """All pod templates of an overlay."""
    return [template for manifest in manifests(overlay) for template in templates(manifest)]


def containers(overlay: str) -> list[tuple[Manifest, Manifest]]:
    """Each container of Moonpool's images, with the pod."""
    found = [(pod, container) for pod in pods(overlay) for container in pod["spec"]["containers"]]
    return [(pod, container) for pod, container in found if container["image"].startswith("moonpool-")]


def environment(
    overlay: str,
    container: Manifest,
    pod: Mapping[str, str] = MappingProxyType(POD),
    group: Mapping[str, str] = MappingProxyType(GROUP),
) -> dict[str, str]:
    """The variables that a container of a pod with these fields would have, at this place in its group."""
    maps = {item["metadata"]["name"]: item["data"] for item in manifests(overlay) if item["kind"] == "ConfigMap"}
    found: dict[str, str] = dict(group)
    for source in container.get("envFrom", ()):
        found |= maps[source["configMapRef"]["name"]]
    for variable in container.get("env", ()):
        origin = variable.get("valueFrom", {})
        match origin:
            case {"fieldRef": {"fieldPath": path}}:
                value = pod[path]
            case {"configMapKeyRef": {"name": name, "key": key}}:
                value = maps[name][key]
            case _:
                value = variable["value"]
        found[variable["name"]] = expanded(value, found)
    return found


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """The text with `$(NAME)` replaced, as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)
