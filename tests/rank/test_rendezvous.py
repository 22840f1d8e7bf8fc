"""Ranks wait for rank 0, and send heartbeats while they wait. Rank 0 may have to download the base
model first."""

import shutil
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from rank import jobs
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.trainer.rank import rendezvous
from tandem.trainer.rank.rendezvous import meet


def test_a_download_may_outlast_the_wait_for_peers_and_all_ranks_beat(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = jobs.claim(spool, jobs.submit_sft(spool)).spec.id
    store, here = HashStore(), threading.local()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(rendezvous, "rendezvous", lambda *_, **__: iter([(store, here.rank, 2)]))
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_SECONDS", 0.5)
    find = rendezvous.model_directory

    def download(model: str) -> object:
        time.sleep(3)
        return find(model)

    monkeypatch.setattr(rendezvous, "model_directory", download)
    beats: dict[int, list[str]] = {0: [], 1: []}
    assignments = {}

    def run(rank: int) -> None:
        here.rank = rank
        assignments[rank] = meet(Attempt(spool, job_id, 1), beats[rank].append)[0]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert assignments[0] == assignments[1]
    assert set(beats[0]) == {"download"}
    assert len(beats[0]) >= 2
    assert set(beats[1]) == {"rendezvous"}


def test_each_host_finds_the_base_model_itself(
    spool: Spool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = jobs.claim(spool, jobs.submit_sft(spool)).spec.id
    own, here, store = tmp_path / "own", [0], HashStore()
    shutil.copytree(model, own)
    (own / "README.md").write_text("what another program downloaded does not count")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(rendezvous, "rendezvous", lambda *_, **__: iter([(store, here[0], 2)]))
    first, _ = meet(Attempt(spool, job_id, 1), lambda _: None)
    monkeypatch.setenv("GROUP_RANK", "1")
    here[0] = 1
    monkeypatch.setattr(rendezvous, "model_directory", lambda _: own)
    second, _ = meet(Attempt(spool, job_id, 1), lambda _: None)
    assert (first.model, second.model) == (str(model), str(own))
    assert (second.run, second.job) == (first.run, first.job)
