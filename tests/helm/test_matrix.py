"""Lint and render over a matrix of values, for the oldest and the newest Kubernetes; every object
fits its schema, and a wrong object is found."""

import copy
import re
from typing import Any

import pytest
import yaml

from helm import charts, matrix, schemas
from helm.charts import NEWEST, OLDEST, Rendered, merged
from helm.matrix import EVERYTHING, JOBS, ONE_NODE, SHARED
from helm.renders import of

CHOICES = matrix.choices()
NO_TRAINER = {"trainer": {"enabled": False}}
WILDCARDS = {
    "enabled": True,
    "controllerHost": "*.api.example.org",
    "inferenceHost": "*.example.org",
}
TEMPLATE = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ .Release.Name }}-more}"
MORE: dict[str, dict[str, Any]] = {
    "one node, ephemeral cache": merged(ONE_NODE, {"cache": {"type": "ephemeral"}}),
    "one host": {"ingress": {"enabled": True, "inferenceHost": "models.example.org"}},
    "wildcard hosts": {
        "ingress": WILDCARDS,
        "gateway": {**WILDCARDS, "parentRefs": [{"name": "public"}]},
    },
    "no trainer": merged(EVERYTHING, NO_TRAINER),
    "no trainer, one node": merged(ONE_NODE, NO_TRAINER),
    "paused": matrix.roles(replicas=0),
    "CPU ranks": {"device": "cpu", "trainer": {"cpuRanks": 2, "settings": {"tensorParallel": 2}}},
    "jobs": JOBS,
    "jobs, warm nodes": merged(JOBS, {"trainer": {"warmup": {"enabled": True}}}),
    "jobs, one node": merged(ONE_NODE, {"trainer": {"executor": "kubernetes"}}),
    "everything, jobs": merged(
        EVERYTHING, merged(JOBS, {"trainer": {"runner": {"admissionPolicy": True}}})
    ),
    "an object from a template": {"extraObjects": [TEMPLATE]},
}
SETS: dict[str, dict[str, Any]] = {
    **matrix.VALUES,
    **{name: merged(matrix.BASE, values) for name, values in MORE.items()},
    **{name: values for name, (_, values) in CHOICES.items()},
}


def check_schemas(rendered: Rendered, version: str = NEWEST) -> None:
    assert rendered.objects
    assert [problem for obj in rendered.objects for problem in schemas.validate(obj, version)] == []


@pytest.mark.sample(24)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", SETS)
def test_every_object_fits_its_schema(name, version):
    values = SETS[name]
    if version == OLDEST and values.get("gpuMode") == "shared":
        # Claims need Kubernetes 1.34.
        values = charts.merged(values, {"shared": {"via": "resource"}})
    check_schemas(of(values, version=version), version)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", SETS)
def test_lint_finds_nothing(name):
    assert charts.lint(SETS[name]) == []


def test_lint_finds_what_the_schema_refuses():
    assert "error values.yaml" in charts.lint({"bseModel": "x"})


def test_the_package_has_the_targets_of_links(tmp_path):
    values = matrix.VALUES["everything"]
    assert (
        charts.render(values, chart=charts.package(tmp_path), release="a").objects
        == of(values).objects
    )


def test_a_key_given_twice_and_a_name_used_twice_are_errors():
    """Helm accepts both."""
    one = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}}
    with pytest.raises(ValueError, match=r"more than once.*one"):
        charts.render(merged(matrix.BASE, {"extraObjects": [one, one]}))
    with pytest.raises(yaml.constructor.ConstructorError, match=r"given twice: \{'data'\}"):
        charts.render(
            merged(matrix.BASE, {"extraObjects": [f"{yaml.safe_dump(one)}data: {{}}\ndata: {{}}"]})
        )


@pytest.mark.sample(12)
@pytest.mark.parametrize("choice", CHOICES)
def test_every_switch_and_choice_changes_an_object(choice):
    before, after = CHOICES[choice]
    assert of(before).objects != of(after).objects


@pytest.mark.parametrize(
    "more", [{}, {kind: {"existingClaim": ""} for kind in ("data", "cache")}, SHARED]
)
def test_texts_that_look_like_numbers_stay_texts(more):
    # Names and texts that only Jobs use appear in the Jobs' template.
    values = EVERYTHING if more else merged(EVERYTHING, JOBS)
    for number, (path, _) in enumerate(matrix.leaves(matrix.defaults()), 100):
        schema = matrix.schema_of(path)
        text = schema.get("type") == "string" and re.search(schema.get("pattern", ""), str(number))
        if more and path == "trainer.kernels.existingClaim":
            continue
        if text and not path.endswith(("fullnameOverride", "resources.requests.cpu")):
            values = merged(values, matrix.at(path, str(number)))
    check_schemas(of(merged(values, more)))


POD = "spec template spec containers 0 "


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (f"{POD}imag", "x", "'imag' was unexpected"),
        (f"{POD}env 0 name", "TANDEM_DEVICE", "env: TANDEM_DEVICE more than once"),
        (f"{POD}volumeMounts 0 name", "v", "there is no volume v"),
        (f"{POD}resources requests memory", "9999Gi", "request 9999Gi is above the limit"),
        (
            f"{POD}resources requests nvidia.com/gpu",
            "2",
            "an extended resource's request and limit",
        ),
        ("spec selector matchLabels app", "other", "does not match the labels"),
        ("metadata labels v", "1+2", "'1+2' is not a valid label"),
        ("metadata name", "A_", "'A_' is not a valid name"),
        ("apiVersion", "apps/v2", "SchemaNotFound"),
    ],
)
def test_an_invalid_object_is_seen(path, value, named):
    obj = copy.deepcopy(of(matrix.BASE).one("StatefulSet", "trainer"))
    *parents, last = path.split()
    node = obj
    for part in parents:
        node = node[int(part) if part.isdigit() else part]
    node[last] = value
    assert named in " ".join(schemas.validate(obj, NEWEST))
    monitor = copy.deepcopy(of(matrix.VALUES["everything"]).all("PodMonitor")[0])
    monitor["spec"]["endpoints"] = monitor["spec"].pop("podMetricsEndpoints")
    assert "endpoints" in schemas.validate(monitor, NEWEST)[0]
