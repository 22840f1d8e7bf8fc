"""The model, built into Megatron-core's GPTModel. All imports of Megatron-core are in `mcore.py`.

`build.py` puts the layers (`layer/`), adapters (`lora.py`) and mixtures of experts (`experts.py`)
into Megatron's GPTModel. `gradients.py` has the buffers for gradients of adapters and of trained
weights. `attention.py` and `delta_rule.py` (gated delta nets) work on prefix trees. `rows.py`
divides a row among the ranks that share it. `pipeline.py` carries hidden states between stages.
`adapter_parts.py` maps between whole adapter tensors and each rank's part.

Sliding windows: layers with a window have their own mask, made once per row. A query sees the last
`window` tokens of its own sequence. So a distance is counted in tokens along the tree, not in slots
of the row.

Mixtures of experts: the router is frozen, without auxiliary loss and without dropped tokens. The
router's logits have the activations' dtype, and the softmax is fp32, as in transformers and vLLM.
GLM's sigmoid router computes in fp32, and its bias per expert is an fp32 parameter. The experts'
weights are stacked. In bf16 on CUDA, torch's grouped product multiplies the experts' weights with
the activations; on the CPU, a loop multiplies the weights of one expert after another. Sums have a
fixed order, so a job that runs twice gives the same bits.

Routing replay (arXiv:2510.11370): trainer and vLLM round differently. If two experts have nearly
equal scores, the routers may choose different experts, and the token's log-prob jumps. A turn may
bring the experts that vLLM chose (`routed_experts`). Then every pass over the row computes the
turn's slots with these experts, weighted by the trainer's own router. A slot that several
trajectories share has the experts of one of these trajectories. For a sequence's last token, and
for turns without `routed_experts`, the trainer's router chooses the experts.

Recompute (`recompute.py`): each layer has a level, which says how many tensors it keeps for its
backward pass. `INPUT` keeps the layer's input and the attention's output; `ATTENTION` and `ALL`
keep more. A layer recomputes the tensors that it did not keep, to the same bits. With
`TANDEM_RECOMPUTE=auto`, one layer is measured on the device, and each layer gets the highest level
that fits. A step that runs out of memory starts again with layers that keep fewer tensors, unless
other ranks share the layers. A mixture of experts either keeps everything, or is recomputed as a
whole. Megatron's own recompute is not used: Megatron's MoE layers keep the input of each
checkpoint, and the gradient of this input, until the next forward pass (megatron-core 0.19.2).

CUDA graphs (`graphs.py`): the GPU computes a small model's kernels faster than the host launches
them. All rows of a job have the same length. So the passes of all layers are captured once and
replayed, to the same bits; the row's mask and rotation are inputs of the graphs. A rank captures
after the job's first micro step, if both time and memory allow it. Time allows it if, in the
remaining micro steps, graphs save more host time than two micro steps take. Graphs keep their
memory until the last optimizer step. So the memory of a micro step must fit beside the memory that
is allocated between passes. A step that runs out of memory drops the graphs and starts again. Only
LoRA on dense models is captured, and only if no ranks share the layers. OLMo 3, SmolLM3, Ministral
3 and Gemma 4 are not captured, because no test has run their graphs. The host launches each kernel
separately with pipeline, tensor, context or expert parallelism, in evaluation, and for log-probs
before training.
"""
