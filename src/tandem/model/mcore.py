"""The parts of Megatron-core that the model is made of, imported without loading torch's compiler.

While Megatron is imported it decorates functions, none of which Tandem uses, with `torch.compile`.
The first such call loads the compiler, which takes as long as all the rest of the import, in every
rank of every job. So during the import `torch.compile` returns Megatron's functions as they are:
they are right, but not fused.
"""

# ruff: noqa: F401 - other modules import these names from here

from typing import Any

import torch

_compile = torch.compile


def _compile_unless_megatrons(model: Any = None, **options: Any) -> Any:
    if model is None:  # called with options alone, it returns a decorator
        return lambda function: _compile_unless_megatrons(function, **options)
    return model if model.__module__.startswith("megatron.") else _compile(model, **options)


torch.compile = _compile_unless_megatrons
try:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
finally:
    torch.compile = _compile
