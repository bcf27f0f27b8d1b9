"""How CUDA's allocator is asked to work, wherever ranks are started."""

from __future__ import annotations

# Expandable segments fragment less than fixed blocks: less memory is reserved at the peak.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
