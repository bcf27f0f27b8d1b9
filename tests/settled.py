"""The last import of the fork server: the garbage collector leaves alone what is there by now.

A collection in a process that is forked off would write to every object, and so copy its memory.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
