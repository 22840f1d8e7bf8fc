"""Environment variables that child processes get."""

from __future__ import annotations

from collections.abc import Mapping


def omp_waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that lets OpenMP's threads (libgomp's, in torch and vLLM) wait for each other briefly and then
    sleep; none where `environ` already says how they wait.

    By default they spin 300 000 times. Where another process uses their core, that delays every operation: training a
    tiny model on two cores, one of them busy, took 40 times as long.
    """
    return {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys() else {"GOMP_SPINCOUNT": "1000"}
