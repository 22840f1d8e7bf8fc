"""Code for weights that travel from the trainer's ranks to vLLM's workers. Both the trainer's ranks
and vLLM's workers import this package.

`parts.py` computes the parts of the weights that each rank sends, without torch. `merge.py` adds an
adapter to weights, on a GPU by `merge_kernel.py`. `channel.py` transfers bytes with NCCL or Gloo,
and `members.py` fixes the members of the group. `pinned.py` allocates host memory from which GPUs
copy.
"""
