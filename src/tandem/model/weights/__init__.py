"""Reads base weights from safetensors files onto the device.

`safetensors_reader.py` reads files. `base_weights.py` cuts the tensors according to
`families/weight_rules.py`. Each of the ranks that need the same weights reads a share, and copies
the other shares from the other ranks' GPUs (`base_memory.py`). If GPUs can't access one another's
memory, each rank reads everything.
"""
