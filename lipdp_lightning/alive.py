"""Tells whether the process that trains a run is still there, also after it was killed without a word."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_process() -> dict[str, Any]:
    """Returns what identifies this process: its machine, that machine's start, its namespace, number and start.

    A number alone is given to another process later, and stands for different processes in different containers.
    """
    return {**_here(), "pid": os.getpid(), "start": _start(os.getpid())}


def is_alive(process: Any) -> bool | None:
    """Returns whether a process of :func:`this_process` runs, or None if that cannot be seen from here."""
    if not isinstance(process, Mapping):
        return None
    here = _here()
    if any(process.get(key) != value or not value for key, value in here.items() if key != "boot"):
        return None
    if not here["boot"] or not isinstance(process.get("boot"), str):
        return None
    if process["boot"] != here["boot"]:
        return False  # this machine was started again
    pid, start = process.get("pid"), process.get("start")
    if type(pid) is not int or not 0 < pid < 1 << 31 or not isinstance(start, str) or not start:
        return None
    return _start(pid) == start


def _here() -> dict[str, str]:
    try:
        space, boot = os.readlink("/proc/self/ns/pid"), _BOOT.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # no Linux
        space, boot = "", ""
    return {"host": platform.node(), "boot": boot, "space": space}


def _start(pid: int) -> str:
    """Returns when a process began, in ticks of the machine; "" if it has ended, also if nobody has noticed that."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # the name before it may hold spaces
    except OSError:
        return ""
    return words[19].decode() if len(words) > 19 and words[0] not in (b"Z", b"X") else ""
