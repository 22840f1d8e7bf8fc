"""Lint and render over a matrix of values, for the oldest and the newest Kubernetes; every object fits its schema."""

import gzip
import json
import re
from typing import Any

import pytest

from helm import charts, matrix, schemas
from helm.charts import NEWEST, OLDEST, Rendered, merged
from helm.kubernetes_api import ApiServer, minor
from helm.matrix import EVERYTHING, SHARED
from helm.renders import of

CHOICES = list(matrix.choices())
SETS: dict[str, dict[str, Any]] = {
    **matrix.VALUES, **matrix.more_sets(), **{str(choice): choice.values for choice in CHOICES},
}  # fmt: skip


def check_schemas(rendered: Rendered, version: str = NEWEST) -> None:
    assert rendered.objects
    assert [problem for obj in rendered.objects for problem in schemas.validate(obj, version)] == []


@pytest.mark.sample(24)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", SETS)
def test_every_object_fits_its_schema(name, version):
    values = SETS[name]
    if version == OLDEST and values.get("gpuMode") == "shared":
        values = charts.merged(values, {"shared": {"via": "resource"}})  # claims need Kubernetes 1.34
    check_schemas(of(values, version=version), version)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", SETS)
def test_lint_finds_nothing(name):
    assert charts.lint(SETS[name]) == []


@pytest.mark.sample(12)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_switch_and_choice_changes_an_object(choice):
    assert of(choice.before).objects != of(choice.values).objects


def test_the_matrix_has_the_known_choices_and_examples():
    assert len(CHOICES) > 30
    assert set(SETS) >= {
        "gpuMode=shared", "data.accessMode=ReadWriteOnce", "networkPolicy.enabled=False", "values-cpu.yaml", "1+1.yaml",
        "2+2.yaml", "4+4.yaml",
    }  # fmt: skip
    assert minor(OLDEST) < minor(NEWEST)


@pytest.mark.parametrize("more", [{}, {kind: {"existingClaim": ""} for kind in ("data", "cache")}, SHARED])
def test_texts_that_look_like_numbers_stay_texts(more):
    values = EVERYTHING
    for number, (path, _) in enumerate(matrix.leaves(matrix.defaults()), 100):
        schema = matrix.schema_of(path)
        text = schema.get("type") == "string" and re.search(schema.get("pattern", ""), str(number))
        if text and not path.endswith(("fullnameOverride", "resources.requests.cpu")):
            values = merged(values, matrix.at(path, str(number)))
    check_schemas(of(merged(values, more)))


@pytest.mark.parametrize(("release", "namespace"), [("r" * 53, "ns"), ("tandem", "n" * 63)])
def test_long_names_of_releases_and_namespaces(release, namespace):
    check_schemas(of(matrix.BASE, release=release, namespace=namespace))


def test_a_release_is_installed_upgraded_and_uninstalled_and_its_data_stays():
    with ApiServer() as server:
        release = charts.install(server, matrix.BASE)
        # Helm stores a release in a Secret, which holds at most 1 MiB.
        assert len(gzip.compress(json.dumps(release).encode())) < 600_000
        for choice in CHOICES:
            if choice.path in ("image.pullPolicy", "monitoring.monitors.kind", "gpuMode", "tests.enabled"):
                charts.upgrade(server, choice.values)
        charts.upgrade(server, matrix.BASE)
        charts.uninstall(server)
        left = [(o["kind"], o["metadata"]["name"]) for o in server.objects()]
        assert left == [("PersistentVolumeClaim", "t-tandem-data")]
