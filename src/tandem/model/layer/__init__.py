"""A decoder layer with its own forward and backward passes.

A layer has two sublayers, attention and MLP (`sublayers.py`). In a mixture of experts, the sublayer
of `moe_sublayer.py` replaces the MLP. cuBLAS computes the matrix products. Each computation between
two matrix products is one function of `kernels.py`. On a GPU, each decorated function of
`kernels.py` is one kernel of `triton_kernels.py`. LoRA's products are added in place to the
products of the base weights. Adapters are cast once per optimizer step (`Policy.adapter_fixed`),
and each layer adds the gradients of its adapters to their buffers. No gradient of a frozen weight
is computed. `triton_softmax.py` has the kernels of `logprobs.py`.
"""
