"""Code that transfers weights from the trainer's ranks to vLLM's workers. The trainer's ranks and
vLLM's workers import this package.

`parts.py` does not import torch; it computes the parts of the weights that each rank sends.
`merge.py` adds an adapter to weights; `merge_kernel.py` is the version of `merge.py` for GPUs.
`channel.py` transfers bytes with NCCL or Gloo, and `members.py` fixes the members of the process
group. `pinned.py` allocates host memory from which GPUs copy.
"""
