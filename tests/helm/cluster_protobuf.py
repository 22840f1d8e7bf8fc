"""Reads the one object that Helm's client sends as protobuf: the Secret that records a release."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\x00"


def secret(body: bytes) -> dict[str, Any]:
    """A v1 Secret out of Kubernetes' protobuf envelope (field numbers: core/v1 and meta/v1 generated.proto)."""
    if not body.startswith(MAGIC):
        raise ValueError("not a Kubernetes protobuf message")
    envelope = dict(_fields(body[len(MAGIC) :]))
    type_meta = {number: value.decode() for number, value in _fields(envelope[1])}
    if type_meta != {1: "v1", 2: "Secret"}:
        raise ValueError(f"only Secrets are read as protobuf, not {type_meta}")
    obj: dict[str, Any] = {"apiVersion": "v1", "kind": "Secret", "metadata": {}, "data": {}}
    for number, value in _fields(envelope[2]):
        if number == 1:
            obj["metadata"] = _metadata(value)
        elif number == 2:
            key, data = _entry(value)
            obj["data"][key.decode()] = base64.b64encode(data).decode()
        elif number == 3:
            obj["type"] = value.decode()
    return obj


def _metadata(message: bytes) -> dict[str, Any]:
    names = {1: "name", 3: "namespace", 5: "uid", 6: "resourceVersion"}
    meta: dict[str, Any] = {}
    for number, value in _fields(message):
        if number in names and value:
            meta[names[number]] = value.decode()
        elif number in (11, 12):
            key, text = _entry(value)
            meta.setdefault("labels" if number == 11 else "annotations", {})[key.decode()] = text.decode()
    return meta


def _entry(message: bytes) -> tuple[bytes, bytes]:
    fields = dict(_fields(message))
    return fields.get(1, b""), fields.get(2, b"")


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers with their values: bytes, or an int for a varint."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
        elif wire == 2:
            length, at = _varint(message, at)
            yield number, message[at : at + length]
            at += length
        else:
            raise ValueError(f"field {number} has wire type {wire}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = message[at]
        result |= (byte & 0x7F) << shift
        at += 1
        if not byte & 0x80:
            return result, at
        shift += 7
