"""Logs of ranks as one, in the order of time, with the node of each rank."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardwise.metrics.log_header import header, node_of
from shardwise.platforms.rank_logs import merged_lines, newest_attempt, nodes_of_ranks

BEGIN = time.mktime(time.strptime("2026-11-18 16:00:00", "%Y-%m-%d %H:%M:%S"))
LOGS = {
    0: [
        "2026-11-18T16:00:00 rank 0 of 3 on nodea, process 11",
        "finding units",
        "step   10/3000  0.3%  loss 5.8",
        "2026-11-18 16:00:09,250 WARNING torch: late",
    ],
    1: [
        "2026-11-18T16:00:01 rank 1 of 3 on nodea, process 12",
        "[W1118 16:00:04.500000000 socket.cpp:1] no IPv6",
        "  and more of it",
        "[rank1]:[E1118 16:00:08.000000 ProcessGroup.cpp:2] gone",
    ],
    2: [
        "2026-11-18T16:00:02 rank 2 of 3 on nodeb, process 7",
        "2026-11-18 16:00:07,000 WARNING a clock that is set back",
        "2026-11-18 16:00:03,000 WARNING by four seconds",
    ],
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for attempt in (2, 9, 10):
        folder = tmp_path / "logs" / f"attempt-{attempt}"
        folder.mkdir(parents=True)
    for rank, lines in LOGS.items():
        (folder / f"rank-{rank}.log").write_text("\n".join(lines) + "\n")
    (folder / "rank-x.log").write_text("not a rank's\n")
    (tmp_path / "logs" / "attempt-new").mkdir()
    return tmp_path


def test_the_newest_start_is_the_one_with_the_highest_number(run_dir: Path) -> None:
    found = newest_attempt(run_dir)
    assert found is not None and found.name == "attempt-10"
    assert newest_attempt(run_dir / "nowhere") is None


def test_lines_of_all_ranks_are_merged_by_their_times(run_dir: Path) -> None:
    attempt = newest_attempt(run_dir)
    assert attempt is not None
    assert nodes_of_ranks(attempt) == {0: "nodea", 1: "nodea", 2: "nodeb"}
    events = [{"event": "step", "step": 10, "time": BEGIN + 6}]
    lines = merged_lines(attempt, events)
    told = [(round(line.time - BEGIN, 2), line.rank, line.text.split()[-1]) for line in lines]
    assert told == [
        (0, 0, "11"),
        (0, 0, "units"),
        (1, 1, "12"),
        (2, 2, "7"),
        (4.5, 1, "IPv6"),
        (4.5, 1, "it"),
        (6, 0, "5.8"),
        (7, 2, "back"),
        (7, 2, "seconds"),
        (8, 1, "gone"),
        (9.25, 0, "late"),
    ]
    assert str(lines[3]).startswith("16:00:02 [2 nodeb] 2026-11-18T16:00:02 rank 2")


def test_text_of_a_log_cannot_steer_the_terminal(run_dir: Path) -> None:
    attempt = newest_attempt(run_dir)
    assert attempt is not None
    (attempt / "rank-0.log").write_text("\x1b[2Jgone\n")
    assert "\x1b" not in "".join(map(str, merged_lines(attempt)))


def test_a_header_names_the_node_by_which_slurm_knows_it() -> None:
    assert node_of(header(3, 4, {"SLURMD_NODENAME": "gpu-07"})) == "gpu-07"
    assert node_of(header(3, 4, {})) is not None
    assert node_of("anything else") is None
