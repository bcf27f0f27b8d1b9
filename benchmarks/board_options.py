"""The options that every scoreboard has."""

from __future__ import annotations

import argparse
from pathlib import Path


def board_parser(description: str | None, logs: str) -> argparse.ArgumentParser:
    """A parser with these options, to which a scoreboard adds its own. Rows write below `logs`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600, help="after which nothing runs")
    parser.add_argument("--plan-only", action="store_true", help="run nothing, needs no GPU")
    parser.add_argument("--gpu", default="H200", help="that plans are for")
    parser.add_argument("--json", type=Path, help="results, written after every row")
    parser.add_argument("--logs", type=Path, default=Path(logs), help="what rows said")
    parser.add_argument("--table", nargs="+", type=Path, help="only print results")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the code, no more"
    )
    return parser
