"""The protobuf messages that the stock SDKs send and read, described here and made at run time.

Field numbers and types are the wire's; what nobody here reads or writes (images, provenance) is left out, as protobuf
allows. Arrays travel as the bytes of little-endian numbers: prompt tokens and sampled ones as int32, offsets as int64.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "roost.training"

# message: field number, type, name. A type is [repeated | optional | oneof] kind, or map for string keys.
_FIELDS = {
    "EncodedText": ("1 bytes tokens",),
    "Chunk": ("1 oneof EncodedText encoded_text",),
    "Tensor": ("1 oneof bytes dense", "3 int32 dtype", "4 repeated int64 shape"),
    "Datum": ("1 repeated Chunk model_input", "2 map Tensor loss_fn_inputs"),
    "LossConfigValue": ("1 oneof double number", "2 oneof string text"),
    "ForwardBackwardRequest": (
        "1 string model_id", "2 int32 seq_id", "3 repeated Datum data", "4 string loss_fn",
        "5 map double loss_fn_config", "6 bool forward_only", "7 map LossConfigValue loss_fn_config_v2",
    ),
    "BatchedTensor": ("1 bytes data", "2 bytes offsets", "3 int32 dtype", "4 repeated int64 trailing_shape"),
    "ArrayRecord": ("1 string type_tag", "2 map BatchedTensor fields", "3 int64 num_datums"),
    "ForwardBackwardOutput": (
        "1 string loss_fn_output_type", "2 repeated ArrayRecord loss_fn_outputs", "3 map double metrics",
    ),
    "TopkLogprobs": ("1 bytes token_ids", "2 bytes logprobs", "3 uint32 k", "4 uint32 length"),
    "SampledSequence": (
        "1 int32 stop_reason", "2 bytes tokens", "3 optional bytes logprobs",
        "4 optional TopkLogprobs topk_sampled_logprobs",
    ),
    "SampleResponse": (
        "1 repeated SampledSequence sequences", "2 optional bytes prompt_logprobs",
        "3 optional TopkLogprobs topk_prompt_logprobs", "4 int32 prompt_cache_hit_tokens",
    ),
}  # fmt: skip

# the wire's enumerations travel as numbers
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
STOP, LENGTH = 0, 1

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
}


def _add_field(message: Any, number: int, rule: str, kind: str, name: str) -> None:
    field = message.field.add(name=name, number=number)
    field.label = _Field.LABEL_REPEATED if rule in ("repeated", "map") else _Field.LABEL_OPTIONAL
    if rule == "map":
        entry = message.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "", "string", "key")
        _add_field(entry, 2, "", kind, "value")
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    if rule == "optional":
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    elif rule == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="choice")
        field.oneof_index = 0


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="roost/training.proto", package=_PACKAGE, syntax="proto3")
    for name, lines in _FIELDS.items():
        message = file.message_type.add(name=name)
        for line in lines:
            number, *rule, kind, field = line.split()
            _add_field(message, int(number), rule[0] if rule else "", kind, field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}


_CLASSES = _classes()
ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = _CLASSES["SampleResponse"]
