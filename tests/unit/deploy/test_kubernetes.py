"""The manifests of deploy/kubernetes start services with settings that exist, at ports and paths that answer."""

import os
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from moonpool.base.config import SERVICE_MODULES, ServiceConfig, config_class, parse_address
from moonpool.base.rpc.roles import CLIENTS, ROLE_URI
from moonpool.engine.config import EngineConfig
from moonpool.engine.remote.config import StageConfig
from moonpool.engine.remote.group_place import DEFAULT_PORT
from tests.unit.deploy.compose import ROOT
from tests.unit.deploy.manifests import (
    FOLDER,
    GROUP,
    OVERLAYS,
    POD,
    Manifest,
    containers,
    environment,
    expanded,
    manifests,
    pods,
    templates,
)
from tools.gen_metrics import PAGE
from tools.release import versions

VERSION = versions()["moonpool: version"]
METRICS_PATHS = ("/livez", "/readyz")


def settings(overlay: str, container: Manifest) -> ServiceConfig:
    """The settings that a container's service would run with.

    Raises:
        ConfigError: the service would refuse to start.
    """
    variables = environment(overlay, container)
    kind, *arguments = [expanded(argument, variables) for argument in container["args"]]
    if kind == "adapter":
        arguments = ["--set", f"kind={arguments[0]}", *arguments[1:]]
    with patch.dict(os.environ, variables, clear=True):
        return config_class(kind).load(arguments)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_start_with_settings_that_exist_and_listen_at_their_ports(overlay: str) -> None:
    found = containers(overlay)
    assert {container["args"][0] for _, container in found} >= {"conductor", "gateway", "kvstore"}
    for _, container in found:
        config = settings(overlay, container)
        ports = {port["containerPort"]: port["name"] for port in container["ports"]}
        assert ports[parse_address(config.listen)[1]] in ("grpc", "http")
        assert ports[parse_address(config.metrics_listen)[1]] == "metrics"
        if picker := getattr(config, "picker_listen", ""):
            assert ports[parse_address(picker)[1]] == "picker"
        assert config.id == POD["metadata.name"]
        assert config.advertised(1).split(":")[0] != "0.0.0.0"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_what_answers_and_a_drain_ends_before_the_pod(overlay: str) -> None:
    for pod, container in containers(overlay):
        names = {port["name"] for port in container["ports"]}
        probes = [container[name]["httpGet"] for name in container if name.endswith("Probe")]
        assert probes
        for probe in probes:
            allowed = METRICS_PATHS if probe["port"] == "metrics" else ("/health",)
            assert probe["path"] in allowed
            assert probe["port"] in names
        assert pod["spec"]["terminationGracePeriodSeconds"] > settings(overlay, container).drain_s + 5


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_pods_and_ports(overlay: str) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(overlay)]
    ports = {
        port["name"] for pod in pods(overlay) for item in pod["spec"]["containers"] for port in item.get("ports", ())
    }
    for manifest in manifests(overlay):
        spec = manifest.get("spec", {})
        wanted = {
            "Service": lambda spec=spec: spec["selector"],
            "PodDisruptionBudget": lambda spec=spec: spec["selector"]["matchLabels"],
            "Deployment": lambda spec=spec: spec["selector"]["matchLabels"],
            "StatefulSet": lambda spec=spec: spec["selector"]["matchLabels"],
            "InferencePool": lambda spec=spec: spec["selector"]["matchLabels"],
            "PodMonitor": lambda spec=spec: spec["selector"]["matchLabels"],
        }.get(manifest["kind"])
        if wanted is not None:
            assert any(wanted().items() <= found.items() for found in labels), manifest["metadata"]["name"]
        if manifest["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports
    assert all(found["app.kubernetes.io/part-of"] == "moonpool" for found in labels)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_conductor_is_joined_by_its_name(overlay: str) -> None:
    (conductors,) = [item for item in manifests(overlay) if item["metadata"]["name"] == "moonpool-conductor"
                     and item["kind"] == "StatefulSet"]  # fmt: skip
    (data,) = [item["data"] for item in manifests(overlay) if item["kind"] == "ConfigMap"]
    service = conductors["spec"]["serviceName"]
    names = [f"moonpool-conductor-{number}.{service}:50051" for number in range(conductors["spec"]["replicas"])]
    assert data["MOONPOOL_CONDUCTOR"].split(",") == names


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_pod_mounts_exists(overlay: str) -> None:
    claims = {item["metadata"]["name"] for item in manifests(overlay) if item["kind"] == "PersistentVolumeClaim"}
    secrets = {item["spec"]["secretName"] for item in manifests(overlay) if item["kind"] == "Certificate"}
    for manifest in manifests(overlay):
        templated = {claim["metadata"]["name"] for claim in manifest.get("spec", {}).get("volumeClaimTemplates", ())}
        for pod in templates(manifest):
            volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
            for container in pod["spec"]["containers"]:
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys() | templated
            for volume in volumes.values():
                if "persistentVolumeClaim" in volume:
                    assert volume["persistentVolumeClaim"]["claimName"] in claims
                if "secret" in volume:
                    assert volume["secret"]["secretName"] in secrets


def test_certificates_name_the_role_that_shows_them() -> None:
    roles = {
        item["spec"]["secretName"]: item["spec"]["uris"]
        for item in manifests("tls")
        if item["kind"] == "Certificate" and "uris" in item["spec"]
    }
    for pod, container in containers("tls"):
        (secret,) = [volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume]
        assert roles[secret] == [f"moonpool:role:{container['args'][0]}"]
        config = settings("tls", container)
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert str(config.tls_cert).startswith(mounts["tls"])


def test_certificates_of_roles_that_only_call_prove_no_server() -> None:
    certificates = [
        item["spec"] for item in manifests("tls") if item["kind"] == "Certificate" and "uris" in item["spec"]
    ]
    assert len(certificates) == 5
    for certificate in certificates:
        (role,) = [uri.removeprefix(ROLE_URI) for uri in certificate["uris"]]
        assert ("server auth" in certificate["usages"]) == (role not in CLIENTS)
        assert certificate.get("dnsNames", []) == ([] if role in CLIENTS else ["moonpool"])


def test_engines_of_the_nvidia_overlay_have_a_gpu() -> None:
    engines = [container for _, container in containers("nvidia") if container["args"][0] in ("prefill", "decode")]
    assert len(engines) == 2
    for container in engines:
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert getattr(settings("nvidia", container), "device") == "cuda"  # noqa: B009


def test_hosts_of_a_group_are_ranks_of_one_engine_and_the_leader_alone_is_found() -> None:
    (group,) = [item["spec"] for item in manifests("vllm-hosts") if item["kind"] == "LeaderWorkerSet"]
    (pool,) = [item["spec"] for item in manifests("vllm-hosts") if item["kind"] == "InferencePool"]
    assert not any(item["metadata"]["name"] == "moonpool-vllm" and item["kind"] == "Deployment"
                   for item in manifests("vllm-hosts"))  # fmt: skip
    ranks = []
    for template in (group["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")):
        leads = pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        engine, *beside = template["spec"]["containers"]
        assert bool(beside) == leads == ("--headless" not in engine["args"])
        given = dict(argument.partition("=")[::2] for argument in engine["args"])
        ranks.append({name: given[name] for name in ("--nnodes", "--node-rank", "--master-addr", "--block-size",
                      "--tensor-parallel-size", "--pipeline-parallel-size")})  # fmt: skip
        gpus = engine["resources"]["limits"]["nvidia.com/gpu"]
        assert given["--tensor-parallel-size"] == gpus
    assert ranks[0] == ranks[1]
    assert ranks[0]["--node-rank"] == "$(LWS_WORKER_INDEX)"


def test_hosts_of_an_engine_of_stages_join_their_leader() -> None:
    (engines,) = [item["spec"] for item in manifests("stages") if item["kind"] == "DisaggregatedSet"]
    assert [role["name"] for role in engines["roles"]] == ["prefill", "decode"]
    for role in engines["roles"]:
        group = role["spec"]["leaderWorkerTemplate"]
        assert group["size"] == int(GROUP["LWS_GROUP_SIZE"])
        assert group["restartPolicy"] == "None", "a stage joins again, and a leader waits for its stages"
        (leader,), (stage,) = (group[name]["spec"]["containers"] for name in ("leaderTemplate", "workerTemplate"))
        leads, joins = settings("stages", leader), settings("stages", stage)
        assert isinstance(leads, EngineConfig)
        assert isinstance(joins, StageConfig)
        assert (leader["args"][0], leads.nnodes, leads.pipeline_parallel_size) == (role["name"], 2, 2)
        assert {"name": "stages", "containerPort": DEFAULT_PORT} in leader["ports"]
        assert parse_address(leads.stages_listen)[1] == DEFAULT_PORT
        assert joins.place(GROUP) == (f"{GROUP['LWS_LEADER_ADDRESS']}:{DEFAULT_PORT}", 1)
        assert joins.model == leads.model


def test_every_command_is_a_service() -> None:
    kinds = {container["args"][0] for overlay in OVERLAYS for _, container in containers(overlay)}
    assert kinds <= SERVICE_MODULES.keys()


def test_scalers_ask_for_series_that_exist_and_scale_what_runs() -> None:
    for overlay in ("autoscaled", "autoscaled-plain"):
        scaled = [item["spec"] for item in manifests(overlay) if item["kind"] == "ScaledObject"]
        found = {(spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]) for spec in scaled}
        assert len(scaled) == len(found) == 2
        assert found <= scalable(overlay)
        for spec in scaled:
            (trigger,) = spec["triggers"]
            (series,) = re.findall(r"moonpool_\w+", trigger["metadata"]["query"])
            assert f"`{series}`" in PAGE.read_text()


def scalable(overlay: str) -> set[tuple[str, str]]:
    """What takes a number of replicas from outside: Deployments, and scalers of roles whose scaling is external."""
    items = manifests(overlay)
    found = {("Deployment", item["metadata"]["name"]) for item in items if item["kind"] == "Deployment"}
    for item in items:
        for role in item["spec"]["roles"] if item["kind"] == "DisaggregatedSet" else ():
            if role.get("scaling") == {"mode": "External"}:
                assert "replicas" not in role["spec"], "the controller takes no replicas beside those of the scaler"
                found.add(("DisaggregatedSetRoleScaler", f"{item['metadata']['name']}-{role['name']}"))
    return found


def test_the_overlay_of_the_page_has_its_images_and_the_keys(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    mine = tmp_path / "kubernetes/overlays/mine"
    mine.mkdir()
    found = re.search(r"^```yaml\n(.*?)^```$", (ROOT / "docs/kubernetes.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    (mine / "kustomization.yaml").write_text(found[1])
    (mine / "keys").write_text("sha256:00 ann\n")
    objects = manifests("mine", tmp_path / "kubernetes")
    held = [container for item in objects for pod in templates(item) for container in pod["spec"]["containers"]]
    assert {container["image"] for container in held} == {
        f"registry.example/moonpool-light:{VERSION}",
        f"registry.example/moonpool-engine:{VERSION}",
    }
    (gateway,) = [item for item in objects if item["kind"] == "Deployment" and "gateway" in item["metadata"]["name"]]
    (secret,) = [item for item in objects if item["kind"] == "Secret"]
    spec = gateway["spec"]["template"]["spec"]
    assert secret["metadata"]["name"] in [volume.get("secret", {}).get("secretName") for volume in spec["volumes"]]
    variables = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
    mounts = {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    path = Path(variables["MOONPOOL_API_KEYS"])
    assert (str(path.parent) in mounts, path.name in secret["data"]) == (True, True)
