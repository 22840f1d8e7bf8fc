"""Panels show these thresholds of alerts. The tests in tests/monitoring compare the thresholds with
the rules."""

LIMITS: dict[str, float] = {
    "TandemGPUMemoryNearlyFull": 0.97,
    "TandemTorchFragmentation": 0.35,
    "TandemGPUMemoryOrphaned": 256 * 2**20,
    "TandemJobLeftMemory": 256 * 2**20,
    "TandemReleaseSlow": 5,
    "TandemTrainerStuck": 900,
    "TandemJobStuck": 1800,
    "TandemSessionIdle": 1800,
    "TandemPolicyLag": 0,
    "TandemPublishSlow": 30,
    "TandemVLLMKVThrash": 0.95,
    "TandemVLLMQueueBackedUp": 64,
    "TandemTruncationHigh": 0.3,
    "TandemVLLMErrors": 0.02,
    "TandemControllerErrors": 0.05,
    "TandemVolumeNearlyFull": 0.1,
    "TandemShmNearlyFull": 0.1,
    "TandemVolumeSlow": 2,
}
