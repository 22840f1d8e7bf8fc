"""vLLM's own API server, with vLLM's templates, parsers and routes. The server's engine answers
with texts that a test has written."""

import asyncio
import contextlib
import threading
from array import array
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny_model
import uvicorn
from tokenizers import AddedToken
from transformers import AutoTokenizer

from free_ports import free_ports
from tiny import write_random_model
from waiting import until

FAMILIES = {
    # Chat template of TRL's wheel -> the template's special tokens, the tokens that end a turn, and
    # vLLM's parsers of tool calls and of reasoning.
    "qwen3": ("<think> </think> <tool_call> </tool_call>", "<|im_end|>", "hermes", "qwen3"),
    "qwen3_5_think": (
        "<think> </think> <tool_call> </tool_call>",
        "<|im_end|>",
        "qwen3_coder",
        "qwen3",
    ),
    "glm4moe": (
        "<think> </think> <tool_call> </tool_call> [gMASK] <sop> <|system|> <|user|>"
        " <|assistant|> <|observation|>",
        "<|endoftext|> <|user|> <|observation|>",
        "glm45",
        "glm45",
    ),
}
# Gemma 4's template writes a tool's answer into the turn of the call, before the turn's text.
# Gemma 4's config lists <|tool_response> as a token that ends turns; the config of these tests
# does not.
GEMMA = {
    "gemma4": (
        "<|turn> <turn|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|channel>"
        ' <channel|> <|"|> <|tool> <tool|> <|think|>',
        "<turn|>",
        "gemma4",
        "gemma4",
    )
}


class ScriptedEngine:
    """Answers each request with the next of `texts`. `prompts` are the token ids of each request's
    prompt, and `sampled` are the token ids of each answer."""

    def __init__(self, config: Any, renderer: Any) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer, self.input_processor = renderer, SimpleNamespace(renderer=renderer)
        self.errored = self.is_stopped = False
        self.is_running, self.dead_error = True, RuntimeError()
        self.texts: list[str] = []
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []

    async def generate(self, prompt: Any, params: Any, request_id: str, **_: Any) -> Any:
        from vllm.logprobs import Logprob
        from vllm.outputs import CompletionOutput, RequestOutput

        self.prompts.append(list(prompt["prompt_token_ids"]))
        tokenizer = self.renderer.tokenizer
        text = self.texts.pop(0)
        ids = tokenizer.encode(text, add_special_tokens=False)[: params.max_tokens]
        self.sampled.append(ids)
        ended = ids[-1] in self.model_config.try_get_generation_config()["eos_token_id"]
        # vLLM leaves the token that ends a turn out of the answer's text.
        told = ids[:-1] if ended else ids
        shown = tokenizer.decode(told, skip_special_tokens=params.skip_special_tokens)
        reason, stop = ("stop", None) if ended else ("length", None)
        for string in params.stop or []:
            if string in shown:
                shown, reason, stop = shown[: shown.index(string)], "stop", string
        logprobs = [{token: Logprob(logprob=-0.5)} for token in ids]
        assert params.logprobs is not None
        delta = params.output_kind.name == "DELTA"
        # A stream contains the answer in two parts.
        cuts = [len(ids) // 2, len(ids)] if delta and stop is None else [len(ids)]
        begin, done = 0, ""
        for cut in cuts:
            final = cut == len(ids)
            so_far = (
                shown
                if final
                else tokenizer.decode(ids[:cut], skip_special_tokens=params.skip_special_tokens)
            )
            output = CompletionOutput(
                index=0,
                text=so_far.removeprefix(done),
                token_ids=array("i", ids[begin:cut]).tolist(),
                cumulative_logprob=None,
                logprobs=logprobs[begin:cut],
                finish_reason=reason if final else None,
                stop_reason=stop if final else None,
            )
            begin, done = cut, so_far
            yield RequestOutput(request_id, None, self.prompts[-1], None, [output], finished=final)
            await asyncio.sleep(0)

    def check_admission(self, requests: int) -> None:
        pass

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False


class Scripted:
    """`url`: the server's URL. `engine`: the engine with the script."""

    def __init__(self, url: str, engine: ScriptedEngine) -> None:
        self.url, self.engine = url, engine


def write_model(directory: Path, family: str) -> Path:
    special, ends, _, _ = (FAMILIES | GEMMA)[family]
    tiny_model.write_tokenizer(directory)
    write_random_model(
        directory,
        family="qwen3",
        vocab_size=320,
        hidden_size=64,
        head_dim=32,
        max_position_embeddings=16384,
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    added = [AddedToken(token, special=False, normalized=False) for token in special.split()]
    tokenizer.add_tokens(added)
    # `find_spec` finds TRL without an import. An import of TRL would set VLLM_LOGGING_LEVEL for
    # each vLLM that this process starts.
    package = Path(str(find_spec("trl").origin)).parent  # type: ignore[union-attr]
    template = package / "chat_templates" / f"{family}.jinja"
    tokenizer.chat_template = template.read_text()
    tokenizer.model_max_length = 16384
    tokenizer.eos_token = ends.split()[0]
    tokenizer.save_pretrained(directory)
    ids = tokenizer.convert_tokens_to_ids(ends.split())
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    return directory


@contextlib.contextmanager
def serve(directory: Path, family: str) -> Iterator[Scripted]:
    """vLLM's server on a port of its own, with the rollout door as middleware."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # vLLM 0.26
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.renderers import renderer_from_config
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    write_model(directory, family)
    _, _, tools, reasoning = (FAMILIES | GEMMA)[family]
    options = [
        *("--model", str(directory), "--served-model-name", "run@3", "--dtype", "float32"),
        *("--enable-auto-tool-choice", "--tool-call-parser", tools),
        *("--reasoning-parser", reasoning, "--generation-config", "vllm"),
        *("--max-model-len", "16384", "--disable-log-stats"),
        *("--middleware", "tandem.inference.server.middleware.rollout.RolloutDoor"),
        *("--middleware", "tandem.inference.server.middleware.guard.AdminGuard"),
    ]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    engine = ScriptedEngine(config, renderer_from_config(config))
    app = build_app(args, ("generate",), config.model_config)
    asyncio.run(init_app_state(engine, app.state, args, ("generate",)))
    port = free_ports(1)[0]
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, lifespan="off", log_level="warning")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until("the server listens", lambda: server.started, 60, poll=0.01)
    yield Scripted(f"http://127.0.0.1:{port}", engine)
    server.should_exit = True
    thread.join(20)
