"""Base weights, from safetensors files onto the device.

`safetensors_reader.py` reads. `base_weights.py` cuts the tensors by `families/weight_rules.py`.
Ranks that have the same weights read a part each and copy the other parts from one another's GPUs
(`base_memory.py`). Where GPUs can't reach one another's memory, each rank reads everything.
"""
