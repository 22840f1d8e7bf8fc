"""Ranks find the addresses of vLLM's workers in the publishers' records on the volume."""

import os
import time

import pytest

from tandem.spool import Spool
from tandem.spool.schema import Replica, VllmPlace
from tandem.system.network import network_name, own_address, reachable_address
from tandem.trainer.launch import RankSettings
from tandem.trainer.rank.way_to_vllm import address_for_vllm, choose_interface

HERE = VllmPlace(address="192.0.2.9", network=network_name())
# 127.0.0.2 is a second address of loopback. 127.0.0.2 can be reached in every network namespace.
ELSEWHERE = VllmPlace(address="127.0.0.2", network="another-boot:1")


@pytest.fixture
def spool(tmp_path, monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    yield Spool.create(tmp_path / "spool")
    os.environ.pop("NCCL_SOCKET_IFNAME", None)


def interface(spool, way="nccl"):
    choose_interface(spool, RankSettings(way=way))
    return os.environ.get("NCCL_SOCKET_IFNAME")


def replica(spool, name, place, age=0.0):
    now = time.time()
    record = Replica(
        replica=name, url="u", host="h", place=place, pid=1, started=now, beat=now - age
    )
    with spool.replicas.lock():
        spool.replicas.put(record)


def test_nccl_listens_beyond_this_host_only_for_a_vllm_elsewhere(spool, monkeypatch):
    assert interface(spool) is None
    spool.inference.put_place(HERE)
    assert interface(spool, way="merge") is None
    assert interface(spool) == "lo"
    assert address_for_vllm(spool) == "127.0.0.1"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert interface(spool) == "eth7"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    spool.inference.put_place(ELSEWHERE)
    assert interface(spool) is None
    assert address_for_vllm(spool) == own_address("127.0.0.2")


def test_one_of_several_servers_elsewhere_is_enough(spool):
    # This record was written by an earlier server, which was the only one.
    spool.inference.put_place(ELSEWHERE)
    replica(spool, "0", HERE)
    replica(spool, "old", ELSEWHERE, age=60)
    assert interface(spool) == "lo"
    del os.environ["NCCL_SOCKET_IFNAME"]
    replica(spool, "1", ELSEWHERE)
    assert interface(spool) is None
    assert address_for_vllm(spool) == own_address("127.0.0.2")


def test_a_kernel_that_does_not_name_the_network_is_no_reason_for_loopback(spool, monkeypatch):
    monkeypatch.setattr("tandem.system.network.network_name", lambda: "")
    spool.inference.put_place(VllmPlace(address="127.0.0.2", network=""))
    assert interface(spool) is None


def test_without_a_publisher_ranks_say_so(spool):
    with pytest.raises(RuntimeError, match=r"no publisher has written .* where its vLLM is"):
        address_for_vllm(spool)


def test_this_machine_has_a_name_of_its_network_and_an_address():
    assert network_name() == network_name() != ""
    assert own_address(reachable_address()) == reachable_address()
