"""The model, in Megatron-core's frame. `mcore.py` has every import of Megatron-core.

`build.py` puts the layers (`layer/`), adapters (`lora.py`) and mixtures (`experts.py`) into
Megatron's GPTModel. `gradients.py` has the buffers for gradients of adapters and of trained
weights. `attention.py` and `delta_rule.py` (gated delta nets) work on prefix trees. `rows.py`
divides a row among the ranks that share it. `pipeline.py` carries hidden states between stages.
`adapter_parts.py` knows each rank's part of the adapter.

Sliding windows: layers with a window have their own mask, made once per row. A query sees the last
`window` tokens of its own sequence. So distances are depths in the tree, not slots.

Mixtures of experts: the router is frozen, without auxiliary loss and without dropped tokens. Its
logits have the activations' dtype and the softmax is fp32, as in transformers and vLLM. GLM's
sigmoid router computes in fp32, and its bias of each expert is an fp32 parameter. Experts are
stacked weights: torch's grouped product in bf16 on CUDA, a loop on the CPU. Sums have a fixed
order, so a job gives the same bits twice.

Routing replay (arXiv:2510.11370): trainer and vLLM round differently, so their routers choose
different experts at near ties, and a token's log-probs jump. A turn may bring the experts that vLLM
chose (`routed_experts`). Then every pass over the row computes its slots by these experts, weighted
by the trainer's own router. A slot that several trajectories share has the experts of one of them.
For a sequence's last token, and for turns without `routed_experts`, the trainer's router chooses.

Recompute (`recompute.py`): how much a layer keeps for its backward pass is a level. `INPUT` keeps
its input and the attention's output; `ATTENTION` and `ALL` keep more. A layer computes again the
tensors that it did not keep, to the same bits. With `TANDEM_RECOMPUTE=auto` one layer is measured
on the device, and each layer gets the most that fits. A step that runs out of memory begins again
with layers that keep less, unless other ranks share the layers. A mixture keeps everything, or is
computed again as a whole. Megatron's own recompute is not used. Its MoE layers keep each
checkpoint's input and its gradient until the next forward pass (megatron-core 0.19.2).

CUDA graphs (`graphs.py`): the GPU computes a small model's kernels faster than the host launches
them. All rows of a job have one length. So the passes of all layers are captured once and repeated,
to the same bits; the row's mask and rotation are inputs. A rank captures behind the job's first
micro step, if time and memory allow it. Time: graphs must save more of the host's time in the
remaining micro steps than two micro steps take. Memory: graphs keep their memory until the last
optimizer step. So the memory of a micro step and the memory that is allocated between passes must
fit together. A step that runs out of memory drops the graphs and begins again. Only LoRA on dense
models is captured, and only if no ranks share the layers. OLMo 3, SmolLM3, Ministral 3 and Gemma 4
are not captured, because no test has run their graphs. Pipelines, tensor, context and expert
parallelism launch each kernel; so do evaluation and log-probs before training.
"""
