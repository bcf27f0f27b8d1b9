"""Those who train the same shapes on the same GPU: shardwise, torchtitan, Hugging Face Trainer."""
