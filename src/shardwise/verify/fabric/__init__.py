"""Whether a cluster's links carry what they should: collectives and pairs, measured and judged."""
