"""promtool runs every alert in images/prometheus/rules on whole stacks. Each alert fires on its
fault and on no other fault."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import yaml

from monitoring.faults import FAULTS, NONE, Case
from monitoring.prometheus_tools import PROMETHEUS, ROOT, RULES, promtool
from monitoring.series import MINUTES, Stack, input_series
from monitoring.stacks import (
    idle,
    in_session,
    merged,
    merged_and_sharing,
    on_cpu,
    only_verifying,
    replicas,
    resident,
    resident_idle,
    sharing,
    sharing_in_one_pod,
    starting,
    training,
)

RULE_FILES = sorted(path.name for path in RULES.glob("*.yml"))


@cache
def alerts() -> dict[str, dict]:
    """Every alert of every rule file, by name."""
    groups = [
        group
        for name in RULE_FILES
        for group in yaml.safe_load((RULES / name).read_text())["groups"]
    ]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def quiet(stack: Callable[[], Stack], *minutes: int) -> Case:
    return Case(stack.__name__, stack, dict.fromkeys(minutes, NONE))


# Cases that expect something after hours run to the end (a drift is measured over 6.5 h). The other
# cases run while they differ from the healthy stack.
HEALTHY = [
    quiet(starting, *range(0, 30, 3)),
    quiet(idle, 60, 300, MINUTES),
    quiet(training, *range(40), *range(200, 215), *range(410, MINUTES)),
    quiet(resident, *range(40, 52), 120),
    quiet(resident_idle, 60),
    quiet(sharing, 30, 45, 55, 70, 95, 105, 370, 399, MINUTES),
    quiet(sharing_in_one_pod, 30, 45, 70, 95, 105),
    quiet(only_verifying, 60, 120),
    quiet(on_cpu, 5, 60, 120),
    quiet(in_session, 29, 60, 125),
    quiet(replicas, 11, 30, 65, 66, 80),
    quiet(merged, 30, 59, *range(60, 100), 200),
    quiet(merged_and_sharing, 39, 52, 80, 99, 105, 120),
]


ABSENT = "TandemTargetAbsent"
TOGETHER = 8
"""The number of stacks in one test of promtool. Most of an evaluation's time is the same for any
number of stacks: each of eight stacks takes 0.4 of the time that a stack takes alone. More stacks
take more memory and no less time."""


def _apart(cases: list[Case]) -> list[list[Case]]:
    """Groups of cases that end at about the same minute. A target counts as absent only if no stack
    of the group has the target. So each case with an absent target is a group of its own."""
    alone = [[case] for case in cases if ABSENT in set().union(*case.expected.values())]
    others = [case for case in cases if [case] not in alone]
    others.sort(key=lambda case: max(case.expected))
    return alone + [list(group) for group in itertools.batched(others, TOGETHER)]


def _in_namespace(name: str, series: list[dict[str, str]]) -> list[dict[str, str]]:
    return [
        one | {"series": re.sub('namespace="[^"]*"', f'namespace="{name}"', one["series"])}
        for one in series
    ]


def _test(cases: list[Case]) -> dict:
    """One of promtool's tests: each case is a stack in a namespace of its own, with one scrape and
    one evaluation a minute.

    The test also has an expectation that is wrong on purpose: that no alert fires. So the
    differences that promtool prints contain the real labels and texts.
    """
    inputs, firing, texts = [], [], []
    for case in cases:
        inputs += _in_namespace(case.name, input_series(case.stack(), max(case.expected) + 1))
        # An absent target has no namespace.
        of = [f'ALERTS{{alertstate="firing",namespace="{name}"}}' for name in (case.name, "")]
        firing += [
            {
                "expr": f"group by (alertname) ({' or '.join(of)})",
                "eval_time": f"{minute}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)
                ],
            }
            for minute, names in case.expected.items()
        ]
        texts += [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []}
            for minute, names in case.expected.items()
            for name in sorted(names)
        ]
    return {
        "interval": "1m",
        "input_series": inputs,
        "promql_expr_test": firing,
        "alert_rule_test": texts,
    }


def _run(directory: Path, cases: list[Case]) -> str:
    """promtool's output about these cases."""
    for name in RULE_FILES:
        (directory / name).write_text((RULES / name).read_text())
    tests = {
        "rule_files": RULE_FILES,
        "evaluation_interval": "1m",
        "tests": [_test(together) for together in _apart(cases)],
    }
    (directory / "cases.yml").write_text(json.dumps(tests))
    done = promtool("test", "rules", "cases.yml", cwd=directory)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[list[Future[str]]]:
    """The outputs of three promtool processes: one for the healthy stacks, and one for each half of
    the faults. The processes run at the same time, because each process uses only one core."""
    with ThreadPoolExecutor() as pool:
        yield [
            pool.submit(_run, tmp_path_factory.mktemp("cases"), cases)
            for cases in (HEALTHY, FAULTS[::2], FAULTS[1::2])
        ]


@pytest.fixture
def faults(runs) -> str:
    printed = [run.result() for run in runs[1:]]
    assert all("alertname" in part for part in printed), f"promtool did not run: {printed}"
    return "".join(printed)


def test_the_files_are_valid(tmp_path):
    for path in PROMETHEUS.rglob("*.yml"):
        copy = tmp_path / path.relative_to(PROMETHEUS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text())
    done = promtool("check", "config", "prometheus.yml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    done = promtool("check", "rules", *(f"rules/{name}" for name in RULE_FILES), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_each_fault_fires_its_alerts_and_no_others(faults):
    wrong = re.findall(r"expr: \"group by [^\n]*time: [^\n]*\n[^\n]*\n[^\n]*", faults)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_nothing_fires_on_a_healthy_stack(runs):
    printed = runs[0].result()
    assert "SUCCESS" in printed, printed


def test_every_alert_fires_in_some_case_and_waits_in_another():
    assert set().union(*(names for case in FAULTS for names in case.expected.values())) == set(
        alerts()
    )
    waits = {name for name, rule in alerts().items() if rule.get("for")}
    for case in FAULTS:
        for earlier, later in itertools.pairwise(case.expected.values()):
            waits -= later - earlier
    assert not waits, "no case shows that these do not fire before their `for` is over"


@pytest.mark.slow
def test_what_an_alert_says_can_be_said(faults):
    """An alert has each label that its texts name, and each template expands."""
    said: dict[str, list[tuple[str, str]]] = {}
    for labels, text in re.findall(
        r"Labels:\{([^\n]*?)\}\s*\n?\s*Annotations:\{([^\n]*)\}", faults
    ):
        name = re.search(r'alertname="(\w+)"', labels)
        assert name is not None
        said.setdefault(name[1], []).append((labels, text))
    assert set(said) == set(alerts()), "promtool prints what it got otherwise than this test reads"
    for name, rule in alerts().items():
        texts = " ".join(rule["annotations"].values())
        named = set(re.findall(r"\{\{ \$labels\.(\w+) \}\}", texts))
        named -= set(re.findall(r"\{\{ if \$labels\.(\w+) \}\}", texts))
        for labels, text in said[name]:
            assert "<error expanding" not in text, text
            assert "<no value>" not in text
            for label in named:
                assert re.search(rf'\b{label}="[^"]', labels), (
                    f"{name} names {label} and has only {labels}"
                )


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
