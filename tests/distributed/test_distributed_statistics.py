"""Statistics released before the first step: one release for all processes."""

from __future__ import annotations

from pathlib import Path

from worlds import Worlds


def test_one_rank_releases_and_all_use_its_values(worlds: Worlds, tmp_path: Path) -> None:
    ranks = worlds.run("statistics", 2, folder=str(tmp_path))
    assert [rank["looks"] for rank in ranks] == [2, 0]
    assert ranks[0]["used"] == ranks[1]["used"] and len(ranks[0]["used"]) == 2
    assert (tmp_path / "statistics.npz").exists() and [rank["step"] for rank in ranks] == [12, 12]
