"""A controller estimates how much memory a body will take, and may refuse the body for this reason.
The tests compare the estimate with the memory that the body takes."""

import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from api_server import KEY, Process, Server, make_root, sft_request
from tandem.controller.json_weight import json_weight
from tandem.controller.routes_train import MOST_WEIGHT, SEQUENCE_BYTES

MIB = 2**20
SIZE = 3 * MIB
# The bytes that a body may take beyond the estimate: the connection's buffers, and memory that
# allocators keep.
SLACK_BYTES = 48 * MIB
SEED = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(2**32)))
TURN = '{"prompt_token_ids":[1],"token_ids":[1],"logprobs":[-1]}'
TRAJECTORY = '{"reward":1,"turns":[' + TURN + "]"
# Each attack is the text before the repetitions, the repeated text, and the text after the
# repetitions. Each `#` in the repeated text becomes a different number.
ATTACKS = {
    "objects in an array": ("[", '{"a":{}}', "]"),
    "arrays": ("[", "[]", "]"),
    "numbers": ("[", "1", "]"),
    "unknown keys": ('{"kind":"rl",', '"#":1', "}"),
    "unknown objects": ('{"kind":"rl",', '"#":{}', "}"),
    "unknown keys of each example": ('{"kind":"sft","examples":[', '{"#":{}}', "]}"),
    "labels": ('{"kind":"sft","labels":{', '"#":""', "}}"),
    "wrong labels": ('{"kind":"sft","labels":{', '"#":1', "}}"),
    "metrics": ('{"kind":"rl","groups":[{"trajectories":[' + TRAJECTORY, '"#":1', "}}]}]}"),
    "wrong metrics": ('{"kind":"rl","groups":[{"trajectories":[' + TRAJECTORY, '"#":""', "}}]}]}"),
    "messages": ('{"kind":"rl","groups":[{"trajectories":[' + TRAJECTORY, "{}", "]}]}]}"),
    "ids": (
        '{"kind":"rl","groups":[{"trajectories":[{"reward":1,"turns":[{"logprobs":[1],'
        '"token_ids":[',
        "12345",
        "]}]}]}]}",
    ),
    "examples": ('{"kind":"sft","examples":[', '{"text":"ab"}', "]}"),
    "trajectories": ('{"kind":"rl","groups":[{"trajectories":[', TRAJECTORY + "}", "]}]}"),
    "a tool call's arguments": (
        '{"kind":"sft","examples":[{"messages":[{"role":"user","content":"a"},{"role":"assistant",'
        '"tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":[',
        "{}",
        ']}"}}]}]}]}',
    ),
}


def repeated(before: str, unit: str, after: str) -> bytes:
    count = SIZE // (len(unit) + 6 * unit.count("#") + 1)
    if "#" not in unit:
        return f"{before}{','.join([unit] * count)}{after}".encode()
    return f"{before}{','.join(unit.replace('#', f'{n:x}') for n in range(count))}{after}".encode()


def attack(name: str) -> bytes:
    """The body of an attack. The controller refuses the body before or after parsing. The body
    names step 9 as the base step, and no run has a step 9."""
    before, unit, after = ATTACKS[name]
    before = before.replace('{"kind', '{"base_step":9,"kind', 1)
    if name.endswith("metrics"):
        before += ',"metrics":{'
    if name == "messages":
        before += ',"messages":['
    return repeated(before, unit, after)


def value(chance: random.Random, depth: int) -> object:
    """Any JSON value."""
    kind = chance.randrange(4 if depth else 2)
    if kind == 0:
        return chance.choice([0, -1, 10**9, 0.25, True, None])
    if kind == 1:
        return "a" * chance.choice([0, 1, 30])
    inner = [value(chance, depth - 1) for _ in range(chance.randrange(4))]
    return (
        inner if kind == 2 else {f"{'k' * chance.randrange(9)}{i}": v for i, v in enumerate(inner)}
    )


def random_body(chance: random.Random) -> bytes:
    """A request's body in which many copies of a random value fill a list or an object."""
    before, _, after = ATTACKS[chance.choice(sorted(ATTACKS))]
    unit = json.dumps(value(chance, 4), separators=(",", ":"))
    if before.rstrip('"').endswith(("{", ",")) and "}" in after[:1]:
        unit = '"#":' + unit
    return repeated(before, unit, after)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """A new controller for each test. Memory that stays allocated after an earlier body would hide
    the memory of the next body."""
    root = make_root(tmp_path / "spool")
    with Process(root, MALLOC_TRIM_THRESHOLD_="0") as process:
        post(process, b'{"name": "a", "lora": {"rank": 2}}', "/v1/runs")
        post(process, b'{"kind": "sft", "examples": []}')
        yield process


def post(process: Process, body: bytes, path: str = "/v1/runs/a/train") -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    return httpx.post(
        f"{process.url}{path}", content=body, headers=headers, timeout=120, trust_env=False
    )


def taken(process: Process, body: bytes) -> tuple[int, httpx.Response]:
    """A pair: the largest growth of the controller's resident set during the request, in bytes, and
    the controller's answer."""
    status = Path(f"/proc/{process.popen.pid}")
    (status / "clear_refs").write_text("5")  # resets the peak of the resident set
    before = psutil.Process(process.popen.pid).memory_info().rss
    answer = post(process, body)
    lines = (status / "status").read_text().splitlines()
    highest = next(line for line in lines if line.startswith("VmHWM"))
    return int(highest.split()[1]) * 1024 - before, answer


def check(process: Process, body: bytes, name: str) -> None:
    weight = json_weight(io.BytesIO(body))
    rise, answer = taken(process, body)
    print(f"{name}: {rise / len(body):.1f} of {weight / len(body):.1f} bytes a byte,", answer)
    assert rise <= weight + SLACK_BYTES, (name, body[:200], f"FUZZ_SEED={SEED}")
    assert 400 <= answer.status_code < 500, answer.text


@pytest.mark.sample(3)  # the test of random bodies covers all attacks
@pytest.mark.parametrize("name", ATTACKS)
def test_no_body_takes_more_than_the_estimate(process: Process, name: str) -> None:
    check(process, attack(name), name)


@pytest.mark.slow
def test_no_random_body_takes_more_than_the_estimate(process: Process) -> None:
    print(f"FUZZ_SEED={SEED}")
    chance = random.Random(SEED)
    for number in range(int(os.environ.get("FUZZ_BODIES", "12"))):
        check(process, random_body(chance), f"random {number}")


def test_more_sequences_than_memory_are_refused_before_they_are_packed(tmp_path: Path) -> None:
    root = make_root(tmp_path / "spool")
    with Server(root, max_request_bytes=MIB) as server, server.http() as http:
        http.post("/v1/runs", json={"name": "a", "lora": {"rank": 2}}).raise_for_status()
        most = MOST_WEIGHT * MIB // SEQUENCE_BYTES
        example = {"token_ids": [1, 2], "trainable": [False, True]}
        for count, status in ((most, 202), (most + 1, 413)):
            request = sft_request(examples=[example] * count)
            answer = http.post("/v1/runs/a/train", json=request)
            assert answer.status_code == status, answer.text
        assert answer.json()["error"]["field"] == "examples"


def test_a_body_that_would_take_too_much_is_not_parsed(process: Process) -> None:
    """A body of 48 MB for which the controller once took 4.5 GB of memory."""
    body = b"[" + b'{"a":{}},' * 5_300_000 + b"{}]"
    rise, answer = taken(process, body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (413, "body"), answer.text
    assert "memory" in answer.text
    assert rise < 64 * MIB
