"""Every object of every overlay fits its schema, and unknown fields are refused: custom resources by the schemas beside
this file, core objects and pod templates by the program kubernetes-validate, if it is installed.

Two further checks need what is too large for the repository. Published CRDs (3 MB): their files in `.engines/crds`.
Models for Node (36 MB), installed by npm with `--prefix .engines/kubernetes-models`: kubernetes-models@5.1.0, and of
@kubernetes-models keda@2.0.0, cert-manager@6.0.0 and prometheus-operator@6.0.0."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.unit.deploy.compose import ROOT
from tests.unit.deploy.manifests import OVERLAYS, Manifest, manifests, templates

CUSTOM = yaml.safe_load(Path(__file__).with_name("custom_resources.yaml").read_text())
CORE_GROUPS = {"v1", "apps/v1", "policy/v1", "networking.k8s.io/v1"}
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
CRDS = ROOT / ".engines/crds"
MODELS = ROOT / ".engines/kubernetes-models"
UNKNOWN_TO_MODELS = {"DisaggregatedSet", "LeaderWorkerSet", "InferencePool"}
CHECK_BY_MODELS = """
import {readFileSync} from "node:fs";
const groups = {"cert-manager.io": "cert-manager", "keda.sh": "keda", "monitoring.coreos.com": "prometheus-operator"};
const complaints = [];
for (const item of JSON.parse(readFileSync(0))) {
  const known = groups[item.apiVersion.split("/")[0]];
  const models = await import((known ? `@kubernetes-models/${known}/` : "kubernetes-models/") + item.apiVersion);
  try { new models[item.kind](item).validate(); complaints.push(null) }
  catch (error) { complaints.push(error.message) }
}
console.log(JSON.stringify(complaints));
"""


def closed(schema: Any) -> Any:
    """The schema in which each object takes no other than its properties."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(part) for name, part in schema.items()}
    return (
        found | {"additionalProperties": False} if schema.get("type") == "object" and "properties" in schema else found
    )


def name_of(item: Manifest) -> str:
    """Version and kind, as schemas are called."""
    return f"{item['apiVersion']} {item['kind']}"


def validator(name: str) -> jsonschema.Draft202012Validator:
    """Of a custom resource's spec."""
    return jsonschema.Draft202012Validator(closed(CUSTOM["specs"][name] | {"definitions": CUSTOM["definitions"]}))


def custom(overlay: str) -> list[Manifest]:
    """The custom resources of an overlay."""
    return [item for item in manifests(overlay) if item["apiVersion"] not in CORE_GROUPS]


def core() -> Iterator[Manifest]:
    """The core objects of all overlays and the pod templates of custom resources, each once."""
    found: dict[str, Manifest] = {}
    for item in [item for overlay in OVERLAYS for item in manifests(overlay)]:
        if item["apiVersion"] in CORE_GROUPS:
            found[json.dumps(item, sort_keys=True)] = item
            continue
        for template in templates(item):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": item["metadata"], "template": template}
            found[json.dumps(pod, sort_keys=True)] = pod
    yield from found.values()


def places(part: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of each mapping, but for labels and pod specs."""
    if isinstance(part, dict):
        yield path
        for key, value in part.items():
            if key not in ("labels", "matchLabels") and not (key == "spec" and "metadata" in part):
                yield from places(value, (*path, key))
    elif isinstance(part, list):
        for number, value in enumerate(part):
            yield from places(value, (*path, number))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_custom_resources_fit_their_definitions(overlay: str) -> None:
    for item in custom(overlay):
        assert item.keys() == {"apiVersion", "kind", "metadata", "spec"}
        validator(name_of(item)).validate(item["spec"])


def test_a_schema_for_each_custom_resource_and_no_other() -> None:
    assert {name_of(item) for overlay in OVERLAYS for item in custom(overlay)} == CUSTOM["specs"].keys()


@pytest.mark.parametrize("name", CUSTOM["specs"])
def test_a_field_that_no_definition_has_is_refused_wherever_it_stands(name: str) -> None:
    item = next(item for overlay in OVERLAYS for item in custom(overlay) if name_of(item) == name)
    checks = validator(name)
    for path in places(item["spec"]):
        spec = json.loads(json.dumps(item["spec"]))
        part = spec
        for step in path:
            part = part[step]
        part["replicaz"] = "2"
        (error,) = checks.iter_errors(spec)
        assert "'replicaz'" in error.message
        assert tuple(error.absolute_path) == path


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_core_objects_and_pods_fit_each_version_of_kubernetes(version: str) -> None:
    program = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate==1.37.0 (110 MB)")
    for item in core():
        assert program.validate(item, version, strict=True) == version, item["metadata"]["name"]
    wrong = json.loads(json.dumps(next(item for item in core() if item["kind"] == "Deployment")))
    wrong["spec"]["template"]["spec"]["replicaz"] = 2
    with pytest.raises(program.ValidationError, match="replicaz"):
        program.validate(wrong, version, strict=True)


@pytest.mark.slow
@pytest.mark.skipif(not CRDS.is_dir(), reason="no published CRDs in .engines/crds")
def test_custom_resources_fit_the_published_definitions() -> None:
    published = {}
    for path in CRDS.glob("*.yaml"):
        spec = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            name = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
            published[name] = jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))
    for item in [item for overlay in OVERLAYS for item in custom(overlay)]:
        published[name_of(item)].validate(item)
        item = json.loads(json.dumps(item))
        item["spec"]["replicaz"] = 2
        assert "'replicaz'" in next(published[name_of(item)].iter_errors(item)).message


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None or not MODELS.is_dir(), reason="no .engines/kubernetes-models")
def test_objects_fit_the_models_for_node() -> None:
    items = [item for overlay in OVERLAYS for item in manifests(overlay) if item["kind"] not in UNKNOWN_TO_MODELS]
    assert complaints_of_models(items) == [None] * len(items)
    wrong = json.loads(json.dumps([item for item in items if item["kind"] in ("ScaledObject", "Certificate")]))
    for item in wrong:
        item["spec"] |= {"triggers": 7, "secretName": 7}
    assert None not in complaints_of_models(wrong)


def complaints_of_models(items: list[Manifest]) -> list[str | None]:
    """What @kubernetes-models says against each object. Fields that a model does not know are no complaint there."""
    command = ["node", "--input-type=module", "-e", CHECK_BY_MODELS]
    found = subprocess.run(command, cwd=MODELS, input=json.dumps(items), capture_output=True, text=True, check=True)
    complaints: list[str | None] = json.loads(found.stdout)
    return complaints
