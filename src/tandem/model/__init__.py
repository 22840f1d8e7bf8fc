"""The model, in Megatron-core's frame. `mcore.py` has every import of Megatron-core.

`build.py` puts the layers (`layer/`), adapters (`lora.py`) and mixtures (`experts.py`) into
Megatron's GPTModel. `gradients.py` has the gradients of weights that are trained themselves.
`attention.py` and `delta_rule.py` (gated delta nets) work on prefix trees. `rows.py` deals a row to
the ranks that share it. `pipeline.py` carries hidden states between stages. `adapter_parts.py` says
which rank has which part of the adapter.

Sliding windows: layers with a window have a mask of their own, made once per row. A query sees the
last `window` tokens of its own sequence. So distances are depths in the tree, not slots.

Mixtures of experts: the router is frozen, without auxiliary loss and without dropped tokens. Its
logits have the activations' dtype and the softmax is fp32, as in transformers and vLLM. GLM's
sigmoid router computes in fp32, and its bias of each expert is an fp32 parameter. Experts are
stacked weights: torch's grouped product in bf16 on CUDA, a loop on the CPU. Sums have a fixed
order, so a job gives the same bits twice.

Routing replay (arXiv:2510.11370): trainer and vLLM round differently, so near ties their routers
choose different experts, and a token's log-probs jump. A turn may bring the experts that vLLM chose
(`routed_experts`). Then every pass over the row computes its slots by these experts, weighted by
the trainer's own router. A slot that several trajectories share has the experts of one of them. The
last token of a sequence has the trainer's choice, and so have turns without `routed_experts`.

Recompute (`recompute.py`): the memory that a layer keeps for its backward pass is a level. `INPUT`
is its input and the attention's output; then come `ATTENTION` and `ALL`. A layer computes again
what it did not keep, to the same bits. With `TANDEM_RECOMPUTE=auto` one layer is measured on the
device, and each layer gets the most that fits. A step that runs out of memory begins again with
layers that keep less, unless other ranks share the layers. A mixture keeps all or is computed again
as a whole. Megatron's own recompute is not used. Its MoE layers keep each checkpoint's input and
its gradient until the next forward pass (megatron-core 0.19.2).

CUDA graphs (`graphs.py`): a small model's kernels are done before the host has launched the next
ones. All rows of a job have one length. So the passes of all layers are captured once and repeated,
to the same bits; the row's mask and rotation are inputs. A rank captures behind the job's first
micro step, if time and memory allow it. Time: the remaining micro steps must gain more of the
host's time than two micro steps take. Memory: graphs keep their memory until the last optimizer
step. So what a micro step takes and what is allocated between passes must fit together. A step that
runs out of memory drops the graphs and begins again. Only LoRA on dense models is captured, and
only where no ranks share the layers. OLMo 3, SmolLM3, Ministral 3 and Gemma 4 are not captured,
because no test has run their graphs. Pipelines, tensor, context and expert parallelism launch each
kernel; so do evaluation and log-probs before training.
"""
