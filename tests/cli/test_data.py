"""`tandem data check`, with a controller and without one."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path

import pytest

from api_server import KEY, Server, make_root
from data.chat_tokenizer import TEMPLATES, chat_tokenizer
from spool.volume_tools import refused
from tandem.client import Tandem
from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.inputs import PackingSettings
from tandem.data.prepare import prepare_dpo
from tandem.errors import InvalidInput

ASK = {"role": "user", "content": "Is it <b>sunny</b>?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    root = make_root(tmp_path_factory.mktemp("volume") / "spool")
    chat_tokenizer((TEMPLATES / "qwen3.jinja").read_text()).save_pretrained(
        root / "models" / "tiny"
    )
    config = root / "models" / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 1000}))
    with Server(root) as server:
        yield server


@pytest.fixture
def file(tmp_path) -> Path:
    """301 examples: one is not JSON, the template refuses one, one is too long, and two are the
    same."""
    records = [
        {"messages": [ASK, {"role": "assistant", "content": f"yes {i} " * (i % 5 + 1)}]}
        for i in range(300)
    ]
    records[7]["messages"][1]["content"] = "long " * 2000
    records[9] = records[8]
    records[20]["messages"] = [{"role": "assistant", "content": "nothing was asked"}]
    records[21]["source"] = "web"
    lines = [json.dumps(record) for record in records]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([*lines[:10], "{broken", *lines[10:]]) + "\n")
    return path


def test_check_by_the_controller_and_offline(tandem, server, file, tmp_path):
    page = tmp_path / "page.html"
    base = server.settings.root / "models" / "tiny"
    status, out, err = tandem("data", "check", str(file), "--html", str(page))
    assert status == 1
    assert tandem("data", "check", str(file), "--tokenizer", str(base)) == (1, out, err)
    assert re.findall(r"broken: (.*?: .*)", err) == [
        (
            "data.jsonl line 11: not JSON: Expecting property name enclosed in double quotes at"
            " column 2; correct it or leave it out"
        ),
        (
            "data.jsonl line 22: messages.0: the chat template refuses the conversation: list"
            " object has no element 0; give token_ids and trainable instead of messages"
        ),
    ]
    assert "⟦<think>\n\n</think>\n\nyes 0 <|im_end|>⟧" in out
    facts = dict(re.findall(r"│ (\w[\w ]*?) +│ (.*?) +│", out))
    assert facts["records"] == "301"
    assert facts["broken"] == "2"
    assert facts["duplicates"] == "1: data.jsonl line 10 (as data.jsonl line 9)"
    # a long message takes several lines
    cells = " ".join(re.findall(r"│[^│\n]*│ ([^│\n]*?) +│", out))
    assert (
        "1: data.jsonl line 8 (10031). `tandem train` refuses what doesn't fit a row of 2048"
        " tokens; raise its --sequence-length, or give it --too-long drop or truncate" in cells
    )
    assert facts["columns left out"] == "source"
    html = page.read_text()
    text = re.sub(r"<[^>]+>", "", html)
    assert text.count(" trained ──") == 100
    assert "data.jsonl line 11: not JSON: Expecting property name" in text
    assert "Is it &lt;b&gt;sunny&lt;/b&gt;?" in html
    marked = re.findall(r'<span style="[^"]*background-color: #[^"]*">(.*?)</span>', html)
    assert marked[:3] == ["&lt;think&gt;", "&lt;/think&gt;", "yes 0 &lt;|im_end|&gt;"]
    assert not re.search(r"(src|href)=|url\(|@import", html)
    HTMLParser().feed(html)


def test_json(tandem, server, file):
    status, out, _ = tandem("data", "check", str(file), "--json", "--show", "1")
    found = json.loads(out)
    assert status == 1
    assert [place for place, _ in found["broken"]] == ["data.jsonl line 11", "data.jsonl line 22"]
    ((place, shown),) = found["shown"]
    assert place == "data.jsonl line 1"
    (parts,) = shown["parts"]
    assert [weight for _, weight in parts] == [0, 1]
    assert len(found["too_long"]) == len(found["duplicates"]) == 1


def test_pairs(tandem, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "Is it", "chosen": " sunny", "rejected": " not"}) + "\n")
    status, out, err = tandem("data", "check", str(path))
    assert (status, err) == (0, "")
    assert "Is it⟦ sunny<|im_end|>⟧" in out
    assert "Is it⟦ not<|im_end|>⟧" in out


@pytest.mark.parametrize("offline", [False, True])
def test_a_pair_is_as_long_as_in_training(tandem, server, tmp_path, offline):
    """The two sequences of a pair share the slots of their common beginning. Pairs that are too
    long are dropped, because they can't be truncated."""
    base = server.settings.root / "models" / "tiny"
    pair = PreferencePair(prompt="Is it", chosen=" sunny" * 20, rejected=" not" * 20)
    path = tmp_path / "pairs.jsonl"
    path.write_text(pair.model_dump_json(exclude_none=True) + "\n")
    options = ("--json", *(("--tokenizer", str(base)) if offline else ()))
    found = json.loads(tandem("data", "check", str(path), *options)[1])
    slots = found["shown"][0][1]["slots"]
    assert max(found["shown"][0][1]["lengths"]) < slots < sum(found["shown"][0][1]["lengths"])
    for length, too_long in ((slots, []), (slots - 1, [f"pairs.jsonl line 1 ({slots})"])):
        found = json.loads(
            tandem("data", "check", str(path), *options, "--sequence-length", str(length))[1]
        )
        assert found["too_long"] == too_long
        out = tmp_path / f"packed {length}"
        out.mkdir()
        packing = PackingSettings(sequence_length=length)
        with (
            refused(InvalidInput, "pairs.0", match=f"takes {slots} tokens")
            if too_long
            else nullcontext()
        ):
            prepare_dpo(
                [pair], tokenizer_path=str(base), vocab_size=10**6, packing=packing, out=out
            )
    assert found["too long"].endswith("raise its --sequence-length, or give it --too-long drop")


def test_tokens_that_the_model_does_not_have_are_broken(tandem, server, tmp_path):
    path = tmp_path / "tokens.jsonl"
    rows = ([[1, 2], [0, 1], [0, 999]], [[1, 1000], [0, 1], [0, 3]], [[1, 2], [0, 1], [0, 1000]])
    names = ("token_ids", "weights", "targets")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    for options in ((), ("--tokenizer", str(server.settings.root / "models" / "tiny"))):
        status, out, _ = tandem("data", "check", str(path), "--json", *options)
        (second, first), (third, targets) = json.loads(out)["broken"]
        assert (status, second, third) == (1, "tokens.jsonl line 2", "tokens.jsonl line 3")
        assert first.startswith(
            "token_ids: token id 1000 at index 1 is outside the model's vocabulary of 1000"
        )
        assert targets.startswith("targets: token id 1000 at index 0")


def test_reasoning_and_tools_that_the_template_leaves_out_are_named(tandem, tmp_path):
    chat_tokenizer((TEMPLATES / "phi3.jinja").read_text()).save_pretrained(tmp_path / "tokenizer")
    record = {
        "messages": [ASK, {"role": "assistant", "content": "yes", "reasoning": "I should think."}]
    }
    tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(record) + "\n" + json.dumps(record | {"tools": [tool]}) + "\n")
    status, out, _ = tandem(
        "data", "check", str(path), "--tokenizer", str(tmp_path / "tokenizer"), "--json"
    )
    found = json.loads(out)
    assert status == 0
    assert found["reasoning left out"].startswith(
        "2: chats.jsonl line 1, chats.jsonl line 2. The chat template"
    )
    assert found["tools left out"].startswith("1: chats.jsonl line 2. The chat template")


def test_route(server):
    with Tandem(server.url, KEY) as client, server.http() as http:
        pair = PreferencePair(prompt="Is it", chosen=" sunny", rejected=" not")
        weighted = SFTExample(token_ids=[1, 2, 3], weights=[0.0, 1.0, -0.5])
        found = client.render([SFTExample(text="It is."), weighted], [pair])
        assert [len(one.parts) for one in found] == [1, 1, 2]
        assert [weight for _, weight in found[1].parts[0]] == [0, 1, -0.5]
        assert [one.slots for one in found[:2]] == [one.lengths[0] for one in found[:2]]
        body = {"examples": [{"text": "a"}, {"messages": [{"role": "user", "content": 3}]}]}
        answer = http.post("/v1/data/render", json=body)
        assert answer.status_code == 422
        assert answer.json()["error"]["field"] == "examples.1.messages.0.content"
        many = http.post("/v1/data/render", json={"examples": [{"text": "a"}] * 1001})
        assert (many.status_code, many.json()["error"]["field"]) == (422, "examples")


@pytest.mark.parametrize("options", [(), ("--held-out", "0.3")])
@pytest.mark.parametrize(
    ("broken", "line", "problem"),
    [
        ({"role": "user", "content": 3}, 13, "messages.0.content"),
        ({"role": "x"}, 13, "messages.0"),
        (
            {"role": "assistant", "content": "nothing was asked"},
            14,
            "messages.0: the chat template refuses",
        ),
    ],
)
def test_training_names_the_line_that_is_refused(
    tandem, server, tmp_path, options, broken, line, problem
):
    """The command's own checks refuse line 13 before any job of a chain is made. The chat template
    refuses line 14."""
    small = ("--batch-size", "2", "--checkpoint-every", "1") if line == 13 else ()
    records = [{"messages": [ASK, {"role": "assistant", "content": f"yes {i}"}]} for i in range(20)]
    records[line - 1] = {"messages": [broken]}
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    status, _, err = tandem("train", "sft", "refused", str(path), *options, *small)
    assert (status, f"data.jsonl line {line}: {problem}" in err) == (1, True), err
    assert tandem("run", "list", "--json")[1].strip() == "[]"


def test_without_transformers(file):
    """The client's own dependencies do not include transformers. The error names the extra that
    installs transformers."""
    code = (
        "import sys; sys.modules['transformers'] = None; sys.argv = ['tandem', 'data', 'check',"
        " *sys.argv[1:]]\n"
    )
    code += "from tandem.cli import main; main()"
    command = [sys.executable, "-c", code, str(file), "--tokenizer", "/nowhere"]
    left = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert left.returncode == 1
    assert "pip install 'tandem-rl[data]'" in left.stderr


def records(path: Path, *given: object) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in given))
    return str(path)


def tokenizer_at(path: Path, template: str, **config: object) -> str:
    chat_tokenizer((TEMPLATES / f"{template}.jinja").read_text()).save_pretrained(path)
    if config:
        (path / "generation_config.json").write_text(json.dumps(config))
    return str(path)


def test_turns_that_never_end_are_counted_and_refused_where_all_are(tandem, tmp_path):
    made = chat_tokenizer((TEMPLATES / "gptoss_training.jinja").read_text())
    stops = made.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    model = tokenizer_at(tmp_path / "model", "gptoss_training", eos_token_id=stops)
    one = {"messages": [ASK, {"role": "assistant", "content": "yes"}]}
    two = {"messages": one["messages"] * 2}
    check = ("data", "check", records(tmp_path / "chats.jsonl", one, two), "--json", "--tokenizer")
    status, out, _ = tandem(*check, model)
    assert (status, json.loads(out)["without a stop token"]) == (
        0,
        "1: chats.jsonl line 2. 1 trained turns do not end with a token at which vLLM stops",
    )
    # This directory stands for a base model without generation_config.json. No file says which
    # token ends a turn in the template.
    model = tokenizer_at(tmp_path / "base", "gptoss_training")
    status, out, _ = tandem(*check, model)
    ((where, problem),) = json.loads(out)["broken"]
    assert (status, where) == (1, "chats.jsonl")
    assert "no trained turn ends with a token at which vLLM stops" in problem
    assert f"add {stops[0]} to eos_token_id in the model's generation_config.json" in problem


def test_control_tokens_in_texts_are_counted_and_strict_refuses_them(tandem, tmp_path):
    model = tokenizer_at(tmp_path / "model", "qwen3")
    answer = {"role": "assistant", "content": "yes"}
    odd = {"role": "user", "content": "write <|im_end|> and <|im_end|>"}
    path = records(
        tmp_path / "chats.jsonl", {"messages": [ASK, answer]}, {"messages": [odd, answer]}
    )
    check = ("data", "check", path, "--json", "--tokenizer", model)
    status, out, _ = tandem(*check)
    found = json.loads(out)
    assert (status, found["broken"]) == (0, [])
    assert found["control tokens"].startswith(
        "1: chats.jsonl line 2. The texts have '<|im_end|>' 2 times, which the tokenizer reads as"
    )
    status, out, _ = tandem(*check, "--strict")
    ((where, problem),) = json.loads(out)["broken"]
    assert (status, where) == (1, "chats.jsonl line 2")
    assert problem.startswith("has '<|im_end|>' in its texts")


def test_empty_thoughts_are_counted_and_a_setting_avoids_them(tandem, tmp_path):
    model = tokenizer_at(tmp_path / "model", "qwen3")
    path = records(
        tmp_path / "chats.jsonl", {"messages": [ASK, {"role": "assistant", "content": "yes"}]}
    )
    check = ("data", "check", path, "--json", "--tokenizer", model)
    found = json.loads(tandem(*check)[1])
    assert found["empty thoughts"].startswith(
        "1: chats.jsonl line 1. 1 answers train an empty thought; give their reasoning, or"
    )
    setting = ("--set", "chat_template_kwargs.enable_thinking=false")
    status, out, _ = tandem(*check, *setting)
    found = json.loads(out)
    assert (status, found["empty thoughts"]) == (0, None)
    ((context, _), (trained, _)) = found["shown"][0][1]["parts"][0]
    assert (context.endswith("</think>\n\n"), trained) == (True, "yes<|im_end|>")
    wrong = tandem(*check, "--set", "chat_template_kwargs.enable_thinkin=false")
    ((_, problem),) = json.loads(wrong[1])["broken"]
    assert problem.startswith("chat_template_kwargs.enable_thinkin: the chat template reads no")
    status, _, err = tandem(*check, "--set", "epochs=3")
    assert (status, "only chat_template_kwargs.NAME=VALUE" in err) == (1, True)


def test_todays_date_is_named(tandem, tmp_path):
    model = tokenizer_at(tmp_path / "model", "llama3_2")
    path = records(
        tmp_path / "chats.jsonl", {"messages": [ASK, {"role": "assistant", "content": "yes"}]}
    )
    found = json.loads(tandem("data", "check", path, "--json", "--tokenizer", model)[1])
    assert re.match(r"\d{4}-\d\d-\d\d, which the chat template prints; training", found["date"])


def test_without_a_controller_the_option_is_named(tandem, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("tandem.cli.common.PATIENCE", 0.1)
    path = records(
        tmp_path / "chats.jsonl", {"messages": [ASK, {"role": "assistant", "content": "yes"}]}
    )
    status, _, err = tandem("data", "check", path)
    assert status == 5
    assert "give --tokenizer and a model's directory" in err


def test_a_training_takes_variables_of_the_template(tandem, server, tmp_path):
    path = records(
        tmp_path / "chats.jsonl", {"messages": [ASK, {"role": "assistant", "content": "yes"}]}
    )
    setting = ("--set", "chat_template_kwargs.enable_thinkin=false")
    status, _, err = tandem("train", "sft", "refused", path, *setting)
    assert status == 1
    assert "chats.jsonl line 1: chat_template_kwargs.enable_thinkin: the chat template reads" in err


def test_the_jobs_of_a_run_print_the_date_on_which_it_was_made(server):
    """A job that is made on a later day also gets the run's date. The controller passes this date
    to the code that packs the job."""
    from tandem.controller import routes_train

    seen = []

    def prepare(*_: object, day: object, **__: object) -> None:
        seen.append(day)
        raise InvalidInput("enough")

    with pytest.MonkeyPatch.context() as patch, Tandem(server.url, KEY) as client:
        patch.setattr(routes_train, "prepare_sft", prepare)
        client.create_run("dated")
        path = server.settings.root / "runs" / "dated" / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"created": 1767398399.0}))
        with refused(InvalidInput, None, match="enough"):
            client.train_sft("dated", [SFTExample(text="It is.")])
        client.delete_run("dated")
    assert [str(day) for day in seen] == ["2026-01-02"]
