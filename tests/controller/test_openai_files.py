"""Calls of the openai package for files: uploads, lists and deletions, and uploads that the
controller refuses."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from openai.types import FileDeleted, FileObject

from api_server import KEY, Process, Server, make_root, tree
from metrics.metric_tools import Scraped
from openai_client import chats, client, pairs, refused, upload
from spool.volume_tools import mounted
from tandem.controller.openai.lines import LINE_BYTES
from tandem.spool.schema.tuning import Upload
from tandem.spool.tunings import new_id


@pytest.fixture
def sdk(server: Server) -> Iterator[OpenAI]:
    server.spool.uploads.directory.mkdir(exist_ok=True)
    with client(server.url) as sdk:
        yield sdk


def test_a_file_comes_back_as_it_was_sent(sdk: OpenAI, server: Server, tmp_path: Path) -> None:
    path = tmp_path / "my chats.jsonl"
    path.write_bytes(chats(5))
    made = sdk.files.create(file=path, purpose="fine-tune")
    assert (made.filename, made.bytes, made.purpose) == (
        path.name,
        path.stat().st_size,
        "fine-tune",
    )
    assert made.status == "processed"
    assert sdk.files.retrieve(made.id) == made
    assert sdk.files.content(made.id).read() == path.read_bytes()
    raw = sdk.files.with_raw_response.retrieve(made.id).http_response.json()
    FileObject.model_validate(raw, strict=True)
    assert sdk.files.wait_for_processing(made.id).id == made.id
    deleted = sdk.files.with_raw_response.delete(made.id).http_response.json()
    assert FileDeleted.model_validate(deleted, strict=True).deleted
    for gone in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with refused(404, "file_id", made.id, "not_found"):
            gone(made.id)
    assert not [name for name in tree(server.spool.root) if made.id in str(name)]


def test_lists_have_pages_in_both_orders(sdk: OpenAI, root: Path) -> None:
    for file in sdk.files.list():
        sdk.files.delete(file.id)
    ids = [upload(sdk, chats(1)).id for _ in range(5)]
    assert [file.id for file in sdk.files.list()] == ids[::-1]
    assert [file.id for file in sdk.files.list(order="asc", limit=2)] == ids
    first = sdk.files.list(limit=2, order="asc", after=ids[0])
    assert ([file.id for file in first.data], first.has_more) == (ids[1:3], True)
    last = sdk.files.list(limit=2, order="asc", after=ids[2])
    assert ([file.id for file in last.data], last.has_more) == (ids[3:], False)
    assert sdk.files.list(purpose="batch").data == []
    assert len(sdk.files.list(purpose="fine-tune").data) == 5
    with refused(400, "after", "file-none"):
        sdk.files.list(after="file-none")
    with refused(400, "limit", "10000"):
        sdk.files.list(limit=10_001)


GOOD = {"messages": [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "no"}]}
PAIR = json.loads(pairs(1))
SAID = GOOD["messages"]
PICTURE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
BAD_LINES = {
    "not json": ("{", "not JSON"),
    "a text": ('"a"', "is a str"),
    "a list": ("[]", "is a list"),
    "no messages": ({}, "messages must be a list"),
    "empty": ({"messages": []}, "messages must be a list of messages, and not empty"),
    "another format": ({"prompt": "a", "completion": "b"}, "'completion' is not a key"),
    "unknown key": ({**GOOD, "extra": 1}, "'extra' is not a key of an example for supervised"),
    "functions": ({**GOOD, "functions": []}, "give tools and tool_calls"),
    "role": ({"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role is 'bot'"),
    "a message that is none": ({"messages": ["a"]}, "messages.0.role is None"),
    "no answer": ({"messages": SAID[:1]}, "no assistant message to train"),
    "weight": ({"messages": [SAID[0], {**SAID[1], "weight": 2}]}, "messages.1.weight"),
    "all of weight 0": ({"messages": [SAID[0], {**SAID[1], "weight": 0}]}, "all have weight 0"),
    "picture": ({"messages": [{"role": "user", "content": [PICTURE]}, SAID[1]]}, "image_url"),
    "audio": ({"messages": [SAID[0], {**SAID[1], "audio": {"id": "a"}}]}, "messages.1.audio"),
    "no content": ({"messages": [SAID[0], {"role": "assistant"}]}, "messages.1.content"),
    "bad call": (
        {"messages": [SAID[0], {"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages.1.tool_calls.0",
    ),
    "half a letter": ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "half of a pair"),
    "a pair": (PAIR, "conversations and pairs can't be in one file"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named(sdk: OpenAI, server: Server, case: str) -> None:
    line, message = BAD_LINES[case]
    text = line if isinstance(line, str) else json.dumps(line)
    before = tree(server.spool.root)
    with refused(400, "file", message, "invalid_file_format") as caught:
        upload(sdk, chats(1) + b"\n" + text.encode() + b"\n" + chats(1))
    assert "line 3" in caught.value.message
    assert "file-" not in caught.value.message
    assert tree(server.spool.root) == before


BAD_PAIRS = {
    "no input": ({**PAIR, "input": None}, "input must be an object"),
    "no rejected": (
        {name: PAIR[name] for name in ("input", "preferred_output")},
        "non_preferred_output is missing",
    ),
    "same": ({**PAIR, "non_preferred_output": PAIR["preferred_output"]}, "the same"),
    "user answers": ({**PAIR, "preferred_output": SAID[:1]}, "chosen must be the assistant's"),
    "unknown in input": ({**PAIR, "input": {**PAIR["input"], "n": 1}}, "input.n is not a key"),
}


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_a_bad_pair_is_named(sdk: OpenAI, case: str) -> None:
    line, message = BAD_PAIRS[case]
    with refused(400, "file", message, "invalid_file_format") as caught:
        upload(sdk, pairs(2) + json.dumps(line).encode())
    assert "line 3" in caught.value.message


def test_tools_and_calls_and_weights_are_taken(sdk: OpenAI) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chat = [
        {"role": "developer", "content": "Be brief."},
        SAID[0],
        {"role": "assistant", "tool_calls": [call], "weight": 0},
        {"role": "tool", "tool_call_id": "a", "content": "42"},
        {"role": "assistant", "content": "42", "weight": 1, "refusal": None},
    ]
    line = {"messages": chat, "tools": tools, "parallel_tool_calls": False}
    # The text has a byte order mark, Windows line ends, and no line end after the last line.
    text = b"\xef\xbb\xbf" + json.dumps(line).encode() + b"\r\n\r\n" + json.dumps(GOOD).encode()
    assert upload(sdk, text).bytes == len(text)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(sdk: OpenAI, content: bytes) -> None:
    with refused(400, "file", "empty"):
        upload(sdk, content)


def test_other_purposes_and_fields_are_refused(sdk: OpenAI) -> None:
    for purpose in ("batch", "vision", "assistants", "user_data", "evals", "x" * 1000):
        with refused(400, "purpose", "the only purpose is fine-tune"):
            sdk.files.create(file=("a", chats(1)), purpose=purpose)
    with refused(400, "expires_after", "until they are deleted"):
        expiry = {"anchor": "created_at", "seconds": 3600}
        sdk.files.create(file=("a", chats(1)), purpose="fine-tune", expires_after=expiry)
    with refused(400, "other", "no such field"):
        sdk.files.create(file=("a", chats(1)), purpose="fine-tune", extra_body={"other": "1"})
    with refused(400, "purpose", "missing", "missing_required_parameter"):
        sdk.post(
            "/files",
            cast_to=object,
            files={"file": ("a", chats(1))},
            options={"headers": {"Content-Type": "multipart/form-data"}},
        )


NAMES = {
    "../../jobs/x.jsonl": "x.jsonl",
    "/etc/passwd": "passwd",
    "C:\\Users\\me\\a.jsonl": "a.jsonl",
    "a\x00b\x1b[31m.jsonl": "a%00b[31m.jsonl",  # httpx writes NUL as %00
    "é ü.jsonl": "é ü.jsonl",
    "..": "..",
    "n" * 300: "n" * 255,
}


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_name_leads_nowhere(sdk: OpenAI, server: Server, name: str) -> None:
    before = {path for path in tree(server.spool.root) if "uploads" not in str(path)}
    made = upload(sdk, chats(1), name)
    assert sdk.files.retrieve(made.id).filename == NAMES[name]
    assert {path for path in tree(server.spool.root) if "uploads" not in str(path)} == before
    there = {path.name for path in (server.spool.uploads.directory / made.id).iterdir()}
    assert there == {"file.json", f"{made.id}.jsonl"}


@pytest.mark.parametrize(
    "name", ["..", "../jobs", "file-x", "file-" + "0" * 26, "%2e%2e", "a" * 999]
)
def test_an_id_leads_nowhere(server: Server, name: str) -> None:
    with server.http() as http:
        for path in (f"/v1/files/{name}", f"/v1/fine_tuning/jobs/{name}"):
            answer = http.get(path.replace("..", "%2E%2E"))
            assert answer.status_code in (400, 404), answer.text
            assert set(answer.json()["error"]) >= {"message", "type"}


BOUNDARY = "XX"
HEADERS = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
PURPOSE = b'--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
FILE = b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
END = b"\r\n--XX--\r\n"
BODIES = {
    "no form": (b"{}", {"Content-Type": "application/json"}, None, "multipart/form-data"),
    "no boundary": (b"", {"Content-Type": "multipart/form-data"}, None, "multipart/form-data"),
    "long boundary": (
        b"",
        {"Content-Type": f"multipart/form-data; boundary={'b' * 999}"},
        None,
        "multipart",
    ),
    "no multipart": (b"hello", HEADERS, None, "multipart"),
    "ends early": (PURPOSE + FILE + chats(1), HEADERS, None, "ends before"),
    "nothing": (b"", HEADERS, None, "ends before"),
    "no file": (PURPOSE[:-2] + END, HEADERS, "file", "is missing"),
    "two files": (FILE + chats(1) + b"\r\n" + FILE + chats(1) + END, HEADERS, "file", "one file"),
    "many parts": (PURPOSE * 30 + FILE + chats(1) + END, HEADERS, None, "at most 20 parts"),
    "long field": (
        PURPOSE.replace(b"fine-tune", b"x" * 5000) + FILE + chats(1) + END,
        HEADERS,
        "purpose",
        "4096 bytes",
    ),
    "many headers": (
        b"--XX\r\n" + b"a: b\r\n" * 100 + b"\r\n" + END,
        HEADERS,
        None,
        "multipart",
    ),
    "a long header": (b"--XX\r\na: " + b"b" * 10**6 + b"\r\n\r\n" + END, HEADERS, None, "multi"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_broken_form_is_refused_and_leaves_nothing(server: Server, case: str) -> None:
    body, headers, param, message = BODIES[case]
    before = tree(server.spool.root)
    with server.http() as http:
        answer = http.post("/v1/files", content=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
    assert tree(server.spool.root) == before


def test_a_client_that_hangs_up_leaves_nothing(server: Server) -> None:
    before = tree(server.spool.root)

    def half() -> Iterator[bytes]:
        yield PURPOSE + FILE + chats(1)
        raise ConnectionError

    with server.http() as http, suppress(ConnectionError):
        http.post("/v1/files", content=half(), headers=HEADERS)
    with client(server.url) as sdk:
        sdk.files.delete(upload(sdk, chats(1)).id)
    assert tree(server.spool.root) == before


def test_what_is_too_large_is_refused(root: Path) -> None:
    with Server(root, max_request_bytes=2**20) as small, client(small.url) as sdk:
        with refused(413, "body", "larger than 1048576", "request_too_large"):
            upload(sdk, chats(20_000))
        # The body does not declare its length.
        parts = iter([PURPOSE + FILE, *[chats(1000)] * 50, END])
        with small.http() as http:
            answer = http.post("/v1/files", content=parts, headers=HEADERS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        upload(sdk, chats(100))


def test_a_huge_line_is_refused(sdk: OpenAI) -> None:
    with refused(400, "file", f"more than {LINE_BYTES} bytes") as caught:
        upload(sdk, chats(2) + b'{"messages": [' + b" " * (LINE_BYTES + 1) + b"]}\n")
    assert "line 3" in caught.value.message
    with refused(400, "file", "line 1"):
        upload(sdk, b"[" * 200_000)


def test_uploads_at_once_are_all_whole(server: Server) -> None:
    contents = [chats(200 + i) for i in range(12)]
    with client(server.url) as sdk, ThreadPoolExecutor(12) as pool:
        made = list(pool.map(lambda content: upload(sdk, content), contents))
        assert len({file.id for file in made}) == 12
        for file, content in zip(made, contents, strict=True):
            assert sdk.files.content(file.id).read() == content


@pytest.mark.slow
def test_the_longest_list(server: Server) -> None:
    """A list of 10,000 files, which is the default length of OpenAI's pages."""
    uploads, more = server.spool.uploads, {"lines": 1, "size": 1, "created": 1.0}
    fresh = Upload(id=new_id("file"), filename="a", purpose="fine-tune", method="dpo", **more)
    before, made = len(uploads.ids()), [new_id("file", at=1000.0 + i) for i in range(10_000)]
    try:
        for upload_id in made:
            (uploads.directory / upload_id).mkdir(parents=True)
            record = fresh.model_copy(update={"id": upload_id})
            (uploads.directory / upload_id / "file.json").write_text(record.model_dump_json())
        with client(server.url) as sdk:
            listed = sdk.files.list()
            assert (len(listed.data), listed.has_more) == (10_000, before > 0)
            last = sdk.files.list(after=made[3], limit=3)
            assert [file.id for file in last.data] == made[2::-1]
    finally:
        for upload_id in made:
            shutil.rmtree(uploads.directory / upload_id, ignore_errors=True)


@pytest.mark.slow
def test_a_full_volume_is_a_503_and_leaves_nothing(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with mounted(volume, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        make_root(volume)
        with Process(volume) as process, client(process.url) as sdk:
            kept = upload(sdk, chats(10))
            with refused(503, None, "volume is full", "spool_unusable"):
                upload(sdk, chats(60_000))
            assert [file.id for file in sdk.files.list()] == [kept.id]
            assert [path.name for path in (volume / "uploads").iterdir()] == [kept.id]
            upload(sdk, chats(10))


def test_the_key_is_needed_and_is_enough(server: Server) -> None:
    with client(server.url, key="other") as sdk:
        with refused(401, "Authorization", "bearer key", "invalid_api_key"):
            sdk.files.list()
        with refused(401, "Authorization", "bearer key", "invalid_api_key"):
            upload(sdk, chats(1))
    with client(server.url, organization="org", project="p") as sdk:
        sdk.files.list()


def test_uploads_in_parts_are_refused_in_words(sdk: OpenAI) -> None:
    with refused(404, None, "send the file at once", "not_served"):
        sdk.uploads.create(bytes=1, filename="a", mime_type="text/plain", purpose="fine-tune")
    with pytest.raises(openai.NotFoundError):
        sdk.files._get("/files/a/b/c", cast_to=object)


def test_a_listed_file_that_is_a_link_is_not_read(sdk: OpenAI, server: Server) -> None:
    made = upload(sdk, chats(1))
    path = server.spool.uploads.directory / made.id / f"{made.id}.jsonl"
    path.unlink()
    path.symlink_to("/etc/passwd")
    with refused(404, "file_id", "not a regular file"):
        sdk.files.content(made.id)


@pytest.mark.slow
def test_deleting_and_reading_at_once(server: Server) -> None:
    """A reader gets the whole file or an error."""
    content = chats(3000)
    with client(server.url) as sdk:
        for _ in range(10):
            made = upload(sdk, content)
            thread = threading.Thread(target=sdk.files.delete, args=(made.id,))
            thread.start()
            with suppress(openai.NotFoundError):
                assert sdk.files.content(made.id).read() == content
            thread.join()


def test_errors_elsewhere_keep_tandems_shape(server: Server) -> None:
    answer = httpx.get(f"{server.url}/v1/runs", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
    answer = httpx.get(f"{server.url}/v1/runs/none", headers={"Authorization": f"Bearer {KEY}"})
    assert set(answer.json()["error"]) == {"type", "message", "field"}
    assert httpx.get(f"{server.url}/v1/filesystem").json()["error"].keys() == {
        "type",
        "message",
        "field",
    }


def test_requests_are_counted_by_template(sdk: OpenAI, server: Server) -> None:
    def counted(route: str, status: str) -> float:
        page = Scraped(httpx.get(f"{server.url}/metrics").text)
        labels = {"route": route, "method": "GET", "status_class": status}
        return page.get("tandem_http_requests_total", **labels)

    before = counted("/v1/files/{file_id}", "4xx")
    with refused(404, "file_id", "file-x"):
        sdk.files.retrieve("file-x")
    assert counted("/v1/files/{file_id}", "4xx") == before + 1
    assert counted("/v1/fine_tuning/jobs/{job_id}/events", "5xx") == 0


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_form_breaks_the_door(fuzzed: httpx.Client, data: st.DataObject) -> None:
    """A valid body from which bytes are removed, or in which bytes are replaced or added. The body
    is sent in chunks of any size."""
    body = bytearray(PURPOSE + FILE + chats(2) + END)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(body)))
        end = data.draw(st.integers(at, min(len(body), at + 40)))
        body[at:end] = data.draw(st.binary(max_size=40) | st.sampled_from([PURPOSE, FILE, END]))
    size = data.draw(st.integers(1, 300))
    parts = (bytes(body[i : i + size]) for i in range(0, len(body), size))
    answer = fuzzed.post("/v1/files", content=parts, headers=HEADERS)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def fuzzed(server: Server) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http
    names = [path.name for path in server.spool.uploads.directory.iterdir()]
    assert [name for name in names if name.startswith(".tmp")] == []
