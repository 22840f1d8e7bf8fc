"""Builds the model from Megatron-core's GPTModel and Tandem's own layers. All imports of
Megatron-core are in `mcore.py`.

`build.py` puts the layers (`layer/`), adapters (`lora.py`) and mixtures of experts (`experts.py`)
into Megatron's GPTModel. `gradients.py` has the buffers for gradients of adapters and of trained
weights. `attention.py` and `delta_rule.py` (gated delta nets) compute rows of packed prefix trees.
`rows.py` divides a row of packed sequences among the ranks that share the row. `pipeline.py`
carries hidden states between stages. `adapter_parts.py` joins the ranks' parts of an adapter to
whole tensors, and cuts whole tensors into parts.

Sliding windows: layers with a window have their own mask, made once per row. A query sees the last
`window` tokens of its own sequence. The row's slots between two tokens of a sequence may belong to
other sequences. The window counts only the slots of the query's own sequence.

Mixtures of experts: there is no auxiliary loss, and no token is dropped. With LoRA, the router is
frozen. The router's logits have the activations' dtype, and the softmax is fp32, as in transformers
and vLLM. GLM's sigmoid router computes in fp32, and its bias per expert is an fp32 parameter. The
experts' weights are stacked. In bf16 on CUDA, torch's grouped product multiplies the experts'
weights with the activations. On the CPU, a loop multiplies the weights of one expert after another.
Sums have a fixed order, so a job that runs twice gives the same bits.

Routing replay (arXiv:2510.11370): trainer and vLLM round differently. If two experts have nearly
equal scores, the routers of trainer and vLLM may choose different experts. Different experts change
the token's log-prob strongly. A turn of a trajectory may contain the experts that vLLM chose
(`routed_experts`). If a turn has `routed_experts`, the trainer uses these experts for the turn's
tokens, in every pass. The probabilities that weight vLLM's experts come from the trainer's own
router. If several trajectories share a slot of the row, the slot has the experts of one of these
trajectories. For a sequence's last token, and for turns without `routed_experts`, the trainer's
router chooses the experts.

Recompute (`recompute.py`): each layer has a save level. The save level says how many tensors the
layer keeps for its backward pass. The level `INPUT` keeps the layer's input and the attention's
output; `ATTENTION` and `ALL` keep more tensors. The backward pass recomputes the tensors that the
layer did not keep. Recomputed tensors have the same bits. With `TANDEM_RECOMPUTE=auto`, one layer
is measured on the device, and each layer gets the highest level that fits into memory. A step that
runs out of memory starts again with layers that keep fewer tensors, unless other ranks share the
layers. A mixture of experts keeps gate and up of its experts only at the level `ALL`. Lower levels
recompute gate and up. Megatron's own recompute is not used. In megatron-core 0.19.2, Megatron's
recompute keeps the input of each recomputed part of an MoE layer, and the input's gradient, until
the next forward pass.

CUDA graphs (`graphs.py`): the GPU computes a small model's kernels faster than the host launches
them. All rows of a job have the same length. The passes of all layers are captured once and
replayed, with the same bits. The row's mask and RoPE rotation are inputs of the graphs. A rank
captures the graphs after the job's first micro step, if the graphs save time and fit into memory.
Capturing the graphs costs about as much time as two micro steps, so the graphs must save more than
this time in the remaining micro steps. Graphs keep their memory until the last optimizer step.
While graphs exist, the device needs memory for a micro step and, at the same time, for the tensors
that are allocated between passes. A step that runs out of memory drops the graphs and starts again.
Graphs are captured only for LoRA on dense models, and only if each rank computes its layers alone.
OLMo 3, SmolLM3, Ministral 3 and Gemma 4 are not captured, because no test has run their graphs.
Graphs are not used with pipeline, tensor, context or expert parallelism. Graphs are not used in
evaluation, or for log-probs before training.
"""
