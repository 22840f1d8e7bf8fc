"""The model families: read `config.json` and give shapes, weight names and cuts; without torch.

`registry.py` lists the families. A family is a `Decoder` (`decoder.py`) whose fields say how it
differs from the others. `weight_rules.py` maps a checkpoint's tensors to parameters, and cuts these
over ranks. `adapter.py` has PEFT's names and files. docs/models.md says what each family refuses,
and how to add a family.

LoRA on experts has PEFT's names and shapes: an A and a B for each projection of each expert, such
as `model.layers.0.mlp.experts.17.gate_proj`. In memory the A's of a layer's experts are one
parameter `[experts, …]`, and so are the B's. Its name has `*` in place of the expert's number.
Files never have the stacked form. Base weights are read from one tensor per expert, as in Qwen3's
checkpoints.
"""
