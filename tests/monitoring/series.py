"""Time series with one value per minute. A stack is a dictionary {series: value per minute}. The
value None stands for a minute without a sample."""

from collections.abc import Callable

MINUTES = 450
Value = Callable[[int], float | None] | float
"""A constant, or a function of the minute."""
Values = list[float | None]
Stack = dict[str, Values]

TARGETS = {
    target: {
        "job": f"tandem-{target}",
        "namespace": "compose",
        "pod": pod,
        "role": pod,
        "instance": f"{pod}:{port}",
    }
    for target, pod, port in (
        ("controller", "controller", 8080),
        ("trainer", "trainer", 9400),
        ("inference", "inference", 9401),
        ("vllm", "inference", 8000),
    )
}
_KUBE_STATE_METRICS = {"job": "kube-state-metrics", "namespace": "rl", "pod": "tandem-trainer-0"}


def put(stack: Stack, target: str, metric: str, value: Value, /, **labels: str) -> None:
    """Sets the series `metric{...}` as scraped from a target."""
    every = TARGETS.get(target, _KUBE_STATE_METRICS) | labels
    series = metric + "{" + ",".join(f'{key}="{text}"' for key, text in sorted(every.items())) + "}"
    stack[series] = [
        value(minute) if callable(value) else float(value) for minute in range(MINUTES + 1)
    ]


def drop(stack: Stack, target: str, prefix: str = "", *, since: int = 0, **labels: str) -> None:
    """Removes the samples of some series from minute `since` on. These series belong to the target,
    have `labels`, and have names that begin with `prefix`."""
    own = [f'{key}="{text}"' for key, text in (TARGETS[target] | labels).items()]
    for series, values in stack.items():
        if series.startswith(prefix) and all(label in series for label in own):
            values[since:] = [None] * len(values[since:])


def input_series(stack: Stack, end: int) -> list[dict[str, str]]:
    """A stack's minutes before `end`, as promtool reads them."""
    return [
        {
            "series": name,
            "values": " ".join("_" if value is None else f"{value:.10g}" for value in values[:end]),
        }
        for name, values in stack.items()
        if any(value is not None for value in values[:end])
    ]


def per_minute(amount: float) -> Callable[[int], float]:
    return lambda minute: amount * minute


CLOCK = per_minute(60)
"""The time in seconds."""


def histogram(
    stack: Stack,
    target: str,
    name: str,
    count: Callable[[int], float],
    *,
    at: str,
    buckets: tuple[str, ...],
    seconds: float,
    **labels: str,
) -> None:
    """A histogram with `count` observations so far. Each observation took `seconds` and fell into
    bucket `at`."""
    reached = False
    for le in (*buckets, "+Inf"):
        reached = reached or le == at
        put(stack, target, f"{name}_bucket", count if reached else 0, le=le, **labels)
    put(stack, target, f"{name}_sum", lambda minute: count(minute) * seconds, **labels)
    put(stack, target, f"{name}_count", count, **labels)
