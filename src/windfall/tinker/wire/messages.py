"""The protobuf messages of the API, as a table: what the SDK sends with forward and forward_backward, and what it
expects as the result of these and of samples.

Only field numbers and types are on the wire. Fields that windfall never reads or writes are left out: protobuf keeps
unknown fields, and nothing here depends on them. Tensors are raw little-endian bytes within these messages.
"""

from __future__ import annotations

import contextlib
import importlib.util
from functools import cache
from typing import Any

from windfall.errors import WindfallError, install_command

TABLE: dict[str, str] = {
    "SampleResponse": "1 SampledSequence* sequences, 2 bytes? prompt_logprobs, 3 TopkLogprobs topk_prompt_logprobs, "
    "4 int32 prompt_cache_hit_tokens",
    "SampledSequence": "1 int32 stop_reason, 2 bytes tokens, 3 bytes? logprobs",
    "TopkLogprobs": "1 bytes token_ids, 2 bytes logprobs, 3 uint32 k, 4 uint32 length",
    "ForwardBackwardOutput": "1 string loss_fn_output_type, 2 ArrayRecord* loss_fn_outputs, 3 Metric* metrics",
    "ArrayRecord": "1 string type_tag, 2 NamedArrays* fields, 3 int64 num_datums",
    "NamedArrays": "1 string key, 2 BatchedTensor value",
    "BatchedTensor": "1 bytes data, 2 bytes offsets, 3 int32 dtype, 4 int64* trailing_shape",
    "Metric": "1 string key, 2 double value",
    "ForwardBackwardRequest": "1 string model_id, 2 int32 seq_id, 3 Datum* data, 4 string loss_fn, "
    "5 Metric* loss_fn_config, 6 bool forward_only, 7 NamedSetting* loss_fn_config_v2",
    "NamedSetting": "1 string key, 2 Setting value",
    "Setting": "1 double? number, 2 string? text",
    "Datum": "1 Chunk* model_input, 2 NamedTensor* loss_fn_inputs",
    "NamedTensor": "1 string key, 2 Tensor value",
    "Chunk": "1 EncodedText encoded_text, 2 Opaque image, 3 Opaque dmel",
    "EncodedText": "1 bytes tokens",
    "Tensor": "1 bytes? dense, 2 Opaque sparse_csr, 3 int32 dtype, 4 int64* shape",
    "Opaque": "",
}
"""Fields by message: number, type and name. `*`: any number of them; `?`: a reader can tell whether it was set, as
it can for messages. Maps are lists of messages with `key` and `value`, and enums are integers: both are the same on
the wire."""
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Values of `dtype`."""
STOP, LENGTH = 0, 1
"""Values of `stop_reason`."""
_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}
_MESSAGE = 11
_ONE, _MANY = 1, 3


def check_installed() -> None:
    """Raises WindfallError if the library is missing that reads and writes messages."""
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec("google.protobuf") is not None:
            return
    raise WindfallError("the package protobuf is not installed", fix=f"Run: {install_command('tinker')}")


@cache
def _classes() -> dict[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="windfall_tinker.proto", package="windfall_tinker", syntax="proto3")
    for name, fields in TABLE.items():
        message = file.message_type.add(name=name)
        for line in filter(None, fields.split(", ")):
            _add_field(message, *line.split())
    pool = descriptor_pool.DescriptorPool()  # of its own: the SDK's messages may be in the default one
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"windfall_tinker.{name}")) for name in TABLE
    }


def _add_field(message: Any, number: str, kind: str, name: str) -> None:
    scalar = _SCALARS.get(kind.rstrip("*?"))
    field = message.field.add(name=name, number=int(number), label=_MANY if kind.endswith("*") else _ONE)
    field.type = scalar or _MESSAGE
    if scalar is None:
        field.type_name = f".windfall_tinker.{kind.rstrip('*')}"
    if kind.endswith("?"):
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def new(name: str, **fields: Any) -> Any:
    """A message of the table.

    >>> new("Metric", key="loss:sum", value=0.5).SerializeToString().hex()
    '0a086c6f73733a73756d11000000000000e03f'
    """
    return _classes()[name](**fields)


def read(name: str, data: bytes) -> Any:
    """The message in these bytes. Raises ValueError if they are not one.

    >>> read("Metric", bytes.fromhex("0a086c6f73733a73756d11000000000000e03f")).value
    0.5
    >>> read("Metric", b"not a message")
    Traceback (most recent call last):
    ValueError: not a message of the kind Metric
    """
    from google.protobuf.message import DecodeError

    try:
        return _classes()[name].FromString(data)
    except DecodeError:
        raise ValueError(f"not a message of the kind {name}") from None
