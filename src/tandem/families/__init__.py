"""The model families: they read `config.json` and return shapes, weight names and cuts. Imports no
torch.

`registry.py` lists the families. A family is a `Decoder` (`decoder.py`), whose fields hold its
differences from the standard decoder. `weight_rules.py` maps a checkpoint's tensors to parameters,
and cuts the parameters over ranks. `adapter.py` has PEFT's names and files. docs/models.md says
what each family refuses, and how to add a family.

LoRA on experts has PEFT's names and shapes: an A and a B for each projection of each expert, such
as `model.layers.0.mlp.experts.17.gate_proj`. In memory, the A matrices of all experts of a layer
are one parameter `[experts, …]`, and so are the B matrices. The parameter's name has `*` in place
of the expert's number. Files never contain the stacked form. Base weights are read from one tensor
per expert, as in Qwen3's checkpoints.
"""
