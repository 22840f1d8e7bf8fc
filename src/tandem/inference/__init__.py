"""The vLLM server, the publisher, and the code for weights that both use. The code for weights
imports no torch.

`tensor_files.py` merges an adapter into weights. `merged_model.py` writes the merged model as
files. `spot_check.py` computes rows of the merged model, which are compared with vLLM's weights.

This package and `vllm_client/` protect vLLM from faults that were found in vLLM 0.26 and 0.32:

- If LoRA may change `lm_head`, a request for prompt log-probs crashes vLLM's engine while another
  request runs. Tandem therefore leaves `lm_head` out of the LoRA targets.
- vLLM's engine crashes if the files of an evicted adapter no longer exist. The publisher therefore
  loads adapters from local copies. The name of a copy contains a hash of the copy's content.
- vLLM's prefix cache keeps an adapter's blocks when another adapter is loaded under the same name.
  The path of an adapter's copy therefore contains a hash of the adapter's content.
- `kill -9` of the API server leaves the engine process running on the GPU. Tandem's plugin
  therefore makes the engine end when the API server ends.
- A call to vLLM's workers never returns if the engine dies during the call. During a call,
  `server/middleware/merged_server.py` therefore checks every second that the engine is alive.
- If one worker raises an error in a call, the next call gets the other workers' answers to the
  failed call. In calls for adapters or merged weights, a worker therefore returns an error as its
  answer and does not raise the error. In calls that load or swap merged weights, vLLM's executor
  sets no timeout.
- vLLM chooses some FlashInfer kernels even if nvcc is missing, and then the engine crashes. The
  plugin therefore hides FlashInfer if FlashInfer can't compile kernels.
- On the CPU, vLLM's engine crashes on a seeded request whose prefill is split. Tandem therefore
  switches split prefills off on the CPU.

If an adapter changes only the attention of a mixture of experts, vLLM serves the model in the same
way as a dense model. A test on the CPU covers adapters on the attention of a mixture of experts
(vLLM 0.32). On CUDA, no test covers adapters on the attention of a mixture of experts yet. If LoRA
is enabled, vLLM computes every mixture of experts with Triton kernels, which the CPU does not have.
On the CPU, Tandem's plugin makes vLLM compute mixtures of experts with other kernels. Adapters on
experts need CUDA and `TANDEM_EXPERT_LORA=1` (`test_experts_on_a_gpu.py`). On the CPU, vLLM loads an
adapter on experts without an error, but ignores the adapter's matrices for the experts. Without
`TANDEM_EXPERT_LORA=1`, a controller therefore refuses adapters on experts. The publisher's
verification also refuses a checkpoint if vLLM ignores the checkpoint's matrices for the experts.
"""
