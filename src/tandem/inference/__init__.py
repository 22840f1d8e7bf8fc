"""The vLLM server and the publisher, and the code for weights that both share, without torch.

`tensor_files.py` merges an adapter into weights. `merged_model.py` writes the merged model as
files. `spot_check.py` computes rows of it, to compare with vLLM's.

Tandem protects vLLM from faults that were found in 0.26 and 0.32, here and in `vllm_client/`:

- A request with prompt log-probs next to a running one ends the engine if LoRA may touch `lm_head`:
  the LoRA targets are named.
- An evicted adapter whose files are gone ends the engine: adapters are loaded from local copies,
  which are named by their content.
- Cached prefixes survive a reload under the same name: the path contains the content's hash.
- `kill -9` of the API server leaves the engine on the GPU: a plugin ties the engine's life to its
  server's.
- A call to the workers never returns if the engine dies meanwhile: `merged_server.py` looks at the
  engine every second.
- If one worker raises in a call, the next call gets the other workers' answers to the failed call.
  So the calls that load adapters and the calls of merged weights return errors as answers. The
  calls of merged weights have no timeout in the executor.
- Without nvcc some kernels of FlashInfer are chosen all the same, and end the engine: the plugin
  hides FlashInfer where it can't compile.
- A seeded request whose prefill is split ends the CPU engine: prefill is not split on the CPU.

vLLM serves a mixture with adapters on attention as it serves a dense model. On the CPU (0.32) a
test shows this; on CUDA no test does yet. Tandem's plugin keeps vLLM on the CPU from its Triton
kernels, which vLLM would use for any mixture once LoRA is on. Adapters on experts need CUDA and
`TANDEM_EXPERT_LORA=1` (`test_experts_on_a_gpu.py`). vLLM on the CPU loads such an adapter without
an error and ignores the experts' part. So a controller without the setting refuses adapters on
experts, and the verification would refuse them too.
"""
