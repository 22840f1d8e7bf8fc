"""vLLM's engine keeps the tokens of a request that is not a stream, and sends them together. No
token and no log-prob is lost or comes twice."""

import math
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from tandem.inference.server.worker.gathered_outputs import MOST_STEPS, keep_or_send

KINDS: dict[str, dict[str, Any]] = {
    "whole": {"output_kind": RequestOutputKind.FINAL_ONLY},
    "log-probs": {"output_kind": RequestOutputKind.FINAL_ONLY, "logprobs": 1},
    "stop string": {"output_kind": RequestOutputKind.FINAL_ONLY, "stop": ["###"]},
    "stream": {"output_kind": RequestOutputKind.DELTA},
    "growing": {"output_kind": RequestOutputKind.CUMULATIVE, "logprobs": 0},
}


class Engine:
    """A scheduler's requests. Each step makes one or two tokens for each request."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.scheduler = SimpleNamespace(requests={})
        self.made: dict[str, list[tuple[int, ...]]] = {}
        self.sent: dict[str, list[EngineCoreOutput]] = {}
        self.steps: Counter[str] = Counter()

    def add(self, request_id: str, kind: str) -> None:
        params = SamplingParams(**KINDS[kind])
        request = SimpleNamespace(sampling_params=params, num_output_tokens=0)
        self.scheduler.requests[request_id] = request
        self.made[request_id], self.sent[request_id] = [], []

    def step(self, *ending: str) -> None:
        clients: list[list[EngineCoreOutput]] = [[], []]
        columns = self._draw.randint(2, 4)  # of all requests of the step
        for request_id, request in list(self.scheduler.requests.items()):
            params, count = request.sampling_params, self._draw.choice([1, 1, 1, 2])
            first = request.num_output_tokens == 0
            request.num_output_tokens += count
            tokens = [self._draw.randrange(1000) for _ in range(count)]
            output = EngineCoreOutput(request_id, tokens)
            rows: list[tuple[int, ...]] = [(token,) for token in tokens]
            if params.logprobs is not None:
                table = np.array([[t, *range(1, columns)] for t in tokens], np.int32)
                output.new_logprobs = LogprobsLists(
                    table, table.astype(np.float32) / -8, table[:, 0] % 7
                )
                rows = [(t, t, -t / 8, t % 7) for t in tokens]
            if first:
                output.prefill_stats = PrefillStats()
            if request_id in ending:
                output.finish_reason, output.stop_reason = FinishReason.STOP, 5
                del self.scheduler.requests[request_id]
            self.made[request_id] += rows
            self.steps[request_id] += 1
            clients[hash(request_id) % 2].append(output)
        outputs = {client: EngineCoreOutputs(outputs=made) for client, made in enumerate(clients)}
        keep_or_send(self.scheduler, outputs)
        for client, of_client in outputs.items():
            for output in of_client.outputs:
                assert hash(output.request_id) % 2 == client
                self.sent[output.request_id].append(output)

    def arrived(self, request_id: str) -> list[tuple[int, ...]]:
        rows: list[tuple[int, ...]] = []
        for output in self.sent[request_id]:
            if (logprobs := output.new_logprobs) is None:
                rows += [(token,) for token in output.new_token_ids]
                continue
            ids, values, ranks = (part.tolist() for part in logprobs[:3])
            assert all(len(row) >= 2 for row in ids), "the request asked for two columns"
            found = zip(output.new_token_ids, ids, values, ranks, strict=True)
            rows += [(token, id_[0], value[0], rank) for token, id_, value, rank in found]
        return rows


@pytest.mark.parametrize("seed", range(6))
def test_every_token_arrives_once_and_in_order(seed: int) -> None:
    draw = random.Random(seed)
    engine, number = Engine(draw), 0
    for _ in range(100):
        for _ in range(draw.choice([0, 0, 1, 3])):
            kind, number = draw.choice(list(KINDS)), number + 1
            engine.add(f"{number} {kind}", kind)
        running = list(engine.scheduler.requests)
        engine.step(*(one for one in running if draw.random() < 0.03))
    engine.step(*engine.scheduler.requests)
    assert engine.scheduler.tandem_kept == {}
    for request_id, made in engine.made.items():
        outputs = engine.sent[request_id]
        assert engine.arrived(request_id) == made
        assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].stop_reason == 5
        assert len(outputs) == 1 or outputs[0].prefill_stats is not None
        if request_id.endswith(("whole", "log-probs")):
            steps = engine.steps[request_id]
            assert len(outputs) == (1 if steps == 1 else 1 + math.ceil((steps - 1) / MOST_STEPS))
        else:
            assert all(len(output.new_token_ids) <= 2 for output in outputs)


def test_an_output_with_more_than_tokens_is_sent_at_once() -> None:
    engine = Engine(random.Random(0))
    engine.add("a", "log-probs")
    for _ in range(3):
        engine.step()
    (first,) = engine.sent["a"]
    assert first.prefill_stats is not None
    held = list(engine.scheduler.tandem_kept["a"])
    more = EngineCoreOutput("a", [7], routed_experts=np.zeros((1, 2, 2)))
    outputs = {0: EngineCoreOutputs(outputs=[more])}
    tokens = [token for output in held for token in output.new_token_ids]
    keep_or_send(engine.scheduler, outputs)
    (sent,) = outputs[0].outputs
    assert (sent.new_token_ids, sent.routed_experts.shape) == ([*tokens, 7], (1, 2, 2))


def test_vllms_outputs_have_no_unknown_fields() -> None:
    """`_has_more` decides about each field that an output of a running request can have."""
    tokens = {"request_id", "new_token_ids", "new_logprobs", "trace_headers"}
    more = {"finish_reason", "events", "prefill_stats", "routed_experts", "num_nans_in_logits"}
    first = {"new_prompt_logprobs_tensors", "prompt_token_id_logprobs", "pooling_output"}
    last = {"stop_reason", "kv_transfer_params", "ec_transfer_params", "spec_decode_metrics"}
    last |= {"mm_cache_miss_hashes"}
    known = tokens | more | {"new_sampling_mask"} | first | last
    assert set(EngineCoreOutput.__struct_fields__) == known


def test_an_aborted_request_leaves_nothing() -> None:
    engine = Engine(random.Random(0))
    for name in ("a", "b"):
        engine.add(name, "whole")
    for _ in range(3):
        engine.step()
    assert set(engine.scheduler.tandem_kept) == {"a", "b"}
    del engine.scheduler.requests["a"]
    engine.step()
    assert set(engine.scheduler.tandem_kept) == {"b"}
