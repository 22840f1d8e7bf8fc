"""Panels and dashboards in Grafana's JSON model, and the parts that all dashboards share.

Queries are PromQL, where @ns, @pod and @gpu stand for the matchers of the dashboard's variables.
"""

from typing import Any

Json = dict[str, Any]

# Grafana 12.1 and later have this version of the schema; older versions show the dashboards, too.
SCHEMA_VERSION = 42
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
MATCHERS = {
    "@ns": 'namespace=~"$namespace"',
    "@pod": 'namespace=~"$namespace",pod=~"$pod"',
    "@gpu": 'namespace=~"$namespace",pod=~"$pod",role=~"$role",uuid=~"$uuid"',
}
# Every dashboard has these variables, so that a link to another dashboard keeps their chosen
# values.
VARIABLES = {
    "namespace": ("Namespace", 'label_values(up{job=~"tandem-.*"}, namespace)'),
    "role": ("Role", 'label_values(up{job=~"tandem-.*",namespace=~"$namespace"}, role)'),
    "pod": ("Pod", 'label_values(up{job=~"tandem-.*",namespace=~"$namespace",role=~"$role"}, pod)'),
    "uuid": ("GPU", "label_values(tandem_gpu_info{" + MATCHERS["@pod"] + ',role=~"$role"}, uuid)'),
}
GREEN, YELLOW, RED, BLUE, GREY = "green", "yellow", "red", "blue", "#808080"
YES_NO = {"0": ("no", GREY), "1": ("yes", GREEN)}
UP_DOWN = {"0": ("down", RED), "1": ("up", GREEN)}


def query(expr: str, legend: str = "", *, kind: str = "range") -> Json:
    """One query. `kind`: range (over time), instant (now), table (now, a row per series) or
    heatmap."""
    for name, matcher in MATCHERS.items():
        expr = expr.replace(name, matcher)
    target = {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": expr,
        "legendFormat": legend or "__auto",
        "range": kind in ("range", "heatmap"),
        "instant": kind in ("instant", "table"),
    }
    if kind in ("table", "heatmap"):
        target["format"] = kind
    return target


def gpu(expr: str) -> str:
    """`expr` with the label `gpu`, which is the beginning of the device's UUID. The label
    distinguishes the devices of one machine."""
    return f'label_replace({expr}, "gpu", "$1", "uuid", "(?:GPU-|MIG-)?(.{{0,8}}).*")'


def panel(
    kind: str,
    title: str,
    text: str,
    unit: str,
    *queries: Json,
    width: int = 8,
    height: int = 8,
    limits: list[tuple[str, float]] | None = None,
    texts: dict[str, tuple[str, str]] | None = None,
    none: str = "no data",
    **more: Any,
) -> Json:
    """A panel, without its position in the dashboard.

    `text`: the description, which says what the panel shows and from which metrics. `limits`:
    (colour, the value from which the colour applies); values below all limits are green. `texts`:
    value -> (word, colour). `more`: other parts of the panel, such as its `options`, and for the
    panel's fields `custom`, `overrides` and other `defaults`.
    """
    steps: list[Json] = [{"color": GREEN, "value": None}]
    steps += [{"color": colour, "value": value} for colour, value in limits or []]
    defaults: Json = {
        "unit": unit,
        "noValue": none,
        "mappings": [],
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds" if limits or texts else "palette-classic"},
    }
    if texts:
        results = {
            value: {"text": word, "color": colour, "index": index}
            for index, (value, (word, colour)) in enumerate(texts.items())
        }
        defaults["mappings"] = [{"type": "value", "options": results}]
    defaults |= more.pop("defaults", {})
    made: Json = {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": height},
        "targets": [
            {"refId": chr(ord("A") + index)} | target for index, target in enumerate(queries)
        ],
        "fieldConfig": {
            "defaults": defaults | {"custom": more.pop("custom", {})},
            "overrides": more.pop("overrides", []),
        },
        "options": more.pop("options", {}),
    }
    return made | more


def timeseries(
    title: str,
    text: str,
    unit: str,
    *queries: Json,
    stack: str = "none",
    line: bool = False,
    **more: Any,
) -> Json:
    """A panel of lines. `stack`: none, normal or percent. `line`: whether the limits are drawn as
    dashed lines."""
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if stack != "none" else 8,
        "showPoints": "auto",
        "spanNulls": False,
        "stacking": {"mode": stack, "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if line else "off"},
    }
    custom |= more.pop("custom", {})
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    defaults = {"color": {"mode": "palette-classic"}} | more.pop("defaults", {})
    return panel(
        "timeseries",
        title,
        text,
        unit,
        *queries,
        custom=custom,
        options=options,
        defaults=defaults,
        **more,
    )


def stat(title: str, text: str, unit: str, *queries: Json, **more: Any) -> Json:
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "graphMode": "none",
        "colorMode": "value",
        "textMode": "auto",
        "justifyMode": "auto",
        "orientation": "auto",
        "wideLayout": True,
    }
    more.setdefault("height", 4)
    more.setdefault("width", 4)
    return panel(
        "stat", title, text, unit, *queries, options=options | more.pop("options", {}), **more
    )


def bars(title: str, text: str, unit: str, *queries: Json, **more: Any) -> Json:
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "displayMode": "basic",
        "orientation": "horizontal",
        "showUnfilled": True,
        "valueMode": "color",
    }
    return panel("bargauge", title, text, unit, *queries, options=options, **more)


def timeline(title: str, text: str, unit: str, *queries: Json, **more: Any) -> Json:
    options = {
        "mergeValues": True,
        "showValue": "never",
        "rowHeight": 0.85,
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
    }
    return panel(
        "state-timeline",
        title,
        text,
        unit,
        *queries,
        options=options | more.pop("options", {}),
        custom={"fillOpacity": 80, "lineWidth": 0},
        **more,
    )


def heatmap(title: str, text: str, unit: str, *queries: Json, **more: Any) -> Json:
    options = {
        "calculate": False,
        "yAxis": {"unit": unit},
        "color": {
            "mode": "scheme",
            "scheme": "Blues",
            "steps": 64,
            "exponent": 0.5,
            "fill": "blue",
            "reverse": False,
        },
        "tooltip": {"mode": "single", "yHistogram": False},
        "legend": {"show": True},
        "cellGap": 1,
        "showValue": "never",
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
    }
    return panel("heatmap", title, text, unit, *queries, options=options, **more)


def table(
    title: str, text: str, *queries: Json, columns: dict[str, str], unit: str = "none", **more: Any
) -> Json:
    """`columns`: the headings of the columns. A key is the name of a label, or "Value". The table
    has its columns in this order, and hides all other columns."""
    order = {name: index for index, name in enumerate(columns)}
    organize = {
        "id": "organize",
        "options": {
            "indexByName": order,
            "renameByName": columns,
            "includeByName": dict.fromkeys(columns, True),
        },
    }
    return panel(
        "table",
        title,
        text,
        unit,
        *queries,
        transformations=[organize],
        options={"showHeader": True, "cellHeight": "sm"},
        custom={"align": "auto", "filterable": False},
        **more,
    )


def row(title: str) -> Json:
    return {
        "type": "row",
        "title": title,
        "collapsed": False,
        "panels": [],
        "gridPos": {"w": 24, "h": 1},
    }


def dashboard(
    uid: str, title: str, text: str, *panels: Json, extra: dict[str, tuple[str, str]] | None = None
) -> Json:
    """The panels are placed from left to right, and wrap at Grafana's 24 grid columns. All panels
    of a line should have the same height.

    `extra`: variables that only this dashboard has, as name -> (label, query).
    """
    x = y = lowest = 0
    placed = []
    for number, made in enumerate(panels, start=1):
        size = made["gridPos"]
        if x + size["w"] > 24 or made["type"] == "row":
            x, y = 0, lowest
        placed.append(made | {"id": number, "gridPos": {"x": x, "y": y} | size})
        x, lowest = x + size["w"], max(lowest, y + size["h"])
    return {
        "id": None,
        "uid": uid,
        "title": title,
        "description": text,
        "tags": ["tandem"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "15s",
        "fiscalYearStartMonth": 0,
        "liveNow": False,
        "links": [
            {
                "type": "dashboards",
                "title": "Tandem",
                "tags": ["tandem"],
                "asDropdown": False,
                "icon": "external link",
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "tooltip": "",
                "url": "",
            }
        ],
        "annotations": {"list": [_built_in(), *_annotations()]},
        "templating": {
            "list": [
                _datasource(),
                *(_variable(name, *what) for name, what in (VARIABLES | (extra or {})).items()),
            ]
        },
        "panels": placed,
    }


def _datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "regex": "",
        "refresh": 1,
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "options": [],
        "current": {},
    }


def _variable(name: str, label: str, expr: str) -> Json:
    # The choice "All" has the value ".*", because the list of existing values is empty on a machine
    # without GPUs.
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": expr,
        "query": {"qryType": 5, "query": expr, "refId": f"variable-{name}"},
        "regex": "",
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "options": [],
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _built_in() -> Json:
    return {
        "builtIn": 1,
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "hide": True,
        "iconColor": "rgba(0, 211, 255, 1)",
        "name": "Annotations & Alerts",
        "type": "dashboard",
    }


def _annotations() -> list[Json]:
    wanted = (
        (
            "Jobs that ended",
            BLUE,
            "changes(tandem_jobs_finished_total{@pod}[1m]) > 0",
            "job {{outcome}}",
        ),
        (
            "Steps served",
            GREEN,
            'changes(tandem_policy_version{@ns,side="inference"}[1m]) > 0',
            "{{run}}: served",
        ),
    )
    return [
        {
            "name": name,
            "datasource": DATASOURCE,
            "enable": True,
            "hide": False,
            "iconColor": colour,
            "expr": query(expr)["expr"],
            "step": "60s",
            "titleFormat": title,
            "textFormat": "{{pod}}",
            "tagKeys": "pod",
            "useValueForTime": False,
        }
        for name, colour, expr, title in wanted
    ]
