"""typer builds the parser of a command at every call: 50 ms for ours. Tests build it only once.

Whoever calls the command imports this first: `typer.testing` takes the function as it finds it.
"""

from __future__ import annotations

from functools import cache

import typer.main

typer.main.get_command = cache(typer.main.get_command)
