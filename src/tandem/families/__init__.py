"""Model families: what a `config.json` says about shapes, tensor names and how each tensor is cut. Imports no torch.

To add a family, write a file like `qwen2.py` (or `qwen3_moe.py`, if its layers differ), list it in `registry.py`, and
add its random model to `tests/tiny.py`, whose logits are compared with transformers'. Arithmetic that no family had
before goes to `tandem.model.build`.
"""
