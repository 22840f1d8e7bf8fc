"""Ports that are reserved for a program. No other program gets such a port, and the intended
program can listen on the port."""

import socket
from contextlib import ExitStack

import pytest

from free_ports import free_ports
from tandem.errors import Conflict
from tandem.system.ports import reserve


def test_a_held_port_is_given_to_nobody_who_asks_for_any_port():
    """Sockets with SO_REUSEADDR that bind port 0 never get a reserved port."""
    with ExitStack() as stack:
        held = {stack.enter_context(reserve()).port for _ in range(50)}
        assert len(held) == 50
        for _ in range(2000):
            other = stack.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] not in held


def test_the_program_it_is_for_listens_while_it_is_held():
    # create_server sets SO_REUSEADDR, as servers do.
    with reserve() as held, socket.create_server(("127.0.0.1", held.port)):
        socket.create_connection(("127.0.0.1", held.port), timeout=5).close()


def test_a_port_in_use_or_held_is_refused_by_name():
    with reserve(*free_ports(1)) as held:
        with pytest.raises(Conflict, match="another Tandem process uses port") as caught:
            reserve(held.port, name="controller_port")
        assert caught.value.field == "controller_port"
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(Conflict, match="in use"):
        reserve(server.getsockname()[1])
    with reserve(held.port) as again:  # closed by now
        assert again.port == held.port
