"""Compares the sampling speed of two clients on the same server: `tandem rl`, and the client of
vLLM's own benchmark.

    python -m bench.rollouts http://127.0.0.1:8000 [--model my-run@1] [--in-flight 256 1024]
                             [--tokens 24 512] [--turns 1 3] [--answers 4] [--repeat 2] [--name N]
    python -m bench.rollouts --client [--in-flight 256 1024]

URL is the address of a vLLM server. Its API key is in TANDEM_API_KEY or TANDEM_API_KEY_FILE. The
model is a step of a run (`my-run@1`). Without `--model`, the model is the first step that vLLM
lists. The first client is `Environment.play` with the `Sampler` of `tandem rl`, without training.
Each conversation is a session of the route `/rollout`. The second client is the function with which
`vllm bench serve` sends chat completions. This function requests no log-probs and reads a stream.
Both clients play the same conversations at temperature 1. Each conversation begins with a different
question, and each later user message asks the model to go on. An answer has at most `--tokens`
tokens. `--in-flight` conversations run at the same time. A measurement has `--answers` times
`--in-flight` conversations. The two clients measure in turns, each in its own process. Before each
measurement, `--in-flight` conversations of one token open the connections, and are not counted. The
column `of vLLM's` is a client's rate of answers divided by the rate of vLLM's client. `server CPU
ms` is the CPU time of vLLM's API process, if the process is on this machine.

The option `--client` needs no vLLM: a server on the loopback interface answers after 0.2 s. The
rows have the client's CPU time per answer. Four clients are compared: a whole rollout of
`tandem rl`, aiohttp alone, httpx with one pool, and one `httpx.AsyncClient` for each concurrent
request. The rollout and aiohttp have the settings of `tandem.client.vllm`.
"""

import argparse
import asyncio
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import httpx
import psutil
from aiohttp import web

from bench.report import report
from tandem.client.http import connection
from tandem.client.rl.config import RLSection
from tandem.client.rl.environment import Environment
from tandem.client.rl.sampler import Sampler
from tandem.client.vllm import VARIABLE, Vllm, open_vllm
from tandem.data.inputs import policy_step_of
from tandem.system.open_files import allow_many_open_files
from tandem.system.ports import reserve

WAYS = ("rollouts", "aiohttp", "httpx, a client each", "httpx, one pool")
SERVER_SECONDS, SHORT = 0.2, 24
Conversation = Callable[[int], Awaitable[int]]
"""Plays the conversation of a number; returns its new tokens."""


def task(number: int) -> list[dict[str, Any]]:
    content = f"What is {number} + {7 * number + 3}? Explain each digit, and go on with the next."
    return [{"role": "user", "content": content}]


def tandem_side(vllm: Vllm, model: str, tokens: int, turns: int) -> Conversation:
    """A function that plays a conversation through the rollout code of `tandem rl`."""
    rl = RLSection.model_validate(
        {"steps": 1, "retries": 0, "environment": [{"use": "bench:task"}]}
    )
    options = {"max_tokens": tokens}
    environment: Any = object.__new__(Environment)

    async def rollout(number: int, sampler: Sampler) -> Any:
        messages = task(number)
        for turn in range(turns):
            if turn:
                messages.append({"role": "user", "content": "Go on."})
            messages.append(await sampler.chat(messages))
        return sampler.finish(float(number % 2))

    environment.rollout = rollout

    class Named(Sampler):
        """Samples from the step `model`."""

        @property
        def model(self) -> str:
            return model

    def failed(error: Exception) -> None:
        raise error

    async def play(number: int) -> int:
        made = await environment.play(
            number, lambda: Named(vllm, model, lambda: 0, None, options), rl, failed
        )
        return sum(len(turn.token_ids) for turn in made.turns)

    return play


def vllm_side(
    session: Any, url: str, key: str, model: str, tokens: int, turns: int
) -> Conversation:
    """Plays conversations through the function with which `vllm bench serve` sends requests."""
    from vllm.benchmarks.lib import endpoint_request_func as vllm_client

    async def play(number: int) -> int:
        messages, count = task(number), 0
        for turn in range(turns):
            if turn:
                messages.append({"role": "user", "content": "Go on."})
            request = vllm_client.RequestFuncInput(
                prompt="",
                api_url=f"{url}/chat/completions",
                prompt_len=0,
                output_len=tokens,
                model=model,
                extra_headers={"Authorization": key} if key else {},
                extra_body={"messages": messages, "temperature": 1.0},
            )
            answer = await vllm_client.async_request_openai_chat_completions(request, session)
            if not answer.success:
                sys.exit(f"vLLM's client failed: {answer.error}")
            messages.append({"role": "assistant", "content": answer.generated_text})
            count += answer.output_tokens
        return count

    return play


async def measure(
    opening: Conversation, play: Conversation, in_flight: int, conversations: int
) -> dict[str, Any]:
    """First plays `in_flight` conversations with `opening`, which opens the connections. Then plays
    `conversations` conversations with `play`, `in_flight` at a time, and returns their figures."""
    numbers, total = itertools.count(), 0

    async def worker(play: Conversation, end: int) -> None:
        nonlocal total
        while (number := next(numbers)) < end:
            new = await play(number)
            # `total += await play(number)` would read `total` before the await, and would lose the
            # tokens of other workers.
            total += new

    async def all_of(play: Conversation, end: int) -> None:
        async with asyncio.TaskGroup() as workers:
            for _ in range(in_flight):
                workers.create_task(worker(play, end))

    await all_of(opening, in_flight)
    total, numbers = 0, itertools.count(in_flight)
    server = listener(os.environ[VARIABLE])
    began, computed, served = time.monotonic(), time.process_time(), server()
    await all_of(play, in_flight + conversations)
    return {
        "seconds": time.monotonic() - began,
        "cpu": time.process_time() - computed,
        "server": server() - served,
        "conversations": conversations,
        "tokens": total,
    }


def listener(url: str) -> Callable[[], float]:
    """A function that returns the CPU seconds used so far by the process that listens at `url`. The
    function returns 0 if no process on this machine listens there."""
    port = httpx.URL(url).port
    found = [
        one.pid
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid
    ]
    times = psutil.Process(found[0]).cpu_times if found else None
    return lambda: sum(times()[:2]) if times else 0.0


async def side(of: str, model: str, in_flight: int, tokens: int, turns: int, count: int) -> Any:
    """Makes one measurement in this process."""
    async with AsyncExitStack() as stack:
        vllm = await stack.enter_async_context(open_vllm())
        if of == "tandem":
            make = functools.partial(tandem_side, vllm, model)
        else:
            # The HTTP session has the same settings as in `vllm bench serve`, except for
            # `keepalive_timeout`. vLLM closes a connection that is idle for 5 seconds, and a
            # request that is sent at the same time fails.
            connector = aiohttp.TCPConnector(
                limit=in_flight, limit_per_host=in_flight, keepalive_timeout=4, ttl_dns_cache=300
            )
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=connector, timeout=aiohttp.ClientTimeout(total=21600)
                )
            )
            key = connection(None, None)["headers"].get("Authorization", "")
            make = functools.partial(vllm_side, session, vllm.url, key, model)
        return await measure(make(1, 1), make(tokens, turns), in_flight, count)


def in_a_process(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.rollouts", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_lines(of: str, model: str) -> None:
    """For each line of sizes in the standard input, makes a measurement and prints its figures."""
    figures, sys.stdout = sys.stdout, sys.stderr  # vLLM writes its log to the standard output
    for line in sys.stdin:
        made = asyncio.run(side(of, model, *map(int, line.split())))
        print(json.dumps(made), file=figures, flush=True)


def start_client(of: str, model: str, url: str) -> subprocess.Popen[str]:
    """Starts the process of a client. The process makes all measurements of its client, because the
    import of vLLM takes longer than most measurements. It ends with its standard input."""
    command = [sys.executable, "-m", "bench.rollouts", "--side", of, model]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | {VARIABLE: url}, text=True, **pipes)


def measured(client: Any, *sizes: int) -> dict[str, Any]:
    print(*sizes, file=client.stdin, flush=True)
    line = client.stdout.readline()
    if not line:
        sys.exit(f"a client ended with status {client.wait()}: {' '.join(client.args)}")
    return json.loads(line)


def beside_vllm(options: argparse.Namespace) -> None:
    model = options.model or asyncio.run(first_model(options.url))
    if policy_step_of(model) is None:
        sys.exit(f"--model {model}: it is no step of a run; name a run's step, as my-run@0")
    with (
        start_client("tandem", model, options.url) as tandem,
        start_client("vllm", model, options.url) as vllm,
    ):
        rows = compared({"tandem": tandem, "vllm": vllm}, options)
    report(options.name, f"tandem rl's sampling beside vLLM's own benchmark client, {model}", rows)


def compared(clients: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all sizes. For each size, the clients measure in turns."""
    rows = []
    for in_flight, tokens, turns in itertools.product(
        options.in_flight, options.tokens, options.turns
    ):
        count = options.answers * in_flight
        found: dict[str, list[dict[str, Any]]] = {of: [] for of in clients}
        for _, of in itertools.product(range(options.repeat), clients):
            found[of].append(measured(clients[of], in_flight, tokens, turns, count))
        speed = {
            of: statistics.mean(turns * one["conversations"] / one["seconds"] for one in made)
            for of, made in found.items()
        }
        for of, made in found.items():
            new = statistics.mean(one["tokens"] / one["seconds"] for one in made)
            each = statistics.mean(one["tokens"] / one["conversations"] for one in made) / turns
            api = [one["server"] / (turns * one["conversations"]) for one in made]
            cpu = statistics.mean(one["cpu"] / (turns * one["conversations"]) for one in made)
            row = {"client": of, "in flight": in_flight, "tokens": tokens, "turns": turns}
            row |= {"tokens per answer": each, "answers/s": speed[of], "new tokens/s": new}
            row |= {"CPU ms per answer": 1e3 * cpu}
            if all(api):
                row["server CPU ms"] = 1e3 * statistics.mean(api)
            rows.append(row | {"of vLLM's": speed[of] / speed["vllm"]})
            print(rows[-1], flush=True)
    return rows


async def first_model(url: str) -> str:
    os.environ[VARIABLE] = url
    async with open_vllm() as vllm:
        answer = await vllm.request("GET", "models", seconds=30)
    names = [str(card["id"]) for card in answer.json()["data"]]
    steps = [name for name in names if policy_step_of(name) is not None]
    if not steps:
        sys.exit(
            f"vLLM lists no step, only {names}; make a run (`tandem run create my-run`), or start a"
            " vLLM without Tandem with --served-model-name bench@0"
        )
    return steps[0]


# ---- the client alone


def serve(port: int) -> None:
    """Runs a server that sends an answer in vLLM's format after SERVER_SECONDS."""
    entry = {"bytes": [49], "top_logprobs": []}
    logprobs = [{"token": str(i), "logprob": -0.5 - i / 100, **entry} for i in range(SHORT)]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "The answer is 47. " * 3, "tool_calls": []},
        "logprobs": {"content": logprobs},
        "finish_reason": "length",
        "token_ids": list(range(100, 100 + SHORT)),
    }
    usage = {"prompt_tokens": 40, "completion_tokens": SHORT}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "usage": usage, "choices": [choice]}

    async def chat(request: web.Request) -> web.Response:
        model = json.loads(await request.read())["model"]
        await asyncio.sleep(SERVER_SECONDS)
        return web.json_response({**body, "model": model, "prompt_token_ids": list(range(40))})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, backlog=4096)


async def client_side(way: str, url: str, in_flight: int, count: int) -> dict[str, Any]:
    os.environ[VARIABLE] = url
    body = {"messages": task(1), "logprobs": True, "return_token_ids": True, "model": "r@1"}
    async with AsyncExitStack() as stack:
        vllm = await stack.enter_async_context(open_vllm())
        arguments = connection(url, None) | {"timeout": 60, "trust_env": False}
        arguments["limits"] = httpx.Limits(max_connections=None)
        if way == "rollouts":
            play = tandem_side(vllm, "r@1", SHORT, 1)
            return await measure(play, play, in_flight, count)
        pool = 1 if way == "httpx, one pool" else in_flight if way.startswith("httpx") else 0
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(**arguments)) for _ in range(pool)
        ]

        async def ask() -> Any:
            if way == "aiohttp":
                return (await vllm.request("POST", "chat/completions", body)).json()
            client = clients[0] if pool == 1 else clients.pop()
            answer = await client.post("/v1/chat/completions", json=body)
            if pool > 1:
                clients.append(client)
            return answer.json()

        async def play(_number: int) -> int:
            return len((await ask())["choices"][0]["token_ids"])

        return await measure(play, play, in_flight, count)


def client_alone(options: argparse.Namespace) -> None:
    rows = []
    held = reserve()
    port = held.port
    server = subprocess.Popen([sys.executable, "-m", "bench.rollouts", "--serve", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(url, trust_env=False)
                break
            except httpx.TransportError:
                if server.poll() is not None:
                    sys.exit("the server ended")
                time.sleep(0.1)
        for in_flight, way in itertools.product(options.in_flight, WAYS):
            count = 2 * in_flight if way == "httpx, one pool" else max(2048, 2 * in_flight)
            made = in_a_process(["--side", way, url, str(in_flight), str(count)])
            row = {"client": way, "in flight": in_flight, "answers": count}
            row |= {"CPU ms per answer": 1e3 * made["cpu"] / count}
            rows.append(row | {"answers/s": count / made["seconds"]})
            print(rows[-1], flush=True)
    finally:
        server.terminate()
        server.wait()
        held.close()
    report("rollouts-client", "What a short answer costs the client", rows)


def main(arguments: list[str]) -> None:
    allow_many_open_files()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("url", nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[SHORT, 512])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--name", default="rollouts")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--client", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--side", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve)
    elif options.side and options.side[0] in WAYS:
        way, url, in_flight, count = options.side
        print(json.dumps(asyncio.run(client_side(way, url, int(in_flight), int(count)))))
    elif options.side:
        measure_lines(*options.side)
    elif options.client:
        client_alone(options)
    elif options.url:
        beside_vllm(options)
    else:
        parser.error("name vLLM's URL, or --client")


if __name__ == "__main__":
    main(sys.argv[1:])
