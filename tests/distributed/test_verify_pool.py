"""A rank that raises, dies or hangs ends its world with words, and the next world runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_plugins.verify.pool import Pool, WorldError


def test_worlds_follow_one_another_whatever_became_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with Pool(2, "cpu", tmp_path, seconds=40.0, start="spawn") as pool:
        assert pool.run(2, "pool_functions:add", 3) == [7, 7]
        assert pool.run(1, "pool_functions:add", 3) == [3]
        with pytest.raises(WorldError, match="rank 1 of 2:(.|\n)*the last rank raises"):
            pool.run(2, "pool_functions:misbehave", "raise")
        with pytest.raises(WorldError, match="rank 1 of 2 died without a word, exit status 7"):
            pool.run(2, "pool_functions:misbehave", "die")
        assert pool.run(2, "pool_functions:add", 4) == [9, 9]
        pool.seconds = 1.0
        with pytest.raises(WorldError, match=r"ranks \[0, 1\] of 2 are not done after 1 s"):
            pool.run(2, "pool_functions:misbehave", "hang")
        with pytest.raises(WorldError, match="a world of 3 ranks in a pool of 2"):
            pool.run(3, "pool_functions:add", 1)
