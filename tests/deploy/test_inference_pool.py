"""The endpoint picker finds the pods of the Deployment, and reads figures that they have."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from app_under_test import App

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KNOWN = ("Deployment", "Service", "ServiceAccount", "Role", "RoleBinding")
"""Kinds of the manifest that Kubernetes itself has a schema for; the others come from extensions."""


def objects(name: str) -> dict[str, dict]:
    """The objects of a manifest, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text())}


POOL = objects("inference-pool.yaml")
SERVER = objects("tureen.yaml")["Deployment"]
FLAGS = dict(
    argument.removeprefix("--").split("=", 1)
    for argument in POOL["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
)


@pytest.mark.parametrize("kind", KNOWN)
def test_an_object_is_what_kubernetes_takes(kind):
    kubernetes_validate.validate(POOL[kind], "1.33", strict=True)


def test_the_pool_has_the_pods_of_the_server_and_their_port():
    spec = POOL["InferencePool"]["spec"]
    pod = SERVER["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    ports = [port["containerPort"] for container in pod["spec"]["containers"] for port in container["ports"]]
    assert [port["number"] for port in spec["targetPorts"]] == ports


def test_the_pool_and_its_picker_know_each_other():
    picker, service = POOL["InferencePool"]["spec"]["endpointPickerRef"], POOL["Service"]
    (port,) = service["spec"]["ports"]
    assert (picker["name"], picker["port"]["number"]) == (service["metadata"]["name"], port["port"])
    pod = POOL["Deployment"]["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["serviceAccountName"] == POOL["ServiceAccount"]["metadata"]["name"]
    assert (FLAGS["pool-name"], FLAGS["grpc-port"]) == (POOL["InferencePool"]["metadata"]["name"], str(port["port"]))
    (backend,) = POOL["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", POOL["InferencePool"]["metadata"]["name"])


def test_the_picker_reads_figures_that_a_server_has():
    with App() as app:
        lines = app.request("GET", "/metrics").text.splitlines()
    gauges = {line.split()[2] for line in lines if line.startswith("# TYPE") and line.endswith(" gauge")}
    assert {FLAGS["total-queued-requests-metric"], FLAGS["kv-cache-usage-percentage-metric"]} <= gauges


def test_each_plugin_of_a_profile_of_the_picker_is_there():
    config = yaml.safe_load(FLAGS["config-text"])
    (profile,) = config["schedulingProfiles"]
    assert {each["pluginRef"] for each in profile["plugins"]} == {plugin["type"] for plugin in config["plugins"]}
