"""The model families. A family reads `config.json` and returns the model's shape, the names of its
weights, and how the weights are cut over ranks. The package imports no torch.

`registry.py` lists the families. A family is an object of the class `Decoder` (`decoder.py`). The
object's fields are the family's differences from the standard decoder. `weight_rules.py` maps a
checkpoint's tensors to parameters, and cuts the parameters over ranks. `adapter.py` has PEFT's
names and files. docs/models.md says what each family refuses, and how to add a family.

LoRA on experts has PEFT's names and shapes: an A and a B for each projection of each expert, such
as `model.layers.0.mlp.experts.17.gate_proj`. In memory, the A matrices of all experts of a layer
are one parameter `[experts, …]`, and so are the B matrices. The parameter's name has `*` in place
of the expert's number. Files never contain the stacked form. Base weights of experts are read from
one tensor per expert, as in Qwen3's checkpoints.
"""
