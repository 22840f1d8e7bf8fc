"""The vLLM server, the publisher, and the code for weights that both use. The code for weights
imports no torch.

`tensor_files.py` merges an adapter into weights. `merged_model.py` writes the merged model as
files. `spot_check.py` computes rows of the merged model, to compare with vLLM's.

This package and `vllm_client/` protect vLLM from faults that were found in vLLM 0.26 and 0.32:

- If LoRA may change `lm_head`, a request for prompt log-probs ends the engine while another request
  runs. So the LoRA targets are listed without `lm_head`.
- An evicted adapter whose files are gone ends the engine. So adapters are loaded from local copies,
  and a copy's name contains a hash of its content.
- Cached prefixes survive a reload of an adapter under the same name. So the path of an adapter's
  copy contains the content's hash.
- `kill -9` of the API server leaves the engine on the GPU. So a plugin makes the engine end when
  its server ends.
- A call to the workers never returns if the engine dies during it. So `merged_server.py` checks
  every second that the engine is alive.
- If one worker raises an error in a call, the next call gets the other workers' answers to the
  failed call. So workers return an error as an answer in the calls that load adapters and in the
  calls of merged weights. The executor sets no timeout for the calls of merged weights.
- vLLM chooses some kernels of FlashInfer even without nvcc, and these kernels end the engine. So
  the plugin hides FlashInfer if FlashInfer can't compile kernels.
- A seeded request whose prefill is split ends the CPU engine. So on the CPU prefills are not split.

vLLM serves a mixture of experts with adapters on attention in the same way as a dense model. A test
shows this on the CPU (0.32); on CUDA no test shows it yet. If LoRA is enabled, vLLM computes every
mixture with Triton kernels, which the CPU does not have. On the CPU, Tandem's plugin makes vLLM use
other kernels. Adapters on experts need CUDA and `TANDEM_EXPERT_LORA=1`
(`test_experts_on_a_gpu.py`). vLLM on the CPU loads an adapter on experts without an error, and
ignores the part for the experts. So without `TANDEM_EXPERT_LORA=1` a controller refuses adapters on
experts. The verification would refuse adapters on experts too.
"""
