"""If embedding and output layer share one table, the copies of the table on the first and the last
pipeline stage have the same bits."""

import torch

from model import tied_rank
from ranks import run_program
from tiny import write_random_model


def test_both_copies_stay_the_same_bits(tmp_path):
    """The test uses three pipelines, because the last bits of a sum of three parts depend on the
    order of the parts. One stage has two layers and the other stage has one, so different ranks own
    the table in the two stages."""
    write_random_model(
        tmp_path / "model", family="qwen2", tie_word_embeddings=True, num_hidden_layers=3
    )
    run_program(tied_rank.__file__, str(tmp_path), "3", seconds=300)
    ranks = [torch.load(tmp_path / f"3.{rank}.pt") for rank in range(6)]
    for step, tables in enumerate(zip(*ranks, strict=True)):
        assert all(torch.equal(table, tables[0]) for table in tables), step
    assert not torch.equal(ranks[0][0], ranks[0][-1])
