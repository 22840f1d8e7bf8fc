"""The model families. A family reads `config.json` and returns the model's shape, the weights'
names, and the rules for cutting the weights over ranks. The package imports no torch.

`registry.py` lists the families. A family is an object of the class `Decoder` (`decoder.py`). The
fields of a `Decoder` are the family's differences from the standard decoder. `weight_rules.py` maps
a checkpoint's tensors to parameters, and cuts the parameters over ranks. `adapter.py` has the names
and files of PEFT's adapters. The page docs/models.md says what each family refuses, and how to add
a family.

LoRA on experts has PEFT's names and shapes: an A and a B for each projection of each expert, such
as `model.layers.0.mlp.experts.17.gate_proj`. In memory, the matrices of all experts of a layer are
stacked, `[experts, …]`. For each projection, one parameter has the A matrices, and another
parameter has the B matrices. The stacked parameter's name has `*` in place of the expert's number.
Files never contain stacked adapters. Base weights of experts are read from one tensor per expert
(Qwen3) or from one tensor for all experts (GPT-OSS).
"""
