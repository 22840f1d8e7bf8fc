"""Code that ranks and vLLM's workers share, for weights that travel from ranks to workers.

`parts.py` computes the parts of the weights that each rank sends, without torch. `merge.py` adds an
adapter to weights, on a GPU by `merge_kernel.py`. `channel.py` carries bytes by NCCL or Gloo, and
`members.py` fixes the members of the group. `pinned.py` is host memory that GPUs copy from.
"""
