"""Lint and render over a matrix of values, for the oldest and the newest Kubernetes; every object fits its schema."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import pytest

from helm import charts, matrix, schemas
from helm.charts import NEWEST, OLDEST, Rendered
from helm.kubernetes_api import ApiServer, minor

CHOICES = [*matrix.switches(), *matrix.choices()]
CASES: dict[str, dict[str, Any]] = {
    **matrix.whole(),
    **{path.name: charts.load_values(path) for path in matrix.files()},
    **{choice.name: choice.values for choice in CHOICES},
}


@cache
def rendered(values: str, version: str) -> Rendered:
    return charts.render(json.loads(values), version=version)


def render(values: dict[str, Any], version: str = NEWEST) -> Rendered:
    """A render, once for equal values."""
    return rendered(json.dumps(values, sort_keys=True), version)


@pytest.mark.sample(24)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", CASES)
def test_every_object_fits_its_schema(name, version):
    result = render(CASES[name], version)
    assert result.objects
    assert [problem for obj in result.objects for problem in schemas.validate(obj, version)] == []


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CASES)
def test_lint_finds_nothing(name):
    assert charts.lint(CASES[name]) == []


@pytest.mark.sample(12)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_every_switch_and_choice_does_something(choice):
    before, after = render(choice.before), render(choice.values)
    assert before.objects != after.objects


def test_a_claim_of_gpus_is_made_where_kubernetes_has_them():
    values = {**matrix.BASE, "gpuMode": "shared"}
    result = render(values)
    assert result.all("ResourceClaimTemplate") or result.all("ResourceClaim")
    assert [problem for obj in result.objects for problem in schemas.validate(obj, NEWEST)] == []


def test_the_matrix_walks_what_there_is():
    names = {choice.name for choice in CHOICES}
    assert len(CHOICES) > 30
    assert {"gpuMode=shared", "data.accessMode=ReadWriteOnce", "networkPolicy.enabled=false"} <= names
    assert {path.name for path in matrix.files()} >= {"values-cpu.yaml", "1+1.yaml", "2+2.yaml", "4+4.yaml"}
    assert minor(OLDEST) < minor(NEWEST)


def test_long_names_of_releases_and_namespaces():
    for release, namespace in (("r" * 53, "ns"), ("tandem", "n" * 63)):
        result = charts.render(matrix.BASE, release=release, namespace=namespace)
        assert [problem for obj in result.objects for problem in schemas.validate(obj, NEWEST)] == []


def test_a_release_is_installed_changed_and_removed_and_keeps_its_data():
    with ApiServer() as server:
        release = charts.install(server, matrix.BASE)
        assert len(gzip.compress(json.dumps(release).encode())) < 600_000, (
            "Helm keeps a release in a Secret of at most 1 MiB"
        )
        for choice in CHOICES:
            if choice.path in ("image.pullPolicy", "monitoring.monitors.kind", "gpuMode", "tests.enabled"):
                charts.upgrade(server, choice.values)
        charts.upgrade(server, matrix.BASE)
        charts.uninstall(server)
        left = [(o["kind"], o["metadata"]["name"]) for o in server.objects()]
        assert left == [("PersistentVolumeClaim", "t-tandem-data")]
