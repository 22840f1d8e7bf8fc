"""Model families: what a `config.json` says about shapes, tensor names and how each tensor is cut. Imports no torch.

docs/models.md says how to add one. Arithmetic that no family had before goes to `tandem.model.build`.
"""
