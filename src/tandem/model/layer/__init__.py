"""A decoder layer with its own forward and backward passes.

A layer is two blocks, attention and MLP (`sublayers.py`; `moe_sublayer.py` is a mixture's MLP).
cuBLAS computes the matrix products. Each computation between two matrix products is one function of
`kernels.py`, and on a GPU one kernel of `triton_kernels.py`. LoRA's products are added in place.
Adapters are cast once per optimizer step (`Policy.adapter_fixed`), and each layer adds the
gradients of its adapters to their buffers. No gradient of a frozen weight is computed.
`triton_softmax.py` has the kernels of `logprobs.py`.
"""
