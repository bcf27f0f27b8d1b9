"""The changes to a model, in one order: float8, recompute, compile, shard, prefetch."""
