"""Count the presets whose sizes no formula knows, and keep them in facts/counted_presets.json.

    python benchmarks/count_presets.py [NAME ...]

Run it after a preset has come or changed, or with another torch or transformers: a plan of a preset
reads this file and needs no torch.
"""

from __future__ import annotations

import json
import sys
import time

from shardwise.facts.counted import SHIPPED, config_key
from shardwise.facts.other_presets import OTHER_PRESETS
from shardwise.launch.prepare import count_model


def main() -> None:
    found = json.loads(SHIPPED.read_text(encoding="utf-8"))
    known = {config_key(hf_config) for hf_config in OTHER_PRESETS.values()}
    for name in sys.argv[1:] or OTHER_PRESETS:
        began = time.perf_counter()
        spec = count_model(name, OTHER_PRESETS[name])
        assert not spec.uncounted, f"{name}: {spec.uncounted}"
        found[config_key(OTHER_PRESETS[name])] = spec.to_dict()
        seconds = time.perf_counter() - began
        print(f"{name}: {spec.total_params / 1e9:.2f}B parameters, {seconds:.0f} s", flush=True)
        kept = {key: value for key, value in found.items() if key in known}
        SHIPPED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
