"""Float8, recompute, compile, shard, prefetch: what is done to a model, in one order."""
