"""The Hugging Face model on meta, its units, and its weights into shards."""
