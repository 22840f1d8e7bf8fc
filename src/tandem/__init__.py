"""Tandem: RL and SFT post-training with a Megatron-core trainer and a vLLM inference server."""

__version__ = "0.1.0"
