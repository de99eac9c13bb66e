"""Compiled loops: the same for every number of threads, on torch's own ones, and alone where those are not found."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lipdp_lightning import team
from lipdp_lightning.compiled import Loop
from lipdp_lightning.layers.energy_loops import patch_norms, row_norms
from lipdp_lightning.layers.floored_loops import normalize
from lipdp_lightning.layers.pair_loops import in_order, swap
from lipdp_lightning.layers.row_loops import bound_rows, weigh_rows
from lipdp_lightning.mechanism.release_loop import release
from lipdp_lightning.privacy.box_muller import transform

Arrays = dict[str, np.ndarray[Any, Any]]


def inputs() -> Arrays:
    random = np.random.default_rng(0)
    return {
        "words": random.integers(-(1 << 63), 1 << 63, (5, 64), dtype=np.int64),
        "normals": np.empty((5, 64)),
        "chunks": random.integers(-(1 << 63), 1 << 63, (1, 3, 138), dtype=np.int64),
        "gradient": random.standard_normal(3 * 138).astype(np.float32),
        "images": random.standard_normal((7, 4, 9)).astype(np.float32),
        "counts": random.uniform(1, 9, 9),
        "norms": np.full(7, np.nan, np.float32),
        "factors": random.uniform(1, 9, 7).astype(np.float32),
        "limits": np.array([5.0, 5.0, 1e15]),
        "rows": np.full((7, 36), np.nan, np.float32),
        "pairs": np.full((14, 2, 9), np.nan, np.float32),
        "neighbours": np.full((126, 2, 1), np.nan, np.float32),
        "swapped": random.integers(0, 2, (14, 9), dtype=np.uint8),
    }


def release_arguments(a: Arrays) -> tuple[Any, ...]:
    """For nine threads at most: a segment of the gradient, whole, with its deviation, share and factor."""
    gradient = a["gradient"]
    segments = np.array([[0, len(gradient), gradient.ctypes.data, 0, 0]])
    return a["chunks"], 0, segments, np.array([[0.3, 0.5, 0.7]]), np.empty((9, 1, 32))


CASES: dict[str, tuple[Loop, Callable[[Arrays], tuple[Any, ...]], str]] = {
    "transform": (transform, lambda a: (a["words"], a["normals"]), "normals"),
    "release": (release, lambda a: release_arguments(a), "gradient"),
    "row_norms": (row_norms, lambda a: (a["images"].reshape(7, -1), 3, a["norms"]), "norms"),
    "patch_norms": (patch_norms, lambda a: (a["images"], a["counts"], 2, 3, a["norms"]), "norms"),
    "bound_rows": (bound_rows, lambda a: (a["images"].reshape(7, -1), a["limits"], a["rows"]), "rows"),
    "in_order": (in_order, lambda a: (a["images"].reshape(14, 2, 9), a["pairs"], a["swapped"]), "pairs"),
    "in_order, bytes": (in_order, lambda a: (a["images"].reshape(14, 2, 9), a["pairs"], a["swapped"]), "swapped"),
    "in_order, neighbours": (
        in_order,
        lambda a: (a["images"].reshape(126, 2, 1), a["neighbours"], a["swapped"].reshape(126, 1)),
        "neighbours",
    ),
    "swap": (swap, lambda a: (a["images"].reshape(14, 2, 9), a["swapped"], a["pairs"]), "pairs"),
    "swap, neighbours": (
        swap,
        lambda a: (a["images"].reshape(126, 2, 1), a["swapped"].reshape(126, 1), a["neighbours"]),
        "neighbours",
    ),
    "weigh_rows": (weigh_rows, lambda a: (a["images"].reshape(7, -1), a["factors"], a["rows"]), "rows"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_threads_do_every_part_once_and_with_the_same_bits(case: str, threads: int) -> None:
    run, arguments, result = CASES[case]
    alone, shared = inputs(), inputs()
    run.alone(*arguments(alone))
    run.shared(threads, *arguments(shared))
    assert np.array_equal(alone[result], shared[result]) and not np.array_equal(alone[result], inputs()[result])


def places(arguments: tuple[Any, ...]) -> list[int]:
    """Of arrays their addresses and shapes."""
    fields: list[int] = []
    for argument in arguments:
        fields += [argument.ctypes.data, *argument.shape] if isinstance(argument, np.ndarray) else [argument]
    return fields


@pytest.mark.parametrize("native", [True, False], ids=["on threads", "where none are found"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 3])
def test_what_lies_at_addresses_is_what_arrays_hold(
    case: str, threads: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, arguments, result = CASES[case]
    if not native:
        monkeypatch.setattr(run, "_native", None)
    alone, found = inputs(), inputs()
    run.alone(*arguments(alone))
    held = arguments(found)  # alive while its memory is written
    run.at(threads, *places(held))
    assert np.array_equal(alone[result], found[result]) and not np.array_equal(alone[result], inputs()[result])


def test_fewer_threads_than_asked_for_do_all_parts() -> None:
    """Parts that no thread does would be left without noise."""
    if not team.found():
        pytest.skip("torch has another OpenMP here, and loops run alone")
    code = (
        "from test_compiled import CASES, inputs, team; import numpy as np\n"
        "assert team._openmp().omp_get_thread_limit() == 1\n"
        "for run, arguments, result in CASES.values():\n"
        "    alone, shared = inputs(), inputs()\n"
        "    run.alone(*arguments(alone)); run.shared(4, *arguments(shared))\n"
        "    assert np.array_equal(alone[result], shared[result])\n"
    )
    environment = os.environ | {"OMP_THREAD_LIMIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, check=True)


def test_whole_numbers_are_read_as_what_the_signature_says() -> None:
    """The bits of the integer 2 are those of a number near zero: the floor would be left out."""
    rows = np.array([[1.0, -1.0]], dtype=np.float32)
    for floor in (2, np.float32(2), 2.0):
        out, kept = np.empty((1, 2), dtype=np.float32), np.empty((1, 3))
        normalize.shared(3, rows, floor, out, kept)
        assert out.tolist() == [[0.5, -0.5]]


def test_arrays_that_are_not_as_in_the_signature_are_not_read_by_address() -> None:
    words, normals = inputs()["words"], inputs()["normals"]
    for wrong in (words.astype(np.float64), words[:, ::2], words.reshape(-1)):
        with pytest.raises(TypeError):
            transform.shared(3, wrong, normals)


def test_the_threads_are_torchs_own_where_its_library_has_the_interface() -> None:
    if not team.found():
        pytest.skip("torch has another OpenMP here, and loops run alone")
    before = threading.active_count()
    a = inputs()
    transform.shared(3, a["words"], a["normals"])
    assert threading.active_count() == before


def test_without_torchs_threads_a_loop_runs_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.__file__", str(tmp_path / "__init__.py"))  # no library is there
    assert team._openmp.__wrapped__() is None
    monkeypatch.setattr(transform, "_native", None)  # as where none is found when the loop is defined
    monkeypatch.setattr(team, "run", lambda *_: pytest.fail("there are no threads to run on"))
    alone, shared = inputs(), inputs()
    transform.alone(alone["words"], alone["normals"])
    transform.shared(2, shared["words"], shared["normals"])
    assert np.array_equal(alone["normals"], shared["normals"])


def test_threads_of_python_may_share_at_the_same_time() -> None:
    """As the thread that draws noise beside a GPU does, and what else computes meanwhile."""
    expected = inputs()
    transform.alone(expected["words"], expected["normals"])
    found: list[bool] = []

    def work() -> None:
        for _ in range(50):
            own = inputs()
            transform.shared(2, own["words"], own["normals"])
            found.append(np.array_equal(own["normals"], expected["normals"]))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 150 and all(found)
