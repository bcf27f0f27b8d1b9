"""How transformers reads and writes the files of each family: names that differ, tensors that lie
apart in files and are one in the model (Mixtral's experts).

Only transformers knows that, and none of it is promised. There is no public path that reads a
rank's own rows; on a release without these names reading weights ends with an error that says so.
"""

from __future__ import annotations

from shardwise.internals.parts import no_public_path

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        revert_weight_conversion,
    )
except ImportError as error:
    raise no_public_path("transformers", "reading weights", error) from error

__all__ = [
    "Concatenate",
    "MergeModulelist",
    "WeightConverter",
    "WeightRenaming",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "revert_weight_conversion",
]
