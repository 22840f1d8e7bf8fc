"""Makes a job's packed arrays from files and trajectories. The package does not import torch.

Trajectories, examples and pairs become tokens (`render.py`), then prefix trees and rows
(`packing.py`), then a job's arrays (`prepare.py`). `formats.py` reads files of examples, and
`chain_plan.py` cuts a training on a file into jobs. `datums.py` has the data and losses of a
session, under the names of Tinker's API.

A row has `sequence_length` slots, one for each token, and holds whole prefix trees. The tokens of a
tree lie in depth-first order, and sequences share the slots of their common prefix. Two integers
per slot describe the tree:

    `positions[i]`: the depth of the token in slot i, which is its RoPE position.
    `subtree_end[i]`: one past the last slot of the subtree that begins in slot i.

The query in slot q may attend to the key in slot k exactly when k <= q < subtree_end[k]. The
condition k <= q < subtree_end[k] is the complete attention mask for trees of any depth. The trained
tokens are a list of items, separate from the slots. Several trajectories can train one shared token
with different advantages. The trainer computes logits only in the slots that predict trained
tokens. `packed_format.py` lists every packed array.

A sequence longer than a row is refused, left out or cut, according to `packing.too_long`
(`prepare.py`).
"""
