"""The parts of Megatron-core that the model uses, imported without loading torch's compiler.

Megatron decorates functions with `torch.compile` during its import; Tandem uses none of these
functions. The first call of `torch.compile` loads the compiler. Loading the compiler would take as
long as the rest of the import, in every rank of every job. So during the import `torch.compile`
returns Megatron's functions uncompiled. Uncompiled functions have the same results.
"""

# ruff: noqa: F401 - other modules import these names from here

from tandem.model.device import patches

with patches.uncompiled("megatron."):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
