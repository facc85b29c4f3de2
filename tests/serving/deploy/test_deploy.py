# SPDX-License-Identifier: Apache-2.0
"""The manifests and the chart in deploy/ against Kubernetes' own schemas. `make test-deploy` installs what it needs."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="not installed: make test-deploy")
jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[3]
BASE, GPU, CHART = ROOT / "deploy/kubernetes/base", ROOT / "deploy/kubernetes/gpu", ROOT / "deploy/helm/speccompile"
CACHE = "speccompile-cache"
GO = shutil.which("go", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
needs_go = pytest.mark.skipif(GO is None, reason="no Go to render the chart with: make test-deploy")


def documents(text):
    """Returns {kind: document}, each valid for the newest Kubernetes that the validator knows and for 1.29.

    The claim of the cache is under its name.
    """
    found = {}
    for document in yaml.safe_load_all(text):
        if document is not None:
            name = document["metadata"]["name"]
            key = name if name == CACHE else document["kind"]
            assert key not in found
            found[key] = document
            for version in (kubernetes_validate.latest_version(), "1.29"):
                kubernetes_validate.validate(document, version, strict=True)
    return found


def check_parts_fit(found):
    """Checks what a schema does not see: names, labels, ports and times that belong together."""
    deployment, service = found["Deployment"], found["Service"]
    template = deployment["spec"]["template"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    [container] = pod["containers"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ):
        assert selector and selector.items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])
    for probe, path in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
        assert container[f"{probe}Probe"]["httpGet"] == {"path": f"/v2/health/{path}", "port": "http"}
    mounts, volumes = {m["name"] for m in container["volumeMounts"]}, {v["name"]: v for v in pod["volumes"]}
    assert mounts == set(volumes)
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert "PersistentVolumeClaim" not in found or claim == found["PersistentVolumeClaim"]["metadata"]["name"]
    [cache] = [entry["value"] for entry in container["env"] if entry["name"] == "SPECCOMPILE_CACHE"]
    [mount] = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "cache"]
    assert cache.startswith(f"{mount}/")  # the mount itself is the group's
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    settings = found.get("ConfigMap", {}).get("data", {})
    arguments = [re.sub(r"\$\((\w+)\)", lambda name: settings[name[1]], argument) for argument in container["args"]]
    [drain] = [int(a.partition("=")[2]) for a in arguments if a.startswith("--exit-timeout-secs=")]
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain + wait
    if "HorizontalPodAutoscaler" in found:
        assert "replicas" not in deployment["spec"]
        scaler = found["HorizontalPodAutoscaler"]["spec"]
        assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        [metric] = [entry["pods"]["metric"]["name"] for entry in scaler["metrics"]]
        assert metric in (ROOT / "speccompile/serving/triton/metrics.py").read_text()
    return container


def test_the_validator_finds_faults():
    deployment = yaml.safe_load((BASE / "deployment.yaml").read_text())
    for path, value in ((("spec", "replica"), 3), (("spec", "template", "spec", "containers", 0, "ports"), "80")):
        broken = copy.deepcopy(deployment)
        part = broken
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            documents(yaml.safe_dump(broken))


def base():
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert sorted([*names, "kustomization.yaml"]) == sorted(path.name for path in BASE.iterdir())
    return documents("\n---\n".join((BASE / name).read_text() for name in names))


def test_the_base_is_valid_and_its_parts_fit():
    container = check_parts_fit(base())
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl to build the kustomization with")
@pytest.mark.parametrize(("folder", "gpus"), [(BASE, None), (GPU, "1")])
def test_kustomize_builds(folder, gpus):
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    found = documents(done.stdout)
    container = check_parts_fit(found)
    assert found.keys() - base().keys() == ({CACHE} if gpus else set())
    volumes = {v["name"]: v for v in found["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    kept = {"persistentVolumeClaim": {"claimName": CACHE}} if gpus else {"emptyDir": {}}
    assert volumes["cache"] == {"name": "cache", **kept}
    assert container["image"] == "registry.example.com/speccompile-triton:0.1"
    assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("go")
    environment = {**os.environ, "GO111MODULE": "off", "GOFLAGS": "", "GOTOOLCHAIN": "local"}
    program = folder / "render"
    source = str(Path(__file__).with_name("render.go"))
    subprocess.run([str(GO), "build", "-o", str(program), source], check=True, env=environment)
    return program


def render(renderer, changes, release="prod"):
    """Returns the chart's documents with some values changed, as `helm template` would give them."""
    values = merged(VALUES, changes)
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    data = {
        "Values": values,
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
        "Release": {"Name": release, "Service": "Helm"},
    }
    templates = {path.name: path.read_text() for path in sorted((CHART / "templates").iterdir())}
    given = json.dumps({"templates": templates, "data": data})
    done = subprocess.run([str(renderer)], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    texts = json.loads(done.stdout)
    assert release in texts.pop("NOTES.txt")
    assert texts.pop("_helpers.tpl").strip() == ""
    return documents("\n---\n".join(texts.values()))


def merged(values, changes):
    """Returns one file of values overridden by another, as Helm does it."""
    both = dict(values)
    for key, value in changes.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and key in both else value
    return both


@needs_go
def test_the_chart_is_what_the_base_is(renderer):
    found, plain = render(renderer, {}), base()
    container = check_parts_fit(found)
    theirs = check_parts_fit(plain)
    assert found.keys() | {"ConfigMap"} == plain.keys()
    for key in (
        "startupProbe",
        "readinessProbe",
        "livenessProbe",
        "securityContext",
        "volumeMounts",
        "resources",
        "env",
    ):
        assert container[key] == theirs[key], key
    ours, base_pod = (f["Deployment"]["spec"]["template"]["spec"] for f in (found, plain))
    assert ours["securityContext"] == base_pod["securityContext"]
    scalers = [f["HorizontalPodAutoscaler"]["spec"] for f in (found, plain)]
    for key in ("minReplicas", "maxReplicas", "metrics", "behavior"):
        assert scalers[0][key] == scalers[1][key]


@needs_go
@pytest.mark.parametrize(
    ("changes", "kinds_gone"),
    [
        ({"autoscaling": {"enabled": False}, "replicas": 3}, {"HorizontalPodAutoscaler"}),
        ({"models": {"existingClaim": "mine"}}, {"PersistentVolumeClaim"}),
        ({"cache": {"existingClaim": "kept"}}, set()),
        ({"gpus": 2, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}, set()),
        (
            {"image": {"tag": "1.2"}, "extraArgs": ["--rate-limit=off", 'a "b"'], "imagePullSecrets": [{"name": "s"}]},
            set(),
        ),
        (
            {"models": {"storageClassName": "fast"}, "nodeSelector": {"disk": "ssd"}, "service": {"type": "NodePort"}},
            set(),
        ),
    ],
)
def test_the_chart_with_other_values(renderer, changes, kinds_gone):
    everything = render(renderer, {})
    found = render(renderer, changes, release="a" * 53)
    container = check_parts_fit(found)
    assert everything.keys() - found.keys() == kinds_gone
    pod = found["Deployment"]["spec"]["template"]["spec"]
    assert container["resources"]["limits"].get("nvidia.com/gpu") == (changes.get("gpus") or None)
    assert container["args"][4:] == changes.get("extraArgs", [])
    assert container["image"].endswith(":1.2" if "image" in changes else ":0.1")
    assert found["Deployment"]["spec"].get("replicas") == changes.get("replicas")
    assert len(found["Deployment"]["metadata"]["name"]) <= 63
    claims = [v.get("persistentVolumeClaim", {}).get("claimName") for v in pod["volumes"] if v["name"] == "cache"]
    assert claims == [changes.get("cache", {}).get("existingClaim")]
    assert pod["nodeSelector"] == changes.get("nodeSelector", {})


@pytest.mark.parametrize("wrong", [{"gpu": 1}, {"gpus": "1"}, {"image": {"repository": ""}}, {"replicas": -1}])
def test_the_values_schema_refuses(wrong):
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(VALUES, wrong), schema)
