"""Runs the tutorials' cells in an empty folder and keeps their outputs: python docs/tutorials/execute.py [NAME ...].

A notebook is edited as text or in Jupyter, then executed by this script. What is kept of an output names no folder of
the machine, no time and no version of the interpreter, so that two executions differ in what is random alone.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def notebooks() -> list[Path]:
    """Returns the tutorials, in the order of their numbers."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path, folder: Path, timeout: int = 600) -> Any:
    """Returns the notebook as it comes out of a new kernel whose working directory is an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises.
    """
    notebook: Any = nbformat.read(path, as_version=4)
    before = dict(os.environ)
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    os.environ.update(
        COLUMNS="100", NO_COLOR="1", OMP_NUM_THREADS="1", WANDB_MODE="offline", IPYTHONDIR=str(folder / "ipython")
    )
    try:
        resources = {"metadata": {"path": str(folder)}}
        client = NotebookClient(
            notebook, timeout=timeout, kernel_name="python3", record_timing=False, resources=resources
        )
        client.execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({key: value for key, value in cell.metadata.items() if key == "tags"})
        if cell.cell_type == "code":
            cell.outputs = [_clean(output, folder) for output in _joined(cell.outputs) if not _is_chatter(output)]
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Joins the pieces in which a stream arrived."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == "stream" == last.output_type and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _is_chatter(output: Any) -> bool:
    """Whether an output is the log on standard error, where Lightning describes the machine, or an empty display."""
    if output.output_type == "stream":
        return bool(output.name == "stderr")
    return output.get("data", {}).get("text/plain") == ""


def _clean(output: Any, folder: Path) -> Any:
    if output.output_type == "stream":
        output.text = _without_places(output.text, folder)
    for kind in ("text/plain", "text/html"):
        if kind in output.get("data", {}):
            output.data[kind] = _without_places(output.data[kind], folder)
    if "image/png" in output.get("data", {}):
        del output.data["text/plain"]
    return output


def _without_places(text: str, folder: Path) -> str:
    lines = _ESCAPES.sub("", text).replace("\r\n", "\n").split("\n")
    text = "\n".join(line.rpartition("\r")[2] for line in lines)  # a terminal shows what was written last
    for place in {str(folder), str(folder.resolve())}:
        text = text.replace(f"{place}/", "").replace(place, ".")
    return text.replace(str(Path(sys.executable).parent) + "/", "")


def main() -> None:
    wanted = sys.argv[1:] or [path.name for path in notebooks()]
    for name in wanted:
        path = FOLDER / name
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, Path(folder)), path)
        print(f"{name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
