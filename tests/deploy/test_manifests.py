"""Manifests are what Kubernetes takes, images differ in what they must, and a pod gets the time to end."""

from __future__ import annotations

import jsonschema
import kubernetes_validate
import pytest
from chart import MANIFEST, SCHEMA, USERS, VALUES, merged
from deployed import CONTAINER, IMAGES, MANIFESTS, commands, instruction

from tureen.cli import command_line as cli
from tureen.cli.flags import load_config


def test_images_differ_only_in_what_cuda_needs():
    heads = [instruction(image, "ENTRYPOINT") for image in IMAGES]
    assert heads == [["tureen", "serve"]] * 2
    assert set(instruction(IMAGES[1], "CMD")) - set(instruction(IMAGES[0], "CMD")) == {"--device", "cuda"}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_a_manifest_is_what_kubernetes_takes(manifest):
    kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_a_manifest_with_a_slip_is_not():
    wrong = {**MANIFESTS[2], "spec": {**MANIFESTS[2]["spec"], "selectr": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.33", strict=True)


def test_a_pod_gets_longer_to_end_than_the_server_takes():
    pod = MANIFESTS[0]["spec"]["template"]["spec"]
    drain_s = float(CONTAINER["args"][CONTAINER["args"].index("--drain-timeout-s") + 1])
    pause_s = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain_s + pause_s


@pytest.mark.parametrize("name", [None, *USERS])
def test_the_schema_takes_what_people_give(name):
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(merged(VALUES, USERS.get(name, {})), SCHEMA, jsonschema.Draft7Validator)


@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_a_service_named_as_the_server_sets_none_of_its_variables(kind):
    """Kubernetes gives pods TUREEN_PORT=tcp://… for a Service `tureen`, unless they refuse: no server would start."""
    assert MANIFEST[kind]["metadata"]["name"] == "tureen"
    assert MANIFEST["Deployment"]["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("name", commands())
def test_a_command_starts_a_server_with_settings_that_it_has(name):
    program, *arguments = commands()[name]
    assert (program, arguments[0]) == ("tureen", "serve")
    config = load_config(cli.parser(arguments).parse_args(arguments))
    assert (config.port, config.engine) == (30000, "process")
