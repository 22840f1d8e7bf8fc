"""Bodies of Tinker's API. Tandem reads the bodies that Tinker's package writes, and the package
reads Tandem's bodies."""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import tinker
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as theirs
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response

from tandem.controller.tinker.losses import UNSERVED
from tandem.controller.tinker.passes import PROTOBUF, Pass, read_pass
from tandem.controller.tinker.protobuf import (
    DTYPE_FLOAT32,
    DTYPE_INT64,
    STOP_REASON_LENGTH,
    STOP_REASON_STOP,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    SampleResponse,
)
from tandem.controller.tinker.results import (
    ABSENT,
    Sampled,
    SampleResult,
    Top,
    encode_pass,
    encode_sample,
)
from tandem.controller.tinker.routes_sessions import TESTED
from tandem.data.datums import Datum, named_loss
from tandem.errors import InvalidInput, RequestTooLarge

MOST = 2**20
F32 = {"dtype": "float32"}


def datum(tokens: Sequence[int], **inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={"target_tokens": list(tokens), **inputs},
    )


def encoded(*data: types.Datum, forward_only: bool = False, config: Any = None) -> bytes:
    """The body of a forward-backward request, as Tinker's package encodes it."""
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=list(data), loss_fn="cross_entropy", loss_fn_config=config
        ),
        model_id="a-model",
        seq_id=7,
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


def read(body: bytes, encoding: str = "") -> Pass:
    return read_pass(PROTOBUF, encoding, body, MOST)


def data(body: bytes) -> list[Datum]:
    return read(body).data(("weights",), needed=False)


@pytest.mark.parametrize("message", ["ForwardBackwardRequest", "Datum", "Chunk", "Tensor"])
@pytest.mark.parametrize("written", ["ForwardBackwardOutput", "SampleResponse", "ArrayRecord"])
def test_fields_have_the_numbers_and_types_of_the_package(message: str, written: str) -> None:
    """Tandem's description has all fields of the package's own description, except fields that no
    reader uses."""
    ours = {
        name: one
        for root in (ForwardBackwardRequest, ForwardBackwardOutput, SampleResponse)
        for name, one in root.DESCRIPTOR.file.message_types_by_name.items()
    }
    for name in (message, written):
        package = theirs.DESCRIPTOR.message_types_by_name[name].fields_by_name
        for field, own in ours[name].fields_by_name.items():
            assert own.number == package[field].number, field
            enum = package[field].type == package[field].TYPE_ENUM
            assert own.type == (own.TYPE_INT32 if enum else package[field].type), field
            assert own.is_repeated == package[field].is_repeated, field
    assert (DTYPE_FLOAT32, DTYPE_INT64) == (theirs.DTYPE_FLOAT32, theirs.DTYPE_INT64)
    assert STOP_REASON_STOP == theirs.STOP_REASON_STOP
    assert STOP_REASON_LENGTH == theirs.STOP_REASON_LENGTH


@pytest.mark.parametrize("encoding", ["", "identity", "zstd"])
@pytest.mark.parametrize("forward_only", [False, True])
def test_what_the_package_encodes_is_read(encoding: str, forward_only: bool) -> None:
    data = [datum([1, 2, 3], weights=[0.0, 1.5, -2.0]), datum([4] * 1000)]
    config = {"clip_low_threshold": 0.5, "loss_id": "x"}
    body = encoded(*data, forward_only=forward_only, config=config)
    if encoding == "zstd":
        body = zstandard.ZstdCompressor().compress(body)
    found = read(body, encoding)
    assert (found.model_id, found.seq, found.forward_only) == ("a-model", 7, forward_only)
    assert (found.loss, found.config) == ("cross_entropy", config)
    first, second = found.data(("weights",), needed=False)
    assert (first.tokens.tolist(), first.targets.tolist()) == ([1, 2, 3], [1, 2, 3])
    assert first.factors.tolist() == [0.0, 1.5, -2.0]
    assert second.tokens.tolist() == [4] * 1000
    assert second.factors.tolist() == [1.0] * 1000
    assert first.logprobs is None


def test_chunks_of_text_are_one_sequence() -> None:
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3])]
    one = types.Datum(
        model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": [2, 3, 4]}
    )
    (found,) = data(encoded(one))
    assert (found.tokens.tolist(), found.targets.tolist()) == ([1, 2, 3], [2, 3, 4])


IMAGE = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
TARGETS = types.TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2])
SPARSE = types.TensorData(
    data=[1.0], **F32, shape=[1, 8], sparse_crow_indices=[0, 1], sparse_col_indices=[3]
)


@pytest.mark.parametrize(
    ("one", "field", "words"),
    [
        (datum([1, 2], weights=[1.0]), "loss_fn_inputs.weights", "1 values for 2 tokens"),
        (datum([1], advantages=[1.0]), "loss_fn_inputs.advantages", "the loss does not read it"),
        (datum([1], weights=[float("nan")]), "loss_fn_inputs.weights", "not finite"),
        (datum([1], weights=SPARSE), "loss_fn_inputs.weights", "sparse"),
        (
            types.Datum(
                model_input=types.ModelInput.from_ints([1, 2]),
                loss_fn_inputs={"target_tokens": TARGETS},
            ),
            "loss_fn_inputs.target_tokens",
            "several targets per position",
        ),
        (
            types.Datum(
                model_input=types.ModelInput(chunks=[IMAGE]), loss_fn_inputs={"target_tokens": [1]}
            ),
            "model_input.0",
            "an image",
        ),
        (
            types.Datum(
                model_input=types.ModelInput.from_ints([]), loss_fn_inputs={"target_tokens": []}
            ),
            "model_input",
            "no token",
        ),
        (
            types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={}),
            "loss_fn_inputs.target_tokens",
            "is missing",
        ),
        (
            types.Datum(
                model_input=types.ModelInput.from_ints([1]),
                loss_fn_inputs={"target_tokens": types.TensorData(data=[1.0], **F32)},
            ),
            "loss_fn_inputs.target_tokens",
            "other values than token ids",
        ),
        (
            types.Datum(
                model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [-1]}
            ),
            "loss_fn_inputs.target_tokens",
            "other values than token ids",
        ),
    ],
)
def test_what_is_not_trained_is_refused_at_its_field(
    one: types.Datum, field: str, words: str
) -> None:
    good = datum([1, 2])
    with pytest.raises(InvalidInput, match=words) as caught:
        data(encoded(good, one))
    assert caught.value.field == f"data.1.{field}"


def test_the_inputs_of_losses_of_samples_are_read_by_their_names() -> None:
    one = datum([1, 2], logprobs=[-1.0, -2.0], advantages=[0.5, -0.5])
    names = ("advantages", "logprobs")
    (found,) = read(encoded(one)).data(names, needed=True)
    assert found.factors.tolist() == [0.5, -0.5]
    assert found.logprobs is not None
    assert found.logprobs.tolist() == [-1.0, -2.0]
    with pytest.raises(InvalidInput, match="is missing") as caught:
        read(encoded(datum([1], advantages=[0.5]))).data(names, needed=True)
    assert caught.value.field == "data.0.loss_fn_inputs.logprobs"


def test_bodies_that_are_none_are_refused() -> None:
    good = encoded(datum([1, 2]))
    with pytest.raises(InvalidInput, match=r"tinker sends from 0\.25"):
        read_pass("application/json", "", b"{}", MOST)
    with pytest.raises(InvalidInput, match="not a ForwardBackwardRequest"):
        read(good[:-1])
    with pytest.raises(InvalidInput, match="not zstd"):
        read(good, "zstd")
    with pytest.raises(InvalidInput, match="gzip"):
        read(good, "gzip")


def test_a_small_body_does_not_become_a_large_one() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 * MOST))
    assert len(bomb) < MOST / 64
    with pytest.raises(RequestTooLarge, match="without its compression"):
        read(bomb, "zstd")


def test_the_package_reads_log_probs_and_metrics() -> None:
    rows = [np.array([-0.5, -1.25], "<f4"), np.array([-2.0], "<f4"), np.array([], "<f4")]
    body = encode_pass([row.tobytes() for row in rows], {"loss:sum": 3.75, "tokens:sum": 3.0})
    found = deserialize_proto_response(body, types.ForwardBackwardOutput)
    assert isinstance(found, types.ForwardBackwardOutput)
    assert found.metrics == {"loss:sum": 3.75, "tokens:sum": 3.0}
    outputs = [one["logprobs"] for one in found.loss_fn_outputs]
    assert [one.data for one in outputs] == [row.tolist() for row in rows]
    assert [one.shape for one in outputs] == [[2], [1], [0]]
    assert {one.dtype for one in outputs} == {"float32"}


def test_the_package_reads_samples() -> None:
    top = Top(np.array([[5, 6], [7, 0]]), np.array([[-0.5, -1.0], [-2.0, ABSENT]], np.float32))
    first = np.array([[0, 0], [9, 8]]), np.array([[ABSENT] * 2, [-1.0, -3.0]], np.float32)
    result = SampleResult(
        [
            Sampled(np.array([5, 7]), np.array([-0.5, -2.0], np.float32), True, top),
            Sampled(np.array([1]), np.array([-4.0], np.float32), False),
        ],
        prompt=np.array([np.nan, -1.5], np.float32),
        top=Top(*first),
        cached_tokens=16,
    )
    found = deserialize_proto_response(encode_sample(result), types.SampleResponse)
    assert isinstance(found, types.SampleResponse)
    one, other = found.sequences
    assert (one.tokens, one.logprobs, one.stop_reason) == ([5, 7], [-0.5, -2.0], "stop")
    assert one.topk_logprobs == [[(5, -0.5), (6, -1.0)], [(7, -2.0)]]
    assert (other.tokens, other.stop_reason, other.topk_logprobs) == ([1], "length", None)
    assert found.prompt_logprobs == [None, -1.5]
    assert found.topk_prompt_logprobs == [None, [(9, -1.0), (8, -3.0)]]
    assert found.prompt_cache_hit_tokens == 16


@pytest.mark.parametrize("name", get_args(types.LossFnType))
def test_every_loss_of_the_package_is_served_or_refused_in_words(name: str) -> None:
    if name in UNSERVED:
        with pytest.raises(InvalidInput):
            named_loss(name, {})
    else:
        named_loss(name, {"beta": 1.0} if name == "dro" else {})


def test_the_package_is_the_tested_one() -> None:
    assert tinker.__version__.startswith(f"{TESTED}.")
