"""Reads the transaction log of an offline W&B run: records in blocks of 32 KiB, each record a protobuf message."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER, _FILE_HEADER = 32768, 7, 7


def _payloads(data: bytes) -> Iterator[bytes]:
    position, parts = _FILE_HEADER, b""
    while position + _HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEADER])
        parts += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def _put(target: dict[str, Any], items: Any) -> None:
    for item in items:
        target["/".join(item.nested_key) or item.key] = json.loads(item.value_json)


def read_run(run_dir: Path) -> dict[str, Any]:
    """id, names, config, summary, history and artifacts of the newest offline run in a run directory."""
    file = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))[-1]
    content: dict[str, Any] = {"config": {}, "summary": {}, "history": [], "kinds": [], "artifacts": []}
    for payload in _payloads(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(payload)
        kind = record.WhichOneof("record_type")
        content["kinds"].append(kind)
        if kind == "run":
            content |= {"id": record.run.run_id, "project": record.run.project, "tags": list(record.run.tags)}
            content |= {"name": record.run.display_name, "group": record.run.run_group, "job": record.run.job_type}
            _put(content["config"], record.run.config.update)
            _put(content["summary"], record.run.summary.update)
        elif kind == "config":
            _put(content["config"], record.config.update)
        elif kind == "summary":
            _put(content["summary"], record.summary.update)
        elif kind == "artifact":
            content["artifacts"].append(record.artifact)
        elif kind == "history":
            row: dict[str, Any] = {}
            _put(row, record.history.item)
            content["history"].append(row)
    return content
