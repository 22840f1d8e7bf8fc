"""The protobuf messages of Tinker's API that the server reads and writes, with the names, numbers
and types of their fields. Fields that are not listed here are skipped when a message is read."""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "tandem_tinker"
_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
}
DTYPE_FLOAT32, DTYPE_INT64 = 1, 2
STOP_REASON_STOP, STOP_REASON_LENGTH = 0, 1

# The messages by name, and for each message its fields: number, name, type. An enum is written as
# int32, which has the same bytes. A type that ends with "?" is optional: the reader can tell an
# absent field from an empty one. A field whose type ends with "*" is repeated. A field whose type
# ends with "{}" is a map with texts as keys.
_MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "SparseCsr": ((1, "values", "bytes"),),
    "Tensor": (
        (1, "dense", "bytes?"),
        (2, "sparse_csr", "SparseCsr"),
        (3, "dtype", "int32"),
        (4, "shape", "int64*"),
    ),
    "EncodedTextChunk": ((1, "tokens", "bytes"),),
    "OtherChunk": (),
    "Chunk": (
        (1, "encoded_text", "EncodedTextChunk"),
        (2, "image", "OtherChunk"),
        (3, "dmel", "OtherChunk"),
    ),
    "Datum": ((1, "model_input", "Chunk*"), (2, "loss_fn_inputs", "Tensor{}")),
    "LossConfigValue": ((1, "number", "double?"), (2, "text", "string?")),
    "ForwardBackwardRequest": (
        (1, "model_id", "string"),
        (2, "seq_id", "int32"),
        (3, "data", "Datum*"),
        (4, "loss_fn", "string"),
        (5, "loss_fn_config", "double{}"),
        (6, "forward_only", "bool"),
        (7, "loss_fn_config_v2", "LossConfigValue{}"),
    ),
    "BatchedTensor": (
        (1, "data", "bytes"),
        (2, "offsets", "bytes"),
        (3, "dtype", "int32"),
        (4, "trailing_shape", "int64*"),
    ),
    "ArrayRecord": (
        (1, "type_tag", "string"),
        (2, "fields", "BatchedTensor{}"),
        (3, "num_datums", "int64"),
    ),
    "ForwardBackwardOutput": (
        (1, "loss_fn_output_type", "string"),
        (2, "loss_fn_outputs", "ArrayRecord*"),
        (3, "metrics", "double{}"),
    ),
    "TopkLogprobs": (
        (1, "token_ids", "bytes"),
        (2, "logprobs", "bytes"),
        (3, "k", "uint32"),
        (4, "length", "uint32"),
    ),
    "SampledSequence": (
        (1, "stop_reason", "int32"),
        (2, "tokens", "bytes"),
        (3, "logprobs", "bytes?"),
        (4, "topk_sampled_logprobs", "TopkLogprobs"),
    ),
    "SampleResponse": (
        (1, "sequences", "SampledSequence*"),
        (2, "prompt_logprobs", "bytes?"),
        (3, "topk_prompt_logprobs", "TopkLogprobs"),
        (4, "prompt_cache_hit_tokens", "int32"),
    ),
}


def _describe() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            bare = kind.rstrip("?*{}")
            if kind.endswith("{}"):
                _add_map(message, name, field, number, bare)
                continue
            repeated = kind.endswith("*")
            label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            _set_type(added, bare)
            if kind.endswith("?"):
                added.proto3_optional = True
                added.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field}")
    return file


def _add_map(message: Any, name: str, field: str, number: int, kind: str) -> None:
    """Adds a map field. In protobuf, a map is a repeated message with the fields key and value."""
    entry = "".join(part.capitalize() for part in field.split("_")) + "Entry"
    nested = message.nested_type.add(name=entry)
    nested.options.map_entry = True
    for at, (part, of) in enumerate((("key", "string"), ("value", kind)), 1):
        _set_type(nested.field.add(name=part, number=at, label=_Field.LABEL_OPTIONAL), of)
    added = message.field.add(name=field, number=number, label=_Field.LABEL_REPEATED)
    _set_type(added, f"{name}.{entry}")


def _set_type(field: Any, kind: str) -> None:
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_describe().SerializeToString())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ForwardBackwardRequest = _class("ForwardBackwardRequest")
ForwardBackwardOutput = _class("ForwardBackwardOutput")
SampleResponse = _class("SampleResponse")
