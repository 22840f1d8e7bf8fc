"""The results of transformers, PEFT and torch's AdamW for a case. The reference computes each
sequence alone, on one rank and without packing."""

from dataclasses import dataclass
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch.func import functional_call

from full import saved, without_buffers
from oracle.cases import Case
from oracle.oracle_rank import ENTROPY, SETTINGS, STEPS
from policies import merged
from tandem.families.adapter import WEIGHTS_FILE
from tiny import VISIONS
from wide import computed_in


@dataclass(frozen=True)
class Reference:
    loss: float
    scale: float  # The sum of the absolute values of the loss's terms.
    norm: float
    gradients: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


class Model:
    """transformers' model of a case. `parameters`: the trained parameters, by PEFT's keys, or by
    transformers' own names if all weights are trained."""

    def __init__(self, case: Case, directory: Path, dtype: torch.dtype) -> None:
        self._case = case
        kind = "ImageTextToText" if case.family in VISIONS else "CausalLM"
        self.base = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
            directory / "model", dtype=dtype, experts_implementation="eager"
        )
        for name, module in self.base.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                # For the norms of latents transformers uses its default epsilon. Tandem uses the
                # model's epsilon, as vLLM does.
                module.variance_epsilon = self.base.config.rms_norm_eps
        self.parameters = dict(self.base.named_parameters())
        if case.lora is None:
            self.logits = lambda tokens: self.base(tokens[None]).logits[0]
            return
        self.base.requires_grad_(False)
        lora, adapter = case.lora, load_file(directory / "adapter" / WEIGHTS_FILE)
        if any(".experts." in key for key in adapter):  # PEFT can't adapt experts.
            self.parameters = {
                key: value.to(dtype).clone().requires_grad_() for key, value in adapter.items()
            }
            self.logits = lambda tokens: functional_call(
                self.base, merged(self.base, self.parameters, lora), (tokens[None],)
            ).logits[0]
        else:
            theirs = peft.PeftModel.from_pretrained(
                self.base, directory / "adapter", is_trainable=True
            ).to(dtype)
            named = {name.replace(".default", ""): p for name, p in theirs.named_parameters()}
            # If layers of a vision tower have the names of adapted layers, PEFT makes adapters of
            # zeros for them. The reference leaves out the vision tower's adapters.
            self.parameters = {name: named[name] for name in adapter}
            self.logits = lambda tokens: theirs(tokens[None]).logits[0]

    def loss(self) -> tuple[torch.Tensor, float]:
        terms = []
        for row in self._case.rows():
            for number, tokens in enumerate(row.sequences):
                items = [item for item in row.items if item.sequence == number]
                if not items:
                    continue
                with computed_in(next(self.base.parameters()).dtype):
                    logits = self.logits(torch.tensor(tokens)) / self._case.temperature
                at = torch.tensor([item.position - 1 for item in items])
                log_p = torch.log_softmax(logits[at], -1)
                own = log_p.gather(-1, torch.tensor([[item.token] for item in items]))[:, 0]
                entropy = -(log_p.exp() * log_p).sum(-1)
                weights = torch.tensor([item.weight for item in items], dtype=own.dtype)
                terms.append(weights * (own + ENTROPY * entropy))
        together = torch.cat(terms)
        return together.sum(), float(together.detach().abs().sum())

    def named(self, values: dict[str, torch.Tensor], directory: Path) -> dict[str, torch.Tensor]:
        """The values of the trained parameters, by the names of the model's files or, for adapters,
        by PEFT's keys."""
        if self._case.lora is None:
            return {
                name: value
                for name, value in without_buffers(saved(self.base, directory, values)).items()
                if not name.endswith("layer_scalar")
            }
        return {name: value.detach().clone() for name, value in values.items()}


def compute(case: Case, directory: Path, dtype: torch.dtype = torch.float32) -> Reference:
    model = Model(case, directory, dtype)
    trained = model.parameters
    # All tensors of an adapter have weight decay. If all weights are trained, vectors have no
    # weight decay.
    decays = [p for p in trained.values() if p.ndim > 1]
    rest = [p for p in trained.values() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": decays}, {"params": rest, "weight_decay": 0.0}],
        lr=SETTINGS.learning_rate,
        betas=(SETTINGS.beta1, SETTINGS.beta2),
        eps=SETTINGS.eps,
        weight_decay=SETTINGS.weight_decay,
    )
    before = model.named(trained, directory / f"{dtype}-before")
    first: tuple[float, float, float, dict[str, torch.Tensor]] | None = None
    for _ in range(STEPS):
        adam.zero_grad()
        loss, scale = model.loss()
        loss.backward()
        gradients = {
            name: p.grad if p.grad is not None else torch.zeros_like(p)
            for name, p in trained.items()
        }
        if first is None:
            norm = float(torch.nn.utils.get_total_norm(gradients.values()))
            first = (
                float(loss),
                scale,
                norm,
                model.named(gradients, directory / f"{dtype}-gradients"),
            )
        torch.nn.utils.clip_grad_norm_(trained.values(), SETTINGS.max_grad_norm)
        adam.step()
    assert first is not None
    return Reference(*first, before, model.named(trained, directory / f"{dtype}-after"))
