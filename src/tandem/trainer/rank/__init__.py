"""One rank: a training process, on one GPU or the CPU.

`entry.py` is the rank's program. `train.py` runs the steps of a job: rendezvous, load, train, exit.
`rendezvous.py` connects the ranks through their parent's store, and sends the job from rank 0 to
the other ranks. `session.py` has a rank's attempt, device and heartbeat. The module is unrelated to
clients' sessions. `state.py` has the state that a resident rank keeps between jobs. `commit.py`
makes the job's checkpoint. `checkpoint.py` reads and writes the adapter and Adam's state.
`model_checkpoint.py` reads and writes all weights and their optimizer state, for a run that trains
all weights. `model_files.py` writes a Hugging Face model from all ranks at the same time.
`model_loader.py` loads the model, and temporarily replaces its weights by those of the loss's
reference policy. `publication.py` offers whole weights to vLLM and sends them. `way_to_vllm.py`
chooses the network between ranks and vLLM. `full_volume.py` waits for space on the volume before a
training.

A rank starts fast for these reasons:

- A thread starts CUDA. While CUDA starts, the ranks connect, and Megatron builds the model in host
  memory without writing to the memory. After CUDA has started, `Policy.place` allocates the model's
  memory on the device. Until CUDA has started, a rank uses no device memory and reports none.

- Base weights, the adapter and Adam's moments have one allocation each, because each call of the
  driver blocks the other threads.

- The rank reads the base weights as soon as their memory is allocated.

- While the weights are read, a thread of a new rank on a GPU runs one layer with arbitrary weights.
  This warm-up pass loads the kernels.

- The compiled attention is stored in files beside torch's own caches (`model/compiled.py`), so
  later processes load the compiled attention from the files.

- A row's mask and RoPE's sines are computed once for all layers.

- Ranks exchange tensors in host memory through Gloo, so NCCL creates communicators only for the
  groups that the model and its gradients need.

A session's job computes requests as they arrive (`session_loop.py`). `calls.py` applies the
requests to the model. Ranks load the base model once per job. Rank 0 looks for the next request
every 10 ms and sends it to the other ranks. A pass adds its gradients to the gradients of earlier
passes since the last optimizer step. The optimizer step sums the gradients over ranks, clips them,
updates the weights and zeroes the gradients, with the code of ordinary jobs. So a pass and an
optimizer step give the same weights as a job with the same batch, bit for bit. After
`TANDEM_SESSION_IDLE_SECONDS` without a request, the ranks make a checkpoint of all changes, and
exit. If another job waits, the ranks exit after 2 s without a request. They also exit when their
job has run for `TANDEM_SESSION_IDLE_SECONDS` and another job waits.
"""
