"""`lipdp bench` from its arguments to its output, on tiny batches."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from lipdp_lightning.commands.bench import add_arguments, run

TINY = "--certificate --model convnet-1.6m --batch-size 2 3 --steps 4 --repeats 1"


def bench(arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(arguments.split()))


def test_table_names_update_size_and_threads(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert bench(f"{TINY} --update-size 0.003") == 0
    printed = capsys.readouterr().out
    assert "updates of 0.3 %" in printed and "threads: 1" in printed and "processor time" in printed
    assert [line.split()[:3] for line in printed.splitlines() if line.startswith("convnet")] == [
        ["convnet-1.6m", "1630090", "2"],
        ["convnet-1.6m", "1630090", "3"],
    ]
    assert torch.get_num_threads() == threads


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(f"{TINY} --json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["batch_size"] for row in rows] == [2, 3]
    assert {row["threads"] for row in rows} == {1} and {row["update_size"] for row in rows} == {0.002}
    for row in rows:
        assert row["amortised"] >= row["projection"] > 0 and row["forward_backward"] > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_measured_with_the_threads_asked_for(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, before = [], torch.get_num_threads()

    def recorded(*arguments: object) -> list[object]:
        seen.append(torch.get_num_threads())
        return []

    monkeypatch.setattr("lipdp_lightning.bench.certificate_cost.measure", recorded)
    assert bench(f"--certificate --threads {threads} --json") == 0
    assert seen == [threads] * 2  # two models by default
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--certificate --model alexnet", "alexnet"),
        ("--certificate --batch-size 0", "--batch-size 0"),
        ("--certificate --threads 0", "--threads 0"),
        ("--certificate --steps 2 --repeats 3", "--steps 2"),
        ("--certificate --update-size nan", "nan"),
        ("--certificate --update-size 0", "--update-size 0"),
        ("--model alexnet", "alexnet"),
        ("--full --contender sgd", "sgd"),
        ("--growth --threads 0", "--threads 0"),
        ("--batch-size 64 0", "--batch-size 0"),
        ("--memory-limit 0", "--memory-limit 0"),
        ("--device tpu9", "--device tpu9"),
        ("--device meta", "--device meta: only cpu and cuda"),
        ("--device cuda:64", "--device cuda:64"),
        ("--page none_such.md", "none_such.md is not a file"),
        ("--growth --page README.md", "lacks the sections estimate, growth"),
        ("--check --device cuda:64", "--device cuda:64"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: str, named: str) -> None:
    threads = torch.get_num_threads()
    with pytest.raises(ValueError, match=f"(?s){named}.*HINT"):
        bench(arguments)
    assert torch.get_num_threads() == threads


def test_all_problems_at_once() -> None:
    with pytest.raises(ValueError, match=r"alexnet.*--repeats 0.*--update-size"):
        bench("--certificate --model alexnet --repeats 0 --update-size -1")


def test_all_problems_of_a_comparison_at_once() -> None:
    with pytest.raises(ValueError, match=r"alexnet.*contender ours.*--threads 0.*--memory-limit nan"):
        bench("--model alexnet --contender ours --threads 0 --memory-limit nan")
