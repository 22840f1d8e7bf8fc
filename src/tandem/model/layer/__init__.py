"""A decoder layer with its own forward and backward passes.

A layer is two blocks, attention and MLP (`sublayers.py`; `moe_sublayer.py` is a mixture's MLP).
Matrix products are cuBLAS's. Everything between the matrix products is one kernel each:
`kernels.py`, or on a GPU `triton_kernels.py`. LoRA's products are added in place. Adapters are cast
once per optimizer step (`Policy.adapter_fixed`), and each layer adds its adapters' gradients to
their buffers. No gradient of a frozen weight is computed. `triton_softmax.py` has the kernels of
`logprobs.py`.
"""
