"""Requests whose headers do not end, or whose body does not arrive, over sockets to a controller
process."""

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import psutil
import pytest

from api_server import KEY, Process, make_root, sft_request
from tandem.system.http_limits import HEAD_BYTES, PART_BYTES, WAIT_SECONDS

MIB = 2**20
START = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
TRAIN = (
    b"POST /v1/runs/a/train HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer " + KEY.encode() + b"\r\n"
)
CHUNKED = TRAIN + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with Process(make_root(tmp_path_factory.mktemp("limits") / "spool")) as process:
        headers = {"Authorization": f"Bearer {KEY}"}
        run = {"name": "a", "lora": {"rank": 2}}
        httpx.post(f"{process.url}/v1/runs", json=run, headers=headers).raise_for_status()
        yield process


def connect(process: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", process.port), timeout=10)


def resident(process: Process) -> int:
    return psutil.Process(process.popen.pid).memory_info().rss


def send_until_refused(peer: socket.socket, piece: bytes, most: int) -> int:
    """Sends `piece` again and again until the server refuses it, or until `most` bytes are sent.
    Returns the bytes that the server took."""
    sent = 0
    with suppress(ConnectionError, TimeoutError):
        while sent < most:
            peer.sendall(piece)
            sent += len(piece)
    return sent


def answer(peer: socket.socket) -> bytes:
    """The bytes that the server sent before it closed the connection."""
    received = b""
    with suppress(ConnectionError):
        while data := peer.recv(2**16):
            received += data
    return received


ENDLESS = {
    "request line": (b"GET /", b"a" * 2**16),
    "header": (START + b"X-A: ", b"a" * 2**16),
    "name of a header": (START, b"a" * 2**16),
    "headers": (START, b"X-A: b\r\n" * 2**13),
    "trailer": (CHUNKED + b"0\r\nX-A: ", b"a" * 2**16),
    "trailers": (CHUNKED + b"0\r\n", b"X-A: b\r\n" * 2**13),
    "extension of a chunk": (CHUNKED + b"5;", b"a" * 2**16),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_never_ends_takes_no_memory(process: Process, kind: str) -> None:
    start, piece = ENDLESS[kind]
    before = resident(process)
    for _ in range(3):
        with connect(process) as peer:
            peer.sendall(start)
            # The taken bytes include bytes in the kernels' buffers.
            assert send_until_refused(peer, piece, 100 * MIB) < 20 * MIB
    assert resident(process) - before < 16 * MIB


def test_a_head_has_64_KiB(process: Process) -> None:
    for size, expected in ((HEAD_BYTES - 1000, b" 200 "), (HEAD_BYTES + 1, b" 431 ")):
        for headers in (
            b"X-A: " + b"a" * size + b"\r\n",
            b"X-A: b\r\n" * (size // 8 + 1),
        ):
            with connect(process) as peer:
                peer.sendall(START + headers + b"Connection: close\r\n\r\n")
                assert expected in answer(peer).partition(b"\r\n")[0]


@pytest.mark.slow
@pytest.mark.sample(1, of="slow clients")
def test_a_half_sent_request_is_closed(process: Process) -> None:
    """All peers connect at once, so that the test waits only once for the server's time limit."""
    sent = {
        "nothing": b"",
        "a head": START + b"X-A: b",
        "a blank line after a request": START + b"\r\n",
        "a second head": START + b"\r\n" + START,
        "a body": TRAIN + b"Content-Length: 1000\r\n\r\n{",
        "a chunk": CHUNKED + b"5\r\n{",
    }
    begin = time.monotonic()
    peers = {kind: connect(process) for kind in sent}
    for kind, data in sent.items():
        peers[kind].sendall(data)
        peers[kind].settimeout(WAIT_SECONDS + 15)
    time.sleep(1)
    peers["a blank line after a request"].sendall(b"\r\n")
    slow = connect(process)  # this peer sends too few bytes
    slow.sendall(TRAIN + b"Content-Length: 1000000\r\n\r\n")
    patient = connect(process)  # this peer is slow and sends enough bytes
    body = b" " * PART_BYTES * 2 + b"{}"
    patient.sendall(TRAIN + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
    for part in range(4):
        patient.sendall(body[part * PART_BYTES // 2 :][: PART_BYTES // 2])
        time.sleep(8)
        with suppress(ConnectionError):
            slow.sendall(b" " * 100)
    patient.sendall(body[2 * PART_BYTES :])
    assert b" 422 " in answer(patient).partition(b"\r\n")[0]
    answers = {kind: answer(peer) for kind, peer in peers.items()}
    assert time.monotonic() - begin < WAIT_SECONDS + 15
    answer(slow)
    assert answers["nothing"] == b""
    assert b" 408 " in answers["a head"]
    for peer in (*peers.values(), slow, patient):
        peer.close()
    assert "Traceback" not in process.output()


@pytest.mark.slow
@pytest.mark.sample(1, of="slow clients")
def test_a_long_answer_is_not_cut_off(process: Process) -> None:
    """A peer that has sent its whole request is not cut off, even if the answer takes long."""
    key = {"Authorization": f"Bearer {KEY}"}
    request = sft_request(id="j")
    httpx.post(f"{process.url}/v1/runs/a/train", json=request, headers=key).raise_for_status()
    with connect(process) as peer:
        peer.sendall(START.replace(b"/healthz", b"/v1/jobs/j/events"))
        peer.sendall(b"Authorization: Bearer " + KEY.encode() + b"\r\n\r\n")
        peer.settimeout(2)
        received, end = b"", time.monotonic() + WAIT_SECONDS + 5
        while time.monotonic() < end:
            with suppress(TimeoutError):
                data = peer.recv(2**16)
                assert data, received
                received += data
        assert received.count(b"keep-alive") >= 3
