"""Start ranks to measure something, and read what the first of them has written."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.launch.failure import error_of
from shardwise.launch.ranks import Ranks


def ask_ranks(count: int, module: str, question: dict[str, Any], *, after: str) -> Any:
    """Run `python -m module QUESTION ANSWER` on `count` ranks. Both arguments are paths of JSON
    files.

    `after` says what the user should do where a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        scratch = Path(folder)
        asked, answered = scratch / "question.json", scratch / "answer.json"
        asked.write_text(json.dumps(question), encoding="utf-8")
        ranks = Ranks(count, [str(asked), str(answered)], scratch, module=module)
        with ranks:
            failures = ranks.wait()
        if failures:
            error = error_of(failures, scratch)
            raise UserError(error.what, why=error.why, fix=after, code=error.code)
        return json.loads(answered.read_text(encoding="utf-8"))
