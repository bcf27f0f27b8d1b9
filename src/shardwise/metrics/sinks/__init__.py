"""Where events go besides events.jsonl: TensorBoard, W&B, a Prometheus endpoint."""
