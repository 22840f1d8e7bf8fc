"""Every alert in images/prometheus/rules on whole stacks: what fires, and that nothing else does. Run by promtool."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import yaml

from monitoring import broken
from monitoring.promtool import PROMETHEUS, ROOT, RULES, promtool
from monitoring.stacks import MINUTES, Stack, Values, idle, on_cpu, resident, resident_idle, sharing, starting, training

RULE_FILES = sorted(path.name for path in RULES.glob("*.yml"))


@cache
def alerts() -> dict[str, dict]:
    """Every alert of every rule file, by name."""
    found = {}
    for name in RULE_FILES:
        for group in yaml.safe_load((RULES / name).read_text())["groups"]:
            found |= {rule["alert"]: rule for rule in group["rules"] if "alert" in rule}
    return found


@dataclass(frozen=True)
class Case:
    """After `at` minutes of `stack` exactly the alerts `fires` fire."""

    name: str
    stack: Callable[[], Stack]
    at: int
    fires: frozenset[str] = field(default_factory=frozenset)


HEALTHY = [
    *(Case(f"starting, minute {at}", starting, at) for at in range(0, 30, 3)),
    *(Case(f"idle, minute {at}", idle, at) for at in (60, 300, MINUTES)),
    *(Case(f"training, minute {at}", training, at) for at in (*range(0, 40), *range(200, 215), *range(560, MINUTES))),
    *(Case(f"ranks that stay, minute {at}", resident, at) for at in (*range(100, 112), 300, MINUTES)),
    *(Case(f"ranks that stay, idle, minute {at}", resident_idle, at) for at in (60, 300, MINUTES)),
    *(Case(f"one GPU for both, minute {at}", sharing, at) for at in (30, 45, 55, 70, 95, 105, 370, 399, MINUTES)),
    *(Case(f"without a GPU, minute {at}", on_cpu, at) for at in (5, 60, 120, MINUTES)),
]
BROKEN = [Case(case.name, case.stack, at, frozenset(fires)) for case in broken.CASES for at, fires in case.expected]


def _write(directory: Path, cases: list[Case], checks: Callable[[Case], dict]) -> Path:
    """A file of promtool's next to copies of the rules; times are minutes, one scrape and evaluation in each."""
    for name in RULE_FILES:
        (directory / name).write_text((RULES / name).read_text())

    def last(together: list[Case]) -> int:
        return max(case.at for case in together) + 1

    tests = []
    for stack, together in _by_stack(cases):
        test: dict = {"interval": "1m", "name": together[0].name, "input_series": [
            {"series": name, "values": _values(values[: last(together)])}
            for name, values in stack().items() if any(value is not None for value in values[: last(together)])
        ]}  # fmt: skip
        for case in together:
            for key, value in checks(case).items():
                test.setdefault(key, []).extend(value)
        tests.append(test)
    path = directory / "cases.yml"
    path.write_text(json.dumps({"rule_files": RULE_FILES, "evaluation_interval": "1m", "tests": tests}))
    directory.chmod(0o755)
    return path


def _values(values: Values) -> str:
    return " ".join("_" if value is None else f"{value:.10g}" for value in values)


def _by_stack(cases: list[Case]) -> list[tuple[Callable[[], Stack], list[Case]]]:
    groups: dict[Callable[[], Stack], list[Case]] = {}
    for case in cases:
        groups.setdefault(case.stack, []).append(case)
    return list(groups.items())


def _firing(case: Case) -> dict:
    """Exactly these alerts fire, whatever their labels."""
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(case.fires)]
    query = 'group by (alertname) (ALERTS{alertstate="firing"})'
    return {"promql_expr_test": [{"expr": query, "eval_time": f"{case.at}m", "exp_samples": expected}]}


def test_the_files_are_valid(tmp_path):
    for path in PROMETHEUS.rglob("*.yml"):
        copy = tmp_path / path.relative_to(PROMETHEUS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    done = promtool("check", "config", "prometheus.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = promtool("check", "rules", *(f"rules/{name}" for name in RULE_FILES), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_fires_on_a_healthy_stack(tmp_path):
    done = promtool("test", "rules", _write(tmp_path, HEALTHY, _firing).name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> str:
    """What promtool prints about all faults. Besides what fires, it is told that each alert that fires has no labels
    and texts, which is wrong: so it prints them."""

    def checks(case: Case) -> dict:
        nothing = [{"eval_time": f"{case.at}m", "alertname": name, "exp_alerts": []} for name in sorted(case.fires)]
        return _firing(case) | {"alert_rule_test": nothing}

    directory = tmp_path_factory.mktemp("faults")
    done = promtool("test", "rules", _write(directory, BROKEN, checks).name, cwd=directory)
    return done.stdout + done.stderr


def test_each_fault_fires_its_alerts_and_no_others(faults):
    wrong = re.findall(r"expr: \"group by [^\n]*time: [^\n]*\n[^\n]*\n[^\n]*", faults)
    assert "alertname" in faults, f"promtool did not run: {faults[-2000:]}"
    assert not wrong, "\n".join(wrong)


def test_every_alert_fires_in_some_case_and_waits_in_another():
    fired = {name for case in BROKEN for name in case.fires}
    assert fired == set(alerts())
    waits = {name for name, rule in alerts().items() if rule.get("for")}
    for case in broken.CASES:
        before = [set(fires) for _, fires in case.expected]
        for earlier, later in itertools.pairwise(before):
            waits -= later - earlier
    assert not waits, "no case shows that these do not fire before their `for` is over"


def test_what_an_alert_says_can_be_said(faults):
    """Each label that a text names is one that the alert has, and each template expands."""
    said: dict[str, list[tuple[str, str]]] = {}
    for labels, text in re.findall(r"Labels:\{([^\n]*?)\}\s*\n?\s*Annotations:\{([^\n]*)\}", faults):
        name = re.search(r'alertname="(\w+)"', labels)
        assert name is not None
        said.setdefault(name[1], []).append((labels, text))
    assert set(said) == set(alerts()), "promtool prints what it got otherwise than this test reads"
    for name, rule in alerts().items():
        texts = rule["annotations"]
        named = set(re.findall(r"\{\{ \$labels\.(\w+) \}\}", " ".join(texts.values())))
        named -= set(re.findall(r"\{\{ if \$labels\.(\w+) \}\}", " ".join(texts.values())))
        for labels, text in said[name]:
            assert "<error expanding" not in text, text
            assert "<no value>" not in text
            for label in named:
                assert re.search(rf'\b{label}="[^"]', labels), f"{name} names {label} and has only {labels}"


def test_every_alert_has_a_runbook_a_severity_and_advice():
    text = (ROOT / "docs" / "alerts.md").read_text()
    anchors = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert sorted(anchors) == sorted(alerts()), "docs/alerts.md and the rules name different alerts"
    for name, rule in alerts().items():
        assert name.startswith("Tandem")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}"
        assert len(rule["annotations"]["summary"]) < 110, name


@pytest.mark.parametrize("name", RULE_FILES)
def test_every_threshold_is_explained(name):
    """A number in an alert's expression, or a wait, has a comment beside it (shares of 0 and 1 explain themselves)."""
    for block in (RULES / name).read_text().split("      - alert: ")[1:]:
        alert, body = block.split("\n", 1)
        rule = alerts()[alert]
        numbers = set(re.findall(r"(?<![\w.\"])\d+(?:\.\d+)?(?![\w\"])", rule["expr"])) - {"0", "1", "0.95", "1024"}
        if numbers or rule.get("for", "5m") not in ("5m",):
            head = body.split("        annotations:")[0]
            assert "# " in head, f"{alert}: why {sorted(numbers)} or {rule.get('for')}?"
